"""The worker processes of a loader: forks that live until `close`.

All take their tasks from one queue, so one that the machine delays holds up only its own task. Each
sends its results through a pipe. Its sentinel tells that it died, and the time in which none begins
a sample that they hang. Either message names the sample that was begun last.
"""

import math
import mmap
import multiprocessing
import multiprocessing.util
import os
import resource
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cl_train.errors import ConfigError, WorkerError
from cl_train.system.processes import end_with_parent

_POLL_S = 1.0
_CLOSE_S = 2.0
_FILES_PER_WORKER = 3  # of the parent: its end of the pipe, and multiprocessing's two sentinels
_OTHER_FILES = 100
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_BEGUN, _SAMPLE, _PID = range(3)  # columns of the progress of all workers


def shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeros in memory that later forks share.

    The memory has no name that could remain after a crash, is not in /dev/shm, and is freed with
    the last process that maps it.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Abandoned(Exception):
    """Nobody waits for the result of the task."""


class Progress:
    """What worker `worker` is doing: its `row` of the shared int64 [workers, 3]."""

    def __init__(self, worker: int, row: npt.NDArray[np.int64], running_round: Tensor) -> None:
        self.worker, self._row, self._running_round = worker, row, running_round.numpy()
        self.round = 0  # of the task
        row[_PID] = os.getpid()

    def begin(self, sample: int) -> None:
        """Notes that `sample` is read next. Raises Abandoned."""
        if self._running_round[0] != self.round:
            raise Abandoned
        self._row[_SAMPLE] = sample
        self._row[_BEGUN] += 1


