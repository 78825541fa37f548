"""What a run leaves besides checkpoints: `metrics.jsonl`, `config.yaml`, `summary.json`, `train.log`, a profile; and
who else receives its records (`log_to`): TensorBoard, Weights & Biases, MLflow, or the user's function.

The first record is `{"kind": "start", "step", "folder", "group", "config"}`: `step` is above 0 if the run was resumed,
`group` is the name of its sweep or None. Then come those of metrics.jsonl, last `{"kind": "end", "step", "summary"}`.
A full disk does not end a run: records stay in memory until they can be written (see `AppendFile`)."""

import copy
import errno
import json
import logging
import os
import resource
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import torch
import yaml
from tqdm import tqdm

from cl_train.config.schema import Config, ConfigError
from cl_train.config.validation import flatten, optional_module, suggest, user_function
from cl_train.data.loader import BadImageError
from cl_train.data.workers import WorkerError
from cl_train.step.cuda_graph import RecordingError
from cl_train.system.checkpoints import CheckpointError
from cl_train.system.distributed import RankFault
from cl_train.system.files import AppendFile, retry, write_json, write_text
from cl_train.system.machine import describe_out_of_memory, is_out_of_memory
from cl_train.system.processes import BUSY_PCT
from cl_train.training.state import Progress, TrainingFault, score_of

log = logging.getLogger("cl_train")
_PLACE = ("kind", "step", "epoch", "time")  # of a record in a run


class Records:
    """Writes a run's records, and sends them to its trackers; without a `folder` (other ranks than 0) it keeps them.
    A resumed run drops those of lost work, and of an evaluation that will be repeated."""

    def __init__(
        self, folder: Path | None, cfg: Config, trackers: "Trackers", description: dict[str, Any], progress: Progress
    ) -> None:
        self._folder, self._trackers, self.description, self._progress = folder, trackers, description, progress
        self._earlier: list[dict[str, Any]] = []  # of earlier processes
        self._new: list[dict[str, Any]] = []  # of this process
        if folder is None:
            return
        self._metrics = AppendFile(folder / "metrics.jsonl")
        step, is_evaluated = progress.step, progress.closed_step == progress.step
        before = [record for record in read_records(folder) if 0 < record["step"] <= step]
        self._earlier = [r for r in before if r["step"] < step or is_evaluated or r["kind"] == "train"]
        write_text(self._metrics.path, "".join(json.dumps(record) + "\n" for record in self._earlier))
        write_text(folder / "config.yaml", yaml.safe_dump(asdict(cfg), sort_keys=False))
        group = folder.parent.name if (folder.parent / "sweep.json").is_file() else None
        start = {"kind": "start", "step": step, "folder": str(folder), "group": group}
        trackers.send({**start, "config": dict(flatten(asdict(cfg)))})

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append the training since the last log line, or the evaluation of this step."""
        place = {"kind": kind, "step": self._progress.step, "epoch": self._progress.epoch}
        record = {**place, **values, "time": time.time()}
        record |= finite_or_null(record)  # whose keys are new strings: a long run would hold them all
        self._new.append(record)
        if self._folder is not None:
            self._metrics.append((json.dumps(record) + "\n").encode())
            self._trackers.send(record)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self._new if record["kind"] == kind]

    def finish(self, status: str, utilisation: Callable[..., Any] | None = None, **results: Any) -> dict[str, Any]:
        """Write `summary.json` with `results`, which the records do not have, and return its content. Percent is 0-100,
        unknown is None. Results are those of this process, unless it had nothing left to train.
        Raises OSError: the disk is full, still after a minute (see `retry`) unless the run failed."""
        everything, progress = self._earlier + self._new, self._progress
        records = self._new if status == "failed" or self.of_kind("train") else everything
        trained = [record for record in records if record["kind"] == "train"]
        scored = [record for record in everything if record["kind"] == "val" and record.get("top1") is not None]
        best = max(scored, key=score_of, default=None)
        last, measured, now = trained[-1] if trained else {}, speed(trained), datetime.now().astimezone()
        seconds = (now - datetime.fromisoformat(self.description["started"])).total_seconds()  # since the last resume
        peaks_gib = [peak_memory_gib(torch.device(self.description["device"]))]
        peaks_gib += [record["peak_memory_gib"] for record in trained]
        summary = {
            "schema_version": 1,
            "status": status,
            **self.description,
            "steps": progress.step,
            "images_seen": progress.images_seen,
            **measured,
            "utilisation": utilisation(measured) if utilisation is not None and trained else None,
            "peak_memory_gib": round(max(peaks_gib), 4),
            "train": {"loss": last.get("loss")},
            "val": None,
            **{r["kind"]: {name: r[name] for name in r if name not in _PLACE} for r in records if r["kind"] != "train"},
            "amp": {"scale": last.get("loss_scale"), "skipped_steps": progress.skipped_steps},
            "others_pct": None,
            "skipped_images": 0,
            "best": best and {name: best[name] for name in ("top1", "epoch")},
            **results,
            "ended": now.isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
        }
        if self.description["data"] == "synthetic":  # no loader
            summary["images_per_s"]["compute"] = summary["images_per_s"]["end_to_end"]
        summary = finite_or_null(summary)

        def write(folder: Path) -> None:
            self._metrics.flush()
            write_json(folder / "summary.json", summary, indent=2)

        if self._folder is not None:
            self._trackers.send({"kind": "end", "step": progress.step, "summary": summary})
            write(self._folder) if status == "failed" else retry(partial(write, self._folder))
        return summary


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run, without a last line that a killed process left incomplete."""
    path, records = folder / "metrics.jsonl", []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int) and "kind" in record:
                records.append(record)
    return records


