"""Who else receives the records of a run (`log_to`): TensorBoard, Weights & Biases, MLflow, or the
user's function.

The first record is `start_record`, then come those of metrics.jsonl, last `{"kind": "end", "step",
"summary"}`.
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

from cl_train.config.validation import optional_module, suggest, user_function
from cl_train.errors import ConfigError
from cl_train.system.files import write_text
from cl_train.system.run_folder import Record

log = logging.getLogger("cl_train")

Tracker = Callable[[Iterator[Record]], None]  # takes all records of a run; ends with it

START_S = 120.0  # the first step waits this long for trackers, whose first start may be slow
LAST_RECORDS_S = 30.0  # the end of a run waits this long for trackers that are still sending
# TensorBoard sorts the groups of its charts by name: what is looked at first comes first.
_FIRST = ("train/loss", "train/top1", "train/top5", "train/images_per_s")
_NO_RESULTS = ("step", "time", "warmup", "world_size", "images")
_HPARAMS = (
    "model channels_last precision compile batch_size seed data.image_size optim.name optim.lr"
)


def start_record(folder: Path, config: dict[str, Any], step: int, classes: int) -> Record:
    """step: above 0 if the run was resumed. classes: their number."""
    group = folder.parent.name if (folder.parent / "sweep.json").is_file() else None
    start = {"kind": "start", "step": step, "folder": str(folder), "group": group}
    return start | {"config": config, "classes": classes}


class Trackers:
    """Sends records to the trackers of `log_to`, each in a thread: one that waits for a network
    delays no step.
    """

    def __init__(self, log_to: Sequence[str]) -> None:
        self._trackers = [_Running(name) for name in log_to]

    def begin(self, start: Record) -> None:
        """Send the first record, and wait up to `START_S` until every tracker has begun the run.

        Raises ConfigError: TensorBoard, Weights & Biases or MLflow cannot begin the run.
        """
        self.send(start)
        deadline = time.monotonic() + START_S
        for tracker in self._trackers:
            if not tracker.has_begun.wait(max(0.0, deadline - time.monotonic())):
                log.warning("%s has not begun the run within %g s", tracker.name, START_S)
            if tracker.failure and tracker.is_known:
                self._trackers = []
                what = f"{tracker.name} cannot begin the run: {tracker.failure}"
                raise ConfigError(f"{what}; mend it, or leave it out of log_to")

    def send(self, record: Record) -> None:
        for tracker in self._trackers:
            tracker.send(record)

    def close(self) -> None:
        """Wait up to `LAST_RECORDS_S` for all records to arrive."""
        deadline = time.monotonic() + LAST_RECORDS_S
        for tracker in self._trackers:
            tracker.close(max(0.0, deadline - time.monotonic()))


class _Running:
    def __init__(self, tracker: str) -> None:
        self.name = f"log_to={tracker}"
        self.is_known = tracker in _TRACKERS
        self.failure: str | None = None
        self.has_begun = threading.Event()  # or failed
        self._records: SimpleQueue[Record | None] = SimpleQueue()
        # A daemon: a tracker that hangs does not keep the process alive.
        arguments = (find_tracker(tracker),)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def send(self, record: Record) -> None:
        self._records.put(copy.deepcopy(record))  # what one changes, the others must not see

    def _run(self, tracker: Tracker) -> None:
        try:
            tracker(self._received())
        except Exception as error:  # training must not depend on a tracker
            reason = str(error).strip().partition("\n")[0]
            self.failure = f"{type(error).__name__}: {reason}"
            if self.has_begun.is_set() or not self.is_known:
                log.warning("%s gets no further records: it raised %s", self.name, self.failure)
        self.has_begun.set()

    def _received(self) -> Iterator[Record]:
        """The records for the tracker, which has dealt with one when it asks for the next."""
        for record in iter(self._records.get, None):
            yield record
            self.has_begun.set()

    def close(self, seconds: float) -> None:
        self._records.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive() or self.failure:
            why = self.failure or f"still sending after {LAST_RECORDS_S:g} s"
            log.error("WARNING: %s HAS LOST RECORDS OF THIS RUN (%s)", self.name, why)


def find_tracker(name: str) -> Tracker:
    """Raises ConfigError: there is no such tracker, or its package is not installed."""
    if name in ("wandb", "mlflow"):
        optional_module(name, f"log_to={name}")
    if name in _TRACKERS:
        return _TRACKERS[name]
    if ":" not in name:
        choices = "must be tensorboard, wandb, mlflow or package.module:function"
        raise ConfigError(f"log_to={name}: {choices}{suggest(name, [*_TRACKERS])}")
    function = user_function("log_to", name)

    def call(records: Iterator[Record]) -> None:
        for record in records:
            function(record)

    return call


def metrics_of(record: Record, start: Record) -> dict[str, float]:
    """The numbers of a record as `train/loss`, `val/top1` and so on, without those that settings
    make constant; of the last one, what runs are compared by.
    """
    config = start["config"]
    is_constant = {
        "top5": start["classes"] <= 5,
        "image_size": not config["data.size_schedule"],
        "skipped_images": config["data.on_bad_image"] == "error",
        "skipped_steps": record.get("loss_scale") is None and config["on_nonfinite"] == "stop",
    }
    values = {
        f"{record['kind']}/{name}": value
        for name, value in record.items()
        if name not in _NO_RESULTS and not is_constant.get(name)
    }
    if record["kind"] == "end":
        summary = record["summary"]
        values = {
            "whole_run/top1": (summary["val"] or {}).get("top1"),
            "whole_run/train_loss": summary["train"]["loss"],
            "whole_run/images_per_s": (summary["images_per_s"]["end_to_end"] or {}).get("median"),
            "whole_run/peak_memory_gib": summary["peak_memory_gib"],
        }
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def run_id(start: Record, tracker: str, new_id: Callable[[], str]) -> str:
    """The run's name in the tracker, kept in a file of the run folder for a resumed run."""
    path = Path(start["folder"]) / f"{tracker}.run_id"
    if not (start["step"] and path.is_file()):
        write_text(path, new_id() + "\n")
    return path.read_text(encoding="utf-8").strip()


