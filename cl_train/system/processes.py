"""Processes, without torch: launchers, children, pools, the load of others, stop signals."""

import atexit
import ctypes
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn, TypeVar

from cl_train.errors import ConfigError

Item = TypeVar("Item")
Result = TypeVar("Result")

BUSY_PCT = 10.0  # share of the cores used by others: reported with the result
LOST_PCT = 5.0  # share of the time waiting for a core that others had: not comparable
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal was closed
SAVE_SIGNAL = signal.SIGUSR1

_PR_SET_PDEATHSIG = 1  # prctl(2)
# Slurm signals torchrun and its ranks, and torchrun passes the signal on.
_SAME_REQUEST_S = 0.5


# --- launchers ------------------------------------------------------------------------------------


class Launch(NamedTuple):
    rank: int
    local_rank: int
    world_size: int


def read_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Returns what the variables of torchrun say; None without them. Raises ConfigError: some are
    wrong, or `srun` started several tasks without torchrun.
    """
    ranks = (environment.get("RANK"), environment.get("WORLD_SIZE"))
    if ranks == (None, None) or (ranks == ("0", "1") and "MASTER_ADDR" not in environment):
        # SLURM_NTASKS is also set for one process, of `salloc` or `sbatch`.
        if (tasks := environment.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
            advice = "let one task per node start torchrun, see scripts/slurm"
            raise ConfigError(f"srun started {tasks} tasks, each of which would train: {advice}")
        return None
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    are_numbers = all(environment.get(name, "").isdecimal() for name in names[:4])
    if are_numbers and environment.get("MASTER_ADDR"):
        launch = Launch(*(int(environment[name]) for name in names[:3]))
        if launch.local_rank <= launch.rank < launch.world_size:
            return launch
    values = ", ".join(f"{name}={environment.get(name, 'unset')!r}" for name in names)
    alone = "unset RANK, WORLD_SIZE and LOCAL_RANK to train in one process"
    raise ConfigError(f"the environment has {values}: start with torchrun, or {alone}")


def cores_of_process(world_size: int, environment: Mapping[str, str] = os.environ) -> int:
    cores = len(usable_cores()) or os.cpu_count() or 1
    return max(1, cores // int(environment.get("LOCAL_WORLD_SIZE", world_size)))


def _position_of_core(core: int) -> tuple[int, int, int]:
    """Returns socket, physical core and number, by which hyperthreads sort as neighbours."""
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        socket = int((topology / "physical_package_id").read_text())
        return socket, int((topology / "core_id").read_text()), core
    except OSError:  # hidden in some containers
        return 0, core, core


def usable_cores() -> list[int]:
    """Returns the cores of this process; hyperthreads of one physical core are adjacent. Empty on
    macOS.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return sorted(cores, key=_position_of_core)


def with_threads(command: str, device_name: str = "") -> str:
    """Returns `command` with OMP_NUM_THREADS of a record's `device_name`, else of this process:
    runs with another number are not comparable.
    """
    recorded = re.search(r"\((\d+) threads?\)", device_name)
    threads = recorded[1] if recorded else os.environ.get("OMP_NUM_THREADS")
    return f"OMP_NUM_THREADS={threads} {command}" if threads else command


# --- children -------------------------------------------------------------------------------------


def end_with_parent(signum: int = signal.SIGKILL, *, by_kernel: bool = True) -> None:
    """Call in a child: it receives `signum` when its parent has ended. Linux sends it when the
    thread ends that started the child; else a thread watches the parent.
    """
    parent_pid = getattr(multiprocessing.parent_process(), "pid", os.getppid())

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(0.5)
        os.kill(os.getpid(), signum)

    if sys.platform != "linux" or not by_kernel:
        threading.Thread(target=watch, name="parent", daemon=True).start()
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent ended before the call
        os.kill(os.getpid(), signum)