class Workers:
    """Runs tasks in `count` processes, or for 0 in the caller.

    `work(task, progress)` runs in forks: it is not pickled, but tasks and results are. It calls
    `progress.begin` before each sample. When no worker has begun another one for `timeout_s`,
    `result` raises.
    """

    def __init__(
        self,
        work: Callable[[Any, Progress], Any],
        count: int,
        timeout_s: float,
        name_of: Callable[[int], str],
    ) -> None:
        self._work, self._count, self._timeout_s, self._name_of = work, count, timeout_s, name_of
        self._progress = shared((max(1, count), 3), torch.int64).numpy()
        self._round = shared((1,), torch.int64)  # of the tasks that are still wanted
        self._tasks = multiprocessing.get_context("fork").SimpleQueue()
        self._results: deque[Any] = deque()  # received, and not yet returned
        self._unfinished = 0  # tasks whose results were not returned
        self._pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self._owner = os.getpid()
        # at exit before multiprocessing's own: SIGTERM, which workers ignore, and an endless wait
        multiprocessing.util.Finalize(self, _kill, (self.processes,), exitpriority=10)
        self.is_running = True
        self._start()

    def submit(self, task: Any) -> None:
        """Hands `task` to the worker that is free first."""
        self._tasks.put((int(self._round[0]), task))
        self._unfinished += 1

    def result(self) -> Any:
        """Waits for the result of any submitted task, and returns it.

        Raises WorkerError, after which the workers have ended.
        """
        result = self._next_result()
        if isinstance(result, WorkerError):
            self.close()
            raise result
        return result

    def skip(self) -> None:
        """Lets the workers skip the submitted tasks, after the sample that each is reading."""
        self._round += 1

    def drain(self) -> None:
        """Skips the submitted tasks and waits until no worker writes for one of them."""
        self.skip()
        while self._unfinished:
            self._next_result()

    def close(self) -> None:
        """Ends the workers: each finishes the sample that it reads, and is killed after 2 s."""
        if os.getpid() != self._owner or not self.is_running:
            return  # in a fork: the processes are not its children
        self.is_running = False
        self.skip()
        for _ in self.processes:
            self._tasks.put(None)
        deadline = time.monotonic() + _CLOSE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        _kill(self.processes)
        self._tasks.close()
        for pipe in self._pipes:
            pipe.close()

    def _start(self) -> None:
        fork = multiprocessing.get_context("fork")
        # The kernel's signal follows the end of the thread that forked, not of its process.
        by_kernel = threading.current_thread() is threading.main_thread()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)  # until `_run`
        try:
            for worker in range(self._count):
                pipe, workers_end = fork.Pipe(duplex=False)
                self._pipes.append(pipe)
                run = fork.Process(
                    target=self._run, args=(worker, workers_end, by_kernel), daemon=True
                )
                with warnings.catch_warnings():
                    # of a fork of a threaded process, whose locks no worker takes
                    warnings.simplefilter("ignore")
                    run.start()
                self.processes.append(run)
                workers_end.close()
        except OSError as error:
            self.close()
            raise WorkerError(
                f"cannot start {self._count} loader workers: {error}. Free memory, processes or"
                " open files (ulimit -n), or lower data.workers"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _run(self, worker: int, pipe: Connection, by_kernel: bool) -> None:
        """In the worker: does tasks until the loader closes or its process ends."""
        end_with_parent(by_kernel=by_kernel)
        ignore_parents_signals()
        torch.set_num_threads(1)
        progress = Progress(worker, self._progress[worker], self._round)
        while message := self._tasks.get():
            pipe.send(self._done(message, progress))

    def _done(self, message: tuple[int, Any], progress: Progress) -> Any:
        progress.round, task = message
        try:
            return self._work(task, progress)
        except Abandoned:
            return None
        except Exception as error:  # a bug, or lack of memory; its own type may not be picklable
            return WorkerError(f"a loader worker failed: {type(error).__name__}: {error}")

    def _next_result(self) -> Any:
        self._unfinished -= 1
        if not self._count:
            return self._done(self._tasks.get(), Progress(0, self._progress[0], self._round))
        try:
            if not self._results:
                self._receive()
        except BaseException:  # also Ctrl-C, after which half a result may be left in a pipe
            _kill(self.processes)
            self.close()
            raise
        return self._results.popleft()

    def _receive(self) -> None:
        """Waits for results, and takes all that there are. Raises WorkerError."""
        quiet_s = 0.0
        poll_s = min(_POLL_S, self._timeout_s)
        while not self._results:
            begun = int(self._progress[:, _BEGUN].sum())
            # The host waits. Polls are counted, not seconds: a program that was suspended goes on.
            ready = wait([*self._pipes, *(process.sentinel for process in self.processes)], poll_s)
            for worker, (pipe, process) in enumerate(zip(self._pipes, self.processes, strict=True)):
                if pipe in ready:
                    try:
                        self._results.append(pipe.recv())
                    except (EOFError, OSError):
                        raise self._death(worker) from None
                elif process.sentinel in ready:
                    raise self._death(worker)
            quiet_s = 0.0 if ready or self._progress[:, _BEGUN].sum() != begun else quiet_s + poll_s
            if quiet_s >= self._timeout_s:
                raise WorkerError(
                    f"no loader worker finished an image for {self._timeout_s:g} s. Last images"
                    f" begun: {self._last_samples(self._progress)}. If the storage is slow, raise"
                    " data.worker_timeout_s."
                )

    def _death(self, worker: int) -> WorkerError:
        process = self.processes[worker]
        process.join(_CLOSE_S)
        code = process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        last = self._last_samples(self._progress[worker : worker + 1])
        hint = ""
        if code == -signal.SIGKILL:
            hint = " Out of memory? Lower data.workers or data.prefetch."
        return WorkerError(f"a loader worker {how}; the last image it began: {last}.{hint}")

    def _last_samples(self, progress: npt.NDArray[np.int64]) -> str:
        """Names the sample that each of these workers began last."""
        names = [
            f"{self._name_of(int(row[_SAMPLE]))} (pid {row[_PID]})"
            for row in progress
            if row[_BEGUN]
        ]
        return "; ".join(names) or "none yet"


def check_open_files(workers: int) -> None:
    """Raises ConfigError: the process may not open the files that `workers` need.

    Checked before the first epoch, because some workers start only after it.
    """
    needed = _FILES_PER_WORKER * workers + _OTHER_FILES
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if workers and needed > limit:
        raise ConfigError(
            f"{workers} loader workers for both splits need {needed} open files, and {limit} are"
            " allowed: raise the limit (ulimit -n), or lower data.workers"
        )


def ignore_parents_signals() -> None:
    """In a worker: Ctrl-C and a scheduler's SIGTERM reach the whole process group; see `close`."""
    for signum in _PARENTS_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)


def _kill(processes: list[BaseProcess]) -> None:
    for process in filter(BaseProcess.is_alive, processes):
        process.kill()
