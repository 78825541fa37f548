"""Checkpoint files and their folder; `training/checkpointing.py` makes the content of one.

A file of `torch.save` is written under a temporary name, synced and renamed: a `.pt` file is always
whole. `torch.load` verifies no checksum, so every load does.
"""

import argparse
import logging
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from cl_train.config.fields import suggest_path
from cl_train.errors import CheckpointError as CheckpointError
from cl_train.errors import ConfigError
from cl_train.system.files import replacing, retry

log = logging.getLogger(__name__)

FORMAT = "cl_train checkpoint"
FORMAT_VERSION = 1

_STEP_FILE = re.compile(r"step-(\d+)\.pt")


def read_torch_file(path: Path) -> Any:
    """Loads a file of `torch.save` to the CPU; no code in it runs.

    Raises CheckpointError, in one line: the file is missing, damaged, or has more than tensors and
    plain types.
    """
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            head = file.read(4)
            if head == b"PK\x03\x04":
                if zipfile.ZipFile(file).testzip():
                    raise ValueError("wrong checksum")
            elif not head.startswith(b"\x80"):  # the first byte of a pickle
                raise ValueError("it begins with something else")
            file.seek(0)
            warnings.simplefilter("ignore")  # a deprecated format is either read or refused
            # Many checkpoints contain a Namespace, of their arguments.
            with torch.serialization.safe_globals([argparse.Namespace]):
                return torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
    except pickle.UnpicklingError:
        what = "has more than tensors and plain types; reading it could run code"
    except Exception as error:  # a damaged file raises BadZipFile, RuntimeError, EOFError, ...
        reason = (str(error) or type(error).__name__).splitlines()[0][:300]
        what = f"truncated, damaged or no usable file of torch.save: {reason}"
    raise CheckpointError(f"{path}: {what}")


def load(path: Path) -> dict[str, Any]:
    """Returns the state in a checkpoint. Raises CheckpointError: it cannot be read, is none of
    cl_train's, or of a newer format.
    """
    state = read_torch_file(path)
    if not is_checkpoint(state) or state.get("format_version") != FORMAT_VERSION:
        what = "not a checkpoint of cl_train, or written by a newer version"
        raise CheckpointError(f"{path}: {what}; weights={path} starts from its weights only")
    return state


