"""`python train.py -m ...`: run every job of a sweep in its own process, then compare.

A thread per place takes one group of compared jobs after the other. With repeats=auto undecided
pairs get more repeats; runs that other processes disturbed do not count.
"""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from cl_train.config.command_line import Composed
from cl_train.errors import ConfigError
from cl_train.sweeps.job import JOB_NAME, LOG_NAME, outcome_of, start_job
from cl_train.sweeps.places import Place, plan_places, visible_gpus
from cl_train.sweeps.plan import Job, Sweep, plan_sweep
from cl_train.sweeps.report import Report, benchmark_command, compare_folders, read_report
from cl_train.sweeps.verdict import too_few_windows
from cl_train.system.files import create, lock_file, write_json
from cl_train.system.processes import StopRequest, read_launch
from cl_train.system.run_folder import Run

GRACE_S = 20.0  # a job has so long to save a checkpoint after a stop signal
_PLACE = re.compile(rb"Epoch: (\[\d+\]\[\d+/\d+\]).*? ETA (\S+)")  # in a log line


def run_sweep(runs: Sequence[Composed]) -> tuple[Report, int]:
    """Runs the jobs of a sweep, then writes the comparison.

    Returns the comparison and the exit code: 0, 1 if a job has not completed, 128 + n after signal
    n. Raises ConfigError.
    """
    if read_launch() is not None:
        raise ConfigError("torchrun cannot start a sweep: train.py -m nproc=N starts torchrun")
    sweep = plan_sweep(runs)
    jobs = missing_jobs(sweep)
    places = [Place()]
    if sweep.options.launcher.gpus and jobs:
        places = plan_places(sweep.options.launcher.gpus, visible_gpus(), sweep.groups(jobs))
        names = ", ".join(f"GPU {','.join(place.gpus)}" for place in places)
        print(f"{len(places)} jobs at a time, each with {len(places[0].cores)} CPU cores: {names}")

    lock = sweep.folder / ".sweep.lock"
    create(lock, f"hydra.sweep.dir={sweep.folder}")
    with lock_file(lock), StopRequest() as request:
        sweep.save()
        where = f"{sweep.folder}/<job>/{LOG_NAME}"
        print(f"sweep of {len(sweep.jobs)} jobs, {len(jobs)} to run, in {where}", flush=True)
        sweep = Launcher(sweep, places, request).run(jobs)
        report = compare_folders([sweep.folder])
    missing = missing_jobs(sweep)
    if missing:
        print(f"{sweep.resume_command()} runs what is missing", flush=True)
    return report, 128 + request.stop if request.stop else int(missing != [])


def missing_jobs(sweep: Sweep) -> list[Job]:
    return [job for job in sweep.jobs if isinstance(outcome_of(sweep.folder / job.name), str)]


def undecided_groups(sweep: Sweep) -> set[int]:
    """Returns the groups with a pair that more repeats may decide."""
    group_of = {job.name: job.group for job in sweep.jobs}
    return {
        group_of[pair.runs[0].folder.name]
        for pair in read_report(sweep.folder).pairs
        if pair.is_disturbed or (pair.verdict == "inconclusive" and pair.bottleneck != "host")
    }


