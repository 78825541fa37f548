"""Odd folders and environments."""

from pathlib import Path

import pytest

from tests.faults import plants

pytestmark = pytest.mark.slow


def test_odd_folders_and_environments(bench):
    """Odd folders and environments: success, or one message and exit code 2; never a traceback."""
    here = bench.folder / "odd"
    here.mkdir()
    (here / "file").write_text("")
    rows = [
        (here / "with space and = sign", 0, "", {}),
        (here / "\u00fcn\u00ef \u2603", 0, "", {"LANG": "C", "LC_ALL": "C", "TERM": ""}),
        (here / "file/run", 2, "cannot write|Not a directory", {}),
        (Path("/proc/nowhere"), 2, "cannot write|No such file", {}),
        (here / "clock", 0, "", {}),
        (here / "home", 0, "", {"HOME": "/nonexistent", "COLUMNS": "0"}),
        (here / "secret", 0, "", {"API_TOKEN": "s3cr3t-value"}),
    ]
    for run, code, said, environment in rows:
        with bench.attempt():
            hooks = (plants.clock_jumps_back,) if run.name == "clock" else ()
            bench.run(run, *hooks, code=code, said=said, environment=environment)
            for path in filter(Path.is_file, run.rglob("*")):
                assert b"s3cr3t-value" not in path.read_bytes(), f"{path.name} holds a secret"
