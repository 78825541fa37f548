"""Signals, a used folder, a full disk: a run is stopped, refused or continued without losing
anything.
"""

import errno
import json
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cl_train.errors import ConfigError
from cl_train.system import checkpoints, files
from cl_train.system.checkpoints import CheckpointError
from cl_train.system.files import AppendFile
from cl_train.training import loop
from tests.conftest import Run

FULL = OSError(errno.ENOSPC, "No space left on device")
TERMINATED = "model=tests.networks:terminated_in_evaluation"


def test_a_signal_in_the_evaluation_ends_it_and_the_resumed_run_repeats_it(train, tmp_path):
    words = (TERMINATED, "batch_size=4", "epochs=2", "checkpoint.every_epochs=0")
    folder = tmp_path / "stopped"
    stopped = train(*words, folder=folder)
    assert stopped.exit_code == 143 and stopped.summary["status"] == "interrupted"
    assert stopped.records("val") == [] and stopped.summary["steps"] == 24
    assert stopped.saved_step() == 24, "saved although no checkpoint was due"
    closing = stopped.log.splitlines()[-1]
    assert "step-00000024.pt" in closing and f"hydra.run.dir={folder} resume=auto" in closing
    resumed = train(*words, "resume=auto", "max_steps=24", folder=folder)
    assert resumed.exit_code == 143, "the evaluation is what the resumed run begins with"
    assert len(resumed.records("train")) == 24 and resumed.summary["steps"] == 24


def test_the_epoch_is_saved_before_its_evaluation(train, monkeypatch, tmp_path):
    # Not a KeyboardInterrupt, after which a run does not wait for the file.
    monkeypatch.setattr(loop, "evaluate_model", Mock(side_effect=RuntimeError("planted")))
    with pytest.raises(RuntimeError, match="planted"):
        train(folder=tmp_path)
    assert Run(tmp_path, 1).saved_step() == 3


@pytest.mark.slow
def test_a_finished_run_that_is_continued_elsewhere_leaves_a_checkpoint_there(train, tmp_path):
    train("epochs=1", folder=tmp_path / "first")
    second = train("epochs=1", f"resume={tmp_path / 'first'}", folder=tmp_path / "second")
    assert second.saved_step() == 3
    third = train("epochs=2", "resume=auto", folder=tmp_path / "second")
    assert third.steps == [4, 5, 6]


@pytest.mark.slow
def test_a_full_disk_ends_no_run_and_loses_no_record(train, monkeypatch):
    """The disk refuses records and checkpoints for some writes in the middle."""
    calls = [0]

    def refusing(write):
        def refuse(*data, **named):
            calls[0] += 1
            if 10 <= calls[0] < 30:
                raise FULL
            return write(*data, **named)

        return refuse

    monkeypatch.setattr(AppendFile, "_write", refusing(AppendFile._write))
    monkeypatch.setattr(checkpoints, "write", refusing(checkpoints.write))
    done = train("epochs=8", "log_to=[tensorboard]", "checkpoint.every_steps=1")
    assert done.exit_code == 0 and done.summary["status"] == "completed" and calls[0] > 30
    assert done.steps == list(range(1, 25))
    events = EventAccumulator(str(done.folder)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 25))
    assert done.saved_step() == 24 and done.log.count("Epoch:") == 24


def test_a_full_disk_at_the_last_save_is_named(train, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoints, "write", Mock(side_effect=FULL))
    monkeypatch.setattr(files, "RETRY_S", 0.01)
    with pytest.raises(CheckpointError, match=r"No space left[\s\S]*resume=auto"):
        train(folder=tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["steps"] == 6


def test_what_cannot_be_saved_is_found_before_the_first_step(train, tmp_path):
    with pytest.raises(ConfigError, match="get_extra_state"):
        train("model=tests.networks:unsaveable", folder=tmp_path / "a")
    assert not (tmp_path / "a" / "metrics.jsonl").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "checkpoints").write_text("in the way")
    with pytest.raises(ConfigError, match="checkpoints"):
        train(folder=tmp_path / "b")