def map_in_processes(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int | None,
    *,
    description: str,
    unit: str,
) -> Iterator[Result]:
    """Yields `function` of each item, in order, with a progress bar. It runs in `workers` forked
    processes (None: one per core; 1: this process). Raises RuntimeError: a process died.
    """
    from tqdm import tqdm

    fork = multiprocessing.get_context("fork")
    count = min(workers or len(usable_cores()), len(items))
    pool = ProcessPoolExecutor(count, fork, initializer=_start_worker) if count > 1 else None
    chunk = min(32, 1 + len(items) // (100 * max(1, count)))  # items sent at once
    bar = tqdm(desc=description, total=len(items), unit=unit, mininterval=1.0)
    with bar, warnings.catch_warnings():
        # The warning is about a fork with threads; these workers start none.
        warnings.simplefilter("ignore", DeprecationWarning)
        results = pool.map(function, items, chunksize=chunk) if pool else map(function, items)
        try:
            for result in results:
                yield result
                bar.update()
        except BrokenExecutor:
            where = f"{description}: a worker died at {items[int(bar.n)]} or later"
            raise RuntimeError(f"{where}; if memory is short, use fewer workers") from None
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends them
    if torch := sys.modules.get("torch"):  # if the task has imported it
        torch.set_num_threads(1)


class MachineLoad:
    """Measures from its construction on: the load of others on this process's cores, and what it
    cost the process.
    """

    def __init__(self) -> None:
        self._cores = {f"cpu{core}" for core in usable_cores()}
        self._before = self._clocks()
        self._threads_before, self._throttled_before_s = thread_times(), throttled_s()

    def others_pct(self) -> float | None:
        """Returns the percentage of the cores' time that others used, also other guests of the
        hypervisor; None: unknown.
        """
        before, now = self._before, self._clocks()
        if before is None or now is None:
            return None
        elapsed_s, busy_s, own_s = (end - start for start, end in zip(before, now, strict=True))
        return max(0.0, 100 * (busy_s - own_s) / (max(elapsed_s, 1e-9) * len(self._cores)))

    def lost_pct(self) -> tuple[float, float] | None:
        """Returns two percentages of the time: how long the threads of this process waited for a
        core that others had, or were throttled, and how long those of the child that waited most.
        None: unknown.

        The threads and workers of a run wait for each other, too: of each one's waiting, others
        caused their share of all else that ran.
        """
        before, now = self._before, self._clocks()
        if before is None or now is None or not self._threads_before:
            return None
        elapsed_s, busy_s, own_s = (end - start for start, end in zip(before, now, strict=True))
        others_s = max(0.0, busy_s - own_s)

        def lost_s(pid: int) -> float:
            total_s = 0.0
            for thread, (ran_s, waited_s) in thread_times(pid).items():
                ran_before_s, waited_before_s = self._threads_before.get(thread, (0.0, 0.0))
                beside_s = max(busy_s - (ran_s - ran_before_s), others_s, 1e-9)
                total_s += (waited_s - waited_before_s) * others_s / beside_s
            return total_s

        pid = os.getpid()
        of_threads_s = lost_s(pid) + throttled_s() - self._throttled_before_s
        of_children_s = max((lost_s(child) for child in cpu_ticks(pid).keys() - {pid}), default=0.0)
        of_threads, of_children = (
            min(100.0, 100 * lost / max(elapsed_s, 1e-9)) for lost in (of_threads_s, of_children_s)
        )
        return of_threads, of_children

    def _clocks(self) -> tuple[float, float, float] | None:
        """Returns seconds: now, of busy cores, of this process's own work; None except on Linux."""
        try:
            lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        # columns: name user nice system idle iowait irq softirq steal
        rows = [row for row in map(str.split, lines) if row[0] in self._cores]
        ticks = sum(sum(map(int, row[1:9])) - int(row[4]) - int(row[5]) for row in rows)
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own_cpu_s()


def own_cpu_s() -> float:
    """CPU seconds of this process and all its descendants; under torchrun of all ranks."""
    root = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    return sum(cpu_ticks(root).values()) / os.sysconf("SC_CLK_TCK")


def cpu_ticks(root: int) -> dict[int, int]:
    """Returns the CPU time, in clock ticks, of a process and of each of its descendants."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for number in _numbers_in("/proc"):
        with suppress(OSError):  # it has just ended
            stat = Path(f"/proc/{number}/stat").read_text(errors="replace")
            fields = stat.rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(number)
            # own and waited children's utime and stime
            ticks[number] = sum(map(int, fields[11:15]))
    family = [root]
    for pid in family:
        family += children.get(pid, [])
    return {pid: ticks.get(pid, 0) for pid in family}


def thread_times(pid: int | None = None) -> dict[int, tuple[float, float]]:
    """Returns for each thread of a process, by default this one, the seconds that it ran, and those
    that it was ready and had no core. Empty: unknown, as on other systems than Linux.
    """
    times, folder = {}, f"/proc/{pid or os.getpid()}/task"
    for thread in _numbers_in(folder):
        with suppress(OSError, ValueError):  # it has just ended
            ran_s, waited_s = ran_and_waited_s(Path(f"{folder}/{thread}/schedstat").read_bytes())
            if ran_s:  # a kernel without these statistics has zeros
                times[thread] = ran_s, waited_s
    return times


def _numbers_in(folder: str) -> list[int]:
    """Returns numbers of processes or threads; none if the folder is gone. `Path.glob` raises if a
    process ends between its name and its file.
    """
    try:
        return [int(name) for name in os.listdir(folder) if name.isdigit()]
    except OSError:
        return []


def ran_and_waited_s(schedstat: bytes) -> tuple[float, float]:
    """Returns the seconds that a thread ran and waited; `schedstat` has both in ns, and slices."""
    ran_ns, waited_ns = map(int, schedstat.split()[:2])
    return 1e-9 * ran_ns, 1e-9 * waited_ns


def throttled_s() -> float:
    """Seconds that the limit of its container kept this process from its cores."""
    with suppress(OSError, ValueError):
        _, _, rest = Path("/sys/fs/cgroup/cpu.stat").read_text().partition("throttled_usec")
        return 1e-6 * int(rest.split(maxsplit=1)[0]) if rest else 0.0
    return 0.0


# --- signals --------------------------------------------------------------------------------------

_RUN_IS_SAVED = "the run is saved after this step; Ctrl-C again exits without saving"
_active: "StopRequest | None" = None


def handles_signals() -> bool:
    """Whether this is the main thread: Python runs handlers of signals in no other."""
    return threading.current_thread() is threading.main_thread()


class StopRequest:
    """In its block, in the main thread, SIGTERM, SIGINT and SIGHUP set `stop`, SIGUSR1 sets
    `save_requested`.

    A second stop signal n exits with 128 + n and saves nothing: SIGINT at any time, the others from
    half a second after the first. Without `ends_process` (a notebook) a second SIGINT raises
    KeyboardInterrupt.
    """

    def __init__(self, *, ends_process: bool = True) -> None:
        self.ends_process = ends_process
        self._save = False
        self._stopped_at = 0.0
        self.stop: int | None = None  # the signal that requested the stop

    @property
    def save_requested(self) -> bool:
        """True once after each SIGUSR1."""
        if not self._save:
            return False
        self._save = False
        return True

    def __enter__(self) -> "StopRequest":
        global _active
        if handles_signals():
            assert _active is None, "one StopRequest at a time"
            _active = self
            signals = (*STOP_SIGNALS, SAVE_SIGNAL)
            self._previous = {signum: signal.getsignal(signum) for signum in signals}
            for signum, previous in self._previous.items():
                if signum != signal.SIGHUP or previous != signal.SIG_IGN:  # ignored under nohup
                    signal.signal(signum, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        global _active
        if _active is self:  # not in a forked child, or another thread
            _active = None
            for signum, handler in self._previous.items():
                signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if signum == SAVE_SIGNAL:
            self._save = True
        elif self.stop is None:
            self.stop, self._stopped_at = signum, now
            if signum == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                os.write(2, f"\nstopping: {_RUN_IS_SAVED}\n".encode())
        elif not self.ends_process:
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
        elif signum == signal.SIGINT or now - self._stopped_at >= _SAME_REQUEST_S:
            os.write(2, f"second {signal.Signals(signum).name}: exiting without saving\n".encode())
            os._exit(128 + signum)


def _reset_in_child() -> None:
    """Lets SIGTERM end a forked child; Ctrl-C and SIGUSR1 are left to the parent."""
    global _active
    if _active is not None:
        _active = None
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(SAVE_SIGNAL, signal.SIG_IGN)


os.register_at_fork(after_in_child=_reset_in_child)


def exit_without_teardown(code: int) -> NoReturn:
    """Exits after `atexit`'s functions, but without freeing torch's modules, which takes 1-3 s."""
    atexit._run_exitfuncs()
    with suppress(OSError):  # nobody reads it
        print(end="", flush=True)
    os._exit(code)
