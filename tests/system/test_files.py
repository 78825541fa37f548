"""Outputs of commands, which replace nothing unasked and leave nothing half; records beside a full disk."""

import errno
import logging
import os
from pathlib import Path

import pytest

from cl_train.config.schema import ConfigError
from cl_train.system.files import AppendFile, output_file, output_folder


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


def tree(folder: Path) -> dict[str, str | None]:
    """Every path below `folder`, with the text of the files."""
    return {str(p.relative_to(folder)): p.read_text() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize("exists", [False, True])
def test_an_output_file_appears_whole_or_not_at_all(exists: bool, tmp_path: Path) -> None:
    path = tmp_path / ("old.pt2" if exists else "a/b/new.pt2")
    (tmp_path / "old.pt2").write_text("old")
    before = tree(tmp_path)
    with pytest.raises(KeyboardInterrupt), output_file(path, overwrite=exists) as file:
        file.write_text("half")
        raise KeyboardInterrupt
    assert tree(tmp_path) == before
    with output_file(path, overwrite=exists) as file:
        assert file.suffix == ".pt2" and file.parent == path.parent, "writers look at the suffix"
        file.write_text("new")
    assert tree(tmp_path) == {
        **before,
        **dict.fromkeys([] if exists else ["a", "a/b"]),
        str(path.relative_to(tmp_path)): "new",
    }


@pytest.mark.parametrize("name", ["file", "link", "folder", "file/below", "/proc/x"])
def test_an_output_file_is_refused_before_the_work(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=r"out=.*(overwrite=true|choose another|name a file)"):
        output_file(tmp_path / name, overwrite=False).__enter__()
    assert tree(tmp_path) == before


def test_an_output_folder_is_ones_own(tmp_path: Path) -> None:
    for names in ({"photo.jpg"}, {"photo.jpg", ".lock"}):
        (tmp_path / "foreign").mkdir(exist_ok=True)
        for name in names:
            (tmp_path / "foreign" / name).write_text("precious")
        with pytest.raises(ConfigError, match="overwrite=true"):
            output_folder(tmp_path / "foreign", overwrite=False, markers=[".settings"]).__enter__()
    with output_folder(tmp_path / "foreign", overwrite=True, markers=[".settings"]):
        assert len(os.listdir(tmp_path / "foreign")) == 2
    before = tree(tmp_path)
    out = tmp_path / "a/out"
    with pytest.raises(ValueError), output_folder(out, overwrite=False, markers=[".settings"]):
        (out / ".settings").touch()
        raise ValueError
    assert tree(tmp_path) == before, "nothing was done"
    with pytest.raises(ValueError), output_folder(out, overwrite=False, markers=[".settings"]):
        for name in (".settings", "part"):
            (out / name).touch()
        raise ValueError
    with output_folder(out, overwrite=False, markers=[".settings"]):
        assert set(os.listdir(out)) == {".settings", "part"}, "continued"
