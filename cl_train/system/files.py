"""Files that are replaced atomically or extended by records, run folders, locks; no torch."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from cl_train.errors import ConfigError
from cl_train.errors import LockHeld as LockHeld

log = logging.getLogger(__name__)

RETRY_S = 60.0
_OWN_FILES = ("config.yaml", "metrics.jsonl", "summary.json", "train.log")
_RESULTS = (*_OWN_FILES[:3], "checkpoints/step-*.pt", "checkpoints/best.pt")
_LOGS = ("train.log", "bad_images.csv", "events.out.tfevents.*")  # alone: a refused run left them


# What a run or a sweep leaves may come from a stranger, with links to files of the user's: no file
# in such a folder is written but by `replacing`, `AppendFile` and `open_no_link`.


def open_no_link(path: str | Path, flags: int) -> int:
    """Returns the descriptor of a file; it is also an `opener` for `open`. Raises OSError: it is a
    link, or a pipe that nobody reads.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        what = "is a link" if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, what, str(path)) from None


def refuse_link(path: Path) -> Path:
    """Returns `path`. Raises ConfigError: it is a link."""
    if path.is_symlink():
        raise ConfigError(f"{path} is a link, through which a run does not write: remove it")
    return path


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """The block writes a temporary file, which then replaces `path`."""
    if temporary is None:
        temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        temporary.unlink(missing_ok=True)  # a link, perhaps
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Adds the file's name to an OSError of the block: that of a read or write does not have it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8; names of files in `text` keep their bytes."""
    with naming(path), replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape")


def write_json(path: Path, value: Any, *, indent: int = 1) -> None:
    """Raises ValueError: `value` holds a NaN or an infinity."""
    write_text(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Raises OSError; ValueError: it is damaged, or holds no object."""
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def retry(write: Callable[[], None]) -> None:
    """Calls `write` until it succeeds. Raises the OSError of the last try, after `RETRY_S`."""
    deadline = None
    while True:
        try:
            return write()
        except FileNotFoundError:  # no space would bring the folder back
            raise
        except OSError as error:
            if deadline is None:
                deadline = time.monotonic() + RETRY_S
                log.warning("%s: trying again for %g s; free some space", error, RETRY_S)
            elif time.monotonic() >= deadline:
                raise
        time.sleep(min(1.0, RETRY_S))


def cache_folder() -> Path:
    """${XDG_CACHE_HOME:-~/.cache}/cl_train; in the temporary folder without a home directory."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "cl_train"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "cl_train"


def safe_name(text: str) -> str:
    """`text` as one component of a path; over 100 bytes it ends in a hash."""
    name = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text).lstrip(".") or "_"
    if len(name) <= 100:
        return name
    return f"{name[:91]}-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"


# --- outputs of commands, run folders -------------------------------------------------------------


@contextmanager
def output_file(path: Path, *, overwrite: bool, key: str = "out") -> Iterator[Path]:
    """Yields a new file, which replaces `path` at the end of the block. Raises ConfigError before
    that: `path` is no file, cannot be written, or exists without `overwrite`.
    """
    if not _is_file_or_absent(path):
        raise ConfigError(f"{key}={path} is a folder, a link or a device: choose another name")
    if path.exists() and not overwrite:
        raise ConfigError(f"{key}={path} exists: choose another name, or write overwrite=true")
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    create(temporary, f"{key}={path}")
    with replacing(path, temporary):
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors makes a new file, for its owner alone


def claim_output(path: Path, *, overwrite: bool, markers: Collection[str] = ()) -> None:
    """Creates a folder, or accepts one that has a file with a name in `markers`. Raises
    ConfigError: it cannot be written, or has other files without `overwrite`.
    """
    probe = path / f".tmp-{os.getpid()}"
    create(probe, f"out={path}")
    probe.unlink()
    names = set(os.listdir(path))
    if names and names.isdisjoint(markers) and not overwrite:
        what = f"out={path} holds files of something else"
        raise ConfigError(f"{what}: choose another name, or write overwrite=true")


