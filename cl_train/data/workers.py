"""Worker processes: `torch.utils.data.DataLoader` starts, feeds and ends them; this module adds the rest.

A message about a dead or hung worker names the sample that it began last, workers ignore the signals that the training
process handles, and no worker outlives its parent. One DataLoader iterator serves all epochs: its sampler takes
tasks from a queue and yields None when the queue is empty. So the workers stay alive between epochs, and an abandoned
epoch leaves nothing to drain.
"""

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import util
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from cl_train.system.child_process import watch_parent

_POLL_S = 1.0
_CLOSE_S = 2.0
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
BEGUN, SAMPLE, PID = range(3)  # columns of the progress array

Task = TypeVar("Task")
Result = TypeVar("Result")


class WorkerError(RuntimeError):
    """The next batch will not come: a worker died or hangs (the message names the sample that it began last), or an
    IterableDataset ended too early."""


class Workers(Generic[Task, Result]):
    """Runs tasks in `count` processes; results come back in the order of the tasks.

    Args:
        work: runs in the workers, which are forked: it is not pickled. It must not raise.
        count: processes; 0 = tasks run in the caller when their result is requested.
        queued: tasks that are sent to each worker in advance.
        progress: shared int64 [workers, 3], see `cl_train.data.slots`; `work` writes the first two columns.
        timeout_s: `next_result` raises when no worker has begun another sample for this long.
        name_of: sample index -> its name in messages.
    """

    def __init__(
        self,
        work: Callable[[Task], Result],
        *,
        count: int,
        queued: int,
        progress: npt.NDArray[np.int64],
        timeout_s: float,
        name_of: Callable[[int], str],
    ) -> None:
        self._pending: deque[Task] = deque()
        self._progress, self._timeout_s, self._name_of = progress, timeout_s, name_of
        # DataLoader draws a seed for its workers; a separate generator keeps the training's random numbers unchanged.
        options: dict[str, Any] = {"batch_size": None, "sampler": _tasks(self._pending), "generator": torch.Generator()}
        if count:
            start = partial(_start_worker, progress, os.getpid())
            options |= {"num_workers": count, "multiprocessing_context": "fork", "worker_init_fn": start}
            options |= {"prefetch_factor": queued, "timeout": _POLL_S}
        before = set(multiprocessing.active_children())
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)  # until the worker ignores them
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # warns of more workers than cores, which the user chose
                # Python 3.12+ warns that a forked copy of a threaded process may deadlock. Workers take none of the
                # parent's locks, and DataLoader forks by default.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._results: Iterator[Result | None] | None = iter(DataLoader(_Calls(work), **options))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self.processes = [child for child in multiprocessing.active_children() if child not in before]
        if count:
            _leave_deaths_to_next_result(self._results)
        # multiprocessing sends SIGTERM at the interpreter's exit, which workers ignore, and then waits for them.
        self._kill = util.Finalize(self, _kill, (self.processes,), exitpriority=10)

    def submit(self, task: Task) -> None:
        self._pending.append(task)

    def next_result(self) -> Result:
        """The result of the oldest task; waits for it. Raises WorkerError."""
        assert self._results is not None
        begun, since = self._progress[:, BEGUN].copy(), time.monotonic()
        while True:
            try:
                result = next(self._results)
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
                continue
            if result is not None:
                return result

    def close(self) -> None:
        """End the workers: they finish the sample that they are reading, and are killed after 2 s."""
        if self._results is None:
            return
        timer = threading.Timer(_CLOSE_S, _kill, (self.processes,))
        timer.start()
        self._results = None  # DataLoader ends the workers when its iterator is deleted
        timer.cancel()
        timer.join()
        self._kill()

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


class _Calls(Dataset[Any]):
    """A dataset whose indices are tasks."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def __getitem__(self, task: Any) -> Any:
        return None if task is None else self._work(task)


def _leave_deaths_to_next_result(iterator: Any) -> None:
    """Remove these workers from the list that torch's SIGCHLD handler checks.

    The handler would raise in the middle of a training step, without the sample's name. It goes on watching the workers
    of other DataLoaders. torch has no public function for this.
    """
    signal_handling._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False


def _tasks(pending: deque[Any]) -> Iterator[Any]:
    """An endless sampler: the oldest pending task, or None."""
    while True:
        yield pending.popleft() if pending else None


def _start_worker(progress: npt.NDArray[np.int64], parent: int, number: int) -> None:
    progress[number, PID] = os.getpid()
    for name in _PARENTS_SIGNALS:  # Ctrl-C and a scheduler's SIGTERM reach the whole process group
        signal.signal(name, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    # A killed parent cannot end its workers. The kernel's signal for this would follow the thread that forked.
    threading.Thread(target=watch_parent, args=(parent,), daemon=True).start()


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
