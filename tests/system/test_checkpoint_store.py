"""The folder of a run's checkpoints: which files stay, which one is the newest whole one, what a full disk does."""

import errno
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cl_train.config.schema import ConfigError
from cl_train.system import checkpoint_store, files
from cl_train.system.checkpoint_file import CheckpointError, load, write
from cl_train.system.checkpoint_store import CheckpointStore, load_for_resume
from tests.processes import LIMIT_S


def small_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((64, 3, 3, 3), float(value))},
        "progress": {"step": 3, "epoch": 0},
        "classes": ["a", "b"],
    }


@pytest.mark.parametrize("background", [False, True])
def test_store_keeps_the_last_ones_and_the_best(tmp_path: Path, background: bool) -> None:
    store = CheckpointStore(tmp_path / "c", keep=2, background=background)
    for step in (10, 20, 30, 100):
        store.save(small_state(step), step, best=step == 20)
    store.wait()
    assert sorted(os.listdir(tmp_path / "c")) == ["best.pt", "step-00000030.pt", "step-00000100.pt"]
    assert load(tmp_path / "c/best.pt")["model"]["w"][0, 0, 0, 0] == 20
    found = store.newest()
    assert found is not None
    path, state, skipped = found
    assert path.name == "step-00000100.pt" and state["model"]["w"].mean() == 100 and skipped == []


def test_the_snapshot_is_taken_before_save_returns(tmp_path: Path) -> None:
    weight = torch.zeros(500, 500)
    store = CheckpointStore(tmp_path, keep=1, background=True)
    store.save({"w": weight}, 1)
    weight.fill_(1.0)
    store.wait()
    assert load(tmp_path / "step-00000001.pt")["w"].sum() == 0


def test_best_twice_at_the_same_step_leaves_no_temporary_file(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, background=False)
    store.save(small_state(), 1, best=True)
    checkpoint_store._link(tmp_path / "step-00000001.pt", tmp_path / "best.pt")
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "step-00000001.pt"]


def test_best_is_a_copy_where_hard_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    store = CheckpointStore(tmp_path, keep=1, background=False)
    store.save(small_state(5), 1, best=True)
    assert load(tmp_path / "best.pt")["model"]["w"].mean() == 5
    assert os.stat(tmp_path / "best.pt").st_nlink == 1


def test_newest_skips_damaged_files_names_them_and_puts_them_aside_at_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=3, background=False)
    for step in (1, 2, 3):
        store.save(small_state(step), step)
    (tmp_path / "step-00000003.pt").write_bytes((tmp_path / "step-00000003.pt").read_bytes()[:-1])
    (tmp_path / "step-00000002.pt").write_bytes(b"")
    found = store.newest()
    assert found is not None
    path, state, skipped = found
    assert path.name == "step-00000001.pt" and state["model"]["w"].mean() == 1
    assert ["step-00000003.pt" in skipped[0], "step-00000002.pt" in skipped[1]] == [True, True]
    with caplog.at_level(logging.WARNING):
        store.save(small_state(9), 2)
    assert "superseded" in caplog.text
    found = store.newest()
    assert found is not None and found[0].name == "step-00000002.pt" and found[2] == []


def test_superseded_files_are_never_overwritten(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3, background=False)
    for value in (1, 2, 3):  # three times: train to step 24, then go back and save step 12
        store.save(small_state(value), 24)
        store.save(small_state(value), 12)
    names = [f"step-00000024.pt.superseded{suffix}" for suffix in ("", "-2", "-3")]
    assert sorted(os.listdir(tmp_path)) == ["step-00000012.pt", *names]
    assert [load(tmp_path / name)["model"]["w"].mean() for name in names] == [1, 2, 3]