def create(path: Path, setting: str) -> None:
    """Creates a file, unless it exists, and the folders around it. Raises ConfigError, which names
    `setting`, such as out=FOLDER.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(open_no_link(path, os.O_WRONLY | os.O_CREAT))
    except OSError as error:
        what = f"{setting} cannot be written: {error.strerror} ({error.filename})"
        raise ConfigError(f"{what}; choose another place") from None


def _is_file_or_absent(path: Path) -> bool:
    return not os.path.lexists(path) or stat.S_ISREG(path.lstat().st_mode)


@contextmanager
def claimed_folder(folder: Path, *, resume: str | None, overwrite: bool) -> Iterator[None]:
    """Locks a run folder; `overwrite` deletes an earlier run, but nothing else. Raises ConfigError:
    it cannot be written, another run uses it, or it has results that `resume` does not continue.
    """
    is_continued = continues(resume, folder)
    if overwrite and is_continued:
        what = f"resume={resume} continues the run in {folder}, which overwrite=true deletes"
        raise ConfigError(f"{what}: leave out one")
    lock, checkpoints = folder / ".lock", refuse_link(folder / "checkpoints")
    for path in (lock, *(folder / name for name in _OWN_FILES)):
        if not _is_file_or_absent(path):
            raise ConfigError(f"{path} is a link, a folder or a device: remove it")
    setting = f"hydra.run.dir={folder}"
    create(lock, setting)
    with lock_file(lock):
        probe = checkpoints / f".tmp-{os.getpid()}"
        create(probe, f"{setting}/checkpoints")
        probe.unlink()
        results = [path for name in _RESULTS for path in folder.glob(name)]
        if overwrite:
            logs = [path for name in _LOGS for path in folder.glob(name)]
            for path in results + logs:
                path.unlink()
        elif not is_continued and any(path.stat().st_size for path in results):
            what = f"{folder} holds the results of an earlier run, or files of the same names"
            advice = "continue it with resume=auto, choose another hydra.run.dir=FOLDER"
            raise ConfigError(f"{what}: {advice}, or delete them with overwrite=true")
        yield


def continues(resume: str | None, folder: Path) -> bool:
    """Whether `resume=` names a checkpoint of the run in `folder`."""
    if resume is None or resume == "auto":
        return resume == "auto"
    return Path(resume).expanduser().resolve().is_relative_to(folder.resolve())


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises ConfigError: the disk has less free space."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        free, needed = (f"{size / 2**20:,.1f} MiB" for size in (free_bytes, needed_bytes))
        advice = "free some space, or choose another hydra.run.dir=FOLDER"
        raise ConfigError(f"{folder}: {free} free for checkpoints of {needed}: {advice}")


class AppendFile:
    """An append-only file; what cannot be written stays in memory until the next write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []

    def append(self, record: bytes) -> None:
        self._waiting.append(record)
        try:
            self.flush()
        except OSError as error:
            if len(self._waiting) == 1:  # told once, also if the log itself is what fails
                log.warning("%s; the records stay in memory; free some space", error)

    def flush(self) -> None:
        """Writes what waits. Raises OSError; the records remain pending."""
        if self._waiting:
            with naming(self.path):
                self._write(b"".join(self._waiting))
            self._waiting.clear()

    def _write(self, data: bytes) -> None:
        with open(self.path, "ab", buffering=0, opener=open_no_link) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)
                raise


_held: set[int] = set()  # descriptors of the locks of this process


@contextmanager
def lock_file(path: str | Path, *, waiting_for: str | None = None) -> Iterator[None]:
    """Holds a lock on a file, which stays, for the block: against all others, also in this process;
    forked children do not hold it. Raises LockHeld if another holds it; with `waiting_for` it
    prints a line to stderr and waits instead.
    """
    descriptor = _locked(Path(path), waiting_for)
    _held.add(descriptor)
    try:
        me = f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%F %T}"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, me.encode(), 0)
        yield
    finally:
        if descriptor in _held:  # else this is a forked child
            _held.remove(descriptor)
            os.ftruncate(descriptor, 0)
            os.close(descriptor)


def _locked(path: Path, waiting_for: str | None) -> int:
    """Locks by flock: a record lock would end when any other descriptor of the file is closed."""
    descriptor = open_no_link(path, os.O_RDWR | os.O_CREAT)
    is_told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace") or "another process"
        if waiting_for is None:
            os.close(descriptor)
            what = f"another run writes to {path.parent} ({holder})"
            elsewhere = "hydra.run.dir=FOLDER or hydra.sweep.dir=FOLDER"
            raise LockHeld(f"{what}: stop it, or choose another {elsewhere}")
        if not is_told:
            is_told = True
            what = f"waiting for {waiting_for}: locked by {holder} ({path})"
            print(what, file=sys.stderr, flush=True)
        time.sleep(0.2)


def _leave_locks() -> None:
    """Closes a forked child's locks, which it would hold when this process is dead."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_locks)
