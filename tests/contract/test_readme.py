"""README and docs are part of the program: commands exist with these settings, links lead to files,
programs run.
"""

import contextlib
import importlib
import io
import os
import re
import shlex
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from cl_train.commands import COMMANDS
from cl_train.config.command_line import check_command_line
from cl_train.config.fields import setting_fields
from tests.faults.forkserver import Forked

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_PROGRAMS = [ROOT / f"docs/{name}.md" for name in ("own_loop", "python", "integrations")]
PROGRAMS = {
    f"{page.stem}: {title}": program
    for page in WITH_PROGRAMS
    for title, program in re.findall(
        r"^##? ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```",
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
}


def commands(page):
    """Every command in a code block or in a code span."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.S)
    whole = "\n".join(blocks).replace("\\\n", " ")
    lines = [line.partition("  #")[0].strip() for line in whole.splitlines()]
    spans = re.findall(r"`((?:python|bash|torchrun|cl-train) [^`]+)`", text)
    found = [*lines, *spans]
    return [line for line in found if re.match(r"(python|bash|torchrun|cl-train) ", line)]


WRITTEN = {line for page in PAGES for line in commands(page)}
ALL = sorted(line for line in WRITTEN if "..." not in line and "<" not in line)
TRAIN = [line for line in ALL if " train.py" in line or line.startswith("cl-train train")]
OTHERS = [line for line in ALL if line.startswith("cl-train") and line not in TRAIN]
SCRIPTS = set(re.findall(r"(?:scripts|benchmarks)/\w+\.\w+", "\n".join(ALL)))


def test_there_are_commands_to_check_and_every_script_exists():
    assert len(TRAIN) >= 10 and len(OTHERS) >= 10 and len(SCRIPTS) >= 3
    assert not [script for script in SCRIPTS if not (ROOT / script).is_file()]


@pytest.mark.parametrize("command", TRAIN)
def test_every_training_command_is_accepted(command):
    words = shlex.split(command)
    arguments = words[words.index("train.py" if "train.py" in words else "train") + 1 :]
    if arguments != ["--help"]:
        assert check_command_line(arguments)


@pytest.mark.parametrize("command", OTHERS)
def test_every_command_exists_and_has_these_settings(command):
    name, *words = shlex.split(command)[1:]
    if name == "completion":
        return
    assert name in COMMANDS
    schemas = importlib.import_module(f"cl_train.commands.{name}").SETTINGS.values()
    known = {key for schema in schemas for key in setting_fields(schema)}
    assert {word.partition("=")[0] for word in words if "=" in word} <= known


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_section_has_one_program():
    text = "".join(page.read_text(encoding="utf-8") for page in WITH_PROGRAMS)
    assert len(PROGRAMS) == text.count("```python") == text.count("\n## ") + 1  # own_loop has one


def test_the_one_liners_of_channels_last_print_what_it_says():
    lines = (ROOT / "docs/channels_last.md").read_text(encoding="utf-8").splitlines()
    quoted = [(line, after) for line, after in pairwise(lines) if line.startswith("    python -c ")]
    assert len(quoted) >= 4
    for line, after in quoted:
        code = line.partition('"')[2].rpartition('"')[0]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, {})
        if after.startswith("    # "):
            shown = after.removeprefix("    # ").removesuffix(" ...")
            assert out.getvalue().startswith(shown), line


def run_program(title, folder):
    os.chdir(folder)
    program = re.sub(r"time_limit_s=\d+", "time_limit_s=0.1", PROGRAMS[title])
    program = re.sub(r"\bsize=64", "size=16", program)
    exec(compile(program, title, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("title", PROGRAMS)
def test_program(title, tmp_path):
    """Every program of the pages runs as it stands but for the time of measurements and the number
    of images, in a process and a folder of its own.
    """
    for package in re.findall(r"^(?:import|from) (\w+)", PROGRAMS[title], flags=re.MULTILINE):
        pytest.importorskip(package)
    program, environment = partial(run_program, title, tmp_path), {"XDG_CACHE_HOME": str(tmp_path)}
    run = Forked(program, tmp_path / "log", environment)
    assert run.wait() == 0, run.output()[-2000:]
    assert "Traceback" not in run.output()
