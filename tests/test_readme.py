"""The README is part of the program: its commands are those that exist, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cl_train.config.command_line import check_command_line

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[str]:
    """Every command in a code block or in a code span of a table."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.S)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    spans = re.findall(r"`((?:python|bash|torchrun) [^`]+)`", text)
    return [line for line in [*lines, *spans] if line]


TRAIN = sorted({line for page in PAGES for line in commands(page) if " train.py" in line and "..." not in line})
SCRIPTS = sorted({name for page in PAGES for line in commands(page) for name in re.findall(r"scripts/\w+\.\w+", line)})


@pytest.mark.parametrize("command", TRAIN)
def test_every_training_command_is_accepted(command: str) -> None:
    words = shlex.split(command)
    arguments = words[words.index("train.py") + 1 :]
    if "-sc" in arguments or arguments == ["--help"]:
        return
    assert check_command_line(arguments)


def test_there_are_commands_to_check() -> None:
    assert len(TRAIN) >= 6 and len(SCRIPTS) >= 8


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_exists(script: str) -> None:
    assert (ROOT / script).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name.endswith(".py")])
def test_every_script_explains_itself(script: str) -> None:
    done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "usage" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_tree_names_every_module() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "cl_train").glob("*.py"):
        if path.name != "__init__.py":
            assert path.name in text, f"README's file tree lacks {path.name}"
