"""Exclusive locks between processes; messages name the process that holds the lock.

They are POSIX record locks. The kernel releases them when the process that acquired them ends for any reason, and
forked children do not inherit them: a worker that outlives a killed parent does not hold the lock.
"""

import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.2
_REPEAT_MESSAGE_S = 60.0


class LockHeld(RuntimeError):
    """Another process holds the lock; the message names it: `process 4711 on host since 2025-01-31 12:00:00`."""


@contextmanager
def lock_file(path: str | Path, *, waiting_for: str | None = None) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is created if necessary and not deleted.

    It excludes other processes, not other threads of this one. Raises OSError if the file system has no locks.

    Args:
        waiting_for: wait for the lock, and report this on stderr once a minute, for example "waiting for the sample
            data: locked by process 4711 on host since ...". None = raise LockHeld.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        message_at = 0.0
        while not _try_lock(descriptor):
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace") or "another process"
            if waiting_for is None:
                raise LockHeld(holder)
            if time.monotonic() >= message_at:
                print(f"waiting for {waiting_for}: locked by {holder} ({path})", file=sys.stderr, flush=True)
                message_at = time.monotonic() + _REPEAT_MESSAGE_S
            time.sleep(_POLL_S)
        holder = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)  # releases the lock


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that is held
        return False
    return True
