"""Run the jobs of a sweep on this machine, one at a time per slot.

A job that fails or is killed does not affect the others: its exit code, reason and log are kept, and `resume_sweep`
runs it again.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cl_train.comparison.job_process import LOG_NAME, record_end, request_stop, start_job, training_line
from cl_train.comparison.run_records import read_run
from cl_train.comparison.slots import Slot
from cl_train.comparison.status_lines import StatusLines
from cl_train.comparison.sweep_plan import Job
from cl_train.config.schema import ConfigError

GRACE_S = 20.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.1
_REFRESH_S = 1.0


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
    """These signals call `handler` inside the block."""
    before = {signum: signal.signal(signum, handler) for signum in signals}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


@dataclass
class _Lane:
    """A slot, the rest of the group of jobs that runs in it, and the running job."""

    slot: Slot
    jobs: deque[Job]
    job: Job | None = None
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0


class LocalJobs:
    """The jobs of `groups`: the next group starts in the slot that is free first."""

    def __init__(
        self,
        folder: Path,
        groups: Sequence[Sequence[Job]],
        slots: Sequence[Slot],
        program: Sequence[str],
        save: Callable[[Job], None],
        grace_s: float = GRACE_S,
    ) -> None:
        """
        Args:
            folder: of the sweep; each job has its own folder in it.
            program: what the process of a job runs.
            save: called with each job that has started or ended.
            grace_s: how long a job may take to save a checkpoint after a signal, seconds.
        """
        self._folder, self._program, self._save, self._grace_s = folder, program, save, grace_s
        self._groups = deque(groups)
        self._lanes = [_Lane(slot, deque()) for slot in slots]
        self._count, self._ended = sum(map(len, groups)), 0
        self._started_at = time.monotonic()
        self._status = StatusLines()

    def run(self) -> None:
        """Run all jobs. Raises `Stopped` after a signal; the running jobs have ended by then."""
        refreshed_at = time.monotonic()
        try:
            while any([self._advance(lane) for lane in self._lanes]):
                time.sleep(_POLL_S)
                if time.monotonic() >= refreshed_at + _REFRESH_S:
                    refreshed_at = time.monotonic()
                    self._draw()
        except Stopped as stop:
            self._stop(stop)
            raise

    def _advance(self, lane: _Lane) -> bool:
        """Record the end of the lane's job and start the next one; False if nothing is left to do in this lane."""
        if lane.process is not None:
            if lane.process.poll() is None:
                return True
            assert lane.job is not None
            record_end(lane.job, lane.process.returncode, self._log(lane.job))
            self._end(lane)
        if not lane.jobs and self._groups:
            lane.jobs = deque(self._groups.popleft())
        if not lane.jobs:
            return False
        lane.job, lane.started_at = lane.jobs.popleft(), time.monotonic()
        lane.process = start_job(lane.job, self._folder / lane.job.name, self._program, lane.slot)
        self._save(lane.job)
        if lane.process is None:
            self._end(lane)
        return True

    def _end(self, lane: _Lane) -> None:
        job = lane.job
        assert job is not None
        self._ended += 1
        job.seconds = round(time.monotonic() - lane.started_at, 1)
        lane.job = lane.process = None
        self._save(job)
        place = f" on {lane.slot.name}" if lane.slot.name else ""
        line = f"[{self._ended}/{self._count}] {outcome_line(job, self._folder, place)}"
        if self._ended < self._count and job.status != "interrupted":
            remaining_s = (time.monotonic() - self._started_at) / self._ended * (self._count - self._ended)
            line += f"; about {duration(remaining_s)} left"
        self._status.print(line)

    def _stop(self, stop: Stopped) -> None:
        """Pass the signal on, so that the jobs can save; after `grace_s`, or another signal, kill them."""
        running = [(lane, lane.job, lane.process) for lane in self._lanes if lane.job and lane.process]
        deadline = time.monotonic() + self._grace_s
        for lane, _, process in running:
            request_stop(process, stop.signum, lane.slot)
        for lane, job, process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except (subprocess.TimeoutExpired, Stopped):
                process.kill()  # its ranks and workers end with it
                process.wait()
            if process.returncode == 0:  # it ended before the signal reached it
                record_end(job, 0, self._log(job))
            else:
                job.status, job.why = "interrupted", f"stopped by {stop}"
            self._end(lane)

    def _log(self, job: Job) -> Path:
        return self._folder / job.name / LOG_NAME

    def _draw(self) -> None:
        running = [(f"{lane.slot.name}, " if lane.slot.name else "", lane.job) for lane in self._lanes if lane.job]
        self._status.draw([f"{place}{job.name}: {training_line(self._log(job))}" for place, job in running])


def outcome_line(job: Job, folder: Path, place: str = "") -> str:
    """How a job ended, with its speed, for the console."""
    time_taken = f" in {duration(job.seconds)}" if job.seconds is not None else ""
    line = f"{job.name}: {job.status}{time_taken}{place}{f' ({job.why})' if job.why else ''}"
    if job.status == "completed":
        with suppress(ConfigError):
            speed = read_run(folder / job.name).median_images_per_s
            line += f", {speed:.1f} images/s" if speed else ""
    return line


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
