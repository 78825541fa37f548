"""Wraps torch's DataLoader: its workers end with this process in any case, and its failures name
the sample.
"""

import gc
import math
import mmap
import multiprocessing.util
import os
import signal
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkContext
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from cl_train.errors import WorkerError
from cl_train.system.processes import SAVE_SIGNAL, STOP_SIGNALS, end_with_parent, handles_signals

_POLL_S = 2.0  # a dead worker is noticed within this time
_PARENTS_SIGNALS = (*STOP_SIGNALS, SAVE_SIGNAL, signal.SIGUSR2)

# If this process is a worker: how many samples it has begun, and the number of the last one.
_begun: npt.NDArray[np.int64] = np.zeros(2, np.int64)
_ending: npt.NDArray[np.int64] = np.zeros(1, np.int64)


def begin_sample(number: int) -> None:
    """A dataset calls it: if the worker then dies or hangs, the message names sample `number`."""
    _begun[:] = _begun[0] + 1, number


def is_ending() -> bool:
    """Returns whether this worker is to finish its item, even if that is of no use any more."""
    return bool(_ending[0])


def shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeros in memory that later forks share; it has no name that could outlive a crash."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Workers:
    """A DataLoader (`options`) with `count` forks that live until `close`; with 0 the caller loads.

    `name_of` returns the name of a sample that has begun; `nice` is that of the workers.
    WorkerError: one died, or none has begun a sample for `timeout_s`; then none is left.
    """

    def __init__(
        self,
        dataset: Any,
        count: int,
        name_of: Callable[[int], str],
        timeout_s: float,
        nice: int = 0,
        **options: Any,
    ) -> None:
        self._name_of, self._timeout_s = name_of, timeout_s
        self._poll_s = min(_POLL_S, timeout_s / 2)
        self._begun = shared((max(1, count), 2), torch.int64).numpy()
        self._ending = shared((1,), torch.int64).numpy()
        self._items: Any = None
        context = _Fork()
        self.processes = context.processes
        # At the end of the program multiprocessing would send SIGTERM, which they ignore, and wait.
        multiprocessing.util.Finalize(self, _kill, (self.processes,), exitpriority=10)
        if count:
            start = partial(_start_worker, self._begun, self._ending, handles_signals(), nice)
            options |= {"multiprocessing_context": context, "worker_init_fn": start}
            options |= {"num_workers": count, "timeout": self._poll_s}
        options["generator"] = torch.Generator()  # draws none of the training's own numbers
        handler = signal.getsignal(signal.SIGCHLD)
        # A signal that comes earlier would end the worker, or call the parent's handler in it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about many workers, and a fork with threads
                self._items = iter(DataLoader(dataset, **{"collate_fn": _unchanged, **options}))
        except (OSError, RuntimeError) as error:
            self.close()
            raise WorkerError(
                f"cannot start {count} loader workers: {error}. Free memory, processes or open"
                " files (ulimit -n), or lower data.workers"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if handles_signals():  # torch's raises for a dead worker anywhere, even in a step
                signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)

    @property
    def is_running(self) -> bool:
        return self._items is not None

    def next(self) -> Any:
        """Returns the next item; None: there is no more. Raises WorkerError."""
        begun, quiet_s = -1, 0.0  # counted in polls: a time of suspension is one poll
        try:
            while quiet_s < self._timeout_s:
                try:
                    return next(self._items, None)
                except RuntimeError:  # a worker died, or none sent an item for `_poll_s`
                    if not self.processes:
                        raise
                self.check()
                before, begun = begun, int(self._begun[:, 0].sum())
                quiet_s = quiet_s + self._poll_s if begun == before else 0.0
            last = "; ".join(map(self._last, range(len(self.processes))))
            _kill(self.processes)
            raise WorkerError(
                f"no loader worker finished an image for {self._timeout_s:g} s. Last images begun:"
                f" {last}. If the storage is slow, raise data.worker_timeout_s."
            )
        except BaseException:  # Ctrl-C may leave half an item in the pipe
            self.close()
            raise

    def check(self) -> None:
        """Raises WorkerError: a worker has ended."""
        if death := self._death():
            self.close()
            raise WorkerError(death)

    def close(self) -> None:
        """Ends the workers: each finishes its item; torch waits for it, 5 s at most."""
        self._ending[0] = 1
        self._items = None
        _kill(self.processes)
        self.processes.clear()

    def _death(self) -> str:
        """Returns what happened to a worker that has ended."""
        for worker, process in enumerate(self.processes):
            if not process.is_alive():
                code = process.exitcode or 0
                how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
                memory = " Out of memory? Lower data.workers or data.prefetch."
                hint = memory if code == -signal.SIGKILL else ""
                return (
                    f"a loader worker {how}; the last image it began: {self._last(worker)}.{hint}"
                )
        return ""

    def _last(self, worker: int) -> str:
        count, sample = self._begun[worker].tolist()
        name = self._name_of(sample) if count else "none yet"
        return f"{name} (pid {self.processes[worker].pid})"


class _Fork(ForkContext):
    """A fork context that knows the processes it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[BaseProcess] = []

    def Process(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        self.processes.append(super().Process(*arguments, **options))
        return self.processes[-1]


def _start_worker(
    begun: npt.NDArray[np.int64],
    ending: npt.NDArray[np.int64],
    by_kernel: bool,
    nice: int,
    worker: int,
) -> None:
    """Sets up a worker. `by_kernel`: as in `end_with_parent`; the kernel's signal follows the end
    of the thread that forked.
    """
    global _begun, _ending
    _begun, _ending = begun[worker], ending
    gc.freeze()  # freeing the parent's garbage may wait for its threads
    for signum in _PARENTS_SIGNALS:  # Ctrl-C and a scheduler's SIGTERM reach the whole group
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    end_with_parent(by_kernel=by_kernel)
    os.nice(nice)


def _unchanged(item: Any) -> Any:
    return item


def _kill(processes: list[BaseProcess]) -> None:
    for process in filter(BaseProcess.is_alive, processes):
        process.kill()
        process.join()
