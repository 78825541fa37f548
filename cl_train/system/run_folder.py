"""The run folder: one writer at a time, writable, with space for checkpoints."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from cl_train.config.schema import ConfigError
from cl_train.system.files import LockHeld, lock_file

_RESULTS = ("config.yaml", "metrics.jsonl", "summary.json", "checkpoints/step-*.pt", "checkpoints/best.pt")
_LOGS = ("train.log", "events.out.tfevents.*")  # alone they are of a run that was refused


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
    is_new, elsewhere = not folder.exists(), "choose another folder with hydra.run.dir=FOLDER"
    with ExitStack() as stack:
        try:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_file(folder / ".lock"))
            with lock_file(folder / "checkpoints/.lock"):
                (folder / "checkpoints/.lock").unlink()
        except LockHeld as holder:
            raise ConfigError(f"another run writes to {folder} ({holder}): stop it, or {elsewhere}") from None
        except OSError as error:
            reason = f"{error.strerror} ({error.filename or folder})"
            raise ConfigError(f"cannot write to the folder {folder}: {reason}; {elsewhere}") from None
        results, logs = ([path for name in names for path in folder.glob(name)] for names in (_RESULTS, _LOGS))
        for path in results + logs:
            if path.exists() and not path.is_file():  # a FIFO would block the run, a folder would fail it at its end
                raise ConfigError(f"{path} is not a regular file: move it away, or {elsewhere}")
            if overwrite:
                path.unlink()
        if not (overwrite or continues(resume, folder)) and any(path.stat().st_size for path in results):
            raise ConfigError(
                f"{folder} holds the results of an earlier run, or files of the same names: continue it with "
                f"resume=auto, {elsewhere}, or delete them with overwrite=true"
            )
        try:
            yield
        except ConfigError:
            if is_new and not any((folder / name).exists() for name in ("metrics.jsonl", "config.yaml")):
                for name in (".lock", "train.log"):  # a run that was refused leaves nothing
                    (folder / name).unlink(missing_ok=True)
                with suppress(OSError):
                    (folder / "checkpoints").rmdir()
                    folder.rmdir()
            raise


def continues(resume: str | None, folder: Path) -> bool:
    """Whether `resume=` names a checkpoint of the run in `folder`."""
    if resume is None or resume == "auto":
        return resume == "auto"
    return Path(resume).expanduser().resolve().is_relative_to(folder.resolve())


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
