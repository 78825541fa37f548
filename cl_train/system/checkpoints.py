"""Checkpoint files, and the `checkpoints/` folder of a run. `training/state.py` defines what a checkpoint contains.

A checkpoint is a file of `torch.save` (plain types and contiguous tensors), written under a temporary name, synced and
renamed: a `.pt` file is always whole. `torch.load` verifies no checksum, so every load does, of any file of weights.
"""

import argparse
import errno
import logging
import os
import pickle
import re
import shutil
import time
import warnings
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch

from cl_train.config.schema import ConfigError
from cl_train.system.files import replacing, retry

log = logging.getLogger(__name__)

FORMAT = "cl_train checkpoint"
FORMAT_VERSION = 1
MAX_MINUTES_WITHOUT_CHECKPOINT = 30.0

_STEP_FILE = re.compile(r"step-(\d+)\.pt")
_DOS_FOLDER = 0x10  # torch returns uninitialised memory for a member with this attribute
_MAX_VALUES = 1_000_000  # containers, tensors and plain values
_MAX_GROWTH = 8  # bytes of all tensors per byte of the file: weights may be shared between a few names


class CheckpointError(RuntimeError):
    """A checkpoint or a file of weights cannot be read or written; the message has the file and the reason."""


def read_torch_file(path: Path) -> Any:
    """Load a file of `torch.save` to the CPU. No code in it runs, and its size bounds the memory used.

    Raises CheckpointError, in one line: the file is missing, damaged, compressed or a program (TorchScript), or has
    more than dense tensors and plain types.
    """
    try:
        if path.exists() and not path.is_file():  # opening a FIFO would block
            raise ValueError("not a regular file")
        with path.open("rb") as file, warnings.catch_warnings():
            if file.read(4) == b"PK\x03\x04":
                _check_archive(file)
            file.seek(0)
            warnings.simplefilter("ignore")  # deprecated formats are either read or refused without a warning
            with torch.serialization.safe_globals([argparse.Namespace]):  # many checkpoints contain it
                value = torch.load(file, map_location="cpu", weights_only=True)
        _check_values(value, path.stat().st_size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: has more than tensors and plain types; reading it could run code") from error
    except Exception as error:  # of a damaged file: BadZipFile, RuntimeError, EOFError, struct.error and others
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: truncated, damaged or no usable file of torch.save: {reason[:300]}") from error
    return value


def _check_archive(file: BinaryIO) -> None:
    """Compressed members could expand to a thousand times the file."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        is_compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
        if is_compressed or sum(member.file_size for member in members) > os.fstat(file.fileno()).st_size:
            raise ValueError("it is a compressed zip archive, or claims more bytes than it has")
        damaged = archive.testzip() or next((m.filename for m in members if m.external_attr & _DOS_FOLDER), None)
        if damaged is not None:
            raise ValueError(f"{damaged} has another checksum, or is marked as a folder")


def _check_values(value: Any, file_bytes: int) -> None:
    """A tensor of stride 0, or a container that is referred to many times, would grow when it is copied."""
    visited, tensor_bytes, pending = 0, 0, [value]
    while pending:
        item, visited = pending.pop(), visited + 1
        if isinstance(item, torch.Tensor):
            if item.layout != torch.strided or item.device.type != "cpu" or item.is_quantized or item.is_nested:
                raise ValueError(f"it has a tensor that is not dense ({item.layout}, {item.dtype}, {item.device})")
            tensor_bytes += item.nbytes
        elif isinstance(item, Mapping | list | tuple | set):
            pending.extend(item.values() if isinstance(item, Mapping) else item)
        if visited + len(pending) > _MAX_VALUES or tensor_bytes > _MAX_GROWTH * file_bytes:
            raise ValueError("its tensors or lists are many times larger than the file")


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint as `read_torch_file` does. CheckpointError also if it is none, or of a newer format."""
    state = read_torch_file(path)
    if not is_checkpoint(state) or state.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: not a checkpoint of cl_train, or written by a newer version; weights={path} starts from its "
            "weights only"
        )
    return state


