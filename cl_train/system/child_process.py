"""Child processes that end with their parent, so that a killed program leaves no processes behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # prctl(2)
_POLL_S = 0.5


def end_with_parent(signum: int = signal.SIGKILL) -> None:
    """Call in a child: it receives `signum` when its parent has ended, also when the parent was killed.

    For worker processes pass it as the initializer: `ProcessPoolExecutor(4, context, initializer=end_with_parent)`. On
    Linux the kernel sends the signal when the thread that started the child ends; elsewhere a thread checks for the
    parent twice a second.
    """
    expected = multiprocessing.parent_process()
    parent_pid = expected.pid if expected is not None else os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent ended before the call
            os.kill(os.getpid(), signum)
        return
    threading.Thread(target=_watch, args=(parent_pid, signum), name="parent", daemon=True).start()


def _watch(parent_pid: int | None, signum: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signum)
