"""Who receives the records of a run besides its folder: TensorBoard, Weights & Biases, MLflow, or the user's function.

A tracker is a function that is called with each record, a dict. First comes `{"kind": "start", "step", "folder",
"group", "config"}`: `step` is above 0 if the run was resumed, `group` is the name of its sweep or None. Then come the
records as they are written to metrics.jsonl, and last `{"kind": "end", "step", "summary"}`.

Each tracker has a thread of its own, so that one that waits for a network never delays a step. One that raises gets a
warning and no further records.
"""

import copy
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cl_train.config.schema import ConfigError
from cl_train.config.user_function import optional_module, user_function
from cl_train.config.validation import suggest
from cl_train.system.files import write_text

log = logging.getLogger(__name__)

Record = dict[str, Any]
Tracker = Callable[[Record], None]

LAST_RECORDS_S = 30.0  # the end of a run waits this long for trackers that are still sending
# TensorBoard sorts the groups of its charts by name: what is looked at first comes first.
_FIRST = ("loss", "top1", "top5", "images_per_s")
_NO_RESULTS = ("step", "time", "warmup", "world_size", "images")
_HPARAMS = ("model", "channels_last", "precision", "compile", "batch_size", "data.image_size", "optim.lr", "seed")


class Trackers:
    """Sends records to the trackers named in `log_to`; the methods return at once, except `close`.

    Raises ConfigError: an unknown tracker, or one whose package is not installed.
    """

    def __init__(self, log_to: Sequence[str]) -> None:
        self._threads = {name: _TrackerThread(name, build_tracker(name)) for name in log_to}

    def send(self, record: Record) -> None:
        for thread in self._threads.values():
            thread.records.put(copy.deepcopy(record))  # what one changes, the others must not see

    def close(self) -> None:
        """Wait for the trackers to receive all records, together at most `LAST_RECORDS_S`."""
        deadline = time.monotonic() + LAST_RECORDS_S
        for name, thread in self._threads.items():
            thread.records.put(None)
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("log_to=%s: still sending after %g s; the last records are lost", name, LAST_RECORDS_S)


class _TrackerThread(threading.Thread):
    def __init__(self, name: str, tracker: Tracker) -> None:
        super().__init__(name=f"log_to={name}", daemon=True)  # a tracker that hangs does not keep the process alive
        self.records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._tracker = tracker
        self.start()

    def run(self) -> None:
        while (record := self.records.get()) is not None:
            try:
                self._tracker(record)
            except Exception as error:  # training must not depend on a tracker
                what = str(error).strip().splitlines()[:1] or [type(error).__name__]
                log.warning("%s gets no further records: it raised %s: %s", self.name, type(error).__name__, what[0])
                return


def build_tracker(name: str) -> Tracker:
    if name in _TRACKERS:
        return _TRACKERS[name]()
    if ":" not in name:
        raise ConfigError(f"log_to={name}: must be tensorboard, wandb, mlflow or package.module:function"
                          f"{suggest(name, list(_TRACKERS))}")  # fmt: skip
    return user_function("log_to", name)


def numbers(record: Record) -> dict[str, float]:
    """The numbers of a training window or an evaluation as `train/loss`, `val/top1` and so on."""
    found = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return {f"{record['kind']}/{name}": value for name, value in found.items() if name not in _NO_RESULTS}


def final_metrics(summary: Record) -> dict[str, float]:
    """The results of a run by which runs are compared; those that are unknown are left out."""
    results = {
        "whole_run/top1": (summary["val"] or {}).get("top1"),
        "whole_run/train_loss": summary["train"]["loss"],
        "whole_run/images_per_s": (summary["images_per_s"]["end_to_end"] or {}).get("median"),
        "whole_run/peak_memory_gib": summary["peak_memory_gib"],
    }
    return {name: value for name, value in results.items() if value is not None}


def run_id(record: Record, tracker: str, new_id: Callable[[], str]) -> str:
    """The name of this run in the tracker, kept in the run folder: a resumed run continues its run in the tracker."""
    path = Path(record["folder"]) / f"{tracker}.run_id"  # a file for each: trackers have threads of their own
    if record["step"] and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    created = new_id()
    write_text(path, f"{created}\n")
    return created


