"""Signals, a used folder, a full disk: a run is stopped, refused or continued without losing anything."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cl_train.config.schema import ConfigError
from cl_train.system.append_file import AppendFile
from cl_train.system.checkpoint_store import CheckpointStore
from tests.conftest import Run, write_images

Train = Callable[..., Run]


def test_a_signal_in_the_evaluation_ends_it_and_the_resumed_run_repeats_it(train: Train, tmp_path: Path) -> None:
    words = ("model=tests.networks:terminated_in_evaluation", "batch_size=4", "epochs=2", "checkpoint.every_epochs=0")
    folder = tmp_path / "stopped"
    stopped = train(*words, folder=folder)
    assert stopped.exit_code == 143 and stopped.summary["status"] == "interrupted"
    assert stopped.records("val") == [] and stopped.summary["steps"] == 24
    assert stopped.checkpoint()["progress"]["step"] == 24, "saved although no checkpoint was due"
    resumed = train(*words, "resume=auto", "max_steps=24", folder=folder)
    assert resumed.exit_code == 143, "the evaluation is what the resumed run begins with"
    assert len(resumed.records("train")) == 24 and resumed.summary["steps"] == 24


@pytest.mark.slow
def test_evaluate_only_stopped_by_a_signal_says_so(train: Train) -> None:
    trained = train("model=tests.networks:small")
    weights = trained.folder / "checkpoints" / "step-00000006.pt"
    words = ("model=tests.networks:terminated_in_evaluation", "evaluate_only=true", "batch_size=4", "epochs=1")
    folder = trained.folder.parent / "evaluated"
    saved = torch.load(weights, weights_only=True)["model"]
    torch.save({f"network.{name}": value for name, value in saved.items()}, trained.folder / "weights.pth")
    done = train(*words, f"weights={trained.folder / 'weights.pth'}", folder=folder)
    assert done.exit_code == 143 and done.summary["status"] == "interrupted" and done.summary["val"] is None


@pytest.mark.slow
def test_the_epoch_is_saved_before_its_evaluation(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kill in the evaluation loses nothing, and the resumed run ends like one that nothing disturbed."""
    from cl_train.training import loop

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    whole = train(folder=tmp_path / "whole")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop, "evaluate_exactly", killed)
        train(folder=tmp_path / "killed")
    resumed = train("resume=auto", folder=tmp_path / "killed")
    assert [record["step"] for record in resumed.records("val")] == [3, 6]
    assert resumed.losses == whole.losses and resumed.summary["val"] == whole.summary["val"]


def test_a_second_run_in_a_used_folder_is_refused(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = train(folder=folder)
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}
    with pytest.raises(ConfigError, match=r"resume=auto.*hydra\.run\.dir.*overwrite=true"):
        train("epochs=1", folder=folder)
    after = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"}
    assert after == before
    assert train("resume=auto", folder=folder).summary["val"] == first.summary["val"]
    replaced = train("epochs=1", "overwrite=true", folder=folder)
    assert [record["step"] for record in replaced.records("train")] == [1, 2, 3]
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-00000003.pt", "best.pt"}


def test_a_full_disk_ends_no_run_and_loses_no_record(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = AppendFile._write, [0]

    def refuse_for_a_while(self: AppendFile, data: bytes) -> None:
        calls[0] += 1
        if 8 <= calls[0] < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, data)

    monkeypatch.setattr(AppendFile, "_write", refuse_for_a_while)
    done = train("epochs=8")
    assert done.exit_code == 0 and [record["step"] for record in done.records("train")] == list(range(1, 25))
    assert (done.folder / "train.log").read_text().count("Epoch:") == 24
    assert calls[0] > 40


def test_a_full_disk_at_the_last_save_is_named(train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cl_train.system import checkpoint_store
    from cl_train.system.checkpoint_file import CheckpointError

    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_store, "write", refuse)
    with pytest.raises(CheckpointError, match=r"No space left[\s\S]*resume=auto"):
        train(folder=tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["steps"] == 6


def test_what_cannot_be_saved_is_found_before_the_first_step(train: Train, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="get_extra_state"):
        train("model=tests.networks:unsaveable", folder=tmp_path / "a")
    assert not (tmp_path / "a" / "metrics.jsonl").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "checkpoints").write_text("in the way")
    with pytest.raises(ConfigError, match="checkpoints"):
        train(folder=tmp_path / "b")


def test_skipped_images_and_the_load_of_others_are_recorded(train: Train, tmp_path: Path) -> None:
    images = tmp_path / "images"
    write_images(images, {"train": 32, "val": 7})
    for number in (3, 5):
        (images / "train" / "red" / f"{number:03d}.JPEG").write_bytes(b"")
    done = train(f"data.root={images}", "data.on_bad_image=skip", "epochs=1")
    assert done.summary["skipped_images"] == done.records("train")[-1]["skipped_images"] == 2
    assert "others_pct" in done.summary
    log = (done.folder / "train.log").read_text()
    assert "Bad images 2" in log and "2 bad images" in log


@pytest.mark.slow
def test_best_pt_follows_the_evaluation_without_a_second_file(train: Train) -> None:
    done = train("epochs=3")
    best = max(done.records("val"), key=lambda record: (record["top1"], -record["step"]))
    folder = done.folder / "checkpoints"
    assert done.checkpoint("best.pt")["progress"]["step"] == best["step"]
    newest = CheckpointStore(folder).newest()
    assert newest is not None and newest[1]["progress"]["step"] == 9
