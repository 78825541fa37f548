"""Worker processes: `torch.utils.data.DataLoader` starts, feeds and ends them, and they live until `close`. A message
about a dead or hung one names the sample that it began last. They ignore the signals that the training handles."""

import itertools
import math
import mmap
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import util
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

_POLL_S = 1.0
_CLOSE_S = 2.0
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ITERATIONS = itertools.count(1)
BEGUN, SAMPLE, PID = range(3)  # columns of the progress array


class WorkerError(RuntimeError):
    """The next batch will not come: a worker failed, died or hangs, or an IterableDataset ended too early."""


def shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that forked workers share with this process: without a name that could remain after a crash, not in
    /dev/shm, and freed with the last process that maps it."""
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


class Workers(Dataset[Any]):
    """Runs tasks in `pool_size` processes (0: in the caller); results come back in their order. All calls of `results`
    go through one DataLoader with an endless sampler, which yields the tasks of the running call, then empty ones. Each
    worker gets `queued` tasks in advance.

    `work` is called with the number of the iteration and a task, in a fork: it is not pickled. It writes into its row
    of `progress`, int64 [workers, 3], which sample it began; when no worker has begun another one for `timeout_s`,
    `results` raises. `iteration[0]` is the number of the running iteration; the tasks of others can be skipped.
    """

    def __init__(
        self, work: Callable[..., Any], pool_size: int, timeout_s: float, name_of: Callable[[int], str], queued: int = 1
    ) -> None:
        self._work, self._name_of, self._timeout_s = work, name_of, timeout_s
        self._pool_size, self._queued = pool_size, queued
        self.iteration = shared((1,), torch.int64).numpy()
        self.progress = shared((max(1, pool_size), 3), torch.int64).numpy()
        self._tasks: Iterator[tuple[int, Any]] = itertools.repeat((0, None))
        self._received: Iterator[tuple[int, Any]] | None = None
        self.processes: list[BaseProcess] = []
        self._taken = 0  # results: the next task goes to worker `_taken % pool_size`
        # multiprocessing sends SIGTERM at the interpreter's exit, which workers ignore, and then waits for them.
        util.Finalize(self, _kill, (self.processes,), exitpriority=10)

    def results(self, tasks: Iterator[Any]) -> Iterator[Any]:
        """The result of each task. Ends an earlier iteration. Raises WorkerError; RuntimeError: another one has
        begun."""
        self.iteration[0] = 0  # workers leave what an abandoned iteration prepared in advance
        self._tasks = itertools.repeat((0, None))
        number = next(_ITERATIONS)
        try:
            if self._received is not None:  # results that are on their way; then worker 0 is the next again
                for _ in range(self._pool_size * self._queued + -self._taken % max(1, self._pool_size)):
                    self._next_result()
            self.iteration[0] = number
            self._tasks = zip(itertools.repeat(number), itertools.chain(tasks, itertools.repeat(None)))
            while self.iteration[0] == number:
                iteration, result = self._next_result()
                if isinstance(result, WorkerError):
                    raise result
                if iteration == number and result is None:  # of the first task after the last one
                    return
                if result is not None:
                    yield result
            raise RuntimeError("another iteration over this loader has begun")
        except WorkerError:
            self.close()
            raise
        finally:
            if self.iteration[0] == number:
                self.iteration[0] = 0

    @property
    def is_running(self) -> bool:
        return self._received is not None

    def close(self) -> None:
        """End the workers: they finish the sample that they are reading, and are killed after 2 s."""
        self.iteration[0] = 0
        timer = threading.Timer(_CLOSE_S, _kill, (self.processes,))
        timer.start()
        self._received = None  # DataLoader ends the workers when its iterator is deleted
        timer.cancel()
        _kill(self.processes)

    def __getitem__(self, task: tuple[int, Any]) -> tuple[int, Any]:
        """In a worker."""
        iteration, content = task
        try:
            return iteration, None if content is None else self._work(iteration, content)
        except Exception as error:  # a bug, or lack of memory; its own type may not be picklable
            return iteration, WorkerError(f"a loader worker failed: {type(error).__name__}: {error}")

    def _next_result(self) -> tuple[int, Any]:
        begun, since = -1, time.monotonic()
        received = self._start() if self._received is None else self._received
        while True:
            try:
                result = next(received)
                self._taken += 1
                return result
            except RuntimeError as error:  # after _POLL_S without a result, or because a worker died
                for process in self.processes:
                    if not process.is_alive():
                        code, last = process.exitcode or 0, self._last_samples(process.pid)
                        how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
                        hint = " Out of memory? Lower data.workers or data.prefetch." if code == -signal.SIGKILL else ""
                        raise WorkerError(f"a loader worker {how}; the last image it began: {last}.{hint}") from None
                if "timed out" not in str(error):
                    raise
            if begun != self.progress[:, BEGUN].sum():
                begun, since = self.progress[:, BEGUN].sum(), time.monotonic()
            elif time.monotonic() - since > self._timeout_s:
                raise WorkerError(
                    f"no loader worker finished an image for {self._timeout_s:g} s. Last images begun:"
                    f" {self._last_samples()}. If the storage is slow, raise data.worker_timeout_s."
                )

    def _last_samples(self, of: int | None = None) -> str:
        """The sample that each worker, or the worker with this process id, began last."""
        rows = [row for row in self.progress if row[BEGUN] and of in (None, row[PID])]
        return "; ".join(f"{self._name_of(int(row[SAMPLE]))} (pid {row[PID]})" for row in rows) or "none yet"

    def _start(self) -> Iterator[tuple[int, Any]]:
        # DataLoader draws a seed for its workers; a separate generator keeps the training's random numbers unchanged.
        options: dict[str, Any] = {"generator": torch.Generator(), "batch_size": None, "collate_fn": lambda done: done}
        options["sampler"] = iter(lambda: next(self._tasks), None)  # of the iteration that is running
        if self._pool_size:
            options |= {"num_workers": self._pool_size, "prefetch_factor": self._queued, "timeout": _POLL_S}
            options |= {"multiprocessing_context": "fork", "worker_init_fn": self._begin_worker}
        self._taken, before = 0, set(multiprocessing.active_children())
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)  # until the worker ignores them
        try:
            with warnings.catch_warnings():
                # Of more workers than cores, which the user chose; of a fork of a threaded process, whose locks no
                # worker takes.
                warnings.simplefilter("ignore")
                self._received = received = iter(DataLoader(self, **options))
        except OSError as error:
            for frame, _ in traceback.walk_tb(error.__traceback__):  # else the unfinished iterator prints a traceback
                vars(frame.f_locals.get("self", self))["_shutdown"] = True
            raise WorkerError(
                f"cannot start {self._pool_size} loader workers: {error}. Free memory, /dev/shm (docker run"
                " --shm-size=1g), processes or open files (ulimit -n), or lower data.workers"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            self.processes[:] = [child for child in multiprocessing.active_children() if child not in before]
        if self._pool_size:
            # torch's SIGCHLD handler would raise in the middle of a training step, without the sample's name. It still
            # watches the workers of other DataLoaders. torch has no public function for this.
            signal_handling._remove_worker_pids(id(received))
            vars(received)["_worker_pids_set"] = False
        return received

    def _begin_worker(self, number: int) -> None:
        self.progress[number, PID] = os.getpid()
        for name in _PARENTS_SIGNALS:  # Ctrl-C and a scheduler's SIGTERM reach the whole process group
            signal.signal(name, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # torch watches only parents that are alive from here on
            os._exit(1)


def _kill(processes: list[BaseProcess]) -> None:
    for process in filter(BaseProcess.is_alive, processes):
        process.kill()