def tensorboard(records: Iterator[Record]) -> None:
    """Events directly in the run folder, so that TensorBoard names the run after the folder."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    start = next(records)
    # `purge_step` drops the events of lost work.
    writer: Any = SummaryWriter(start["folder"], purge_step=start["step"] + 1)
    config = start["config"]
    writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))
    loss = f"loss in training ({config['loss']}) and validation (plain cross-entropy)"
    charts = {
        loss: ["Multiline", ["^train/loss$", "^val/loss$"]],
        "top-1 in training and validation, %": ["Multiline", ["^train/top1$", "^val/top1$"]],
    }
    writer.add_custom_scalars({"a run": charts})
    for record in records:
        for tag, value in metrics_of(record, start).items():
            is_vital = tag.startswith("train/") and tag not in _FIRST
            shown_tag = tag.replace("train/", "vitals/") if is_vital else tag
            writer.add_scalar(shown_tag, value, record["step"])
        if record["kind"] == "end":
            compared = {key: str(config[key]) for key in _HPARAMS.split()}
            compared["memory_format"] = record["summary"]["memory_format"]
            # `add_hparams` would create a second run (pytorch/pytorch#32651).
            for part in hparams(compared, metrics_of(record, start)):
                writer.file_writer.add_summary(part)
        writer.flush()
    writer.close()


def wandb(records: Iterator[Record]) -> None:
    """A run of Weights & Biases, in the project of WANDB_PROJECT or else cl_train."""
    library = optional_module("wandb", "log_to=wandb")
    start = next(records)
    folder = Path(start["folder"])
    run = library.init(
        id=run_id(start, "wandb", lambda: secrets.token_hex(4)),
        resume="allow",
        dir=folder,
        name=folder.name,
        project=os.environ.get("WANDB_PROJECT", "cl_train"),
        group=start["group"],
        config=start["config"],
        settings=library.Settings(console="off", silent=True),
    )
    # A resumed run repeats steps, which wandb's own step refuses.
    run.define_metric("*", step_metric="step")
    for record in records:
        if record["kind"] == "end":
            run.summary.update({**metrics_of(record, start), "status": record["summary"]["status"]})
            run.finish(exit_code=int(record["summary"]["status"] == "failed"))
            if run.offline:
                log.info("log_to=wandb: offline; to send it: wandb sync %s", run.sync_dir)
        else:
            run.log({**metrics_of(record, start), "step": record["step"]})


def mlflow(records: Iterator[Record]) -> None:
    """A run of MLflow, in the experiment of MLFLOW_EXPERIMENT_NAME or else cl_train."""
    library = optional_module("mlflow", "log_to=mlflow")
    client, start = library.MlflowClient(), next(records)

    def new_run() -> str:
        experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "cl_train")
        entry = client.get_experiment_by_name(experiment_name)
        experiment = entry.experiment_id if entry else client.create_experiment(experiment_name)
        tags = {"group": start["group"]} if start["group"] else {}
        name = Path(start["folder"]).name
        created = client.create_run(experiment, run_name=name, tags=tags).info.run_id
        settings = {key: str(value)[:500] for key, value in start["config"].items()}
        library.log_params(settings, True, created)
        return str(created)

    run = run_id(start, "mlflow", new_run)
    client.update_run(run, status="RUNNING")
    for record in records:
        library.log_metrics(metrics_of(record, start), record["step"], synchronous=True, run_id=run)
        if record["kind"] == "end":
            ends = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
            client.set_terminated(run, ends[record["summary"]["status"]])


_TRACKERS: dict[str, Tracker] = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