def is_checkpoint(content: object) -> bool:
    return isinstance(content, dict) and content.get("format") == FORMAT


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write `state`, a `snapshot`, atomically and durably. Raises OSError, with `path` unchanged: no space, no disk."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        try:
            torch.save({"format": FORMAT, "format_version": FORMAT_VERSION, **state}, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch replaces it with an error of its zip writer
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable. Some network file systems cannot sync a folder, which is not an error."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def snapshot(tree: Any, where: str = "state") -> Any:
    """A deep copy on the CPU with contiguous tensors; the host waits for the device. TypeError for other types."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(tree, Mapping) and all(type(key) in (str, int) for key in tree):
        return {key: snapshot(value, f"{where}[{key!r}]") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [snapshot(value, f"{where}[{index}]") for index, value in enumerate(tree)]
    if tree is None or type(tree) in (str, bytes, int, float, bool):
        return tree
    raise TypeError(f"{where}: a value or key of {type(tree).__name__} cannot be saved")


class CheckpointStore:
    """`step-<n>.pt` (the last `keep`) and `best.pt` (a hard link). A thread writes them.

    A failed write is logged and keeps the earlier files. The next save, or `finish`, repeats it if it was of the best
    model or the last one. Failures for `MAX_MINUTES_WITHOUT_CHECKPOINT` raise. Without `background`, `save` waits.
    """

    def __init__(self, folder: str | Path, keep: int = 2, background: bool = True) -> None:
        self.folder, self.keep, self.background = Path(folder), keep, background
        self._unwritten: dict[int, dict[str, Any]] = {}  # states on the host, by step; at most the best and the last
        self._best: int | None = None  # the unwritten step that will be `best.pt`
        self._failing_since: float | None = None  # time of the first failed write in a row
        self._executor = ThreadPoolExecutor(1, "checkpoint")  # the interpreter's end waits for its work
        self._writing: Future[None] | None = None

    def save(self, state: Mapping[str, Any], step: int, *, best: bool = False) -> None:
        """Save `state` as `step-<n>.pt`, and also as `best.pt` if `best`. Raises as `wait` and `snapshot`."""
        self.wait()
        if best:
            self._best = step
        older_best = {known: kept for known, kept in self._unwritten.items() if known == self._best}
        self._unwritten = {**older_best, step: snapshot(state)}
        self._writing = self._executor.submit(self._write)
        if not self.background:
            self.wait()

    def mark_best(self, step: int) -> bool:
        """Make `best.pt` the checkpoint of `step`, the last that was saved; false if somebody has removed its file."""
        self.wait()
        if step in self._unwritten:
            self._unwritten, self._best = {step: self._unwritten[step]}, step
            return True
        try:
            self._link_best(step)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("%s was not written: %s", self.folder / "best.pt", error)
        return True

    def wait(self) -> None:
        """Wait until the current write has ended. Raises CheckpointError if none has succeeded for too long."""
        if self._writing is not None:
            self._writing.result()

    def finish(self) -> None:
        """Wait until all is written, and repeat failed writes. Raises CheckpointError if the last one fails."""
        self.wait()
        try:
            retry(self._write_all)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> CheckpointError:
        what = f"no checkpoint could be written for too long: {self._path(max(self._unwritten))}: {error}"
        return CheckpointError(f"{what}; free some space and use resume=auto")

    def _write(self) -> None:
        """In the thread; what it raises ends the run."""
        try:
            self._write_all()
        except OSError as error:
            level = logging.WARNING if self._failing_since is None else logging.INFO
            self._failing_since = self._failing_since or time.monotonic()
            if time.monotonic() - self._failing_since > 60 * MAX_MINUTES_WITHOUT_CHECKPOINT:
                raise self._failure(error) from error
            text = "checkpoint %s was not written: %s; free some space: training ends after %g minutes without one"
            log.log(level, text, self._path(max(self._unwritten)), error, MAX_MINUTES_WITHOUT_CHECKPOINT)

    def _write_all(self) -> None:
        for step in sorted(self._unwritten):
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(".*.pt.tmp-*"):  # of a killed process: a run folder has one writer
                path.unlink()
            write(self._path(step), self._unwritten[step])
            if step == self._best:
                self._link_best(step)
            saved = self._steps()
            for path in [saved.pop(known) for known in sorted(saved) if known > step]:  # a resume went back from them
                target = path.with_suffix(f".pt.superseded-{time.time_ns()}")
                os.replace(path, target)
                log.warning("%s is later than the checkpoint just written: renamed to %s", path, target.name)
            for old in sorted(saved)[: -self.keep]:
                saved[old].unlink(missing_ok=True)
            del self._unwritten[step]
        if self._failing_since is not None:
            self._failing_since = None
            log.warning("checkpoints are written again")

    def _link_best(self, step: int) -> None:
        """Make `best.pt` the same file as that of `step`, atomically; a copy if the file system has no hard links."""
        with replacing(self.folder / "best.pt") as temporary:
            temporary.unlink(missing_ok=True)
            try:
                os.link(self._path(step), temporary)
            except OSError:
                shutil.copyfile(self._path(step), temporary)
        _sync_folder(self.folder)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def _steps(self) -> dict[int, Path]:
        paths = self.folder.iterdir() if self.folder.is_dir() else ()  # raises if it is unreadable; glob does not
        return {int(match[1]): path for path in paths if (match := _STEP_FILE.fullmatch(path.name))}

    def newest(self) -> tuple[Path, dict[str, Any], list[str]] | None:
        """The newest whole checkpoint, at last `best.pt`: path, state, and why newer ones were skipped, a line each.

        None if there is no checkpoint. Raises CheckpointError if none of several is whole.
        """
        skipped: list[str] = []
        newest_first = [path for _, path in sorted(self._steps().items(), reverse=True)]
        for path in [*newest_first, *self.folder.glob("best.pt")]:
            try:
                return path, load(path), skipped
            except CheckpointError as error:
                skipped.append(str(error))
        if skipped:
            raise CheckpointError("no checkpoint can be used:\n" + "\n".join(skipped))
        return None


def resume_path(resume: str) -> Path:
    """The file or folder that `resume=` names. Raises ConfigError: it does not exist."""
    path = Path(resume).expanduser()
    if path.is_file() or path.is_dir():
        return path
    raise ConfigError(f"resume={resume}: no such file or folder; give a checkpoint, a run folder, or auto")


def load_for_resume(resume: str, store: CheckpointStore) -> tuple[Path, dict[str, Any], list[str]] | None:
    """The checkpoint that `resume=` names, as `newest` returns it: of the store for `auto`, else a file or run folder.

    Raises ConfigError: there is no such file or folder, or no checkpoint in it. CheckpointError: as `load` or `newest`.
    """
    if resume == "auto":
        return store.newest()
    path = resume_path(resume)
    if path.is_file():
        return path, load(path), []
    folder = path / "checkpoints"
    found = CheckpointStore(folder if folder.is_dir() else path).newest()
    if found is None:
        raise ConfigError(f"resume={resume}: the folder has no checkpoint (checkpoints/step-*.pt)")
    return found
