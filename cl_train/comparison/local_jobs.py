"""Run the jobs of a sweep as processes of this machine, one at a time per slot.

A job that fails or is killed does not affect the others: its exit code, reason and log are kept, and `resume_sweep`
runs it again.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from cl_train.comparison.run_records import read_run
from cl_train.comparison.slots import Slot
from cl_train.comparison.sweep_plan import Job
from cl_train.config.command_line import quoted
from cl_train.config.schema import ConfigError
from cl_train.system.child_process import end_with_parent
from cl_train.system.locks import lock_file
from cl_train.system.signals import STOP_SIGNALS

LOG_NAME = "job.log"
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 0.1
_REFRESH_S = 1.0
_ERROR_LINE = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?:[\w.]*(?:Error|Exception|Interrupt|Fault|Exit)\b.*|.*\bthe run failed: .*)"
)


# --- signals ----------------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """A signal requested the end of the sweep; `logging` in another signal handler would suppress an `Exception`."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def raise_stopped(signum: int, frame: FrameType | None) -> None:
    if signum != signal.SIGINT:  # Slurm repeats SIGTERM; only a second Ctrl-C is meant to kill the jobs
        signal.signal(signum, signal.SIG_IGN)
    raise Stopped(signum)


@contextmanager
def signals_handled(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers, signals: Sequence[int] = STOP_SIGNALS
) -> Iterator[None]:
    """These signals call `handler` inside the block; SIGHUP does not under nohup, which ignores it."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    before = {signum: signal.signal(signum, handler) for signum in signals if signum not in ignored}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


# --- the jobs of a sweep ----------------------------------------------------------------------------------------------


class Progress:
    """The console of a sweep: a line for each job that has ended; at the bottom of a terminal, one per running job."""

    def __init__(self, folder: Path, count: int) -> None:
        self.ended: set[int] = set()  # numbers of jobs
        self._folder, self._count, self._started_at = folder, count, time.monotonic()
        self._drawn = 0  # lines on the screen

    def end(self, job: Job, place: str = "") -> None:
        """Print how a job ended, its speed, and an estimate of the time left."""
        self._erase()
        self.ended.add(job.number)
        line = f"[{len(self.ended)}/{self._count}] {job.name}: {job.status}"
        line += f" in {_duration(job.seconds)}" if job.seconds is not None else ""
        line += f" on {place}" if place else ""
        line += f" ({job.why})" if job.why else ""
        if job.status == "completed":
            with suppress(ConfigError):
                speed = read_run(self._folder / job.name).median_images_per_s
                line += f", {speed:.1f} images/s" if speed else ""
        remaining = self._count - len(self.ended)
        if remaining and job.status != "interrupted":
            left_s = (time.monotonic() - self._started_at) / len(self.ended) * remaining
            line += f"; about {_duration(left_s)} left"
        print(line, flush=True)

    def draw(self, lines: Sequence[str]) -> None:
        """Replace the lines at the bottom; those that do not fit on the screen are left out."""
        if not sys.stdout.isatty():
            return
        columns, rows = shutil.get_terminal_size()
        self._erase()
        for line in lines[: rows - 2]:
            print(line[: columns - 1], flush=True)
            self._drawn += 1

    def _erase(self) -> None:
        if self._drawn:
            print(f"\x1b[{self._drawn}F\x1b[J", end="")
        self._drawn = 0


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class LocalJobs:
    """The jobs of `groups`: the next group starts in the slot that is free first.

    `program` is what the process of a job runs; `save` is called with each job that has started or ended. After a
    signal a job may take `grace_s` seconds to save a checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        groups: Sequence[Sequence[Job]],
        slots: Sequence[Slot],
        program: Sequence[str],
        save: Callable[[Job], None],
        grace_s: float = 20.0,
    ) -> None:
        self._folder, self._program, self._save, self._grace_s = folder, program, save, grace_s
        self._groups = deque(groups)
        self._lanes = [self._run_groups(slot) for slot in slots]
        self._running: dict[Slot, tuple[Job, subprocess.Popen[bytes], float]] = {}  # with the time of its start
        self._progress = Progress(folder, sum(map(len, groups)))

    def run(self) -> None:
        """Run all jobs. Raises `Stopped` after a signal; the running jobs have ended by then."""
        drawn_at = time.monotonic()
        try:
            while any([next(lane, False) for lane in self._lanes]):
                time.sleep(_POLL_S)
                if time.monotonic() >= drawn_at + _REFRESH_S:
                    drawn_at = time.monotonic()
                    self._progress.draw([self._status_line(job, slot) for slot, (job, *_) in self._running.items()])
        except Stopped as stop:
            self._stop(stop)
            raise

    def _run_groups(self, slot: Slot) -> Iterator[bool]:
        """Run one group after another in this slot; yields True while a job runs."""
        while self._groups:
            for job in self._groups.popleft():
                folder = self._folder / job.name
                if folder.exists() and not job.is_started:
                    job.status, job.why = "failed", f"{folder} exists already, and this sweep has not created it"
                    self._end(job, slot)
                    continue
                job.status, job.is_started = "running", True
                self._save(job)  # before the folder exists: after a kill, `resume_sweep` must know that it is the job's
                process = start_job(job, folder, self._program, slot)
                self._running[slot] = job, process, time.monotonic()
                while process.poll() is None:
                    yield True
                record_end(job, process.returncode, self._folder / job.name / LOG_NAME)
                self._end(job, slot)

    def _end(self, job: Job, slot: Slot) -> None:
        if slot in self._running:
            job.seconds = round(time.monotonic() - self._running.pop(slot)[2], 1)
        self._save(job)
        self._progress.end(job, slot.name)

    def _stop(self, stop: Stopped) -> None:
        """Pass the signal on, so that the jobs can save; after `grace_s`, or another signal, kill them."""
        deadline = time.monotonic() + self._grace_s
        for slot, (_, process, _) in self._running.items():
            request_stop(process, stop.signum, slot)
        for slot, (job, process, _) in list(self._running.items()):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except (subprocess.TimeoutExpired, Stopped):
                process.kill()  # its ranks and workers end with it
                process.wait()
            if process.returncode == 0:  # it ended before the signal reached it
                job.status, job.exit_code = "completed", 0
            else:
                job.status, job.why = "interrupted", f"stopped by {stop}"
            self._end(job, slot)

    def _status_line(self, job: Job, slot: Slot) -> str:
        lines = [line for line in _last_lines(self._folder / job.name / LOG_NAME) if line.startswith("Epoch:")]
        return f"{slot.name} {job.name}: {lines[-1] if lines else 'starting'}".lstrip()


