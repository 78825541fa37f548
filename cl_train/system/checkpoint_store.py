"""The `checkpoints/` folder of a run: keep the right files, and find the one to resume from."""

import itertools
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
from cl_train.system.files import replacing, retry

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
        self._failing_since: float | None = None  # time of the first failed write in a row
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # that ends the run

    def save(self, state: Mapping[str, Any], step: int, *, best: bool = False) -> None:
        """Save `state` as `step-<n>.pt`, and also as `best.pt` if `best`. Raises as `wait` and `snapshot`."""
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
        if self._unwritten and self._unwritten[-1].step == step:
            del self._unwritten[:-1]
            self._unwritten[0].best = True
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
        """Wait until the current write has ended. Raises CheckpointError if none has succeeded for too long."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until all is written, and repeat failed writes. Raises CheckpointError if the last one fails."""
        self.wait()
        try:
            retry(self._write_all)
        except OSError as error:
            raise self._failure("the last checkpoint could not be written", error) from error

    def _failure(self, what: str, error: OSError) -> CheckpointError:
        path = self._path(self._unwritten[-1].step)
        return CheckpointError(
            f"{what}: {path}: {error}; the last good one of this process: {self.last_saved or 'none'}; "
            "free some space and use resume=auto"
        )

    def _write(self) -> None:
        """In the thread: `wait` raises in the training thread what must end the run."""
        try:
            self._write_all()
        except OSError as error:
            self._note_failure(error)
        except BaseException as error:
            self._error = error

    def _note_failure(self, error: OSError) -> None:
        path = self._path(self._unwritten[-1].step)
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            log.warning(
                "checkpoint %s was not written: %s; earlier ones are unchanged and training continues, but it ends if "
                "none can be written for %g minutes; free some space",
                *(path, error, MAX_MINUTES_WITHOUT_CHECKPOINT),
            )
            return
        log.info("checkpoint %s was not written either: %s", path, error)
        minutes = (time.monotonic() - self._failing_since) / 60
        if minutes > MAX_MINUTES_WITHOUT_CHECKPOINT:
            self._error = self._failure(f"no checkpoint could be written for {minutes:.0f} minutes", error)

    def _write_all(self) -> None:
        while self._unwritten:
            save = self._unwritten[0]
            path = self._path(save.step)
            if self.last_saved is None:
                self._create_folder()
            write(path, save.state)
            if save.best:
                _link(path, self.folder / "best.pt")
            self._retire(save.step)
            self.last_saved = path
            del self._unwritten[0]
        if self._failing_since is not None:
            self._failing_since = None
            log.warning("checkpoints are written again: %s", self.last_saved)

    def _create_folder(self) -> None:
        """Also deletes temporary files of a killed process: see `claimed_folder`, a run folder has one writer."""
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
            target = path.with_suffix(".pt.superseded")
            numbers = itertools.count(2)
            while target.exists():
                target = path.with_suffix(f".pt.superseded-{next(numbers)}")
            os.replace(path, target)
            log.warning("%s is later than the checkpoint just written: renamed to %s", path, target.name)
        for old in sorted(steps)[: -self.keep]:
            steps[old].unlink(missing_ok=True)

    def _steps(self) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        matches = ((_STEP_FILE.fullmatch(path.name), path) for path in self.folder.iterdir())  # may be unreadable
        return {int(match[1]): path for match, path in matches if match}

    def newest(self) -> tuple[Path, dict[str, Any], list[str]] | None:
        """The newest whole checkpoint: its path, its state, and why newer ones were skipped, one line each.

        `best.pt` is tried last. None if there is no checkpoint. Raises CheckpointError if none of several is whole.
        """
        skipped: list[str] = []
        for path in [*(path for _, path in sorted(self._steps().items(), reverse=True)), *self.folder.glob("best.pt")]:
            try:
                return path, load(path), skipped
            except CheckpointError as error:
                skipped.append(str(error))
        if skipped:
            raise CheckpointError("no checkpoint can be used:\n" + "\n".join(skipped))
        return None


def _link(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, atomically; a copy if the file system has no hard links."""
    with replacing(target) as temporary:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
    sync_folder(target.parent)


def resume_path(resume: str) -> Path:
    """The file or folder that `resume=` names. Raises ConfigError: it does not exist."""
    path = Path(resume).expanduser()
    if not (path.is_file() or path.is_dir()):
        raise ConfigError(f"resume={resume}: no such file or folder; give a checkpoint, a run folder, or auto")
    return path


def load_for_resume(resume: str, store: CheckpointStore) -> tuple[Path, dict[str, Any], list[str]] | None:
    """The checkpoint that `resume=` names, as `newest` returns it: of the store for `auto`, else a file or run folder.

    Raises:
        ConfigError: there is no such file or folder, or no checkpoint in it.
        CheckpointError: the file is damaged, or every file of the folder is.
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
