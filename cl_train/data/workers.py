"""Worker processes: `torch.utils.data.DataLoader` starts, feeds and ends them; this module adds the rest.

A message about a dead or hung worker names the sample that it began last, workers ignore the signals that the training
process handles, and no worker outlives its parent. The workers stay alive between iterations.
"""

import math
import mmap
import multiprocessing
import os
import resource
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import util
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cl_train.config.schema import ConfigError
from cl_train.system.processes import watch_parent

_POLL_S = 1.0
_CLOSE_S = 2.0
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_FILES = 8, 32  # per worker of both splits (each has a queue and two pipes), and for everything else
_SEMAPHORES = 4  # pages of /dev/shm per worker, for the locks of its queue
BEGUN, SAMPLE, PID = range(3)  # columns of the progress array

Task = TypeVar("Task")
Result = TypeVar("Result")


class WorkerError(RuntimeError):
    """The next batch will not come: a worker died or hangs (the message names the sample that it began last), or an
    IterableDataset ended too early."""


def shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that workers, which are forked, share with this process. It is anonymous: no name remains after a crash,
    it takes no space in /dev/shm, and it is freed with the last process that maps it."""
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def check_resources(workers: int) -> None:
    """Raises ConfigError: the limit of open files, or /dev/shm, is too small for so many workers."""
    limit, used = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/proc/self/fd"))
    need = used + _FILES[0] * workers + _FILES[1]
    if workers and limit != resource.RLIM_INFINITY and need > limit:
        raise ConfigError(
            f"data.workers={workers} needs {need} open files, and the limit is {limit}: raise it (ulimit -n {need}), or"
            " lower data.workers"
        )
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:  # the platform keeps semaphores elsewhere
        return
    if workers and shm.f_bavail < _SEMAPHORES * workers:
        raise ConfigError(
            f"data.workers={workers}: /dev/shm is full ({shm.f_bavail * shm.f_frsize} bytes free). Empty or enlarge it"
            " (docker run --shm-size=1g), or use data.workers=0"
        )


class Workers(Generic[Task, Result]):
    """Runs tasks in `count` processes; results come back in the order of the tasks.

    Args:
        work: runs in the workers, which are forked: it is not pickled. It must not raise.
        count: processes; 0 = tasks run in the caller when their result is requested.
        progress: shared int64 [workers, 3]; `work` writes the number of samples that it began and the last one's index.
        timeout_s: `results` raises when no worker has begun another sample for this long.
        name_of: sample index -> its name in messages.
        queued: tasks that are sent to each worker in advance.
    """

    def __init__(
        self,
        work: Callable[[Task], Result],
        *,
        count: int,
        progress: npt.NDArray[np.int64],
        timeout_s: float,
        name_of: Callable[[int], str],
        queued: int = 1,
    ) -> None:
        self._work, self._count, self._queued = work, count, queued
        self._progress, self._timeout_s, self._name_of = progress, timeout_s, name_of
        self._tasks = _Tasks()
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Result] | None = None
        self.processes: list[BaseProcess] = []
        # multiprocessing sends SIGTERM at the interpreter's exit, which workers ignore, and then waits for them.
        util.Finalize(self, _kill, (self.processes,), exitpriority=10)

    def results(self, tasks: Iterator[Task]) -> Iterator[Result]:
        """The result of each task. Waits first for those of an abandoned iteration. Raises WorkerError."""
        try:
            for _ in self._received():
                pass
            self._tasks.tasks = tasks
            self._iterator = self._restarted()
            if self._iterator is None:
                self._iterator = self._started()
            yield from self._received()
        except WorkerError:
            self.close()
            raise

    def close(self) -> None:
        """End the workers: they finish the sample that they are reading, and are killed after 2 s."""
        timer = threading.Timer(_CLOSE_S, _kill, (self.processes,))
        timer.start()
        self._loader = self._iterator = None  # DataLoader ends the workers when its iterator is deleted
        timer.cancel()
        timer.join()
        _kill(self.processes)

    def _restarted(self) -> Iterator[Result] | None:
        """None if there are no workers, or if a busy machine gives them no time: they are started again.

        Raises WorkerError: one was killed or stopped since the last iteration.
        """
        try:
            return iter(self._loader) if self._loader is not None else None
        except RuntimeError:
            self._raise_if_dead()
            if any(_is_stopped(process.pid) for process in self.processes):
                raise WorkerError(f"a loader worker was stopped. Last images begun: {self._last_samples()}") from None
            self.close()
            return None

    def _started(self) -> Iterator[Result]:
        # DataLoader draws a seed for its workers; a separate generator keeps the training's random numbers unchanged.
        options: dict[str, Any] = {"batch_size": None, "sampler": self._tasks, "generator": torch.Generator()}
        if self._count:
            options |= {"num_workers": self._count, "persistent_workers": True, "multiprocessing_context": "fork"}
            options |= {"worker_init_fn": partial(_start_worker, self._progress, os.getpid())}
            options |= {"prefetch_factor": self._queued, "timeout": _POLL_S}
        before = set(multiprocessing.active_children())
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)  # until the worker ignores them
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # warns of more workers than cores, which the user chose
                # Python 3.12+ warns that a forked copy of a threaded process may deadlock. Workers take none of the
                # parent's locks, and DataLoader forks by default.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._loader = DataLoader(_Calls(self._work), **options)
                iterator = iter(self._loader)
        except OSError as error:
            _kill([child for child in multiprocessing.active_children() if child not in before])
            _discard(error)
            raise WorkerError(
                f"cannot start {self._count} loader workers: {error}. Free memory, /dev/shm (docker run --shm-size=1g)"
                " or processes, or lower data.workers"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self.processes[:] = [child for child in multiprocessing.active_children() if child not in before]
        if self._count:
            _leave_deaths_to_next_result(iterator)
        return iterator

    def _received(self) -> Iterator[Result]:
        """The results of this iteration that are missing."""
        while self._iterator is not None:
            begun, since = self._progress[:, BEGUN].copy(), time.monotonic()
            while True:
                try:
                    with _time_limit(self._timeout_s, self._progress) if not self._count else nullcontext():
                        result = next(self._iterator)
                    break
                except StopIteration:
                    return
                except RuntimeError as error:  # a timeout after _POLL_S, or a dead worker
                    self._raise_if_dead()
                    if "timed out" not in str(error):
                        raise
                    if not np.array_equal(begun, self._progress[:, BEGUN]):
                        begun, since = self._progress[:, BEGUN].copy(), time.monotonic()
                    elif time.monotonic() - since > self._timeout_s:
                        raise WorkerError(
                            f"no loader worker finished an image for {self._timeout_s:g} s. Last images begun:"
                            f" {self._last_samples()}. If the storage is slow, raise data.worker_timeout_s."
                        ) from None
            yield result

    def _raise_if_dead(self) -> None:
        for process in self.processes:
            if not process.is_alive():
                code = process.exitcode or 0
                how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
                hint = " Out of memory? Lower data.workers or data.prefetch." if code == -signal.SIGKILL else ""
                raise WorkerError(
                    f"a loader worker {how}; the last image it began: {self._last_samples(process.pid)}.{hint}"
                ) from None

    def _last_samples(self, of: int | None = None) -> str:
        """The sample that each worker, or the worker with this process id, began last."""
        rows = [row for row in self._progress if row[BEGUN] and of in (None, row[PID])]
        return "; ".join(f"{self._name_of(int(row[SAMPLE]))} (pid {row[PID]})" for row in rows) or "none yet"


class _Tasks(Sampler[Any]):
    """The tasks of the next iteration over the DataLoader."""

    tasks: Iterator[Any] = iter(())

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return self.tasks


class _Calls(Dataset[Any]):
    """A dataset whose indices are tasks."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def __getitem__(self, task: Any) -> Any:
        return self._work(task)