def finite_or_null(value: Any) -> Any:
    """JSON has no NaN or Infinity: they become null."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


@dataclass(frozen=True)
class RunResult:
    folder: Path
    summary: dict[str, Any]  # the content of summary.json
    exit_code: int  # 0, or 128 + n if signal n stopped the run

    @property
    def top1(self) -> float | None:
        """Percent of the validation images; None without an evaluation."""
        return (self.summary["val"] or {}).get("top1")

    @property
    def images_per_s(self) -> float | None:
        """The median over the windows after warm-up, with loading; None if nothing was trained."""
        return (self.summary["images_per_s"]["end_to_end"] or {}).get("median")


def peak_memory_gib(device: torch.device) -> float:
    """The most memory used so far: allocated by torch on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB; bytes on macOS
    return peak / 2**20 if sys.platform != "darwin" else peak / 2**30


def without_warmup(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The training records after warm-up, or all if there are no others."""
    return [record for record in records if not record["warmup"]] or records


def speed(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Throughput and step time over the training records after warm-up with the last `image_size`; None without one.
    `loader` is always null: `cl-train loader_benchmark` measures it."""
    speeds: dict[str, Any] = {"end_to_end": None, "compute": None, "loader": None}
    if not records:
        return {"images_per_s": speeds, "step_ms": None, "data_wait_pct": None}
    by_size: dict[int, list[dict[str, Any]]] = {}
    for record in without_warmup(records):
        by_size.setdefault(record["image_size"], []).append(record)
    medians = {str(size): round(spread(found, "images_per_s")["median"], 2) for size, found in sorted(by_size.items())}
    image_size = without_warmup(records)[-1]["image_size"]
    records = by_size[image_size]
    speeds["end_to_end"] = {name: round(value, 2) for name, value in spread(records, "images_per_s").items()}
    step_ms, waits_pct = spread(records, "step_ms"), [record["data_wait_pct"] for record in records]
    return {
        "image_size": image_size,
        "images_per_s": speeds | ({"by_image_size": medians} if len(medians) > 1 else {}),
        "step_ms": {name: round(step_ms[name], 3) for name in ("median", "p95")},
        "data_wait_pct": round(statistics.fmean(waits_pct, weights=[record["seconds"] for record in records]), 2),
    }


def spread(records: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Median and 5th and 95th percentile (linear interpolation) of at least one record, and their number."""
    values = [record[name] for record in records]
    percentiles = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else values
    return {"median": statistics.median(values), "p5": percentiles[0], "p95": percentiles[-1], "windows": len(values)}


# --- console, train.log -----------------------------------------------------------------------------------------------


class RunLog(logging.Handler):
    """Context manager: log to the console and, from `open_file` on, to `train.log`; log the error that ends the run."""

    def __enter__(self) -> Self:
        self._console = logging.StreamHandler(sys.stdout)
        self._file: AppendFile | None = None
        self._before = log.propagate, threading.excepthook
        log.propagate, threading.excepthook = False, self._on_thread_error
        log.setLevel(logging.INFO)
        log.addHandler(self)
        return self

    def open_file(self, folder: Path | None) -> None:
        """None (other ranks than 0): no file, and only warnings on the console."""
        self.setLevel(logging.WARNING if folder is None else logging.NOTSET)
        self._file = None if folder is None else AppendFile(folder / "train.log")

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(self._console.stream):  # above the progress bars
            self._console.emit(record)
        if self._file is not None:
            line = logging.Formatter("%(asctime)s %(message)s").format(record)
            self._file.append(f"{line}\n".encode(errors="surrogateescape"))

    def _on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        is_tensorboard = type(args.thread).__module__.startswith("tensorboard.")  # whose next call raises it again
        if not (is_tensorboard and isinstance(args.exc_value, OSError)):
            self._before[1](args)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if (message := describe_failure(error)) is not None:
            log.error("the run failed: %s", message)
        if self._file is not None:
            with suppress(OSError):  # the console has shown the warning and every line
                self._file.flush()
        log.propagate, threading.excepthook = self._before
        log.removeHandler(self)


_ANTICIPATED = (TrainingFault, RecordingError, CheckpointError, BadImageError, WorkerError, RankFault, ConnectionError)


def describe_failure(error: BaseException | None) -> str | None:
    """One line for an anticipated error; None for a bug, which needs a traceback."""
    if isinstance(error, _ANTICIPATED):
        return str(error)
    if isinstance(error, OSError):
        remedy = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the file and its folder"
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return f"{what}; {remedy}, then continue with resume=auto"
    if error is not None and is_out_of_memory(error):
        return f"{describe_out_of_memory(error)}. Lower batch_size; accumulate_steps keeps the global batch"
    return None


def duration(seconds: float) -> str:
    return tqdm.format_interval(round(seconds)).removeprefix("0")  # for instance 0:52, 14:05 or 1:14:05


def progress_bar(description: str, total: int, done: int = 0, *, unit: str = "step", shown: bool) -> "tqdm[Any]":
    """A progress bar with the remaining time, by the average speed; it appears on a terminal only (disable=None)."""
    hidden = None if shown and sys.stdout is not None else True  # None: of a program without standard streams
    bar = partial(tqdm, unit=unit, smoothing=0, leave=False, disable=hidden, file=sys.stdout)
    return bar(desc=description, total=total, initial=done)


def closing_lines(summary: dict[str, Any], folder: Path) -> Iterator[str]:
    parts = [f"{summary['status']} after {summary['steps']} steps in {duration(summary['seconds'])}"]
    checkpoints, best = folder / "checkpoints", summary["best"]
    if end_to_end := summary["images_per_s"]["end_to_end"]:
        parts.append(f"{end_to_end['median']:.1f} images/s ({summary['memory_format']}, {summary['precision']})")
    if summary["val"]:
        parts.append(f"top-1 {summary['val']['top1']:.2f} %")
    if (summary["others_pct"] or 0) >= BUSY_PCT:
        parts.append(f"other processes used {summary['others_pct']:.0f} % of the CPU cores: do not trust the speed")
    if summary["skipped_images"]:
        parts.append(f"{summary['skipped_images']} bad images were skipped")
    yield f"{', '.join(parts)}. Records: {folder}"
    if best is not None and (checkpoints / "best.pt").is_file():
        yield f"best top-1 {best['top1']:.2f} % after epoch {best['epoch']}: {checkpoints / 'best.pt'}"
    if summary["status"] == "interrupted":
        if newest := max(checkpoints.glob("step-*.pt"), default=None):
            yield f"saved: {newest.name}; to continue, repeat the command with hydra.run.dir={folder} resume=auto"
    elif summary["train"]["loss"] is not None and not (folder.parent / "sweep.json").is_file():
        yield "to compare the layouts, repeat the command with -m channels_last=true,false repeats=3"


@contextmanager
def profile(folder: Path, device: torch.device) -> Iterator[Callable[[], object]]:
    """Trace three steps after seven, into `trace.json.gz` and `operators.txt`; call what it gives once per step."""
    trace = folder / "trace.json.gz"
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(trace))
        (folder / "operators.txt").write_text(profiler.key_averages().table(sort_by=key, row_limit=40), "utf-8")
        log.info("profile of 3 steps: %s (open it at ui.perfetto.dev)", trace)

    schedule = torch.profiler.schedule(wait=5, warmup=2, active=3, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write, record_shapes=True) as profiler:
        yield profiler.step
    if not trace.is_file():
        log.warning("profile=true: no profile was taken; it needs a run of at least 10 steps")


# --- trackers ---------------------------------------------------------------------------------------------------------

Record = dict[str, Any]
Tracker = Callable[[Iterator[Record]], None]  # takes all records of a run; ends with it

LAST_RECORDS_S = 30.0  # the end of a run waits this long for trackers that are still sending
# TensorBoard sorts the groups of its charts by name: what is looked at first comes first.
_FIRST = ("train/loss", "train/top1", "train/top5", "train/images_per_s")
_NO_RESULTS = ("step", "time", "warmup", "world_size", "images")
_HPARAMS = ("model", "channels_last", "precision", "compile", "batch_size", "seed", "data.image_size", "optim.name")


class Trackers:
    """Sends records to the trackers of `log_to`, each in a thread: one that waits for a network delays no step."""

    def __init__(self, log_to: Sequence[str]) -> None:
        self._running: list[tuple[threading.Thread, SimpleQueue[Record | None]]] = []
        for name in log_to:
            records: SimpleQueue[Record | None] = SimpleQueue()
            given = (find_tracker(name), iter(records.get, None))
            # A daemon: a tracker that hangs does not keep the process alive.
            thread = threading.Thread(target=_track, args=given, name=f"log_to={name}", daemon=True)
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
    except Exception as error:  # training must not depend on a tracker, which gets no further records
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
        raise ConfigError(f"log_to={name}: {known}{suggest(name, [*_TRACKERS])}")
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
    library = optional_module("mlflow", "log_to=mlflow")
    client, start = library.MlflowClient(), next(records)

    def new_run() -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "cl_train")
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        tags = {"group": start["group"]} if start["group"] else {}
        created = str(client.create_run(experiment, run_name=Path(start["folder"]).name, tags=tags).info.run_id)
        library.log_params({key: str(value)[:500] for key, value in start["config"].items()}, True, created)
        return created

    run = run_id(start, "mlflow", new_run)
    client.update_run(run, status="RUNNING")
    for record in records:
        library.log_metrics(metrics_of(record), record["step"], synchronous=True, run_id=run)
        if record["kind"] == "end":
            ends = {"completed": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
            client.set_terminated(run, ends[record["summary"]["status"]])


_TRACKERS: dict[str, Tracker] = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
