"""Run the jobs of a sweep as processes of this machine, one at a time per slot of GPUs and CPU cores.

A job that fails or is killed does not affect the others: the end of its log has the reason, and `resume_sweep` runs it
again.
"""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from cl_train.comparison.run_records import read_run
from cl_train.comparison.sweep_plan import LOG_NAME, Job, last_lines, problem_of, write_end
from cl_train.config.command_line import quoted
from cl_train.config.schema import Config, ConfigError
from cl_train.system.child_process import end_with_parent
from cl_train.system.locks import lock_file
from cl_train.system.signals import STOP_SIGNALS

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
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
def signals_handled(signals: Sequence[int] = STOP_SIGNALS) -> Iterator[None]:
    """These signals raise `Stopped` inside the block; SIGHUP does not under nohup, which ignores it."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    before = {signum: signal.signal(signum, raise_stopped) for signum in signals if signum not in ignored}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


# --- slots ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Where one job at a time runs."""

    gpus: tuple[str, ...] = ()  # as in CUDA_VISIBLE_DEVICES; () = all that are visible
    cores: tuple[int, ...] = ()  # () = all that this process may use
    nodes: int = 1  # of a Slurm allocation; above 1, srun starts the processes
    cpus_per_task: int | None = None  # of srun

    @property
    def name(self) -> str:
        return f"GPU {','.join(self.gpus)}" if self.gpus else ""