# --- the trackers -----------------------------------------------------------------------------------------------------


def tensorboard() -> Tracker:
    """Events directly in the run folder, so that TensorBoard names the run after the folder."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    threading.excepthook = _report_thread
    writer: Any = None
    start: Record = {}

    def track(record: Record) -> None:
        nonlocal writer, start
        if record["kind"] == "start":
            start = record
            writer = SummaryWriter(record["folder"], purge_step=record["step"] + 1)  # drops the events of lost work
            writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in record["config"].items()))
        elif record["kind"] == "end":
            if start["group"] is None:  # in a sweep the comparison writes the table
                metrics = final_metrics(record["summary"])
                settings = {key: str(start["config"][key]) for key in _HPARAMS}
                # Into the run's own events: add_hparams would create a second run (pytorch/pytorch#32651).
                for part in hparams(settings | {"memory_format": record["summary"]["memory_format"]}, metrics):
                    writer.file_writer.add_summary(part)
                for name, value in metrics.items():
                    writer.add_scalar(name, value, record["step"])
            writer.close()
        else:
            for tag, value in numbers(record).items():
                group, _, name = tag.partition("/")
                writer.add_scalar(
                    tag if group != "train" or name in _FIRST else f"vitals/{name}", value, record["step"]
                )
            writer.flush()

    return track


def _report_thread(args: threading.ExceptHookArgs) -> None:
    """As by default, but silent for SummaryWriter's thread on a full disk: its next call raises the error."""
    if type(args.thread).__module__ != "tensorboard.summary.writer.event_file_writer":
        threading.__excepthook__(args)


def wandb() -> Tracker:
    """A run of Weights & Biases, in the project of WANDB_PROJECT or else cl_train."""
    library = optional_module("wandb", "log_to=wandb")
    run: Any = None

    def track(record: Record) -> None:
        nonlocal run
        if record["kind"] == "start":
            folder = Path(record["folder"])
            run = library.init(
                id=run_id(record, "wandb", lambda: secrets.token_hex(4)), resume="allow", dir=folder, name=folder.name,
                project=os.environ.get("WANDB_PROJECT", "cl_train"), group=record["group"], config=record["config"],
                settings=library.Settings(console="off", silent=True),
            )  # fmt: skip
            run.define_metric("*", step_metric="step")  # a resumed run repeats steps, which wandb's own step refuses
        elif record["kind"] == "end":
            run.summary.update({**final_metrics(record["summary"]), "status": record["summary"]["status"]})
            run.finish(exit_code=int(record["summary"]["status"] == "failed"))
        else:
            run.log({**numbers(record), "step": record["step"]})

    return track


def mlflow() -> Tracker:
    """A run of MLflow at MLFLOW_TRACKING_URI, in the experiment of MLFLOW_EXPERIMENT_NAME or else cl_train."""
    library = optional_module("mlflow", "log_to=mlflow")
    entities = optional_module("mlflow.entities", "log_to=mlflow")
    client: Any = None
    run = ""

    def new_run(record: Record) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "cl_train")
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        tags = {"group": record["group"]} if record["group"] else {}
        created = client.create_run(experiment, run_name=Path(record["folder"]).name, tags=tags).info.run_id
        params = [entities.Param(key, str(value)[:500]) for key, value in record["config"].items()]
        for first in range(0, len(params), 100):  # the most that a request may hold
            client.log_batch(created, params=params[first : first + 100])
        return str(created)

    def log(metrics: dict[str, float], step: int) -> None:
        now_ms = int(1000 * time.time())
        client.log_batch(run, [entities.Metric(name, value, now_ms, step) for name, value in metrics.items()])

    def track(record: Record) -> None:
        nonlocal client, run
        if record["kind"] == "start":
            client = library.MlflowClient()
            run = run_id(record, "mlflow", lambda: new_run(record))
            client.update_run(run, status="RUNNING")
        elif record["kind"] == "end":
            log(final_metrics(record["summary"]), record["step"])
            ends = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
            client.set_terminated(run, ends[record["summary"]["status"]])
        else:
            log(numbers(record), record["step"])

    return track


_TRACKERS: dict[str, Callable[[], Tracker]] = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
