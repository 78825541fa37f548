"""Outputs that replace nothing unasked and leave nothing half; records and a full disk; locks; one run per folder."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cl_train.config.schema import ConfigError
from cl_train.system import files, run_folder
from cl_train.system.files import AppendFile, LockHeld, lock_file, output_file, output_folder, safe_name
from cl_train.system.run_folder import check_space, claimed_folder


def test_refused_records_are_written_later_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = AppendFile(tmp_path / "records")
    file.append(b"1\n")

    def refuse(self: AppendFile, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(AppendFile, "_write", refuse)
        file.append(b"2\n")
        file.append(b"3\n")
        with pytest.raises(OSError, match=r"No space left.*records"):
            file.flush()
    assert (tmp_path / "records").read_bytes() == b"1\n"
    assert [str(tmp_path / "records") in message for message in caplog.messages] == [True], "one warning"
    file.append(b"4\n")
    assert (tmp_path / "records").read_bytes() == b"1\n2\n3\n4\n"


def test_a_record_is_written_whole_or_not_at_all() -> None:
    """/dev/full accepts no byte."""
    file = AppendFile(Path("/dev/full"))
    file.append(b"x" * 100)
    with pytest.raises(OSError, match="/dev/full"):
        file.flush()


# --- outputs of commands ----------------------------------------------------------------------------------------------


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
    folders = dict.fromkeys([] if exists else ["a", "a/b"])
    assert tree(tmp_path) == {**before, **folders, str(path.relative_to(tmp_path)): "new"}


@pytest.mark.parametrize("name", ["file", "link", "folder", "file/below", "/proc/x", "new/" + "x" * 300])
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


NAMES = {
    "channels_last=true,precision=fp16": "channels_last=true,precision=fp16",
    "../../etc/passwd": "_.._etc_passwd",
    "/abs": "_abs",
    "...": "_",
    "": "_",
    "a b\nc\0d": "a_b_c_d",
    "ünï": "_n_",
}


def test_names_stay_inside_the_folder() -> None:
    assert {text: safe_name(text) for text in NAMES} == NAMES
    first, second = safe_name("x" * 300 + "1"), safe_name("x" * 300 + "2")
    assert len(first) == len(second) == 100 and first != second


# --- locks and the run folder -----------------------------------------------------------------------------------------

HOLD = """
import os, sys, time
from cl_train.system.files import lock_file
with lock_file(sys.argv[1]):
    if os.fork() == 0:  # a worker that outlives its parent
        time.sleep(10_000)
    print("held", flush=True)
    time.sleep(10_000)
"""


def hold(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    return process


def test_the_holder_is_named_and_a_killed_one_frees_the_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits says for whom; a second run is refused; a forked worker of the killed process holds nothing."""
    path, pauses = tmp_path / ".lock", []
    first = hold(path)

    def end_the_holder(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            first.kill()
            first.wait()

    clock = SimpleNamespace(monotonic=time.monotonic, strftime=time.strftime, sleep=end_the_holder)
    monkeypatch.setattr(files, "time", clock)
    try:
        with pytest.raises(LockHeld, match=f"process {first.pid} on "), lock_file(path):
            pass
        refusal = rf"another run.*process {first.pid} on .*hydra\.run\.dir"
        with pytest.raises(ConfigError, match=refusal), claimed_folder(tmp_path, resume=None, overwrite=False):
            pass
        with lock_file(path, waiting_for="the sample data"):
            os.killpg(first.pid, 0)  # the forked worker still lives
            assert len(pauses) == 2
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert all(part in message for part in ("the sample data", str(first.pid), str(path)))
    with claimed_folder(tmp_path, resume=None, overwrite=False):
        pass
    assert path.read_bytes() == b""


@pytest.mark.parametrize("obstacle", ["run", "run/.lock/folder", "run/checkpoints"])
def test_a_folder_that_cannot_be_written_is_named(obstacle: str, tmp_path: Path) -> None:
    (tmp_path / obstacle).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / obstacle).touch()
    refused = pytest.raises(ConfigError, match=r"run: .*\(.*/run.*\); .*hydra\.run\.dir")
    with refused, claimed_folder(tmp_path / "run", resume=None, overwrite=False):
        pass


OWN = ["config.yaml", "summary.json", "metrics.jsonl", "checkpoints/best.pt", "checkpoints/step-00000003.pt"]


@pytest.mark.parametrize("name", OWN)
def test_files_of_somebody_are_replaced_only_on_request(name: str, tmp_path: Path) -> None:
    own, other = tmp_path / name, tmp_path / "checkpoints/my.pt"
    other.parent.mkdir()
    own.write_text("own")
    other.write_text("precious")
    refused = pytest.raises(ConfigError, match=r"resume=auto.*hydra\.run\.dir.*overwrite=true")
    with refused, claimed_folder(tmp_path, resume=None, overwrite=False):
        pass
    assert own.read_text() == "own"
    with claimed_folder(tmp_path, resume=None, overwrite=True):
        assert other.read_text() == "precious" and not own.exists()


@pytest.mark.parametrize("name", [*OWN, "train.log"])
def test_a_record_that_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=name), claimed_folder(tmp_path, resume="auto", overwrite=False):
        pass


def test_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_space(tmp_path, 1000, 2) == []
    facts = list(os.statvfs(tmp_path))
    facts[1], facts[4] = 1, 10_000  # f_frsize, f_bavail: 10,000 bytes free
    monkeypatch.setattr(run_folder.os, "statvfs", lambda folder: os.statvfs_result(facts))
    assert check_space(tmp_path, 2_500, 2) == []
    (warning,) = check_space(tmp_path, 2_501, 2)
    assert "4" in warning and "checkpoint.keep" in warning
    with pytest.raises(ConfigError, match="free some space"):
        check_space(tmp_path, 10_001, 2)
    facts[7] = 0  # f_favail
    with pytest.raises(ConfigError, match="df -i"):
        check_space(tmp_path, 1, 2)
