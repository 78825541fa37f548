"""Checkpoint files that survive kills, full disks and flipped bits. What is inside them: `run_state.py`.

A checkpoint is a file of `torch.save` (plain dicts, lists, numbers, strings and contiguous tensors, nothing else), with
a SHA-256 of all its bytes in the zip comment at its end: `torch.load` verifies no checksum, so that a flipped bit in a
weight would load silently. `torch.load(path, weights_only=True)` reads it without this package.

It is written to a temporary file in the same folder, synced, and renamed: whatever the instant of a kill, a name that
ends in `.pt` is a whole checkpoint, and the one before it is still there.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import pickle
import re
import shutil
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from cl_train.config.schema import ConfigError

log = logging.getLogger(__name__)

FORMAT = "cl_train checkpoint"
FORMAT_VERSION = 1
MAX_FAILED_SAVES = 3

_DIGEST_LABEL = b"sha256:"
_COMMENT_BYTES = len(_DIGEST_LABEL) + 2 * hashlib.sha256().digest_size
_TRAILER_BYTES = 2 + _COMMENT_BYTES  # the zip comment's length, little-endian, and the comment
_STEP_FILE = re.compile(r"step-(\d+)\.pt")
_TEMPORARY = re.compile(r"\..+\.pt\.tmp-\d+")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message has the file and the reason."""


# --- one file ---------------------------------------------------------------------------------------------------------