@contextmanager
def _time_limit(seconds: float, progress: npt.NDArray[np.int64]) -> Iterator[None]:
    """Without workers: TimeoutError in code that begins no sample for so long. Only the main thread has signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    begun, since = -1, time.monotonic()

    def check(*_: object) -> None:
        nonlocal begun, since
        if begun != progress[0, BEGUN]:
            begun, since = progress[0, BEGUN], time.monotonic()
        elif time.monotonic() - since > seconds:
            raise TimeoutError(f"reading it takes longer than data.worker_timeout_s={seconds:g}")

    earlier = signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, seconds / 8, seconds / 8)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def _leave_deaths_to_next_result(iterator: Any) -> None:
    """Remove these workers from the list that torch's SIGCHLD handler checks.

    The handler would raise in the middle of a training step, without the sample's name. It goes on watching the workers
    of other DataLoaders. torch has no public function for this.
    """
    signal_handling._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False


def _discard(error: Exception) -> None:
    """Keep the DataLoader iterator that `error` left unfinished from ending its workers, which prints a traceback."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(unfinished := frame.f_locals.get("self"), _BaseDataLoaderIter):
            unfinished._shutdown = True  # type: ignore[attr-defined]


def _start_worker(progress: npt.NDArray[np.int64], parent: int, number: int) -> None:
    progress[number, PID] = os.getpid()
    for name in _PARENTS_SIGNALS:  # Ctrl-C and a scheduler's SIGTERM reach the whole process group
        signal.signal(name, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    # A killed parent cannot end its workers. The kernel's signal for this would follow the thread that forked.
    threading.Thread(target=watch_parent, args=(parent,), daemon=True).start()


def _is_stopped(pid: int | None) -> bool:
    """By SIGSTOP; False where there is no /proc."""
    with suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"
    return False


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
