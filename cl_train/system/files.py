"""Files replaced atomically or extended by whole records; the outputs of commands; full disks; the cache folder."""

import errno
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cl_train.config.schema import ConfigError

log = logging.getLogger(__name__)

RETRY_S = 60.0


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
    _refuse_existing(path, overwrite or not os.path.lexists(path), "exists", key)
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    created = _create_folders(path.parent, key)
    try:
        try:
            temporary.touch()
        except OSError as error:
            raise _unwritable(path, error, key) from None
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        _remove_empty(created)
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
    try:
        names = set(os.listdir(path)) if path.exists() else set()
    except OSError as error:
        raise _unwritable(path, error) from None
    _refuse_existing(path, overwrite or not names or not names.isdisjoint(markers), "holds files of something else")
    created = _create_folders(path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise _unwritable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    try:
        yield
    except BaseException:
        if created and set(os.listdir(path)) <= set(markers):
            for name in markers:
                (path / name).unlink(missing_ok=True)
            _remove_empty(created)
        raise


def _refuse_existing(path: Path, is_allowed: bool, what: str, key: str = "out") -> None:
    if not is_allowed:
        raise ConfigError(f"{key}={path} {what}: choose another name, or write overwrite=true")


def _create_folders(folder: Path, key: str = "out") -> list[Path]:
    """Create `folder`; returns the new folders, innermost first."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _remove_empty(missing)
        raise _unwritable(folder, error, key) from None
    return missing


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # somebody else has put a file there
            folder.rmdir()


def _unwritable(path: Path, error: OSError, key: str = "out") -> ConfigError:
    return ConfigError(f"{key}={path} cannot be written: {error.strerror or error}; choose another place")


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