def is_checkpoint(content: object) -> bool:
    return isinstance(content, dict) and content.get("format") == FORMAT


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Writes `state`, a `snapshot`, atomically and durably. Raises OSError; `path` is unchanged."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        try:
            torch.save({"format": FORMAT, "format_version": FORMAT_VERSION, **state}, file)
        except RuntimeError as error:
            # torch replaces an OSError with an error of its zip writer.
            cause = error.__context__
            raise cause if isinstance(cause, OSError) else error from None
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes a rename durable, except on network file systems that cannot sync a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step_of(path: Path) -> int | None:
    """Returns the step of a checkpoint without reading its tensors; None: it cannot be read."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return int(content["progress"]["step"])
    except Exception:  # as in `read_torch_file`
        return None


def snapshot(tree: Any, where: str = "state") -> Any:
    """Returns a deep copy on the CPU with contiguous tensors; the host waits for the device. A
    state dict keeps its attributes, the versions of its modules. Raises TypeError: a value or key
    is of another type.
    """
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(tree, Mapping) and all(type(key) in (str, int) for key in tree):
        copied = {key: snapshot(value, f"{where}[{key!r}]") for key, value in tree.items()}
        if not isinstance(tree, OrderedDict):
            return copied
        state = OrderedDict(copied)
        vars(state).update(snapshot(vars(tree), where))
        return state
    if isinstance(tree, list | tuple):
        return [snapshot(value, f"{where}[{index}]") for index, value in enumerate(tree)]
    if tree is None or type(tree) in (str, bytes, int, float, bool):
        return tree
    raise TypeError(f"{where}: a value or key of {type(tree).__name__} cannot be saved")


class CheckpointStore:
    """Keeps `step-<n>.pt` (the last `keep`) and `best.pt` (a hard link). A thread writes them.

    A failed write is logged and keeps the earlier files. The next write, or `finish`, repeats it
    for the best model and the last one.
    """

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep
        # States on the host, by step: at most that of the best model and the last one.
        self._unwritten: dict[int, dict[str, Any]] = {}
        self._best: int | None = None  # the unwritten step that will be `best.pt`
        # The interpreter's end waits for the work of an executor.
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def write_step(self, state: Mapping[str, Any], step: int, *, best: bool = False) -> None:
        """Writes `state` as `step-<n>.pt`, also as `best.pt` if `best`, after the current write."""
        self.wait()
        if best:
            self._best = step
        unwritten_best = {s: values for s, values in self._unwritten.items() if s == self._best}
        self._unwritten = {**unwritten_best, step: snapshot(state)}
        self._writing = self._executor.submit(self._write)

    def link_best(self, step: int) -> None:
        """Makes `best.pt` the checkpoint of `step`, the last one."""
        self.wait()
        if step in self._unwritten:
            self._best = step
        else:
            self._try_to_link_best(self._path(step))

    def take_best(self, resumed: Path, step: int | None, last: int) -> None:
        """Makes `best.pt` the checkpoint of `step`, if need be from the folder of `resumed`. If
        `step` is unknown, a `best.pt` up to step `last` is taken: a later one is of a way that the
        run has left.
        """
        best = self.folder / "best.pt"
        saved = [] if step is None else [resumed, resumed.with_name(self._path(step).name)]
        for path in (best, resumed.with_name("best.pt"), *saved):
            found = _step_of(path)
            if found is not None and (found == step if step else found <= last):
                if path != best:
                    self._try_to_link_best(path)
                return
        if best.exists() or step is not None:
            why = "is not the best of the steps that this run goes on from, which is gone"
            log.warning("%s %s: weights= takes the last one until a better one", best, why)
            best.unlink(missing_ok=True)

    def wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def finish(self) -> None:
        """Waits until all is written; repeats failed writes. Raises CheckpointError: the last
        failed.
        """
        self.wait()
        try:
            retry(self._write_all)
        except OSError as error:
            what = f"the last checkpoint could not be written: {self.folder}: {error}"
            raise CheckpointError(f"{what}; free some space and use resume=auto") from error

    def _write(self) -> None:
        """Runs in the thread."""
        try:
            self._write_all()
        except OSError as error:
            advice = "free some space before the run ends; the next save tries again"
            log.warning("%s: no checkpoint written: %s; %s", self.folder, error, advice)

    def _write_all(self) -> None:
        for step in sorted(self._unwritten):
            self.folder.mkdir(parents=True, exist_ok=True)
            # Left by a killed process: a run folder has one writer.
            for path in self.folder.glob(".*.pt.tmp-*"):
                path.unlink()

            write(self._path(step), self._unwritten[step])
            if step == self._best:
                self._link_best(self._path(step))
            paths = self._steps()
            for later in [saved for saved in paths if saved > step]:  # a resume went back from them
                log.warning("%s is later than the checkpoint just written: deleted", paths[later])
                paths.pop(later).unlink(missing_ok=True)
            for old in sorted(paths)[: -self.keep]:
                paths[old].unlink(missing_ok=True)
            del self._unwritten[step]

    def _link_best(self, path: Path) -> None:
        """Links it atomically, or copies it if the file system has no hard links."""
        with replacing(self.folder / "best.pt") as temporary:
            try:
                os.link(path, temporary)
            except OSError:
                shutil.copyfile(path, temporary)
        _sync_folder(self.folder)

    def _try_to_link_best(self, path: Path) -> None:
        try:
            self._link_best(path)
        except OSError as error:
            log.warning("%s was not written: %s", self.folder / "best.pt", error)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def _steps(self) -> dict[int, Path]:
        # iterdir raises if the folder is unreadable; glob does not.
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        return {int(match[1]): path for path in paths if (match := _STEP_FILE.fullmatch(path.name))}

    def newest(self) -> tuple[Path, dict[str, Any], list[str]] | None:
        """Returns the newest whole checkpoint: path, state, and why newer ones were skipped; None
        without a checkpoint. Raises CheckpointError: none of several is whole.
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
    """Raises ConfigError: it does not exist."""
    path = Path(resume).expanduser()
    if path.is_file() or path.is_dir():
        return path
    near = suggest_path(path) or "; give a checkpoint, a run folder, or auto"
    raise ConfigError(f"resume={resume}: no such file or folder{near}")


def load_for_resume(
    resume: str, store: CheckpointStore
) -> tuple[Path, dict[str, Any], list[str]] | None:
    """Returns the checkpoint that `resume=` names, as `newest` does. Raises ConfigError: there is
    none, or it cannot be used; CheckpointError: none of this run can.
    """
    if resume == "auto":
        return store.newest()
    path = resume_path(resume)
    try:
        if path.is_file():
            return path, load(path), []
        folder = path / "checkpoints"
        newest = CheckpointStore(folder if folder.is_dir() else path).newest()
    except CheckpointError as error:  # the user named another file, as with weights=
        raise ConfigError(str(error)) from error
    if newest is None:
        what = "no checkpoint in it (checkpoints/best.pt or step-*.pt)"
        raise ConfigError(f"resume={resume}: {what}")
    return newest
