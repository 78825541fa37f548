"""Trackers receive what a run writes, and can neither change nor end it."""

import json
import os
import sys
import threading
import time
from functools import partial
from types import ModuleType

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cl_train.errors import ConfigError
from cl_train.training import trackers
from cl_train.training.trackers import metrics_of
from tests.conftest import SHRUNK
from tests.faults.forkserver import Forked, train_script

received = []
released = threading.Event()
HERE = "tests.training.test_trackers"

ENVIRONMENT = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
receive = received.append


def fail(record):
    received.append(record)
    raise OSError("no route to the tracker")


def hang(record):
    released.wait()


def test_a_function_receives_the_config_each_record_and_the_summary(train):
    received.clear()
    done = train(f"log_to=[{HERE}:receive]", "epochs=1")
    kinds = " ".join(record["kind"] for record in received)
    assert kinds == "start train train train val end"
    start, *records, end = received
    assert (start["step"], start["folder"], start["group"]) == (0, str(done.folder), None)
    assert (start["config"]["epochs"], start["config"]["optim.lr"]) == (1, 0.4)
    top5 = [metrics_of(records[0], start | {"classes": n}).get("train/top5") for n in (5, 6)]
    assert top5 == [None, records[0]["top5"]]
    assert not metrics_of(records[0], start).keys() & {"train/image_size", "train/skipped_steps"}
    lines = (done.folder / "metrics.jsonl").read_text().splitlines()
    assert records == [json.loads(line) for line in lines]
    assert end["summary"] == done.summary
    assert not list(done.folder.glob("events*")), "TensorBoard was not asked for"
    received.clear()
    train(f"log_to=[{HERE}:receive]", "epochs=2", "resume=auto", folder=done.folder)
    assert [received[0]["step"], received[1]["step"], received[-1]["step"]] == [3, 4, 6]


def test_trackers_that_raise_or_hang_leave_the_run_unharmed(train, monkeypatch):
    received.clear()
    monkeypatch.setattr(trackers, "LAST_RECORDS_S", 1.0)
    monkeypatch.setattr(trackers, "START_S", 1.0)
    reference = train("log_to=[]", "epochs=1")
    done = train(f"log_to=[{HERE}:fail,{HERE}:hang]", "epochs=1")
    released.set()
    assert done.losses == reference.losses and done.summary["status"] == "completed"
    assert len(received) == 1, "a tracker that raised gets no further records"
    log = done.log
    lost = [line for line in log.splitlines() if "HAS LOST" in line]
    assert log.splitlines()[-2:] == lost, "the last lines"
    assert "HAS LOST RECORDS OF THIS RUN (OSError: no route to the tracker)" in lost[0]
    assert f"{HERE}:hang HAS LOST" in lost[1] and "still sending" in lost[1]


def lose_one(record):
    if record["kind"] == "end":
        raise OSError("gone")


def cannot_begin(records):
    next(records)
    raise PermissionError("wrong key")


def begins_late(records):
    next(records)
    time.sleep(1.0)
    received.extend(records)


def test_trackers_are_checked_before_the_first_step(train, tmp_path, monkeypatch):
    """One that begins late loses nothing; one that cannot begin is refused, and leaves no run."""
    received.clear()
    for name, tracker in (("wandb", cannot_begin), ("mlflow", begins_late)):
        monkeypatch.setitem(trackers._TRACKERS, name, tracker)
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # as if it were installed
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match="log_to=wandb cannot begin the run: PermissionError"):
        train("log_to=[wandb]", "epochs=1", folder=folder)
    done = train("log_to=[mlflow]", "epochs=1", folder=folder)
    assert [record["kind"] for record in received] == ["train"] * 3 + ["val", "end"]
    assert "HAS LOST" not in done.log
    done = train(f"log_to=[{HERE}:lose_one]", "epochs=1")
    assert "HAS LOST RECORDS" in done.log


@pytest.mark.slow
def test_tensorboard_begins_with_what_is_looked_at_first_and_shows_no_step_twice(train):
    # Every step overflows, which is faster.
    words = ("precision=fp16", "amp.init_scale=1e15", "data.image_size=16")
    done = train(*words)
    for path in (done.folder / "checkpoints").glob("*0006*"):
        path.unlink()
    time.sleep(1.1)  # the name of an event file has whole seconds
    train(*words, "resume=auto", folder=done.folder)
    assert [path.name for path in done.folder.iterdir() if path.is_dir()] == ["checkpoints"]
    log = done.log
    assert f"curves of {done.folder.name}: tensorboard --logdir {done.folder.parent}\n" in log
    events = EventAccumulator(str(done.folder), purge_orphaned_data=True).Reload()
    tags = events.Tags()
    groups = list(dict.fromkeys(tag.partition("/")[0] for tag in sorted(tags["scalars"])))
    assert groups == ["train", "val", "vitals", "whole_run"]
    expected = "train/loss train/images_per_s val/top1 vitals/lr vitals/loss_scale"
    assert set(expected.split()) <= set(tags["scalars"])
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert tags["images"] == []
    assert {"config/text_summary", "custom_scalars__config__"} <= set(tags["tensors"])
    layout = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    assert b"training (cross_entropy)" in layout
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert events.Scalars("whole_run/top1")[0].value == pytest.approx(done.summary["val"]["top1"])


# --- the real packages ----------------------------------------------------------------------------


def train_in_two_parts(folder, images, tracker, **environment):
    """Two processes, the second resumes the first, in the folder of a sweep."""
    folder.mkdir(parents=True)
    (folder.parent / "sweep.json").write_text("{}")
    words = [*SHRUNK.split(), f"data.root={images}", f"hydra.run.dir={folder}"]
    words.append(f"log_to=[{tracker}]")
    for more in (["epochs=1"], ["epochs=2", "resume=auto"]):
        script = partial(train_script, [*words, *more])
        done = Forked(script, folder / f"log-{more[0]}", os.environ | ENVIRONMENT | environment)
        assert done.wait() == 0 and "LOST" not in done.output(), done.output()
        assert ("wandb sync" in done.output()) == (tracker == "wandb")


@pytest.mark.slow
def test_wandb_continues_the_run_offline(image_folder, tmp_path):
    train_in_two_parts(tmp_path / "sweep/job", image_folder, "wandb")
    (run,) = {path.stem for path in tmp_path.glob("sweep/job/wandb/offline-run-*/run-*.wandb")}
    assert run == f"run-{(tmp_path / 'sweep/job/wandb.run_id').read_text().strip()}"
    assert len(list(tmp_path.glob("sweep/job/wandb/offline-run-*"))) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy, for alembic's part
def test_mlflow_continues_the_run(image_folder, tmp_path, monkeypatch):
    """With its default store, a database in a file."""
    pytest.importorskip("alembic")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    train_in_two_parts(tmp_path / "sweep" / "job", image_folder, "mlflow", MLFLOW_TRACKING_URI=uri)
    import mlflow

    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("cl_train")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.tags["group"]) == ("FINISHED", "sweep")
    assert run.data.params["batch_size"] == "32"
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [metric.step for metric in losses] == [1, 2, 3, 4, 5, 6]
    assert run.data.metrics["whole_run/top1"] == run.data.metrics["val/top1"]