# --- the process of one job -------------------------------------------------------------------------------------------


def start_job(job: Job, folder: Path, program: Sequence[str], slot: Slot) -> subprocess.Popen[bytes]:
    """Start the process of a job; its `folder` exists if it was started before.

    It has its own process group, because Ctrl-C in a terminal must reach it once, from the sweep. It is stopped when
    this process is killed: a job must not outlive the sweep.
    """
    is_continued = folder.exists()
    folder.mkdir(exist_ok=True)
    with lock_file(folder / ".lock", waiting_for=f"the end of an earlier {job.name}"):
        has_checkpoint = any((folder / "checkpoints").glob("*.pt"))
    command = [*_launch_command(job.nproc, slot), *program, *continued(job.overrides, folder)]
    command.append(f"hydra.run.dir={quoted(folder.absolute())}")
    if has_checkpoint and not any(word.startswith("resume=") for word in job.overrides):
        command.append("resume=auto")
    elif is_continued and not has_checkpoint:
        command.append("overwrite=true")
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus[: job.nproc])} if slot.gpus else {}
    with open(folder / LOG_NAME, "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, **devices},
            process_group=0,
            preexec_fn=partial(_prepare_child, slot.cores),
        )


def _launch_command(nproc: int, slot: Slot) -> list[str]:
    if slot.nodes > 1:
        cores = [f"--cpus-per-task={slot.cpus_per_task}"] if slot.cpus_per_task else []
        return ["srun", f"--nodes={slot.nodes}", f"--ntasks={nproc}", "--kill-on-bad-exit=1", *cores, sys.executable]
    if nproc > 1:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return [sys.executable]


def _prepare_child(cores: Sequence[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
    end_with_parent(signal.SIGTERM)


def continued(overrides: Sequence[str], folder: Path) -> list[str]:
    """`batch_size=auto` is measured once: a job that continues keeps the size in its config.yaml."""
    config = folder / "config.yaml"
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    found = re.search(r"^batch_size: (\d+)$", text, re.MULTILINE)
    return [f"batch_size={found[1]}" if found and word == "batch_size=auto" else word for word in overrides]


def request_stop(process: subprocess.Popen[bytes], signum: int, slot: Slot) -> None:
    """Ask a job to save a checkpoint and end."""
    if slot.nodes > 1:  # srun would kill its tasks; scancel passes the signal on to them
        subprocess.run(["scancel", "--signal=TERM", own_allocation()], check=False)
    else:
        process.send_signal(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)


def own_allocation() -> str:
    """The Slurm allocation of this process; SLURM_JOB_ID of an element of an array can be the id of the array."""
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array and element else os.environ["SLURM_JOB_ID"]


def record_end(job: Job, exit_code: int, log: Path) -> None:
    """Record the status, the exit code (-n for signal n) and the reason of a failure: the last error in the log."""
    job.exit_code = exit_code
    if exit_code == 0:
        job.status = "completed"
    elif exit_code in (130, 143):
        job.status, job.why = "interrupted", f"the job was stopped by a signal (exit code {exit_code})"
    elif exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = ", often because memory ran out (see dmesg)" if name == "SIGKILL" else ""
        job.status, job.why = "failed", f"killed by {name}{hint}"
    else:
        lines = _last_lines(log)
        errors = [line for line in lines if _ERROR_LINE.match(line) and "ChildFailedError" not in line]
        last = (errors or lines or ["no output"])[-1]
        words = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError")
        memory = "out of memory: " if any(word in last for word in words) else ""
        job.status, job.why = "failed", f"{memory}{last[:300]} (exit code {exit_code})"


def _last_lines(log: Path) -> list[str]:
    if not log.is_file():
        return []
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        return [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
