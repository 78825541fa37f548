"""What a run tells its user: lines on the console and in `train.log`, progress bars, failures in
one line, its closing lines, and a profile.
"""

import errno
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import torch
from tqdm import tqdm

from cl_train.config.start_file import code_named
from cl_train.config.validation import train_program
from cl_train.errors import Fault
from cl_train.system.files import AppendFile, replacing, write_text
from cl_train.system.machine import describe_out_of_memory, is_out_of_memory
from cl_train.system.processes import LOST_PCT
from cl_train.system.run_folder import Window, after_warmup
from cl_train.system.tables import counted
from cl_train.training.plan import Plan

log = logging.getLogger("cl_train")


def describe_failure(error: BaseException | None) -> str | None:
    """Returns one line for an anticipated error; None for a bug, which needs a traceback."""
    if isinstance(error, Fault):
        return str(error)
    if isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if is_full else "check the file and its folder"
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return f"{what}; {remedy}, then continue with resume=auto"
    if error is not None and is_out_of_memory(error):
        advice = "Lower batch_size; accumulate_steps keeps the global batch"
        return f"{describe_out_of_memory(error)}. {advice}"
    return None


def duration(seconds: float) -> str:
    return tqdm.format_interval(round(seconds)).removeprefix("0")


def progress_bar(
    description: str, total: int, done: int = 0, *, unit: str = "step", shown: bool
) -> "tqdm[Any]":
    # None: tqdm looks for a terminal, which fails in a program without standard streams.
    hidden = None if shown and _has_output() else True
    options: dict[str, Any] = {"unit": unit, "disable": hidden, "file": sys.stdout}
    return tqdm(desc=description, total=total, initial=done, smoothing=0, leave=False, **options)


def _has_output() -> bool:
    return sys.stdout is not None and not getattr(sys.stdout, "closed", False)


