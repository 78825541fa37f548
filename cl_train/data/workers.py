"""The worker processes of a loader: forks that live until `close`.

All take their tasks from one queue, so a delayed one holds up only its own task, and send results
through one pipe. A sentinel tells that a process died, the time without a new sample that all hang.
"""

import gc
import math
import mmap
import multiprocessing
import multiprocessing.util
import os
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import torch
from torch import Tensor

from cl_train.errors import WorkerError
from cl_train.system.processes import SAVE_SIGNAL, STOP_SIGNALS, end_with_parent, handles_signals

_CLOSE_S = 2.0
_PARENTS_SIGNALS = (*STOP_SIGNALS, SAVE_SIGNAL, signal.SIGUSR2)


def shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeros in memory that later forks share.

    It has no name that could outlive a crash.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Workers:
    """Runs tasks in `count` processes, or for 0 in the caller.

    `work(task, worker, begin)` runs in forks: it is not pickled, but tasks and results are. It
    calls `begin(sample)` before it reads a sample, and returns None if that is false: the task is
    skipped. `result` raises if none begins for `timeout_s`. WorkerError: no more processes.
    """

    def __init__(
        self,
        work: Callable[[Any, int, Callable[[int], bool]], Any],
        count: int,
        timeout_s: float,
        name_of: Callable[[int], str],
    ) -> None:
        fork = multiprocessing.get_context("fork")
        self._work, self._timeout_s, self._name_of = work, timeout_s, name_of
        self._begun, self._last_begun = shared((2, max(1, count)), torch.int64).numpy()
        self._round = shared((1,), torch.int64).numpy()  # of the tasks that are wanted
        self._tasks = fork.SimpleQueue()
        self._results, self._results_end = fork.Pipe(duplex=False)
        self._sending = fork.Lock()
        self._unfinished = 0
        self._events = DefaultSelector()  # results, and ends of workers
        self._events.register(self._results, EVENT_READ)
        self.processes: list[BaseProcess] = []
        self.is_running = True
        self._owner = os.getpid()
        killing_at_exit(self, self.processes)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)  # until `_run`
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a threaded process forks: no worker takes a lock
                for worker in range(count):
                    arguments = worker, handles_signals()
                    process = fork.Process(target=self._run, args=arguments, daemon=True)
                    process.start()
                    self.processes.append(process)
                    self._events.register(process.sentinel, EVENT_READ, data=worker)
        except OSError as error:
            self.close()
            raise WorkerError(
                f"cannot start {count} loader workers: {error}. Free memory, processes or open"
                " files (ulimit -n), or lower data.workers"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def submit(self, task: Any) -> None:
        """Hands `task` to the worker that is free first."""
        self._tasks.put((int(self._round[0]), task))
        self._unfinished += 1

    def result(self) -> Any:
        """Returns the next result of any submitted task; None: it was skipped.

        Raises WorkerError, after which the workers have ended.
        """
        try:
            result = self._receive() if self.processes else self._done(self._tasks.get(), 0)
            if isinstance(result, WorkerError):
                raise result
        except BaseException:  # Ctrl-C may leave half a result in the pipe
            _kill(self.processes)
            self.close()
            raise
        self._unfinished -= 1
        return result

    def skip(self) -> None:
        """The submitted tasks need not be done."""
        self._round += 1

    def drain(self) -> None:
        """Skips the submitted tasks and waits until no worker writes for one of them."""
        self.skip()
        while self._unfinished:
            self.result()

    def close(self) -> None:
        """Ends the workers: each finishes its sample, and is killed after 2 s."""
        if os.getpid() != self._owner or not self.is_running:
            return  # in a fork: they are not its children
        self.is_running = False
        self.skip()
        for _ in self.processes:
            self._tasks.put(None)
        deadline = time.monotonic() + _CLOSE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        _kill(self.processes)
        self._events.close()

    def _run(self, worker: int, by_kernel: bool) -> None:
        """In the worker: does tasks until the loader closes or its process ends.

        `by_kernel`: its signal follows the end of the thread that forked.
        """
        gc.freeze()  # freeing the parent's garbage may wait for its threads
        ignore_parents_signals()
        end_with_parent(by_kernel=by_kernel)
        torch.set_num_threads(1)
        while message := self._tasks.get():
            result = self._done(message, worker)
            with self._sending:
                self._results_end.send(result)

    def _done(self, message: tuple[int, Any], worker: int) -> Any:
        task_round, task = message

        def begin(sample: int) -> bool:
            if self._round[0] != task_round:
                return False
            self._last_begun[worker] = sample
            self._begun[worker] += 1
            return True

        try:
            return self._work(task, worker, begin)
        except Exception as error:  # a bug or lack of memory; perhaps not picklable
            return WorkerError(f"a loader worker failed: {type(error).__name__}: {error}")

    def _receive(self) -> Any:
        """Waits for a result. Raises WorkerError: a worker died, or all hang."""
        begun = int(self._begun.sum())
        quiet = 0
        # Two quiet halves of the limit (epoll's is 24 days): a program that was suspended has one.
        while not (events := self._events.select(min(self._timeout_s / 2, 1e6))):
            begun_before, begun = begun, int(self._begun.sum())
            quiet = quiet + 1 if begun == begun_before else 0
            if quiet == 2:
                last = "; ".join(map(self._sample_of, range(len(self.processes))))
                raise WorkerError(
                    f"no loader worker finished an image for {self._timeout_s:g} s. Last images"
                    f" begun: {last}. If the storage is slow, raise data.worker_timeout_s."
                )
        dead = [key.data for key, _ in events if key.data is not None]
        if dead:
            raise WorkerError(self._death_of(dead[0]))
        return self._results.recv()

    def _death_of(self, worker: int) -> str:
        self.processes[worker].join()
        code = self.processes[worker].exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        hint = ""
        if code == -signal.SIGKILL:
            hint = " Out of memory? Lower data.workers or data.prefetch."
        return f"a loader worker {how}; the last image it began: {self._sample_of(worker)}.{hint}"

    def _sample_of(self, worker: int) -> str:
        name = self._name_of(int(self._last_begun[worker])) if self._begun[worker] else "none yet"
        return f"{name} (pid {self.processes[worker].pid})"


def ignore_parents_signals() -> None:
    """In a worker: Ctrl-C and a scheduler's SIGTERM reach the whole group."""
    for signum in _PARENTS_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)


def killing_at_exit(owner: object, processes: list[BaseProcess]) -> multiprocessing.util.Finalize:
    """Returns a function that kills `processes`. It is also called when `owner` is freed, and when
    the program ends, where multiprocessing would send SIGTERM, which they ignore, and wait.
    """
    return multiprocessing.util.Finalize(owner, _kill, (processes,), exitpriority=10)


def _kill(processes: list[BaseProcess]) -> None:
    for process in filter(BaseProcess.is_alive, processes):
        process.kill()
        process.join(_CLOSE_S)