def save(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write `state` to `path`, whole or not at all, and durably: it survives a power cut after the return.

    Args:
        state: plain types and tensors; tensors on any device and in any layout are stored contiguous.

    Raises:
        TypeError: `state` holds something else than plain types and tensors.
        OSError: the disk is full or failing; `path` is then what it was before.
    """
    write(Path(path), snapshot(state))


def write(path: Path, state: Mapping[str, Any]) -> None:
    """`save` without the copy: `state` is a snapshot already."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            writer = _HashingWriter(file)
            try:
                torch.save({"format": FORMAT, "format_version": FORMAT_VERSION, **state}, cast(IO[bytes], writer))
            except RuntimeError:
                if writer.error is not None:  # torch hides a full disk behind an error of its own zip writer
                    raise writer.error from None
                raise
            file.seek(-2, os.SEEK_END)  # the empty comment's length, two zero bytes
            file.write(struct.pack("<H", _COMMENT_BYTES) + _DIGEST_LABEL + writer.digest.hexdigest().encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class _HashingWriter:
    """A binary file that hashes what `torch.save` writes to it, front to back, and remembers a failed write."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; some network file systems refuse to sync a folder, and need it less."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU after checking every byte of it against its digest.

    Unpickling is restricted to plain types and tensors (`weights_only=True`), with no fallback.

    Raises:
        CheckpointError: missing, truncated, altered, foreign, or of a newer format.
    """
    path = Path(path)
    try:
        _check_digest(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (RuntimeError, pickle.UnpicklingError, ValueError, KeyError, EOFError, AttributeError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: refused by torch.load: {reason}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a checkpoint of this program; weights={path} starts from its weights alone")
    if state["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: written by a newer version (format {state['format_version']}, this one reads {FORMAT_VERSION})"
        )
    return state


def _check_digest(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _TRAILER_BYTES:
            raise CheckpointError(f"{path}: truncated: {size} bytes")
        digest = hashlib.sha256()
        remaining = size - _TRAILER_BYTES
        while remaining:
            chunk = file.read(min(remaining, 1 << 20))
            if not chunk:
                raise CheckpointError(f"{path}: became shorter while it was read")
            digest.update(chunk)
            remaining -= len(chunk)
        digest.update(b"\0\0")  # the comment's length as torch.save wrote it
        trailer = file.read()
    if trailer != struct.pack("<H", _COMMENT_BYTES) + _DIGEST_LABEL + digest.hexdigest().encode():
        raise CheckpointError(
            f"{path}: truncated, altered or not written by this program (its SHA-256 does not match); "
            f"if it is another program's, weights={path} starts from its weights alone"
        )


def snapshot(tree: Any, where: str = "state") -> Any:
    """A deep copy on the CPU, tensors contiguous. The host waits for the device here.

    Raises:
        TypeError: something else than dict, list, tuple, str, bytes, int, float, bool, None or a tensor.
    """
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(tree, Mapping):
        for key in tree:
            if type(key) not in (str, int):
                raise TypeError(f"{where}: a key of type {type(key).__name__} cannot be saved")
        return {key: snapshot(value, f"{where}[{key!r}]") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [snapshot(value, f"{where}[{index}]") for index, value in enumerate(tree)]
    if tree is None or type(tree) in (str, bytes, int, float, bool):
        return tree
    raise TypeError(f"{where}: a value of type {type(tree).__name__} cannot be saved")


# --- one run's folder -------------------------------------------------------------------------------------------------


class CheckpointStore:
    """The `checkpoints/` folder of one run: `step-<n>.pt` (the last `keep`) and `best.pt` (a hard link).

    Only rank 0 calls `save`. With `background` the file is written by a thread while training goes on; the snapshot is
    taken before `save` returns. One write is under way at a time. Call `wait` before forking loader workers: a fork
    copies the locks that another thread holds.

    A failed write (disk full, I/O error) keeps what is there and is logged; the third in a row raises.
    """

    def __init__(self, folder: str | Path, keep: int = 2, background: bool = True) -> None:
        assert keep >= 1
        self.folder = Path(folder)
        self.keep = keep
        self.background = background
        self.failures = 0  # failed writes in a row
        self.last_saved: Path | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_clean = False

    def save(self, state: Mapping[str, Any], step: int, *, best: bool = False) -> None:
        """Save `state` as `step-<n>.pt`, and as `best.pt` too where `best`.

        Raises:
            CheckpointError: three writes in a row failed.
            TypeError: see `snapshot`.
        """
        self.wait()
        copied = snapshot(state)
        if not self.background:
            self._write(copied, step, best)
            self.wait()
            return
        # Not a daemon: a program that ends, even by an exception, finishes the write first.
        self._thread = threading.Thread(target=self._write, args=(copied, step, best), name="checkpoint")
        self._thread.start()

    def wait(self, *, final: bool = False) -> None:
        """Block until the write under way has ended.

        Args:
            final: raise where the latest write failed, as there will be no later one.

        Raises:
            CheckpointError: the latest write failed, and it was the third in a row or `final`.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None and not isinstance(error, OSError):
            raise error
        if self.failures >= MAX_FAILED_SAVES or (final and self.failures):
            kept = (
                f"the last good one is {self.last_saved}"
                if self.last_saved
                else "there is no earlier one of this process"
            )
            raise CheckpointError(f"{self.failures} checkpoints in a row could not be written to {self.folder}; {kept}")

    def _write(self, state: Mapping[str, Any], step: int, best: bool) -> None:
        path = self.folder / f"step-{step:08d}.pt"
        try:
            self._prepare_folder()
            write(path, state)
            if best:
                _link(path, self.folder / "best.pt")
            self._retire(step)
        except OSError as error:
            self.failures += 1
            self._error = error
            log.warning("checkpoint %s was not written: %s; earlier ones are untouched, training goes on", path, error)
        except BaseException as error:
            self._error = error  # raised on the training thread by `wait`
        else:
            self.failures = 0
            self.last_saved = path

    def _prepare_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._is_clean:  # what a killed process left; a run folder has one writer, see run_folder.RunLock
            for path in self.folder.iterdir():
                if _TEMPORARY.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            self._is_clean = True

    def _retire(self, step: int) -> None:
        """Delete all but the newest `keep`, after the new one is durable. Steps beyond `step` are put aside.

        They are of a timeline that was left: corrupt ones that a resume skipped, or what followed the checkpoint that
        the user resumed from.
        """
        steps = self._steps()
        for later in [known for known in steps if known > step]:
            path = steps.pop(later)
            os.replace(path, path.with_suffix(".pt.superseded"))
            log.warning("%s is later than the checkpoint just written: renamed to %s.superseded", path, path.name)
        for old in sorted(steps)[: -self.keep]:
            steps[old].unlink(missing_ok=True)

    def _steps(self) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        matches = ((_STEP_FILE.fullmatch(path.name), path) for path in self.folder.iterdir())
        return {int(match[1]): path for match, path in matches if match}

    def newest(self) -> tuple[Path, dict[str, Any], list[str]] | None:
        """The newest checkpoint that is whole: its path, its state, and why newer ones were skipped, one line each.

        `best.pt` is the last resort. None where there is no checkpoint at all.

        Raises:
            CheckpointError: there are checkpoints, and none of them is whole.
        """
        steps = self._steps()
        candidates = [steps[step] for step in sorted(steps, reverse=True)]
        best = self.folder / "best.pt"
        if best.exists():
            candidates.append(best)
        skipped: list[str] = []
        for path in candidates:
            try:
                return path, load(path), skipped
            except CheckpointError as error:
                skipped.append(str(error))
        if skipped:
            raise CheckpointError("no checkpoint can be used:\n" + "\n".join(skipped))
        return None


def _link(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, atomically; a copy where the file system has no hard links."""
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
            raise
        shutil.copyfile(source, temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
    os.replace(temporary, target)
    temporary.unlink(missing_ok=True)  # rename(2) leaves it where both names are the same file already
    _sync_folder(target.parent)


def load_for_resume(resume: str, store: CheckpointStore) -> tuple[Path, dict[str, Any], list[str]] | None:
    """What `resume=` asks for: `auto` is the store's newest or None, else a checkpoint file or a run folder.

    Raises:
        ConfigError: there is no such file or folder, or no checkpoint in it.
        CheckpointError: the file is damaged, or every file of the folder is.
    """
    if resume == "auto":
        return store.newest()
    path = Path(resume).expanduser()
    if path.is_file():
        return path, load(path), []
    if not path.is_dir():
        raise ConfigError(f"resume={resume}: no such file or folder; give a checkpoint, a run folder, or auto")
    folder = path / "checkpoints"
    found = CheckpointStore(folder if folder.is_dir() else path).newest()
    if found is None:
        raise ConfigError(f"resume={resume}: the folder has no checkpoint (checkpoints/step-*.pt)")
    return found