class _Printable(logging.Formatter):
    """Escapes control characters: file and class names may hold some that a terminal obeys."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: ascii(m[0])[1:-1], text)


def console_line(epoch_windows: Sequence[Window], step_in_epoch: int, plan: Plan) -> str:
    """Returns the last window in main_amp's format, with the epoch's averages in brackets: seconds
    per step, images/s of all ranks with loading, and so on. The ETA leaves out evaluations.
    """
    window, measured = epoch_windows[-1], after_warmup(epoch_windows)
    epoch_step_s = mean(measured, "step_ms") / 1000
    epoch_images_per_s = sum(w.images for w in measured) / sum(w.seconds for w in measured)
    line = f"Epoch: [{window.epoch}][{step_in_epoch}/{plan.steps_per_epoch}]"
    line += f" Time {window.step_ms / 1000:.3f} ({epoch_step_s:.3f})"
    line += f" Speed {window.images_per_s:.1f} ({epoch_images_per_s:.1f})"
    line += f" Loss {window.loss:.4f} ({mean(epoch_windows, 'loss'):.4f})"
    line += f" Prec@1 {window.top1:.2f} ({mean(epoch_windows, 'top1'):.2f})"
    line += f" Prec@5 {window.top5:.2f} ({mean(epoch_windows, 'top5'):.2f})"
    line += f" LR {window.lr:.2g} Data {window.data_wait_pct:.0f}%"
    if window.loss_scale:
        line += f" Scale {window.loss_scale:g} Skipped {window.skipped_steps}"
    if window.skipped_images:
        line += f" Skipped images {window.skipped_images}"
    line += f" ETA {duration((plan.last_step - window.step) * epoch_step_s)}"
    return line + (" (warm-up)" if window.warmup else "")


def mean(windows: Sequence[Window], name: str) -> float:
    images = sum(window.images for window in windows)
    # Not fmean: it raises an exception for losses like 1e308.
    return sum(getattr(window, name) * window.images for window in windows) / images


def closing_lines(
    summary: dict[str, Any],
    folder: Path,
    config: dict[str, Any],
    bad_images: int,
    *,
    has_trained: bool,
) -> Iterator[str]:
    """Yields up to three lines: the results and their folder, what else the run left, and the next
    command; first a warning if the speed cannot be trusted. bad_images: their number, each perhaps
    skipped often. has_trained: in this process.
    """
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    checkpoints, best = folder / "checkpoints", summary["best"]
    if summary["images_per_s"]["end_to_end"] and (summary["lost_pct"] or 0) >= LOST_PCT:
        share = f"{summary['lost_pct']:.0f} % of the time"
        advice = "do not trust the speed"
        if torch.get_num_threads() > 1:
            advice += "; OMP_NUM_THREADS=1 may be faster"
        yield f"the run waited for a core in {share}: {advice}"

    results = _results(summary, bad_images, config["evaluate_only"], has_trained=has_trained)
    yield f"{results}. Records: {folder}"

    is_trained = summary["train"]["loss"] is not None
    is_alone = not (folder.parent / "sweep.json").is_file()
    is_interrupted = summary["status"] == "interrupted"
    leaves = []
    if best is not None and (checkpoints / "best.pt").is_file():
        score = f"top-1 {best['top1']:.2f} %"
        for name in best.keys() - {"top1", "epoch"}:  # the metric `best_by`
            score = f"{name} {best[name]:.4g}"
        leaves.append(f"best {score} after epoch {best['epoch']}: {checkpoints / 'best.pt'}")
    if summary["val_average"] and is_trained:
        top1 = f"top-1 {summary['val_average']['top1']:.2f} %"
        leaves.append(f"weights=RUN entry=average takes the EMA ({top1})")
    if is_trained and is_alone and not is_interrupted and "tensorboard" in config["log_to"]:
        # TensorBoard names a run by its path below logdir; beside a folder that the user chose
        # anything may lie.
        logdir = folder if "hydra.run.dir=" in summary["command"] else folder.parent
        leaves.append(f"curves: tensorboard --logdir {shlex.quote(str(logdir))}")
    if config["evaluate_only"] and not config["report"]:
        leaves.append("accuracy by class as a page: report=true")
    if leaves:
        yield "; ".join(leaves)

    if is_interrupted:
        if newest := max(checkpoints.glob("step-*.pt"), default=None):
            more = f"hydra.run.dir={folder} resume=auto"
            yield f"saved: {newest.name}; to continue, repeat the command with {more}"
    elif is_trained and is_alone:
        yield f"to compare the layouts: {_comparing_command(folder, config)}"


def _results(
    summary: dict[str, Any], bad_images: int, evaluate_only: bool, *, has_trained: bool
) -> str:
    took = f"in {duration(summary['seconds'])}"
    if evaluate_only:
        parts = [f"evaluation {summary['status']} {took}"]
    else:
        what = f"{summary['status']} after {counted(summary['steps'], 'step')}"
        parts = [f"{what} {took}" if has_trained else f"nothing trained now; {what}"]
    if end_to_end := summary["images_per_s"]["end_to_end"]:
        how = f"{summary['memory_format']}, {summary['precision']}"
        parts.append(f"{end_to_end['median']:.1f} images/s ({how})")
    if summary["val"]:
        parts.append(f"top-1 {summary['val']['top1']:.2f} %")
    if times := summary["skipped_images"]:
        parts.append(f"{counted(bad_images, 'bad image')} skipped {counted(times, 'time')}")
    return ", ".join(parts)


def _comparing_command(folder: Path, config: dict[str, Any]) -> str:
    code = code_named(config)
    if not all(map(is_importable, code.values())):
        return f"cl_train.compare_layouts(model, batch_size={config['batch_size']})"
    words = [f"config={folder}", *(f"{key}={value}" for key, value in code.items())]
    return f"{train_program()} -m channels_last=true,false repeats=4 {shlex.join(words)}"


def is_importable(code: str) -> bool:
    """Whether another process can import `package.module:function`, or a list with such names."""
    names = (name.partition(":")[0] for name in code.strip("[]").split(","))
    modules = [sys.modules[name] for name in names if name in sys.modules]
    return all(module.__spec__ is not None for module in modules)


class RunLog(logging.Handler):
    """Logs to the console and, after `open_file`, to `train.log`; finally logs the run's error."""

    def __enter__(self) -> Self:
        self._console = logging.StreamHandler(sys.stdout if _has_output() else None)
        self._console.setFormatter(_Printable())
        self._file: AppendFile | None = None
        self._before = log.propagate, log.level
        log.propagate = False
        log.setLevel(logging.INFO)
        log.addHandler(self)
        return self

    def open_file(self, folder: Path | None) -> None:
        """folder=None (ranks other than 0): no file, and only warnings on the console."""
        self.setLevel(logging.WARNING if folder is None else logging.NOTSET)
        self._file = None if folder is None else AppendFile(folder / "train.log")

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(self._console.stream):  # above the progress bars
            self._console.emit(record)
        if self._file is not None:
            line = _Printable("%(asctime)s %(message)s").format(record)
            self._file.append(f"{line}\n".encode(errors="surrogateescape"))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if (message := describe_failure(error)) is not None:
            log.error("the run failed: %s", message)
        if self._file is not None:
            with suppress(OSError):  # the console has every line
                self._file.flush()
        log.propagate, level = self._before
        log.setLevel(level)
        log.removeHandler(self)


@contextmanager
def profile(folder: Path, device: torch.device) -> Iterator[Callable[[], bool]]:
    """Traces three steps after the first seven, into `trace.json.gz` and `operators.txt`. Yields a
    function to call after each step, which returns whether the files have just been written.
    """
    trace, written = folder / "trace.json.gz", list[Path]()
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"

    def write(profiler: torch.profiler.profile) -> None:
        with replacing(trace, folder / f".tmp-{os.getpid()}-{trace.name}") as temporary:
            temporary.unlink(missing_ok=True)
            profiler.export_chrome_trace(str(temporary))  # its suffix tells that it is compressed
        operators = profiler.key_averages().table(sort_by=key, row_limit=40)
        write_text(folder / "operators.txt", operators)
        written.append(trace)
        log.info("profile of 3 steps: %s (open it at ui.perfetto.dev)", trace)

    schedule = torch.profiler.schedule(wait=5, warmup=2, active=3, repeat=1)
    options: dict[str, Any] = {"schedule": schedule, "on_trace_ready": write}
    options["acc_events"] = True  # else torch 2.11 warns
    with torch.profiler.profile(record_shapes=True, **options) as profiler:

        def step() -> bool:
            count = len(written)
            profiler.step()
            return len(written) > count

        yield step
    if not written:
        log.warning("profile=true: no profile was taken; it needs a run of at least 10 steps")
