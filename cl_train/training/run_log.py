"""The log of a run: console, progress bars, `train.log`, and one line for the error that ends it."""

import errno
import logging
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from cl_train.data.loader import BadImageError
from cl_train.data.workers import WorkerError
from cl_train.step.cuda_graph import RecordingError
from cl_train.system.checkpoint_file import CheckpointError
from cl_train.system.files import AppendFile
from cl_train.system.heartbeat import RankFault
from cl_train.system.memory import describe_out_of_memory, is_out_of_memory
from cl_train.training.nonfinite import TrainingFault
from cl_train.training.throughput import without_warmup

log = logging.getLogger("cl_train")


class RunLog:
    """Context manager: log to the console and, from `open_file` on, to `train.log`; log the error that ends the run."""

    def __init__(self) -> None:
        self._handlers: list[logging.Handler] = [_Console(sys.stdout)]

    def __enter__(self) -> "RunLog":
        self._propagate, log.propagate = log.propagate, False
        log.setLevel(logging.INFO)
        log.addHandler(self._handlers[0])
        return self

    def open_file(self, folder: Path) -> None:
        self._handlers.append(_LogFile(folder / "train.log"))
        log.addHandler(self._handlers[-1])

    def only_warnings(self) -> None:
        """For ranks other than 0."""
        self._handlers[0].setLevel(logging.WARNING)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (message := describe_failure(error)) is not None:
            log.error("the run failed: %s", message)
        log.propagate = self._propagate
        for handler in reversed(self._handlers):  # the file first: the console shows its last warning
            handler.close()
            log.removeHandler(handler)


class _Console(logging.StreamHandler[TextIO]):
    """Lines appear above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(self.stream):
            super().emit(record)


class _LogFile(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._file = AppendFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        self._file.append((self.format(record) + "\n").encode(errors="surrogateescape"))

    def close(self) -> None:
        with suppress(OSError):  # the console has shown the warning and every line
            self._file.flush()
        super().close()


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


# --- console ----------------------------------------------------------------------------------------------------------


def mean(records: list[dict[str, Any]], name: str) -> float:
    """The mean over windows, weighted by their images."""
    images = sum(record["images"] for record in records)
    return sum(float(record[name]) * record["images"] for record in records) / images


def console_line(records: list[dict[str, Any]], step_in_epoch: int, steps_per_epoch: int, steps_left: int) -> str:
    """The last of the records of an epoch in main_amp's format: each value, and in brackets its mean over the epoch.

    Time is seconds per step, Speed is images per second of all ranks including data loading, Data is the share of the
    time in which a step waited for its batch. The means of Time and Speed are without warm-up if possible. ETA is
    the time for the `steps_left` of the run, without evaluations.
    """
    window, measured = records[-1], without_warmup(records)
    speed = sum(record["images"] for record in measured) / sum(record["seconds"] for record in measured)
    scale = f" Scale {window['loss_scale']:g} Skipped {window['skipped_steps']}" if window["loss_scale"] else ""
    bad_images = f" Bad images {window['skipped_images']}" if window["skipped_images"] else ""
    return (
        f"Epoch: [{window['epoch']}][{step_in_epoch}/{steps_per_epoch}]"
        f" Time {window['step_ms'] / 1000:.3f} ({mean(measured, 'step_ms') / 1000:.3f})"
        f" Speed {window['images_per_s']:.1f} ({speed:.1f})"
        f" Loss {window['loss']:.4f} ({mean(records, 'loss'):.4f})"
        f" Prec@1 {window['top1']:.2f} ({mean(records, 'top1'):.2f})"
        f" Prec@5 {window['top5']:.2f} ({mean(records, 'top5'):.2f})"
        f" LR {window['lr']:.5f} Data {window['data_wait_pct']:.0f}%{scale}{bad_images}"
        f" ETA {duration(steps_left * mean(measured, 'step_ms') / 1000)}" + (" (warm-up)" if window["warmup"] else "")
    )


def duration(seconds: float) -> str:
    """For instance 0:52, 14:05 or 1:14:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def progress_bar(description: str, total: int, done: int = 0, *, unit: str = "step", shown: bool) -> "tqdm[Any]":
    """A progress bar with the remaining time; it appears on a terminal only."""
    return tqdm(
        desc=description,
        total=total,
        initial=done,
        unit=unit,
        smoothing=0,  # the remaining time uses the average speed, including evaluations and checkpoints
        leave=False,
        disable=not (shown and sys.stdout is not None and sys.stdout.isatty()),
        file=sys.stdout,
    )
