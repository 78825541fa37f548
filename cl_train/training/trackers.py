"""Who receives the records of a run besides its folder: TensorBoard, Weights & Biases, MLflow, or the user's function.

The first record is `{"kind": "start", "step", "folder", "group", "config"}`: `step` is above 0 if the run was resumed,
`group` is the name of its sweep or None. Then come those of metrics.jsonl, last `{"kind": "end", "step", "summary"}`.
Each tracker has a thread: one that waits for a network never delays a step. One that raises gets no further records.
"""

import copy
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from cl_train.config.schema import ConfigError
from cl_train.config.validation import optional_module, suggest, user_function
from cl_train.system.files import write_text

log = logging.getLogger(__name__)

Record = dict[str, Any]
Tracker = Callable[[Iterator[Record]], None]  # takes all records of a run; ends with it

LAST_RECORDS_S = 30.0  # the end of a run waits this long for trackers that are still sending
# TensorBoard sorts the groups of its charts by name: what is looked at first comes first.
_FIRST = ("train/loss", "train/top1", "train/top5", "train/images_per_s")
_NO_RESULTS = ("step", "time", "warmup", "world_size", "images")
_HPARAMS = ("model", "channels_last", "precision", "compile", "batch_size", "seed", "data.image_size", "optim.name")


class Trackers:
    """Sends records to the trackers named in `log_to`; the methods return at once, except `close`."""

    def __init__(self, log_to: Sequence[str]) -> None:
        self._running: list[tuple[threading.Thread, SimpleQueue[Record | None]]] = []
        for name in log_to:
            records: SimpleQueue[Record | None] = SimpleQueue()
            arguments = (find_tracker(name), iter(records.get, None))
            # A daemon: a tracker that hangs does not keep the process alive.
            thread = threading.Thread(target=_track, args=arguments, name=f"log_to={name}", daemon=True)
            thread.start()
            self._running.append((thread, records))

    def send(self, record: Record) -> None:
        for _, records in self._running:
            records.put(copy.deepcopy(record))  # what one changes, the others must not see

    def close(self) -> None:
        """Wait for the trackers to receive all records, together at most `LAST_RECORDS_S`."""
        deadline = time.monotonic() + LAST_RECORDS_S
        for thread, records in self._running:
            records.put(None)
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("%s: still sending after %g s; the last records are lost", thread.name, LAST_RECORDS_S)


def _track(tracker: Tracker, records: Iterator[Record]) -> None:
    try:
        tracker(records)
    except Exception as error:  # training must not depend on a tracker
        name, what = threading.current_thread().name, str(error).strip().partition("\n")[0]
        log.warning("%s gets no further records: it raised %s: %s", name, type(error).__name__, what)


def find_tracker(name: str) -> Tracker:
    """Raises ConfigError: there is no such tracker, or its package is not installed."""
    if name in ("wandb", "mlflow"):
        optional_module(name, f"log_to={name}")
    if name in _TRACKERS:
        return _TRACKERS[name]
    if ":" not in name:
        known = "must be tensorboard, wandb, mlflow or package.module:function"
        raise ConfigError(f"log_to={name}: {known}{suggest(name, list(_TRACKERS))}")
    function = user_function("log_to", name)

    def call(records: Iterator[Record]) -> None:
        for record in records:
            function(record)

    return call


def metrics_of(record: Record) -> dict[str, float]:
    """The numbers of a record as `train/loss`, `val/top1` and so on; of the last one, what runs are compared by."""
    found = {f"{record['kind']}/{name}": value for name, value in record.items() if name not in _NO_RESULTS}
    if record["kind"] == "end":
        summary = record["summary"]
        found = {
            "whole_run/top1": (summary["val"] or {}).get("top1"),
            "whole_run/train_loss": summary["train"]["loss"],
            "whole_run/images_per_s": (summary["images_per_s"]["end_to_end"] or {}).get("median"),
            "whole_run/peak_memory_gib": summary["peak_memory_gib"],
        }
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def run_id(start: Record, tracker: str, new_id: Callable[[], str]) -> str:
    """The name of this run in the tracker, kept in the run folder: a resumed run continues its run in the tracker."""
    path = Path(start["folder"]) / f"{tracker}.run_id"  # a file for each: trackers have threads of their own
    if not (start["step"] and path.is_file()):
        write_text(path, new_id() + "\n")
    return path.read_text(encoding="utf-8").strip()


# --- the trackers -----------------------------------------------------------------------------------------------------


def tensorboard(records: Iterator[Record]) -> None:
    """Events directly in the run folder, so that TensorBoard names the run after the folder."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    start = next(records)
    writer: Any = SummaryWriter(start["folder"], purge_step=start["step"] + 1)  # drops the events of lost work
    writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in start["config"].items()))
    for record in records:
        for tag, value in metrics_of(record).items():
            is_vital = tag.startswith("train/") and tag not in _FIRST
            writer.add_scalar(tag.replace("train/", "vitals/") if is_vital else tag, value, record["step"])
        if record["kind"] == "end":
            settings = {key: str(start["config"][key]) for key in (*_HPARAMS, "optim.lr")}
            settings["memory_format"] = record["summary"]["memory_format"]
            # Into the run's own events: add_hparams would create a second run (pytorch/pytorch#32651).
            for part in hparams(settings, metrics_of(record)):
                writer.file_writer.add_summary(part)
        writer.flush()
    writer.close()


def wandb(records: Iterator[Record]) -> None:
    """A run of Weights & Biases, in the project of WANDB_PROJECT or else cl_train."""
    library = optional_module("wandb", "log_to=wandb")
    start = next(records)
    folder = Path(start["folder"])
    run = library.init(
        id=run_id(start, "wandb", lambda: secrets.token_hex(4)), resume="allow", dir=folder, name=folder.name,
        project=os.environ.get("WANDB_PROJECT", "cl_train"), group=start["group"], config=start["config"],
        settings=library.Settings(console="off", silent=True),
    )  # fmt: skip
    run.define_metric("*", step_metric="step")  # a resumed run repeats steps, which wandb's own step refuses
    for record in records:
        if record["kind"] == "end":
            run.summary.update({**metrics_of(record), "status": record["summary"]["status"]})
            run.finish(exit_code=int(record["summary"]["status"] == "failed"))
        else:
            run.log({**metrics_of(record), "step": record["step"]})


def mlflow(records: Iterator[Record]) -> None:
    """A run of MLflow at MLFLOW_TRACKING_URI, in the experiment of MLFLOW_EXPERIMENT_NAME or else cl_train."""
    client = optional_module("mlflow", "log_to=mlflow").MlflowClient()
    entities = optional_module("mlflow.entities", "log_to=mlflow")
    start = next(records)

    def new_run() -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "cl_train")
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        tags = {"group": start["group"]} if start["group"] else {}
        created = str(client.create_run(experiment, run_name=Path(start["folder"]).name, tags=tags).info.run_id)
        params = [entities.Param(key, str(value)[:500]) for key, value in start["config"].items()]
        for first in range(0, len(params), 100):  # the most that a request may hold
            client.log_batch(created, params=params[first : first + 100])
        return created

    run = run_id(start, "mlflow", new_run)
    client.update_run(run, status="RUNNING")
    for record in records:
        now_ms = int(1000 * time.time())
        metrics = [entities.Metric(*metric, now_ms, record["step"]) for metric in metrics_of(record).items()]
        client.log_batch(run, metrics)
        if record["kind"] == "end":
            ends = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
            client.set_terminated(run, ends[record["summary"]["status"]])


_TRACKERS: dict[str, Tracker] = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
