"""The `checkpoints/` folder of a run: keep the right files, and find the one to resume from."""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cl_train.config.schema import ConfigError
from cl_train.system.checkpoint_file import CheckpointError, load, snapshot, sync_folder, write
from cl_train.system.files import retry

log = logging.getLogger(__name__)

MAX_MINUTES_WITHOUT_CHECKPOINT = 30.0

_STEP_FILE = re.compile(r"step-(\d+)\.pt")


@dataclass
class _Save:
    state: dict[str, Any]  # on the host
    step: int
    best: bool


class CheckpointStore:
    """`step-<n>.pt` (the last `keep`) and `best.pt` (a hard link), written by rank 0.

    With `background` a thread writes while training continues. Call `wait` before forking loader workers: a fork copies
    locks that another thread holds.

    A failed write is logged and keeps the earlier files. The next save, or `finish`, repeats it if it was of the best
    model or the last one. Failures for `MAX_MINUTES_WITHOUT_CHECKPOINT` raise.
    """

    def __init__(self, folder: str | Path, keep: int = 2, background: bool = True) -> None:
        assert keep >= 1
        self.folder = Path(folder)
        self.keep = keep
        self.background = background
        self.last_saved: Path | None = None
        self._unwritten: list[_Save] = []  # in order of steps; at most the best and the last one
        self._failing_since: float | None = None
        self._failing_minutes = 0.0  # from the first failed write in a row to the last
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of the last write

    def save(self, state: Mapping[str, Any], step: int, *, best: bool = False) -> None:
        """Save `state` as `step-<n>.pt`, and also as `best.pt` if `best`.

        Raises:
            CheckpointError: no checkpoint could be written for too long.
            TypeError: see `snapshot`.
        """
        self.wait()
        self._unwritten = [save for save in self._unwritten if save.best and not best and save.step < step]
        self._unwritten.append(_Save(snapshot(state), step, best))
        # Not a daemon thread: the write is completed before the program exits, also after an exception.
        self._thread = threading.Thread(target=self._write, name="checkpoint")
        self._thread.start()
        if not self.background:
            self.wait()

    def mark_best(self, step: int) -> bool:
        """Make `best.pt` the checkpoint of `step`; false if that step was not saved."""
        self.wait()
        last = self._unwritten[-1] if self._unwritten else None
        if last is not None and last.step == step:
            last.best = True
            self._unwritten = [last]
            return True
        path = self._path(step)
        try:
            _link(path, self.folder / "best.pt")
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("%s was not written: %s", self.folder / "best.pt", error)
        return True

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def wait(self) -> None:
        """Wait until the current write has ended.

        Raises:
            CheckpointError: it failed, and no checkpoint could be written for too long.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is None:
            return
        if not isinstance(self._error, OSError):
            raise self._error
        if self._failing_minutes > MAX_MINUTES_WITHOUT_CHECKPOINT:
            raise self._failure(f"no checkpoint could be written for {self._failing_minutes:.0f} minutes")

    def finish(self) -> None:
        """Wait until all is written, and repeat failed writes.

        Raises:
            CheckpointError: the last checkpoint cannot be written.
        """
        self.wait()
        try:
            if self._unwritten:
                retry(self._write_all)
        except OSError as error:
            self._error = error
            raise self._failure("the last checkpoint could not be written") from error

    def _failure(self, what: str) -> CheckpointError:
        path = self._path(self._unwritten[-1].step)
        return CheckpointError(
            f"{what}: {path}: {self._error}; the last good one of this process: {self.last_saved or 'none'}; "
            "free some space and use resume=auto"
        )

    def _write(self) -> None:
        path = self._path(self._unwritten[-1].step)
        try:
            self._write_all()
        except OSError as error:
            self._error = error
            if self._failing_since is not None:
                self._failing_minutes = (time.monotonic() - self._failing_since) / 60
                log.info("checkpoint %s was not written either: %s", path, error)
                return
            self._failing_since, self._failing_minutes = time.monotonic(), 0.0
            log.warning(
                "checkpoint %s was not written: %s; earlier ones are unchanged and training continues, but it ends if "
                "none can be written for %g minutes; free some space",
                *(path, error, MAX_MINUTES_WITHOUT_CHECKPOINT),
            )
        except BaseException as error:
            self._error = error  # `wait` raises it in the training thread

    def _write_all(self) -> None:
        while self._unwritten:
            save = self._unwritten[0]
            path = self._path(save.step)
            if self.last_saved is None:
                self._prepare_folder()
            write(path, save.state)
            if save.best:
                _link(path, self.folder / "best.pt")
            self._retire(save.step)
            self.last_saved = path
            del self._unwritten[0]
        self._error = None
        if self._failing_since is not None:
            self._failing_since = None
            log.warning("checkpoints are written again: %s", self.last_saved)

    def _prepare_folder(self) -> None:
        """Delete temporary files of a killed process: a run folder has one writer, see run_folder.claimed_folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(".*.pt.tmp-*"):
            path.unlink(missing_ok=True)

    def _retire(self, step: int) -> None:
        """Delete all but the newest `keep`, after the new one is durable. Later steps than `step` are renamed.

        Those are damaged files that a resume skipped, or later than the checkpoint that the user resumed from.
        """
        steps = self._steps()
        for later in [known for known in steps if known > step]:
            path = steps.pop(later)
            target = _unused_name(path.with_suffix(".pt.superseded"))
            os.replace(path, target)
            log.warning("%s is later than the checkpoint just written: renamed to %s", path, target.name)
        for old in sorted(steps)[: -self.keep]:
            steps[old].unlink(missing_ok=True)

    def _steps(self) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        matches = ((_STEP_FILE.fullmatch(path.name), path) for path in self.folder.iterdir())
        return {int(match[1]): path for match, path in matches if match}

    def newest(self) -> tuple[Path, dict[str, Any], list[str]] | None:
        """The newest whole checkpoint: its path, its state, and why newer ones were skipped, one line each.

        `best.pt` is tried last. None if there is no checkpoint at all.

        Raises:
            CheckpointError: there are checkpoints, and none of them is whole.
        """
        steps, best = self._steps(), self.folder / "best.pt"
        skipped: list[str] = []
        for path in [*(steps[step] for step in sorted(steps, reverse=True)), *([best] if best.exists() else [])]:
            try:
                return path, load(path), skipped
            except CheckpointError as error:
                skipped.append(str(error))
        if skipped:
            raise CheckpointError("no checkpoint can be used:\n" + "\n".join(skipped))
        return None


def _unused_name(path: Path) -> Path:
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _link(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, atomically; a copy if the file system has no hard links."""
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)
    temporary.unlink(missing_ok=True)  # rename(2) does nothing if both names already refer to the same file
    sync_folder(target.parent)


def load_for_resume(resume: str, store: CheckpointStore) -> tuple[Path, dict[str, Any], list[str]] | None:
    """The checkpoint that `resume=` names, as `newest` returns it: of the store for `auto`, else a file or run folder.

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
