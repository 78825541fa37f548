"""One writer per run folder, probed before training, with names that stay inside."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cl_train.config.schema import ConfigError
from cl_train.system import run_folder
from cl_train.system.run_folder import check_space, check_writable, claimed_folder, safe_name


def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    program = (
        "import sys, time; from cl_train.system.locks import lock_file\n"
        "with lock_file(sys.argv[1] + '/.lock'): print(1, flush=True); time.sleep(10_000)"
    )
    first = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert first.stdout is not None and first.stdout.readline() == b"1\n"
    with (
        pytest.raises(ConfigError, match=rf"process {first.pid} on .*hydra\.run\.dir"),
        claimed_folder(tmp_path, resume=None, overwrite=False),
    ):
        pass
    first.kill()
    first.wait()
    first.stdout.close()
    with claimed_folder(tmp_path, resume=None, overwrite=False):
        pass


def test_an_impossible_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigError, match=r"\.lock"), claimed_folder(tmp_path, resume=None, overwrite=False):
        pass


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "checkpoints/best.pt", "checkpoints/step-00000003.pt"])
def test_files_of_somebody_are_replaced_only_on_request(name: str, tmp_path: Path) -> None:
    own, other = tmp_path / name, tmp_path / "checkpoints/my.pt"
    other.parent.mkdir()
    own.write_text("own")
    other.write_text("precious")
    with (
        pytest.raises(ConfigError, match=r"resume=auto.*hydra\.run\.dir.*overwrite=true"),
        claimed_folder(tmp_path, resume=None, overwrite=False),
    ):
        pass
    assert own.read_text() == "own"
    with claimed_folder(tmp_path, resume=None, overwrite=True):
        assert other.read_text() == "precious" and (own.exists() == (name == "config.yaml"))


def test_writable_makes_the_folder_and_leaves_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "a/b")
    assert list((tmp_path / "a/b").iterdir()) == []


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/run: Not a directory"):
        check_writable(tmp_path / "file/run")
    with pytest.raises(ConfigError, match="/proc/no/such"):
        check_writable("/proc/no/such")


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


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("channels_last=true,precision=fp16", "channels_last=true,precision=fp16"),
        ("../../etc/passwd", "_.._etc_passwd"),
        ("/abs", "_abs"),
        ("...", "_"),
        ("", "_"),
        ("a b\nc\0d", "a_b_c_d"),
        ("ünï", "_n_"),
    ],
)
def test_names_stay_inside_the_folder(text: str, name: str) -> None:
    assert safe_name(text) == name
    assert "/" not in name and not name.startswith(".")


def test_long_names_are_cut_and_stay_distinct() -> None:
    first, second = safe_name("x" * 300 + "1"), safe_name("x" * 300 + "2")
    assert len(first) == len(second) == 100 and first != second


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "train.log", "checkpoints/step-00000001.pt"])
def test_a_record_that_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=name), claimed_folder(tmp_path, resume="auto", overwrite=False):
        pass