def test_newest_of_nothing_and_of_ruins(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c", keep=1, background=False)
    assert store.newest() is None
    store.save(small_state(), 1)
    (tmp_path / "c/step-00000001.pt").write_bytes(b"x" * 1000)
    with pytest.raises(CheckpointError, match=r"no checkpoint can be used:\n.*step-00000001"):
        store.newest()


def test_an_unreadable_folder_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    CheckpointStore(tmp_path, keep=1, background=False).save(small_state(), 1)
    monkeypatch.setattr(os, "listdir", deny)
    monkeypatch.setattr(os, "scandir", deny)
    with pytest.raises(PermissionError):
        CheckpointStore(tmp_path).newest()


def test_best_is_the_last_resort(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, background=False)
    store.save(small_state(1), 1, best=True)
    store.save(small_state(2), 2)
    (tmp_path / "step-00000002.pt").write_bytes(b"")
    found = store.newest()
    assert found is not None and found[0].name == "best.pt" and len(found[2]) == 1


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.pt.tmp-77").write_bytes(b"half")
    (tmp_path / "mine.txt").write_text("kept")
    CheckpointStore(tmp_path, keep=1, background=False).save(small_state(), 2)
    assert sorted(os.listdir(tmp_path)) == ["mine.txt", "step-00000002.pt"]


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_keeps_the_previous_one_and_ends_the_run_after_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    store = CheckpointStore(tmp_path, keep=2, background=background)
    store.save(small_state(1), 1)
    store.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for step in range(2, 9):
            store.save(small_state(step), step)
            store.wait()
        assert os.listdir(tmp_path) == ["step-00000001.pt"]
        [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert "No space left" in warning.getMessage()
    store.save(small_state(9), 9)
    store.wait()  # space came back: the time starts anew
    assert sorted(os.listdir(tmp_path)) == ["step-00000001.pt", "step-00000009.pt"]
    monkeypatch.setattr(os, "fsync", full)
    store.save(small_state(10), 10)
    store.wait()
    monkeypatch.setattr(checkpoint_store, "MAX_MINUTES_WITHOUT_CHECKPOINT", 0.0)
    with pytest.raises(CheckpointError, match=r"step-00000011.*No space left.*step-00000009.*resume=auto"):
        store.save(small_state(11), 11)
        store.wait()
    monkeypatch.undo()
    found = store.newest()
    assert found is not None and found[0].name == "step-00000009.pt" and found[2] == []


def test_the_best_of_a_full_disk_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=1, background=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        store.save(small_state(1), 1, best=True)
        store.save(small_state(2), 2)
        assert store.mark_best(2)
        store.save(small_state(3), 3)
        store.save(small_state(4), 4)
    store.save(small_state(5), 5)
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "step-00000005.pt"]
    assert load(tmp_path / "best.pt")["model"]["w"].mean() == 2


def test_the_last_save_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def full_for_a_while(path: Path, state: Any) -> None:
        calls[0] += 1
        if calls[0] < 4:
            full()
        write(path, state)

    monkeypatch.setattr(checkpoint_store, "write", full_for_a_while)
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))
    store = CheckpointStore(tmp_path, keep=1, background=False)
    store.save(small_state(), 1)
    store.finish()
    assert os.listdir(tmp_path) == ["step-00000001.pt"] and calls[0] == 4


def test_the_last_save_must_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(files, "RETRY_S", 0.01)
    store = CheckpointStore(tmp_path, keep=1, background=False)
    store.save(small_state(), 1)
    with pytest.raises(CheckpointError, match=r"step-00000001.*No space left.*resume=auto"):
        store.finish()


def test_resume_targets(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run/checkpoints", keep=1, background=False)
    assert load_for_resume("auto", store) is None
    store.save(small_state(), 4)
    elsewhere = CheckpointStore(tmp_path / "other", keep=1, background=False)
    for target in (tmp_path / "run", tmp_path / "run/checkpoints", tmp_path / "run/checkpoints/step-00000004.pt"):
        found = load_for_resume(str(target), elsewhere)
        assert found is not None and found[0].name == "step-00000004.pt"
    with pytest.raises(ConfigError, match="no such file"):
        load_for_resume(str(tmp_path / "nope"), elsewhere)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no checkpoint"):
        load_for_resume(str(tmp_path / "empty"), elsewhere)


@pytest.mark.slow
def test_a_program_that_ends_by_an_exception_finishes_the_write_first(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from cl_train.system.checkpoint_store import CheckpointStore\n"
        "CheckpointStore(sys.argv[1], 1, True).save({'w': torch.ones(4_000_000)}, 1)\n"
        "raise SystemExit(1)"
    )
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, timeout=LIMIT_S)
    assert result.returncode == 1
    assert load(tmp_path / "step-00000001.pt")["w"].sum() == 4_000_000
