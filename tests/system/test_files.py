"""Outputs that replace nothing unasked and leave nothing half; records and a full disk; locks; one
run per folder.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from cl_train.errors import ConfigError
from cl_train.system import files
from cl_train.system.files import (
    AppendFile,
    check_space,
    claim_output,
    claimed_folder,
    lock_file,
    output_file,
)
from tests.conftest import contents


def test_refused_records_are_reported_once_and_written_later_in_order(tmp_path, caplog):
    for path in (Path("/dev/full"), tmp_path / "folder" / "records"):  # the first accepts no byte
        file = AppendFile(path)
        for record in (b"1\n", b"2\n"):
            file.append(record)
        with pytest.raises(OSError, match=path.name):
            file.flush()
        assert [str(path) in message for message in caplog.messages] == [True], "one warning"
        caplog.clear()
    path.parent.mkdir()
    file.append(b"3\n")
    assert path.read_bytes() == b"1\n2\n3\n"


# --- outputs of commands --------------------------------------------------------------------------


def files_in(folder):
    return {name: data for name, data in contents(folder).items() if data is not None}


@pytest.mark.parametrize("exists", [False, True])
def test_an_output_file_appears_whole_or_not_at_all(exists, tmp_path):
    path = tmp_path / ("old.pt2" if exists else "a/new.pt2")
    (tmp_path / "old.pt2").write_text("old")
    with pytest.raises(ConfigError), output_file(path, overwrite=exists) as file:
        file.write_text("half")
        raise ConfigError("no such model")
    assert files_in(tmp_path) == {"old.pt2": b"old"}
    with output_file(path, overwrite=exists) as file:
        assert file.suffix == ".pt2" and file.parent == path.parent, "writers look at the suffix"
        file.write_text("new")
        file.chmod(0o600)  # as safetensors does
    assert path.read_text() == "new" and os.listdir(path.parent) == [path.name]
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode


REFUSED = [(name, False) for name in ("file", "folder", "file/below")]
REFUSED += [(name, True) for name in ("link", "folder", "/dev/full")]


@pytest.mark.parametrize(("name", "overwrite"), REFUSED)
def test_an_output_file_is_refused_before_the_work(name, overwrite, tmp_path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"out=.*(overwrite=true|choose another)"):
        output_file(tmp_path / name, overwrite=overwrite).__enter__()
    assert contents(tmp_path) == before


def test_an_output_folder_is_ones_own(tmp_path):
    claim = partial(claim_output, overwrite=False, markers=[".settings"])
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/photo.jpg").write_text("precious")
    with pytest.raises(ConfigError, match="overwrite=true"):
        claim(tmp_path / "foreign")
    claim(tmp_path / "foreign", overwrite=True)
    for name in (".settings", "part"):
        claim(out := tmp_path / "a/out")
        (out / name).touch()
    assert {*files_in(tmp_path)} == {"foreign/photo.jpg", "a/out/.settings", "a/out/part"}


def test_names_stay_inside_the_folder():
    names = {"a=true,b=1": "a=true,b=1", "../../etc": "_.._etc", "/abs": "_abs", "": "_"}
    names |= {"ü b\nc\0": "_b_c_"}
    assert {text: files.safe_name(text) for text in names} == names
    first, second = files.safe_name("x" * 300 + "1"), files.safe_name("x" * 300 + "2")
    assert len(first) == len(second) == 100 and first != second


# --- locks and the run folder ---------------------------------------------------------------------

HOLD = """
import os, sys, time
from cl_train.system.files import lock_file
with lock_file(sys.argv[1]):
    if os.fork() == 0:  # a worker that outlives its parent, and has left the lock
        print("held", flush=True)
    time.sleep(10_000)
"""


def test_the_holder_is_named_and_a_killed_one_frees_the_lock(tmp_path, capsys, monkeypatch):
    """Who waits says for whom; a second run is refused; a worker that outlives it holds nothing."""
    path, pauses = tmp_path / ".lock", []
    command = [sys.executable, "-c", HOLD, str(path)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert first.stdout.readline() == b"held\n"

    def end_the_holder(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            first.kill()
            first.wait()

    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=end_the_holder))
    try:
        said = rf"another run.*process {first.pid} on .*hydra\.run\.dir"
        with pytest.raises(ConfigError, match=said):
            claimed_folder(tmp_path, resume=None, overwrite=False).__enter__()
        with lock_file(path, waiting_for="the sample data"):
            os.killpg(first.pid, 0)  # the forked worker still lives
            assert len(pauses) == 2
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
    said = rf"waiting for the sample data: .*process {first.pid} .*{path}.*\n"
    assert re.fullmatch(said, capsys.readouterr().err)
    with claimed_folder(tmp_path, resume=None, overwrite=False):
        pass
    assert path.read_bytes() == b""


OWN = ["config.yaml", "summary.json", "metrics.jsonl", "checkpoints/best.pt"]


@pytest.mark.parametrize("name", [*OWN, "train.log"])
def test_files_of_somebody_are_replaced_only_on_request(name, tmp_path):
    own, other = tmp_path / name, tmp_path / "checkpoints/my.pt"
    other.parent.mkdir()
    other.write_text("precious")
    own.write_text("own")
    claim = partial(claimed_folder, tmp_path, resume=None)
    if name in OWN:
        with pytest.raises(ConfigError, match=r"resume=auto.*hydra\.run\.dir.*overwrite=true"):
            claim(overwrite=False).__enter__()
    else:  # train.log alone is of a run that was refused
        with claim(overwrite=False):
            pass
    assert own.read_text() == "own"
    with claim(overwrite=True):
        assert other.read_text() == "precious" and not own.exists()


def test_no_space_for_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10_000))
    check_space(tmp_path, 10_000)
    with pytest.raises(ConfigError, match="free some space"):
        check_space(tmp_path, 10_001)


def test_the_lock_stays_when_its_own_process_reads_the_file(tmp_path):
    """As a tracker does that copies the run folder."""
    again = partial(claimed_folder, tmp_path / "run", resume="auto", overwrite=False)
    with again():
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        command = [sys.executable, "-c", HOLD, str(tmp_path / "run/.lock")]
        said = subprocess.run(command, capture_output=True, text=True).stderr
        assert f"another run writes to {tmp_path / 'run'} (process {os.getpid()}" in said
    with again():
        pass
