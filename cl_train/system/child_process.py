"""Child processes that end with their parent, so that a killed program leaves no processes behind."""

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time

from cl_train.config.schema import ConfigError

_PR_SET_PDEATHSIG = 1  # prctl(2)
_POLL_S = 0.5
_CONNECT_S = 30.0


def end_with_parent(signum: int = signal.SIGKILL, parent_pid: int | None = None) -> None:
    """Call in a child: it receives `signum` when its parent has ended, also when the parent was killed.

    For worker processes pass it as the initializer: `ProcessPoolExecutor(4, context, initializer=end_with_parent)`. On
    Linux the kernel sends the signal when the thread that started the child ends; elsewhere a thread checks for the
    parent twice a second.
    """
    expected = multiprocessing.parent_process()
    parent_pid = parent_pid or (expected.pid if expected is not None else os.getppid())
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent ended before the call
            os.kill(os.getpid(), signum)
        return
    threading.Thread(target=watch_parent, args=(parent_pid, signum), name="parent", daemon=True).start()


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


def watch_parent(parent_pid: int | None, signum: int = signal.SIGKILL) -> None:
    """Send this process `signum` when its parent has ended; blocks until then."""
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signum)
