"""Signals that a run handles: SIGTERM, SIGINT and SIGHUP make it save and stop, SIGUSR1 makes it save and continue.

Signals only set flags, which the loop reads between two optimizer steps, where the state is consistent.

A Python signal handler runs only between two bytecodes of the main thread, which may block forever in a collective.
Therefore a thread reads the signals from Python's wake-up descriptor: a second Ctrl-C ends the process even then.
"""

import atexit
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal was closed
SAVE_SIGNAL = signal.SIGUSR1

# Slurm signals torchrun and its ranks, and torchrun passes the signal on: two SIGTERMs within milliseconds are one.
_SAME_REQUEST_S = 0.5

_active: "StopRequest | None" = None


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Without a handler Python would not write to the wake-up descriptor."""


def _reset_in_child() -> None:
    """In forked loader workers SIGTERM ends the worker; Ctrl-C and SIGUSR1 are left to the parent."""
    global _active
    if _active is None:
        return
    _active = None
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(SAVE_SIGNAL, signal.SIG_IGN)


os.register_at_fork(after_in_child=_reset_in_child)


def exit_without_teardown(code: int) -> NoReturn:
    """Exit after the functions of `atexit`, but without the interpreter's teardown.

    Freeing the modules of torch takes one to three seconds of processor time, during which a stopped run would still
    be there.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class StopRequest:
    """Context manager for the main thread. Read `stop` and `save_requested` between steps.

    A second signal n that requests a stop exits at once with 128 + n and saves nothing: SIGINT at any time, SIGTERM and
    SIGHUP from half a second after the first. Without `ends_process` (a notebook) a second SIGINT raises
    KeyboardInterrupt instead.
    """

    def __init__(self, *, ends_process: bool = True) -> None:
        self._ends_process, self._interrupts = ends_process, 0
        self.stop: int | None = None  # the signal that requested the stop
        self._save = threading.Event()
        self._stopped_at = 0.0
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1

    @property
    def save_requested(self) -> bool:
        """True once after each SIGUSR1; reading it resets it."""
        if not self._save.is_set():
            return False
        self._save.clear()
        return True

    def __enter__(self) -> "StopRequest":
        global _active
        assert _active is None, "one StopRequest at a time"
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        for signum in (*STOP_SIGNALS, SAVE_SIGNAL):
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # ignored under nohup
                is_counted = signum == signal.SIGINT and not self._ends_process
                self._previous[signum] = signal.signal(signum, self._raise_second if is_counted else _ignore)
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

    def _raise_second(self, signum: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        while received := self._reader.recv(64):
            for signum in received:
                self._receive(signum)

    def _receive(self, signum: int) -> None:
        if signum == SAVE_SIGNAL:
            self._save.set()
        elif signum in STOP_SIGNALS:
            now = time.monotonic()
            if self.stop is None:
                self.stop, self._stopped_at = signum, now
                if signum == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                    os.write(2, b"\nstopping: the run is saved after this step; Ctrl-C again exits without saving\n")
            elif self._ends_process and (signum == signal.SIGINT or now - self._stopped_at >= _SAME_REQUEST_S):
                os.write(2, f"second {signal.Signals(signum).name}: exiting without saving\n".encode())
                os._exit(128 + signum)
