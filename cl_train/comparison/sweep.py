"""`python train.py -m ...`: run every job of a sweep in its own process, one after the other, then compare.

A job that fails or is killed does not affect the others: its exit code, reason and log are kept, and `resume_sweep`
runs it again.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from cl_train.comparison.report import compare_folders, median_speed
from cl_train.comparison.run_records import read_run
from cl_train.comparison.sweep_plan import Job, Sweep, plan_sweep
from cl_train.config.command_line import quoted
from cl_train.config.schema import ConfigError
from cl_train.system.child_process import end_with_parent
from cl_train.system.launcher import read_launch
from cl_train.system.locks import LockHeld, lock_file

LOG_NAME = "job.log"
GRACE_S = 20.0  # a stopped job saves a checkpoint before it ends
_REFRESH_S = 1.0
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_ERROR_LINE = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?:[\w.]*(?:Error|Exception|Interrupt|Fault|Exit)\b.*|.*\bthe run failed: .*)"
)


class Stopped(Exception):
    """A signal requested the end of the sweep."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def run_sweep(arguments: Sequence[str], program: Sequence[str] = ("-m", "cl_train", "train")) -> int:
    """Run all jobs of train.py's `arguments` (checked already), then write the comparison.

    Args:
        program: what the process of a job runs; tests replace it.

    Returns:
        The exit code: 0, 1 if a job failed, 128 + n after signal n (the comparison is written too).

    Raises:
        ConfigError: as `plan_sweep`, started by torchrun, or another process runs this sweep.
    """
    if read_launch() is not None:
        raise ConfigError(
            "torchrun and srun cannot start a sweep; python train.py -m nproc=N starts each job under torchrun"
        )
    sweep = plan_sweep(arguments)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    signum = None
    try:
        with lock_file(sweep.folder / ".sweep.lock"):
            sweep.save()
            try:
                with _signals_as_exceptions():
                    _run_jobs(sweep, program)
            except Stopped as stop:
                signum = stop.signum
            compare_folders([sweep.folder])
    except LockHeld as holder:
        raise ConfigError(f"another process runs the sweep in {sweep.folder} ({holder}): stop it first") from None
    if signum is not None:
        return 128 + signum
    return 0 if all(job.status == "completed" for job in sweep.jobs) else 1


def _run_jobs(sweep: Sweep, program: Sequence[str]) -> None:
    """Run the pending jobs. Raises `Stopped` after a signal; the running job has ended by then."""
    waiting = [job for job in sweep.jobs if job.status == "pending"]
    print(f"sweep of {len(sweep.jobs)} jobs, {len(waiting)} to run, in {sweep.folder}/<job>/{LOG_NAME}", flush=True)
    started_at = time.monotonic()
    for count, job in enumerate(waiting, start=1):
        stopped = None
        job_started_at = time.monotonic()
        title = f"[{count}/{len(waiting)}] {job.name}"
        try:
            _run_job(job, sweep, program, title)
        except Stopped as error:
            stopped = error
            job.status, job.why = "interrupted", f"stopped by {error}"
        job.seconds = round(time.monotonic() - job_started_at, 1)
        sweep.save()
        outcome = f" ({job.why})" if job.why else ""
        with suppress(ConfigError):
            speed = None if job.why else median_speed([read_run(sweep.folder / job.name)])
            outcome += f", {speed:.1f} images/s" if speed else ""
        if count < len(waiting) and not stopped:
            remaining_s = (time.monotonic() - started_at) / count * (len(waiting) - count)
            outcome += f"; about {_duration(remaining_s)} left"
        clear = "\r\x1b[K" if sys.stdout.isatty() else ""
        print(f"{clear}{title}: {job.status} in {_duration(job.seconds)}{outcome}", flush=True)
        if stopped:
            raise stopped


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `Stopped` inside the block."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signum)

    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# --- one job ----------------------------------------------------------------------------------------------------------


def _run_job(job: Job, sweep: Sweep, program: Sequence[str], title: str) -> None:
    """Run one job to its end, and record its status, exit code (-n for signal n) and the reason of a failure.

    It has its own process group, because Ctrl-C in a terminal must reach it once, from here. It is stopped when this
    process is killed: a job must not outlive the sweep.
    """
    folder = sweep.folder / job.name
    if folder.exists() and not job.is_started:
        job.status, job.why = "failed", f"{folder} exists already, and this sweep has not created it"
        return
    folder.mkdir(exist_ok=True)
    with lock_file(folder / ".lock", waiting_for=f"the end of an earlier {job.name}"):
        has_checkpoint = any((folder / "checkpoints").glob("*.pt"))
    command = [sys.executable]
    if job.nproc > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.nproc}"]
    command += [*program, *_continued(job.overrides, folder), f"hydra.run.dir={quoted(folder.absolute())}"]
    if has_checkpoint and not any(word.startswith("resume=") for word in job.overrides):
        command.append("resume=auto")
    elif job.is_started and not has_checkpoint:
        command.append("overwrite=true")
    job.status, job.is_started = "running", True
    sweep.save()
    path = os.pathsep.join(filter(None, [str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    with open(folder / LOG_NAME, "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
            process_group=0,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
        try:
            job.exit_code = _wait(process, folder / LOG_NAME, title)
        except Stopped as stop:
            _end(process, stop.signum)
            raise
    if job.exit_code == 0:
        job.status = "completed"
    elif job.exit_code in (130, 143):
        job.status, job.why = "interrupted", f"the job was stopped by a signal (exit code {job.exit_code})"
    else:
        job.status, job.why = "failed", _reason(job.exit_code, folder / LOG_NAME)


def _continued(overrides: Sequence[str], folder: Path) -> list[str]:
    """`batch_size=auto` is measured once: a job that continues keeps the size in its config.yaml."""
    config = folder / "config.yaml"
    if "batch_size=auto" not in overrides or not config.is_file():
        return list(overrides)
    found = re.search(r"^batch_size: (\d+)$", config.read_text(encoding="utf-8"), re.MULTILINE)
    return [f"batch_size={found[1]}" if word == "batch_size=auto" and found else word for word in overrides]


def _wait(process: subprocess.Popen[bytes], log: Path, title: str) -> int:
    """Wait for a job; on a terminal, show the last line of its training."""
    while True:
        try:
            return process.wait(_REFRESH_S)
        except subprocess.TimeoutExpired:
            if sys.stdout.isatty():
                lines = [line for line in _last_lines(log) if line.startswith("Epoch:")] or ["starting"]
                width = shutil.get_terminal_size().columns - 1
                print(f"\r\x1b[K{f'{title}: {lines[-1]}'[:width]}", end="", flush=True)


def _end(process: subprocess.Popen[bytes], signum: int) -> None:
    """Pass the signal on, so that the job can save; after `GRACE_S`, or a second signal, kill it."""
    process.send_signal(signal.SIGTERM if signum == signal.SIGHUP else signum)
    try:
        process.wait(GRACE_S)
    except (subprocess.TimeoutExpired, Stopped):
        process.kill()  # its ranks and workers end with it
        process.wait()


def _reason(exit_code: int, log: Path) -> str:
    """The signal, or the last line of the log that looks like an error."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"killed by {name}{', often because memory ran out (see dmesg)' if name == 'SIGKILL' else ''}"
    lines = _last_lines(log)
    errors = [line for line in lines if _ERROR_LINE.match(line) and "ChildFailedError" not in line]
    last = (errors or lines or ["no output"])[-1]
    words = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError")
    return f"{'out of memory: ' if any(word in last for word in words) else ''}{last[:300]} (exit code {exit_code})"


def _last_lines(log: Path) -> list[str]:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        return [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
