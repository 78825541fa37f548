"""The log file."""

import logging
import os
from pathlib import Path

from cl_train.system.files import write_text
from cl_train.training.records import RunLog


def test_names_that_are_no_utf_8_are_written_as_they_are(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    with RunLog() as run_log:
        run_log.open_file(tmp_path)
        logging.getLogger("cl_train").warning("skipped %s", name)
    write_text(tmp_path / "table.md", name)
    assert b"skipped caf\xe9\n" in (tmp_path / "train.log").read_bytes()
    assert (tmp_path / "table.md").read_bytes() == b"caf\xe9"
