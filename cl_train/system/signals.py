"""Stopping politely: SIGTERM and SIGINT ask the run to save and leave, SIGUSR1 asks it to save and go on.

Nothing here saves, prints progress or talks to other ranks: signals only set flags, and the loop reads them between two
optimizer steps, where the state is whole. Under torchrun every rank must act on the same step, so the loop agrees on
the flags (one small reduction) before it acts.

A Python handler runs only between two bytecodes of the main thread, which may be stuck in a collective that never
returns. So the signals are read from Python's wake-up descriptor by a small thread: a second Ctrl-C leaves even then.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAVE_SIGNAL = signal.SIGUSR1

# Slurm and process managers signal torchrun *and* its ranks, and torchrun passes the signal on: two SIGTERMs within
# milliseconds are one request. Two SIGINTs are a person who pressed Ctrl-C twice.
SAME_REQUEST_SECONDS = 0.5

_active: StopRequest | None = None


def _ignore(signum: int, frame: FrameType | None) -> None:
    """The handler itself does nothing; without one the descriptor would not be written."""


def _reset_in_child() -> None:
    """A forked loader worker must not answer for its parent: SIGTERM ends it, Ctrl-C is left to the parent."""
    global _active
    if _active is None:
        return
    _active = None
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(SAVE_SIGNAL, signal.SIG_IGN)


os.register_at_fork(after_in_child=_reset_in_child)


def ignore_stop_signals() -> None:
    """For a program that has written everything and is about to leave: nothing is left to stop."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


class StopRequest:
    """Context manager; enter it in the main thread. Read `stop` and `save_requested` between steps.

    A second SIGINT, or a second SIGTERM more than half a second after the first, ends the process at once with 128 + n:
    nothing is saved then, and the checkpoints on disk stay as they are.
    """

    def __init__(self) -> None:
        self.stop: int | None = None
        self._save = threading.Event()
        self._stopped_at = 0.0
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1

    @property
    def save_requested(self) -> bool:
        """True once after each SIGUSR1; reading it answers the request."""
        if not self._save.is_set():
            return False
        self._save.clear()
        return True

    @property
    def exit_code(self) -> int:
        """What a program ends with after a polite stop: 143 for SIGTERM, 130 for SIGINT, 0 where there was none."""
        return 128 + self.stop if self.stop is not None else 0

    def __enter__(self) -> StopRequest:
        global _active
        assert _active is None, "one StopRequest at a time"
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        for signum in (*STOP_SIGNALS, SAVE_SIGNAL):
            self._previous[signum] = signal.signal(signum, _ignore)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        _active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        if _active is not self:  # never entered
            return
        _active = None
        signal.set_wakeup_fd(self._previous_fd)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        # The listener reads the end of the stream and returns; close alone would not end it while a forked loader
        # worker still holds a copy of the descriptor.
        self._writer.shutdown(socket.SHUT_RDWR)
        self._writer.close()
        self._thread.join()
        self._reader.close()

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
                return
            echo = signum == signal.SIGTERM and now - self._stopped_at < SAME_REQUEST_SECONDS
            if not echo:
                os.write(2, f"second {signal.Signals(signum).name}: leaving now, without saving\n".encode())
                os._exit(128 + signum)
