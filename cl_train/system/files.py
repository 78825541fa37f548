"""Files replaced atomically or extended by whole records; the outputs of commands; locks; full disks; the cache folder.

Imports no torch.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from cl_train.config.schema import ConfigError

log = logging.getLogger(__name__)

RETRY_S = 60.0
_POLL_S = 0.2
_REPEAT_MESSAGE_S = 60.0


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file, written in the block, that replaces `path` at its end; after an exception `path` is unchanged.

    A killed process leaves the old or the new content, and perhaps the temporary file.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` by `text`, in UTF-8; undecodable bytes of file names are kept.

    Raises OSError if the disk is full or failing; it names `path`, which is unchanged.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise _with_file_name(error, path) from error


def write_json(path: Path, value: Any, *, indent: int = 1) -> None:
    """`write_text` of strict JSON. Raises ValueError if `value` holds a NaN or an infinity."""
    write_text(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


def retry(write: Callable[[], None]) -> None:
    """Call `write` until it succeeds, for `RETRY_S`: somebody may free space on a full disk.

    Raises the OSError of the last attempt.
    """
    deadline = None
    while True:
        try:
            return write()
        except OSError as error:
            if deadline is None:
                deadline = time.monotonic() + RETRY_S
                log.warning("%s: trying again for %g s; free some space", error, RETRY_S)
            elif time.monotonic() >= deadline:
                raise
        time.sleep(min(1.0, RETRY_S))


def cache_folder() -> Path:
    """${XDG_CACHE_HOME:-~/.cache}/cl_train; in the temporary folder if there is no home directory."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "cl_train"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "cl_train"


def safe_name(text: str, limit: int = 100) -> str:
    """`text` as one component of a path: no separators, no leading dot; a text over `limit` bytes ends in a hash."""
    name = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text).lstrip(".") or "_"
    if len(name) <= limit:
        return name
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{name[: limit - 9]}-{digest}"


# --- outputs of commands ----------------------------------------------------------------------------------------------


@contextmanager
def output_file(path: Path, *, overwrite: bool, key: str = "out") -> Iterator[Path]:
    """A new file in the folder of `path`, with its suffix, that becomes `path` at the end of the block.

    Enter it before the work: what is wrong with `path` is found at once. After an exception nothing is left behind:
    `path` is as before, and folders that were created for it are removed. `key`: of the setting, for messages.

    Raises ConfigError: `path` is a folder, cannot be written, or exists without `overwrite`.
    """
    if path.is_dir():
        raise ConfigError(f"{key}={path} is a folder: name a file")
    if os.path.lexists(path) and not overwrite:
        raise ConfigError(f"{key}={path} exists: choose another name, or write overwrite=true")
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    with _created(path.parent, f"{key}={path}", probe=temporary):
        try:
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def output_folder(path: Path, *, overwrite: bool, markers: Sequence[str]) -> Iterator[None]:
    """The folder `path`, which a command fills, perhaps in several calls; files of others are never deleted.

    Args:
        markers: names of files that the block writes first. A folder that holds one of them was begun by an earlier
            call and is continued; one with nothing else in it is removed again after an exception.

    Raises ConfigError: `path` is a file, cannot be written, or holds files of others without `overwrite`.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"out={path} is a file: name a folder")
    is_new = not path.exists()
    with _created(path, f"out={path}", probe=path / f".tmp-{os.getpid()}"):
        (path / f".tmp-{os.getpid()}").unlink()
        names = set(os.listdir(path))
        if names and names.isdisjoint(markers) and not overwrite:
            raise ConfigError(f"out={path} holds files of something else: choose another name, or write overwrite=true")
        try:
            yield
        except BaseException:
            if is_new and set(os.listdir(path)) <= set(markers):
                for name in markers:
                    (path / name).unlink(missing_ok=True)
            raise


@contextmanager
def _created(folder: Path, setting: str, *, probe: Path) -> Iterator[None]:
    """Create `folder` and the file `probe` in it; after an exception, folders that are new and empty are removed."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"{setting} cannot be written: {reason}; choose another place") from None
        yield
    except BaseException:
        for parent in missing:
            with suppress(OSError):  # somebody else has put a file there
                parent.rmdir()
        raise


# --- records ----------------------------------------------------------------------------------------------------------


class AppendFile:
    """An append-only file. Records that cannot be written stay in memory and are written with later ones.

    Training must not end because its log cannot be written. The first failure is logged, and so is the recovery.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []
        self._is_failing = False

    def append(self, record: bytes) -> None:
        """Write `record`, which includes the terminator of the file's format (a line feed for lines)."""
        self._waiting.append(record)
        try:
            self.flush()
        except OSError as error:
            if not self._is_failing:
                self._is_failing = True  # first: the log may be the file that fails
                log.warning("%s; the records stay in memory; free some space", error)

    def flush(self) -> None:
        """Write the pending records. Raises OSError if they cannot be written; they remain pending."""
        if not self._waiting:
            return
        try:
            self._write(b"".join(self._waiting))
        except OSError as error:
            raise _with_file_name(error, self.path) from error
        self._waiting.clear()
        if self._is_failing:
            self._is_failing = False
            log.warning("%s is written again and complete", self.path)

    def _write(self, data: bytes) -> None:
        with open(self.path, "ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)
                raise


def _with_file_name(error: OSError, path: Path) -> OSError:
    """The same error with the name of the file: a failed write, unlike a failed open, does not have it."""
    return OSError(error.errno, error.strerror or str(error), str(path))


# --- locks ------------------------------------------------------------------------------------------------------------


class LockHeld(RuntimeError):
    """Another process holds the lock; the message names it: `process 4711 on host since 2025-01-31 12:00:00`."""


@contextmanager
def lock_file(path: str | Path, *, waiting_for: str | None = None) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is created if necessary and not deleted.

    It excludes other processes, not other threads of this one. A POSIX record lock: the kernel releases it when the
    process that acquired it ends for any reason, and forked children, which may outlive it, do not inherit it.

    Raises OSError if the file cannot be written or the file system has no locks.

    Args:
        waiting_for: wait for the lock, and report this on stderr once a minute, for example "waiting for the sample
            data: locked by process 4711 on host since ...". None = raise LockHeld.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0) as file:
        message_at = 0.0
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that is held
                holder = os.pread(file.fileno(), 4096, 0).decode(errors="replace") or "another process"
            if waiting_for is None:
                raise LockHeld(holder)
            if time.monotonic() >= message_at:
                print(f"waiting for {waiting_for}: locked by {holder} ({path})", file=sys.stderr, flush=True)
                message_at = time.monotonic() + _REPEAT_MESSAGE_S
            time.sleep(_POLL_S)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%F %T}".encode())
        try:
            yield
        finally:
            file.truncate(0)
