"""Every program of docs/python.md runs as it stands, in a process and a folder of its own."""

import os
import re
from pathlib import Path

import pytest

from tests.faults.forkserver import ForkServer

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"^## ([^\n]+)\n.*?```python\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE))


def test_every_section_has_one_program() -> None:
    assert len(PROGRAMS) == PAGE.count("```python") == PAGE.count("\n## ") == 8


def run_program(title: str, folder: str) -> None:
    os.chdir(folder)
    exec(compile(PROGRAMS[title], title, "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("title", PROGRAMS)
def test_program(title: str, tmp_path: Path, fork_server: ForkServer) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    arguments = [title, str(tmp_path)]
    run = fork_server.call("tests.contract.test_python_docs:run_program", arguments, tmp_path / "log", environment)
    assert run.wait() == 0, run.output()[-2000:]
    assert "Traceback" not in run.output()
