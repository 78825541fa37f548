"""Workers that fill rows of shared batches: processes, threads, or the calling thread itself.

A task names images and rows; a worker writes the pixels straight into the rows and answers with a few numbers, so no
pixel is ever pickled or copied between processes. The memory is an anonymous shared mapping: it has no name that could
be left behind, needs no space in /dev/shm, and vanishes with the last process.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import util
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from cl_train.data.images import Times

_POLL_S = 1.0
_CLOSE_S = 2.0
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class WorkerError(RuntimeError):
    """A worker died or hangs. The message names the worker and the image that it last began."""


@dataclass(frozen=True)
class Task:
    """Rows `first_row`, `first_row + 1`, ... of a slot, to be filled with `indices`."""

    ticket: int
    training: bool
    epoch: int
    slot: int
    first_row: int
    indices: tuple[int, ...]


@dataclass
class Done:
    """A worker's answer. `bad`: (row, path, reason) of undecodable images; `replaced`: (row, index used)."""

    ticket: int
    bad: list[tuple[int, str, str]] = field(default_factory=list)
    replaced: list[tuple[int, int]] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    error: str | None = None


Fill = Callable[[Task], Done]
Progress = npt.NDArray[np.int64]  # [workers, 2]: images begun, and the index of the last one (-1 - index: validation)


class Pool(Protocol):
    def submit(self, task: Task) -> None: ...
    def collect(self) -> list[Done]:
        """At least one answer; waits for it. Raises WorkerError."""
        ...

    def close(self) -> None: ...


class InlinePool:
    """No workers: images are prepared by the thread that asks for the batch."""

    def __init__(self, make_fill: Callable[[int], Fill]) -> None:
        self._fill = make_fill(0)
        self._tasks: deque[Task] = deque()

    def submit(self, task: Task) -> None:
        self._tasks.append(task)

    def collect(self) -> list[Done]:
        return [self._fill(self._tasks.popleft())]

    def close(self) -> None:
        self._tasks.clear()


class ThreadPool:
    """Threads of this process. The decoder and the resize release the interpreter's lock."""

    def __init__(self, count: int, make_fill: Callable[[int], Fill], stalled: Stalled) -> None:
        self._stalled = stalled
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(make_fill, number), name=f"loader-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, make_fill: Callable[[int], Fill], number: int) -> None:
        fill = make_fill(number)
        while (task := self._tasks.get()) is not None:
            if not self._stop.is_set():
                self._done.put(fill(task))

    def submit(self, task: Task) -> None:
        self._tasks.put(task)

    def collect(self) -> list[Done]:
        self._stalled.begin()
        while True:
            try:
                return [self._done.get(timeout=_POLL_S)]
            except queue.Empty:
                self._stalled.check()

    def close(self) -> None:
        self._stop.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._threads = []


class Stalled:
    """Raises when no worker has begun another image for `timeout_s` while the caller waits."""

    def __init__(self, progress: Progress, timeout_s: float, path_of: Callable[[int], str]) -> None:
        self._progress, self._timeout_s, self._path_of = progress, timeout_s, path_of
        self._seen, self._since = progress[:, 0].copy(), time.monotonic()

    def begin(self) -> None:
        self._since = time.monotonic()

    def check(self) -> None:
        counts = self._progress[:, 0]
        if not np.array_equal(counts, self._seen):
            self._seen, self._since = counts.copy(), time.monotonic()
        elif time.monotonic() - self._since > self._timeout_s:
            last = "; ".join(f"worker {number}: {self.last_image(number)}" for number in range(len(counts)))
            raise WorkerError(
                f"no loader worker finished an image for {self._timeout_s:g} s. Last images begun: {last}."
                " Slow storage? Raise data.worker_timeout_s."
            )

    def last_image(self, worker: int) -> str:
        count, index = self._progress[worker]
        return self._path_of(int(index)) if count else "none yet"


