"""The documents for developers name files, functions and settings that exist."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("cl_train", "conf", "docs", "tests", "scripts", "benchmarks", ".ci", ".github")
# Names of other programs and of the past, which the documents mention as such.
OTHERS = {"_target_", "instantiate", "node_creation_hook", "master"}
PATH = re.compile(r"[\w.-]+(/[\w.-]+)*(/|\.(py|md|yaml|sh|sbatch|toml|html))")
NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*(\(.*\))?")


@cache
def files():
    tops = [ROOT / top for top in TOPS]
    paths = [*tops, *(path for top in tops for path in top.rglob("*")), *ROOT.glob("*.*")]
    return [f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in paths]


@cache
def words():
    """All words of the program and its settings."""
    suffixes = (".py", ".yaml", ".sh", ".toml")
    read = [ROOT / path[1:] for path in files() if path.endswith(suffixes)]
    return set(re.findall(r"\w+", " ".join(path.read_text() for path in read)))


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_what_a_document_names_exists(document):
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.S)
    missing = []
    for code in dict.fromkeys(re.findall(r"`([^`]+)`", text)):
        if PATH.fullmatch(code):
            missing += [] if any(path.endswith(f"/{code}") for path in files()) else [code]
        elif NAME.fullmatch(code):
            named = [part for part in re.findall(r"\w+", code) if part not in OTHERS]
            missing += [part for part in named if part not in words()]
    assert not missing
