"""The run folder: one writer at a time, writable, with room for checkpoints, and names that stay inside it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import time
from pathlib import Path
from types import TracebackType

from cl_train.config.schema import ConfigError

_UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]+")


class RunLock:
    """Context manager: this process alone writes to the folder. Rank 0 takes it.

    A POSIX record lock: the kernel drops it when the process ends, however it ends, and forked loader workers do not
    inherit it, so a killed run can be resumed at once. `.lock` names the holder for the message.
    """

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / ".lock"
        self._descriptor = -1

    def __enter__(self) -> RunLock:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 4096).decode(errors="replace")
            os.close(self._descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise ConfigError(
                    f"{self._path}: cannot be locked: {error.strerror}; use a folder on a local disk"
                ) from None
            raise ConfigError(
                f"another run writes to {self._path.parent} ({_describe(holder)}): stop it first, or give this run "
                "its own folder with hydra.run.dir=FOLDER"
            ) from None
        os.ftruncate(self._descriptor, 0)
        holder = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")})
        os.write(self._descriptor, holder.encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def _describe(holder: str) -> str:
    try:
        known = json.loads(holder)
        return f"process {known['pid']} on {known['host']} since {known['since']}"
    except (ValueError, KeyError, TypeError):
        return "by an unknown process"


def check_writable(folder: str | Path) -> None:
    """Make the folder, and write, sync and delete a small file in it: minutes of training later is too late to learn.

    Raises:
        ConfigError: what the system said.
    """
    folder = Path(folder)
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(b"probe")
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run folder {folder}: {error.strerror or error}; choose another with "
            "hydra.run.dir=FOLDER"
        ) from None


def check_space(folder: str | Path, checkpoint_bytes: int, keep: int) -> list[str]:
    """Room for the checkpoints that are kept, the best one and the one being written.

    Returns:
        A warning where some but not all fit; empty where all do.

    Raises:
        ConfigError: not even one fits.
    """
    facts = os.statvfs(folder)
    free = facts.f_bavail * facts.f_frsize
    if facts.f_files and not facts.f_favail:
        raise ConfigError(f"{folder}: the file system has no free inode (df -i): no file can be made")
    wanted = (keep + 2) * checkpoint_bytes
    numbers = f"{folder}: {_mib(free)} free; one checkpoint takes {_mib(checkpoint_bytes)}"
    if free < checkpoint_bytes:
        raise ConfigError(f"{numbers}: not even one fits; free some space or choose another hydra.run.dir=FOLDER")
    if free < wanted:
        return [
            f"{numbers}, and up to {keep + 2} exist at a time ({_mib(wanted)}): lower checkpoint.keep or free space"
        ]
    return []


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def safe_name(text: str, limit: int = 100) -> str:
    """`text` as one component of a path: no separators, no leading dot, at most `limit` bytes.

    What is cut off is replaced by a few digits of a hash, so that two long names stay two.
    """
    name = _UNSAFE.sub("_", text).lstrip(".") or "_"
    if len(name) <= limit:
        return name
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{name[: limit - 9]}-{digest}"
