"""torch's DataLoader, whose workers end with this process in any case, and whose failures name the
sample.
"""

import gc
import math
import mmap
import multiprocessing.util
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import ForkContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from cl_train.errors import WorkerError
from cl_train.system.processes import SAVE_SIGNAL, STOP_SIGNALS, end_with_parent, handles_signals

_POLL_S = 2.0  # a dead worker is noticed so late at most
_PARENTS_SIGNALS = (*STOP_SIGNALS, SAVE_SIGNAL, signal.SIGUSR2)


def shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeros in memory that later forks share; no name of it could outlive a crash."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Progress:
    """How many samples each of `count` workers has begun, and the last one, in shared memory.

    `wanted`: the number of the iteration whose samples are.
    """

    worker = 0  # in a worker: its number

    def __init__(self, count: int, name_of: Callable[[int], str]) -> None:
        self.count, self._name_of = count, name_of
        self.begun, self._samples = shared((2, max(1, count)), torch.int64).numpy()
        self.wanted = shared((1,), torch.int64).numpy()

    def begin(self, sample: int) -> None:
        self._samples[self.worker] = sample
        self.begun[self.worker] += 1

    def last(self, worker: int) -> str:
        return self._name_of(int(self._samples[worker])) if self.begun[worker] else "none yet"


class Workers:
    """A DataLoader (`options`) with forks that live until `close`; without any the caller loads.
    nice: of the workers.

    WorkerError: one died, or none has begun a sample for `timeout_s`; then none is left.
    """

    def __init__(
        self, dataset: Any, progress: Progress, timeout_s: float, nice: int = 0, **options: Any
    ) -> None:
        self._progress, self._timeout_s = progress, timeout_s
        self._poll_s, self._owner = min(_POLL_S, timeout_s / 2), os.getpid()
        context = _Fork()
        self.processes = context.processes
        # At the end of the program multiprocessing would send SIGTERM, which they ignore, and wait.
        multiprocessing.util.Finalize(self, _kill, (self.processes,), exitpriority=10)
        if progress.count:
            start = partial(_start_worker, progress, handles_signals(), nice)
            options |= {"multiprocessing_context": context, "worker_init_fn": start}
            options |= {"num_workers": progress.count, "timeout": self._poll_s}
        options["generator"] = torch.Generator()  # the training's own numbers stay as they are
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of many workers, of the fork of a threaded process
            self._loader: Any = DataLoader(dataset, **{"collate_fn": _unchanged, **options})
            self.begin()

    @property
    def is_running(self) -> bool:
        return self._loader is not None

    def begin(self) -> None:
        """Begins another iteration. Raises WorkerError."""
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)  # see _start_worker
        problem = ""
        try:
            with _without_sigchld():
                self._items = iter(self._loader)
        except (OSError, RuntimeError) as error:
            problem = self._death() or (
                f"cannot start {self._progress.count} loader workers: {error}. Free memory,"
                " processes or open files (ulimit -n), or lower data.workers"
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if problem:
            self.close(kill=True)
            raise WorkerError(problem)

    def next(self) -> Any:
        """Returns the next item; None: there is no more. Raises WorkerError."""
        begun, quiet_s = -1, 0.0  # counted in polls: a program that was suspended has one
        try:
            while quiet_s < self._timeout_s:
                try:
                    return next(self._items, None)
                except RuntimeError:  # a worker died, or none sent an item for `_poll_s`
                    if not self.processes:
                        raise
                if death := self._death():
                    raise WorkerError(death)
                before, begun = begun, int(self._progress.begun.sum())
                quiet_s = quiet_s + self._poll_s if begun == before else 0.0
        except BaseException:  # Ctrl-C may leave half an item in the pipe
            self.close()
            raise
        last = "; ".join(map(self._last, range(len(self.processes))))
        self.close(kill=True)
        raise WorkerError(
            f"no loader worker finished an image for {self._timeout_s:g} s. Last images begun:"
            f" {last}. If the storage is slow, raise data.worker_timeout_s."
        )

    def close(self, *, kill: bool = False) -> None:
        """Ends the workers: each finishes its sample; one that hangs is killed after 10 s."""
        if not self.is_running or os.getpid() != self._owner:
            return  # in a fork: they are not its children
        self._progress.wanted += 1
        with _without_sigchld():
            if kill:
                _kill(self.processes)
            self._items = self._loader = None  # torch waits for them
            _kill(self.processes)
            self.processes.clear()

    def _death(self) -> str:
        """What happened to a worker that has ended."""
        for worker, process in enumerate(self.processes):
            if process.pid and not process.is_alive():
                code = process.exitcode or 0
                how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
                memory = " Out of memory? Lower data.workers or data.prefetch."
                hint = memory if code == -signal.SIGKILL else ""
                return (
                    f"a loader worker {how}; the last image it began: {self._last(worker)}.{hint}"
                )
        return ""

    def _last(self, worker: int) -> str:
        return f"{self._progress.last(worker)} (pid {self.processes[worker].pid})"


class _Fork(ForkContext):
    """Knows the processes that it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[BaseProcess] = []

    def Process(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        self.processes.append(super().Process(*arguments, **options))
        return self.processes[-1]


def _start_worker(progress: Progress, by_kernel: bool, nice: int, worker: int) -> None:
    """`by_kernel`: its signal follows the end of the thread that forked."""
    gc.freeze()  # freeing the parent's garbage may wait for its threads
    for signum in _PARENTS_SIGNALS:  # Ctrl-C and a scheduler's SIGTERM reach the whole group
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    end_with_parent(by_kernel=by_kernel)
    os.nice(nice)
    progress.worker = worker


def _unchanged(item: Any) -> Any:
    return item


@contextmanager
def _without_sigchld() -> Iterator[None]:
    """Without torch's handler, which raises for a dead worker anywhere, such as within a step."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if handles_signals() else None
    try:
        yield
    finally:
        if handles_signals():
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def _kill(processes: list[BaseProcess]) -> None:
    for process in filter(BaseProcess.is_alive, processes):
        process.kill()
        process.join()
