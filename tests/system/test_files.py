"""Outputs of commands, which replace nothing unasked and leave nothing half; records beside a full disk."""

import errno
import logging
from pathlib import Path

import pytest

from cl_train.system.files import AppendFile


def test_refused_records_are_written_later_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = AppendFile(tmp_path / "records")
    file.append(b"1\n")
    original = AppendFile._write

    def refuse(self: AppendFile, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(AppendFile, "_write", refuse)
    with caplog.at_level(logging.WARNING):
        file.append(b"2\n")
        file.append(b"3\n")
    with pytest.raises(OSError, match=r"No space left.*records"):
        file.flush()
    assert (tmp_path / "records").read_bytes() == b"1\n"
    assert [str(tmp_path / "records") in message for message in caplog.messages] == [True], "one warning"
    monkeypatch.setattr(AppendFile, "_write", original)
    file.append(b"4\n")
    assert (tmp_path / "records").read_bytes() == b"1\n2\n3\n4\n"


def test_a_record_is_written_whole_or_not_at_all() -> None:
    """/dev/full accepts no byte."""
    file = AppendFile(Path("/dev/full"))
    file.append(b"x" * 100)
    with pytest.raises(OSError, match="/dev/full"):
        file.flush()
