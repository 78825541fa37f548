"""Processes and signals: children that end with their parent, pools of them, and runs that save when they are stopped.

Imports no torch.
"""

import atexit
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import FrameType
from typing import NoReturn, TypeVar

from cl_train.config.schema import ConfigError

Item = TypeVar("Item")
Result = TypeVar("Result")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal was closed
SAVE_SIGNAL = signal.SIGUSR1

_PR_SET_PDEATHSIG = 1  # prctl(2)
_POLL_S = 0.5
_CONNECT_S = 30.0
# Slurm signals torchrun and its ranks, and torchrun passes the signal on: two SIGTERMs within milliseconds are one.
_SAME_REQUEST_S = 0.5


# --- children ---------------------------------------------------------------------------------------------------------


def end_with_parent(signum: int = signal.SIGKILL) -> None:
    """Call in a child: it receives `signum` when its parent has ended (on Linux by the kernel, else by a thread)."""
    expected = multiprocessing.parent_process()
    parent_pid = expected.pid if expected is not None else os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent ended before the call
            os.kill(os.getpid(), signum)
        return
    threading.Thread(target=watch_parent, args=(parent_pid, signum), name="parent", daemon=True).start()


def watch_parent(parent_pid: int | None, signum: int = signal.SIGKILL) -> None:
    """Send this process `signum` when its parent has ended; blocks until then."""
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signum)


def end_with_torchrun() -> None:
    """Call in a process that may be a rank of torchrun: it receives SIGTERM when torchrun's agent has ended.

    Raises ConfigError if the agent ended before the call.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not host or not port.isdecimal():
        return
    end_with_parent(signal.SIGTERM)
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"torchrun does not respond at {host}:{port}: {error}") from None


def map_in_processes(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int | None,
    *,
    description: str,
    unit: str = "file",
) -> Iterator[Result]:
    """`function` of each item, in order, in `workers` forked processes (None: as many as cores), with a progress bar.

    With one worker, or one item, it runs in this process. Raises RuntimeError with the first item without a result if a
    process died, as for lack of memory.
    """
    from tqdm import tqdm

    count, fork = min(workers or len(os.sched_getaffinity(0)), len(items)), multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(count, fork, initializer=_start_worker) if count > 1 else None
    chunk = min(32, 1 + len(items) // (100 * max(1, count)))  # many small items are sent to a process at once
    seconds = 0.1 if sys.stderr.isatty() else 30.0
    with tqdm(desc=description, total=len(items), unit=unit, mininterval=seconds) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork of a threaded process; the workers start no threads
        try:
            for result in pool.map(function, items, chunksize=chunk) if pool else map(function, items):
                yield result
                bar.update()
        except BrokenProcessPool:
            where = f"{description}: a worker died at {str(items[int(bar.n)])[:200]} or later"
            raise RuntimeError(f"{where}; if memory is short, use fewer workers") from None
        finally:
            if pool:
                pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    import torch

    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends the workers
    torch.set_num_threads(1)


# --- signals ----------------------------------------------------------------------------------------------------------

_active: "StopRequest | None" = None


class StopRequest:
    """Context manager for the main thread: SIGTERM, SIGINT and SIGHUP set `stop`, SIGUSR1 sets `save_requested`.

    The loop reads them between two optimizer steps, where the state is consistent. A second signal n that requests a
    stop exits at once with 128 + n and saves nothing: SIGINT at any time, SIGTERM and SIGHUP from half a second after
    the first. Without `ends_process` (a notebook) a second SIGINT raises KeyboardInterrupt instead.
    """

    def __init__(self, *, ends_process: bool = True) -> None:
        self._ends_process, self._interrupts = ends_process, 0
        self.stop: int | None = None  # the signal that requested the stop
        self._save, self._stopped_at = False, 0.0

    @property
    def save_requested(self) -> bool:
        """True once after each SIGUSR1; reading it resets it."""
        if not self._save:
            return False
        self._save = False
        return True

    def __enter__(self) -> "StopRequest":
        global _active
        assert _active is None, "one StopRequest at a time"
        self._previous = {signum: signal.getsignal(signum) for signum in (*STOP_SIGNALS, SAVE_SIGNAL)}
        for signum, previous in self._previous.items():
            if signum != signal.SIGHUP or previous != signal.SIG_IGN:  # ignored under nohup
                signal.signal(signum, self._handle)
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        _active = self
        return self

    def __exit__(self, *exception: object) -> None:
        global _active
        if _active is not self:  # in a forked child
            return
        _active = None
        signal.set_wakeup_fd(self._previous_fd)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        # shutdown ends the thread's recv; close alone would not, while a forked worker has a copy of the descriptor.
        self._writer.shutdown(socket.SHUT_RDWR)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._interrupts += signum == signal.SIGINT
        if self._interrupts > 1 and not self._ends_process:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        """In a thread: a handler runs only between two bytecodes of the main thread, which may never return from a
        collective. Python writes the signals that have a handler to the wake-up descriptor."""
        while received := self._reader.recv(64):
            for signum in received:
                self._receive(signum)

    def _receive(self, signum: int) -> None:
        now = time.monotonic()
        if signum == SAVE_SIGNAL:
            self._save = True
        elif signum in STOP_SIGNALS:
            is_repeated = signum == signal.SIGINT or now - self._stopped_at >= _SAME_REQUEST_S
            if self.stop is None:
                self.stop, self._stopped_at = signum, now
                if signum == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                    os.write(2, b"\nstopping: the run is saved after this step; Ctrl-C again exits without saving\n")
            elif is_repeated and self._ends_process:
                os.write(2, f"second {signal.Signals(signum).name}: exiting without saving\n".encode())
                os._exit(128 + signum)


def _reset_in_child() -> None:
    """In forked loader workers SIGTERM ends the worker; Ctrl-C and SIGUSR1 are left to the parent."""
    global _active
    if _active is not None:
        _active = None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(SAVE_SIGNAL, signal.SIG_IGN)


os.register_at_fork(after_in_child=_reset_in_child)


def exit_without_teardown(code: int) -> NoReturn:
    """Exit after the functions of `atexit`, but without the interpreter's teardown: freeing the modules of torch takes
    one to three seconds of processor time, during which a stopped run would still be there."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