@dataclass
class Launcher:
    sweep: Sweep
    places: Sequence[Place]
    request: StopRequest
    seconds: list[float] = field(default_factory=list)  # that jobs took
    left: int = 0  # jobs that have not ended yet
    began_s: float = field(default_factory=time.monotonic)
    has_warned: bool = False  # that a job will have no verdict
    console: threading.Lock = field(default_factory=threading.Lock)

    def run(self, jobs: Sequence[Job]) -> Sweep:
        """Runs `jobs`; with repeats=auto, then more repeats of what is undecided."""
        self._run_groups(jobs)
        while self.sweep.options.repeats is None and not self.request.stop:
            if not (undecided := undecided_groups(self.sweep)):
                break
            last = max(job.repeat for job in self.sweep.jobs if job.group in undecided)
            count = min(last + 2, self.sweep.options.max_repeats)
            grown = self.sweep.with_repeats(count, undecided)
            more = grown.jobs[len(self.sweep.jobs) :]
            if not more or self._is_too_late(len(more)):
                why = "more repeats would end after time_limit_s"
                if not more:
                    why = f"max_repeats={self.sweep.options.max_repeats} is reached"
                comparisons = f"{len(undecided)} of {len(grown.groups())} comparisons"
                print(f"repeats=auto gives up with {comparisons} undecided: {why}", flush=True)
                break
            print(f"not decided: {len(undecided)}; now {more[-1].repeat} repeats", flush=True)
            self.sweep = grown
            self.sweep.save()
            self._run_groups(more)
        return self.sweep

    def _seconds_for(self, jobs: int) -> float:
        return jobs * fmean(self.seconds or [0]) / len(self.places)

    def _is_too_late(self, jobs: int) -> bool:
        limit_s = self.sweep.options.time_limit_s or math.inf
        return time.monotonic() - self.began_s + self._seconds_for(jobs) > limit_s

    def _run_groups(self, jobs: Sequence[Job]) -> None:
        groups = iter(self.sweep.groups(jobs))  # each is taken by one of the threads
        self.left = len(jobs)

        def work(place: Place) -> None:
            for group in groups:
                for job in group:
                    if not self.request.stop:
                        self._run_job(job, place)

        with ThreadPoolExecutor(len(self.places)) as pool:
            list(pool.map(work, self.places))

    def _run_job(self, job: Job, place: Place) -> None:
        started_s = time.monotonic()
        outcome = self._outcome(job, place)
        words = outcome if isinstance(outcome, str) else words_of(outcome)
        seconds = time.monotonic() - started_s
        with self.console:
            self.seconds.append(seconds)
            self.left -= 1
            on_gpus = f" on GPU {','.join(place.gpus)}" if place.gpus else ""
            took = f"in {timedelta(seconds=round(seconds))}{on_gpus}"
            remaining = timedelta(seconds=round(self._seconds_for(self.left)))
            left = f"; jobs left: {self.left}, about {remaining}" if self.left else ""
            start = "\r\x1b[K" if sys.stdout.isatty() else ""
            print(f"{start}{job.name}: {words} {took}{left}", flush=True)
            if isinstance(outcome, Run):
                self._say_once(outcome)

    def _say_once(self, run: Run) -> None:
        """Prints once why this run, and so probably the others, will have no verdict."""
        said = too_few_windows(run)
        if not said and run.is_disturbed and self.sweep.compare_by == "channels_last":
            said = f"on a busy machine this decides: {benchmark_command(run)}"
        if said and not self.has_warned:
            self.has_warned = True
            print(f"{said}; the sweep goes on", flush=True)

    def _outcome(self, job: Job, place: Place) -> Run | str:
        folder = self.sweep.folder / job.name
        try:
            process = start_job(job, folder, place)
            exit_code = self._wait(job, process)
            signum = self.request.stop or -exit_code
            name = signal.Signals(signum).name if exit_code and signum > 0 else None
            write_json(folder / JOB_NAME, {"exit_code": exit_code, "signal": name})
            run = outcome_of(folder)
        except (ConfigError, OSError) as error:  # OSError: no space is left
            run = str(error)
        return f"not completed: {run}" if isinstance(run, str) else run

    def _wait(self, job: Job, process: "subprocess.Popen[bytes]") -> int:
        """Returns the exit code of a job, -n after signal n. After a stop signal the job has
        `GRACE_S` to end.
        """
        kill_at_s = math.inf
        while True:
            # Often: a scheduler may have signalled the job, too, and a second signal half a second
            # after the first one would end it without saving.
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=0.2)
            if self.request.stop and kill_at_s == math.inf:
                kill_at_s = time.monotonic() + GRACE_S
                is_ctrl_c = self.request.stop == signal.SIGINT
                process.send_signal(signal.SIGINT if is_ctrl_c else signal.SIGTERM)
            if time.monotonic() > kill_at_s:
                process.kill()  # its ranks and workers end with it
            self._show(f"{job.name}: {progress_of(self.sweep.folder / job.name)}")

    def _show(self, text: str) -> None:
        """Prints on a terminal a line that the next one replaces."""
        if sys.stdout.isatty():
            columns = os.get_terminal_size().columns
            with self.console:
                print(f"\r\x1b[K{text[: columns - 1]}", end="", flush=True)


def words_of(run: Run) -> str:
    speed = f"completed, {run.results['images_per_s']:.1f} images/s"
    if run.is_disturbed:
        return f"{speed}, disturbed: it waited for a core in {run.lost_pct:.0f} % of its time"
    return speed


def progress_of(folder: Path) -> str:
    """Returns epoch, step and remaining time of the last log line of a running job."""
    with suppress(OSError), open(folder / LOG_NAME, "rb") as log:
        log.seek(-min(20_000, log.seek(0, os.SEEK_END)), os.SEEK_END)
        if lines := _PLACE.findall(log.read()):
            step, left = (part.decode() for part in lines[-1])
            return f"{step}, {left} left"
    return "starts"