class ProcessPool:
    """Forked processes, one pipe each. Tasks go to the worker with the fewest images ahead of it."""

    def __init__(self, count: int, make_fill: Callable[[int], Fill], stalled: Stalled) -> None:
        self._stalled = stalled
        self._connections: list[Any] = []
        self._processes: list[Any] = []
        self._load = [0] * count
        # Also at the interpreter's exit and when the pool is forgotten: multiprocessing itself would send a SIGTERM,
        # which workers ignore, and then wait for ever.
        self._end = util.Finalize(self, _end_processes, (self._connections, self._processes), exitpriority=10)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)  # until the child ignores them
        try:
            self._start(count, make_fill)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _start(self, count: int, make_fill: Callable[[int], Fill]) -> None:
        context = multiprocessing.get_context("fork")
        for number in range(count):
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            process = context.Process(
                target=_work,
                args=(number, theirs, list(self._connections), make_fill, os.getpid()),
                name=f"loader-{number}",
                daemon=True,
            )
            with warnings.catch_warnings():
                # Python 3.12+ warns that a forked copy of a threaded process may deadlock. The child takes none of the
                # parent's locks: it only decodes, with one thread, as torch's own DataLoader workers do.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._processes.append(process)

    def submit(self, task: Task) -> None:
        worker = min(range(len(self._load)), key=self._load.__getitem__)
        self._load[worker] += len(task.indices)
        try:
            self._connections[worker].send((task.ticket, task))
        except OSError:
            raise self._death(worker) from None

    def collect(self) -> list[Done]:
        self._stalled.begin()
        sentinels = {process.sentinel: number for number, process in enumerate(self._processes)}
        while True:
            ready = set(multiprocessing.connection.wait([*self._connections, *sentinels], _POLL_S))
            answers: list[Done] = []
            for number, connection in enumerate(self._connections):
                if connection in ready:
                    with contextlib.suppress(EOFError, OSError):  # a dead worker: its sentinel tells
                        images, done = connection.recv()
                        self._load[number] -= images
                        answers.append(done)
            if answers:
                return answers
            for sentinel, number in sentinels.items():
                if sentinel in ready:
                    raise self._death(number)
            self._stalled.check()

    def _death(self, worker: int) -> WorkerError:
        process = self._processes[worker]
        process.join(_CLOSE_S)
        code = process.exitcode
        how = "is gone" if code is None else f"exited with {code}" if code >= 0 else f"was killed by signal {-code}"
        hint = " Out of memory? Lower data.workers or data.prefetch." if code == -signal.SIGKILL else ""
        return WorkerError(
            f"loader worker {worker} (pid {process.pid}) {how}; the last image it began: "
            f"{self._stalled.last_image(worker)}.{hint}"
        )

    def close(self) -> None:
        self._end()
        self._connections, self._processes = [], []


def _end_processes(connections: list[Any], processes: list[Any]) -> None:
    """Workers end when their pipe closes; one that hangs is killed."""
    for connection in connections:
        connection.close()
    deadline = time.monotonic() + _CLOSE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _work(number: int, connection: Any, inherited: list[Any], make_fill: Callable[[int], Fill], parent: int) -> None:
    """The life of a worker process: ends when its pipe closes or its parent is gone."""
    for other in inherited:  # else a sibling would keep the parent's end of our pipe open
        other.close()
    _leave_signals_to_the_parent()
    torch.set_num_threads(1)
    fill = make_fill(number)
    with contextlib.suppress(EOFError, OSError):
        while True:
            while not connection.poll(_POLL_S):
                if os.getppid() != parent:
                    return
            _, task = connection.recv()
            connection.send((len(task.indices), fill(task)))


def _leave_signals_to_the_parent() -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole group; the parent saves first, then closes its workers."""
    for name in _PARENTS_SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)


def shared_memory(size: int) -> mmap.mmap:
    """`size` bytes, zeros, that forked processes share. Pages cost nothing until they are written."""
    return mmap.mmap(-1, size)
