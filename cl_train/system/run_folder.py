"""The run folder: one writer at a time, writable, with space for checkpoints, and safe names for files in it."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from cl_train.config.schema import ConfigError
from cl_train.system.locks import LockHeld, lock_file

_CHECKPOINTS = ("checkpoints/step-*.pt", "checkpoints/best.pt")
_RECORDS = ("metrics.jsonl", "summary.json", "train.log", "events.out.tfevents.*", *_CHECKPOINTS)
_OF_A_RUN = ("config.yaml", "summary.json", *_CHECKPOINTS)  # train.log alone is of a run that was refused
_UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]+")


@contextmanager
def claimed_folder(folder: Path, *, resume: str | None, overwrite: bool) -> Iterator[None]:
    """Lock the run folder, which is released when a process is killed, and check that it holds no other run.

    Args:
        overwrite: delete the records and checkpoints of an earlier run, but no file with another name.

    Raises:
        ConfigError: the folder cannot be written to, a record in it is not a regular file, another run is writing to
            it, or an earlier run's results are in it and `resume` does not continue that run.
    """
    if overwrite and continues(resume, folder):
        raise ConfigError(f"resume={resume} continues the run in {folder}, which overwrite=true deletes: leave out one")
    is_new = not folder.exists()
    check_writable(folder)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_file(folder / ".lock"))
        except LockHeld as holder:
            raise ConfigError(
                f"another run writes to {folder} ({holder}): stop it, or choose another hydra.run.dir=FOLDER"
            ) from None
        except OSError as error:
            raise ConfigError(f"{folder / '.lock'} cannot be locked: {error.strerror}; choose another folder") from None
        records = [path for pattern in _RECORDS for path in folder.glob(pattern)]
        odd = [path for path in records if path.exists() and not path.is_file()]
        if odd:  # a FIFO would block the run, a folder would fail it at its end
            raise ConfigError(f"{odd[0]} is not a regular file: move it away, or choose another hydra.run.dir=FOLDER")
        if overwrite:
            for path in records:
                path.unlink()
        metrics = folder / "metrics.jsonl"
        is_used = (metrics.is_file() and metrics.stat().st_size > 0) or any(
            path for pattern in _OF_A_RUN for path in folder.glob(pattern)
        )
        if is_used and not overwrite and not continues(resume, folder):
            raise ConfigError(
                f"{folder} holds the results of an earlier run, or files of the same names: continue it with "
                "resume=auto, choose another folder with hydra.run.dir=FOLDER, or delete them with overwrite=true"
            )
        check_writable(folder / "checkpoints")
        try:
            yield
        except ConfigError:
            if is_new:
                _remove_empty(folder)
            raise


def _remove_empty(folder: Path) -> None:
    """A run that was refused leaves nothing, unless it has recorded something."""
    if not any((folder / name).exists() for name in ("metrics.jsonl", "config.yaml")):
        for name in (".lock", "train.log"):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            (folder / "checkpoints").rmdir()
            folder.rmdir()


def continues(resume: str | None, folder: Path) -> bool:
    """Whether `resume=` names a checkpoint of the run in `folder`."""
    if resume is None or resume == "auto":
        return resume == "auto"
    return Path(resume).expanduser().resolve().is_relative_to(folder.resolve())


def check_writable(folder: str | Path) -> None:
    """Create the folder, and write, sync and delete a small file in it, to find problems before the first checkpoint.

    Raises ConfigError with the system's reason.
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
            f"cannot write to the folder {folder}: {error.strerror or error}; choose another with hydra.run.dir=FOLDER"
        ) from None


def check_space(folder: str | Path, checkpoint_bytes: int, keep: int) -> list[str]:
    """Check for space for the `keep` last checkpoints, the best one and the one being written.

    Returns a warning if some but not all fit, else nothing. Raises ConfigError if not even one fits.
    """
    disk = os.statvfs(folder)
    if disk.f_files and not disk.f_favail:
        raise ConfigError(f"{folder}: the file system has no free inode (df -i), so no file can be created")
    free_bytes, count = disk.f_bavail * disk.f_frsize, keep + 2
    sizes = f"{folder}: {free_bytes / 2**20:,.1f} MiB free for checkpoints of {checkpoint_bytes / 2**20:,.1f} MiB"
    if free_bytes < checkpoint_bytes:
        raise ConfigError(f"{sizes}: free some space or choose another hydra.run.dir=FOLDER")
    if free_bytes < count * checkpoint_bytes:
        return [f"{sizes}, of which up to {count} exist at a time: free some space or lower checkpoint.keep"]
    return []


def safe_name(text: str, limit: int = 100) -> str:
    """`text` as one component of a path: no separators, no leading dot, at most `limit` bytes.

    A longer text ends in a few digits of its hash instead, so that two long names stay distinct.
    """
    name = _UNSAFE.sub("_", text).lstrip(".") or "_"
    if len(name) <= limit:
        return name
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{name[: limit - 9]}-{digest}"