def plan_slots(
    gpus: Sequence[str], cores: Sequence[int], runs: Sequence[tuple[Config, int]], groups: int
) -> list[Slot]:
    """Divide GPUs and cores among the jobs that run at the same time, at most one per group of jobs.

    Cores are not shared between slots: a job chooses its loader workers and threads by the cores that it may use, and
    the load of a slot does not count as load of other processes in another one. `cores` are ordered as by `own_cores`;
    `runs` are the settings and the number of processes of each job.

    Raises:
        ConfigError: too few GPUs for a job, or too few cores for its processes and loader workers.
    """
    if any(cfg.device == "cpu" for cfg, _ in runs):
        raise ConfigError("launcher.gpus needs jobs on GPUs, and device=cpu is set: leave out launcher.gpus")
    size = max(nproc for _, nproc in runs)
    count = min(len(gpus) // size, groups)
    if not count:
        raise ConfigError(f"nproc={size} needs {size} GPUs per job, and launcher.gpus has {len(gpus)}")
    share = len(cores) // count
    needed = max(_cores_needed(cfg, nproc) for cfg, nproc in runs)
    if share < needed:
        raise ConfigError(
            f"{count} jobs at a time have {share} of {len(cores)} CPU cores each, and a job needs {needed}, or its "
            f"loader would limit the speed: use GPUs for {len(cores) // needed} jobs at most, or fewer data.workers"
        )
    return [
        Slot(tuple(gpus[size * i : size * (i + 1)]), tuple(cores[share * i : share * (i + 1)])) for i in range(count)
    ]


def _cores_needed(cfg: Config, nproc: int) -> int:
    """One core for each process and one for loading, or the loader workers that the user asked for."""
    return nproc if cfg.data.name == "synthetic" else nproc * max(2, cfg.data.workers or 0)


def chosen_gpus(asked: Sequence[str], visible: Sequence[str]) -> list[str]:
    """The GPUs of `launcher.gpus`. Raises ConfigError: there is no GPU, or not the one that was asked for."""
    if not visible:
        raise ConfigError("launcher.gpus needs CUDA devices, and this machine has none: leave it out")
    chosen = list(visible if list(asked) == ["all"] else asked)
    if len(set(chosen) & set(visible)) < len(chosen):
        raise ConfigError(f"launcher.gpus={','.join(asked)}: must be all, or some of {','.join(visible)}, each once")
    return chosen


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""
    import torch

    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (names or [str(number) for number in range(torch.cuda.device_count())])[: torch.cuda.device_count()]


def own_cores() -> list[int]:
    """The cores of this process, those of one socket adjacent, and those that share a physical core too."""

    def place(core: int) -> tuple[int, int, int]:
        topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
        try:
            package, physical = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
        except (OSError, ValueError):  # unknown in some virtual machines
            package, physical = 0, core
        return package, physical, core

    return sorted(os.sched_getaffinity(0), key=place)


# --- the jobs of a sweep ----------------------------------------------------------------------------------------------


class LocalJobs:
    """The jobs of `groups` in the folder of a sweep: a thread per slot takes the next group.

    `program` is what the process of a job runs. After a signal a job may take `grace_s` seconds to save a checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        groups: Sequence[Sequence[Job]],
        slots: Sequence[Slot],
        program: Sequence[str],
        grace_s: float = 20.0,
    ) -> None:
        self._folder, self._program, self._grace_s = folder, program, grace_s
        self._groups: queue.SimpleQueue[Sequence[Job]] = queue.SimpleQueue()
        for group in groups:
            self._groups.put(group)
        self._threads = [threading.Thread(target=self._run_groups, args=[slot]) for slot in slots]
        self._running: dict[Slot, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()  # of starting a process, and of the console
        self._stop: Stopped | None = None
        self._count, self._ended, self._started_at = sum(map(len, groups)), 0, time.monotonic()

    def run(self) -> None:
        """Run all jobs. Raises `Stopped` after a signal; the running jobs have ended by then."""
        for thread in self._threads:
            thread.start()
        try:
            self._join()
        except Stopped as stop:
            with self._lock:
                self._stop = stop
                for slot, process in self._running.items():
                    request_stop(process, stop.signum, slot)
            with suppress(Stopped):
                self._join(time.monotonic() + self._grace_s)
            for process in list(self._running.values()):
                process.kill()  # its ranks and workers end with it
            self._join()
            raise

    def _join(self, deadline: float = float("inf")) -> None:
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _run_groups(self, slot: Slot) -> None:
        while True:
            try:
                group = self._groups.get_nowait()
            except queue.Empty:
                return
            for job in group:
                folder, started_at = self._folder / job.name, time.monotonic()
                try:
                    with self._lock:  # a signal stops the jobs that run
                        if self._stop:
                            return
                        process = self._running[slot] = start_job(job, folder, self._program, slot)
                except (ConfigError, OSError) as error:
                    self._print(job, slot, f"failed ({error})")
                    continue
                exit_code = process.wait()
                del self._running[slot]
                how = _describe_end(exit_code, folder / LOG_NAME)
                if self._stop and exit_code:
                    how = f"interrupted, stopped by {self._stop}"
                write_end(folder, how)
                problem = problem_of(folder)
                outcome = f"failed ({problem})" if problem and not problem.startswith("interrupted") else problem
                self._print(job, slot, outcome or "completed", time.monotonic() - started_at)

    def _print(self, job: Job, slot: Slot, outcome: str, seconds: float | None = None) -> None:
        """How a job ended, its speed, and an estimate of the time left."""
        with self._lock:
            self._ended += 1
            line = f"[{self._ended}/{self._count}] {job.name}: {outcome}"
            line += f" in {_duration(seconds)}" if seconds is not None else ""
            line += f" on {slot.name}" if slot.name else ""
            if outcome == "completed" and (speed := read_run(self._folder / job.name).median_images_per_s):
                line += f", {speed:.1f} images/s"
            remaining = self._count - self._ended
            if remaining and not self._stop:
                left_s = (time.monotonic() - self._started_at) / self._ended * remaining
                line += f"; about {_duration(left_s)} left"
            print(line, flush=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def start_job(job: Job, folder: Path, program: Sequence[str], slot: Slot) -> subprocess.Popen[bytes]:
    """Start the process of a job, which continues from a checkpoint if it was started before.

    It has its own process group, because Ctrl-C in a terminal must reach it once, from the sweep. It is stopped when
    this process is killed: a job must not outlive the sweep.

    Raises ConfigError: the folder is not one of this sweep.
    """
    is_continued, log = folder.exists(), folder / LOG_NAME
    if is_continued and not log.exists():
        raise ConfigError(f"{folder} exists already, and this sweep has not created it")
    folder.mkdir(exist_ok=True)
    log.touch()
    with lock_file(folder / ".lock", waiting_for=f"the end of an earlier {job.name}"):
        has_checkpoint = any((folder / "checkpoints").glob("*.pt"))
        is_damaged = is_continued and _summary_is_completed(folder)  # it runs again because its records are
    command = [*_launch_command(job.nproc, slot), *program, *continued(job.overrides, folder)]
    command.append(f"hydra.run.dir={quoted(folder.absolute())}")
    if has_checkpoint and not is_damaged and not any(word.startswith("resume=") for word in job.overrides):
        command.append("resume=auto")
    elif is_damaged or (is_continued and not has_checkpoint):
        command.append("overwrite=true")
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus[: job.nproc])} if slot.gpus else {}
    with open(log, "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, **devices},
            process_group=0,
            preexec_fn=partial(_prepare_child, slot.cores),
        )


def _summary_is_completed(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.is_file() and '"status": "completed"' in summary.read_text(encoding="utf-8", errors="replace")


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


def _describe_end(exit_code: int, log: Path) -> str:
    """From the exit code (-n for signal n), and for a failure the last error in the log."""
    if exit_code == 0:
        return "completed"
    if exit_code in (130, 143):
        return f"interrupted, stopped by a signal (exit code {exit_code})"
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"killed by {name}" + (", often because memory ran out (see dmesg)" if name == "SIGKILL" else "")
    lines = last_lines(log)
    errors = [line for line in lines if _ERROR_LINE.match(line) and "ChildFailedError" not in line]
    last = (errors or lines or ["no output"])[-1]
    words = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError")
    return f"{'out of memory: ' if any(word in last for word in words) else ''}{last[:300]} (exit code {exit_code})"
