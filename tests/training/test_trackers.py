"""Trackers receive what a run writes, and can neither change nor end it."""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cl_train.errors import ConfigError
from cl_train.training.trackers import metrics_of
from tests.conftest import SHRUNK
from tests.faults.forkserver import Forked, train_script

received = []
HERE = "tests.training.test_trackers"
receive = received.append


def fail(record):
    received.append(record)
    raise OSError("no route to the tracker")


def test_a_function_receives_the_config_each_record_and_the_summary(train):
    received.clear()
    done = train(f"log_to=[{HERE}:receive]", "epochs=1")
    kinds = " ".join(record["kind"] for record in received)
    assert kinds == "start train train train val end"
    start, *records, end = received
    assert (start["step"], start["folder"], start["group"]) == (0, str(done.folder), None)
    assert (start["config"]["epochs"], start["config"]["optim.lr"]) == (1, 0.4)
    assert metrics_of(records[0])["train/loss"] == records[0]["loss"]
    lines = (done.folder / "metrics.jsonl").read_text().splitlines()
    assert records == [json.loads(line) for line in lines]
    assert end["summary"] == done.summary
    assert not list(done.folder.glob("events*")), "TensorBoard was not asked for"
    received.clear()
    train(f"log_to=[{HERE}:receive]", "epochs=2", "resume=auto", folder=done.folder)
    assert [received[0]["step"], received[1]["step"], received[-1]["step"]] == [3, 4, 6]


def change(record):
    record.clear()


def test_trackers_that_raise_or_change_a_record_leave_the_run_unharmed(train):
    received.clear()
    done = train(f"log_to=[{HERE}:change,{HERE}:fail]", "epochs=1")
    assert len(done.losses) == 3 and done.summary["status"] == "completed"
    assert [record["kind"] for record in received] == ["start"], "no further records"
    lost = f"WARNING: log_to={HERE}:fail HAS LOST RECORDS OF THIS RUN (OSError: no route to the"
    assert lost in done.log.splitlines()[-1]
    assert done.log.count("HAS LOST") == 1


def test_trackers_are_checked_before_the_first_step(train, tmp_path, monkeypatch):
    """One that cannot begin is refused, and leaves no run."""
    folder = tmp_path / "run"
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=dict, init=fail))
    with pytest.raises(ConfigError, match="log_to=wandb cannot begin the run: TypeError"):
        train("log_to=[wandb]", "epochs=1", folder=folder)
    with pytest.raises(ConfigError, match="log_to=mlflow: must be tensorboard"):
        train("log_to=[tensorboard,mlflow]", "epochs=1", folder=folder)
    train("epochs=1", folder=folder)


def test_the_function_for_mlflow_in_the_docs(train, tmp_path, monkeypatch):
    _, _, rest = Path("docs/training.md").read_text(encoding="utf-8").partition("`to_mlflow.py`")
    (tmp_path / "to_mlflow.py").write_text(rest.split("```python\n")[1].partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    calls = ("start_run", "log_params", "log_metrics", "end_run")
    mlflow = Mock(ModuleType, **{name: Mock() for name in calls})
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    done = train("log_to=[to_mlflow:track]", "epochs=1")
    assert "HAS LOST" not in done.log
    mlflow.start_run.assert_called_once_with(run_name=done.folder.name)
    assert mlflow.log_params.call_args.args[0]["batch_size"] == "32"
    assert [each.kwargs["step"] for each in mlflow.log_metrics.call_args_list] == [1, 2, 3, 3]
    losses = [each.args[0].get("train/loss") for each in mlflow.log_metrics.call_args_list]
    assert losses == [*done.losses, None]
    assert mlflow.mock_calls[-1] == call.end_run("FINISHED")


@pytest.mark.slow
def test_tensorboard_begins_with_what_is_looked_at_first_and_shows_no_step_twice(
    train, monkeypatch
):
    # Every step overflows, which is faster.
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=1e15))
    words = ("precision=fp16", "data.image_size=16")
    done = train(*words)
    for path in (done.folder / "checkpoints").glob("*0006*"):
        path.unlink()
    time.sleep(1.1)  # the name of an event file has whole seconds
    train(*words, "resume=auto", folder=done.folder)
    assert f"curves: tensorboard --logdir {done.folder.parent}" in done.log
    events = EventAccumulator(str(done.folder), purge_orphaned_data=True).Reload()
    tags = events.Tags()
    groups = list(dict.fromkeys(tag.partition("/")[0] for tag in sorted(tags["scalars"])))
    assert groups == ["train", "val", "vitals", "whole_run"]
    expected = "train/loss train/images_per_s val/top1 vitals/lr vitals/loss_scale"
    assert set(expected.split()) <= set(tags["scalars"])
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Images("images/first batch")] == [0], "once"
    assert {"config/text_summary", "custom_scalars__config__"} <= set(tags["tensors"])
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert events.Scalars("whole_run/top1")[0].value == pytest.approx(done.summary["val"]["top1"])


@pytest.mark.slow
def test_wandb_continues_the_run_offline(image_folder, tmp_path):
    """Two processes, the second resumes the first, in the folder of a sweep."""
    pytest.importorskip("wandb")
    folder = tmp_path / "sweep/job"
    folder.mkdir(parents=True)
    (folder.parent / "sweep.json").write_text("{}")
    words = [*SHRUNK.split(), f"data.root={image_folder}", f"hydra.run.dir={folder}"]
    offline = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    for more in (["epochs=1"], ["epochs=2", "resume=auto"]):
        script = partial(train_script, [*words, "log_to=[tensorboard,wandb]", *more])
        done = Forked(script, folder / f"log-{more[0]}", os.environ | offline)
        assert done.wait() == 0 and "LOST" not in done.output(), done.output()
        assert "wandb sync" in done.output()
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len(list(folder.glob("events*"))) == 2
    for path in files:
        assert path.stem == f"run-{(folder / 'wandb.run_id').read_text().strip()}"
        sent = path.read_bytes()
        for word in (b"train/loss", b"val/top1", b"whole_run/top1", b"sweep"):
            assert word in sent, word
