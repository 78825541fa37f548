"""Training runs for the faults to act on, and undisturbed ones to compare with."""

import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
from forkserver import ForkServer, Run

from cl_train.system.checkpoints import CheckpointStore
from tests.processes import LIMIT_S


@dataclass
class Bench:
    """What the faults share: the server, images, a folder, a seed, and undisturbed runs to compare with."""

    server: ForkServer
    folder: Path
    seed: int = 1  # of every random choice
    patience: float = 1.0  # factor of the times within which a program must end: more than 1 on a busy machine

    def __post_init__(self) -> None:
        self.images = tiny.write_images(self.folder / "images")
        self._references: dict[str, Path] = {}
        self.seconds = 0.0

    def start(self, run: Path, hook: str = "", environment: dict[str, str] | None = None, **settings: Any) -> Run:
        log = self.folder / f"{run.name}.log"
        return self.server.start(tiny.words(self.images, run, **settings), log, environment, hook)

    def reference(self, **settings: Any) -> Path:
        """An undisturbed run with these settings; it is run once."""
        key = "-".join(f"{name}={value}" for name, value in settings.items())
        if key not in self._references:
            run = self.folder / f"reference-{len(self._references)}"
            started = time.monotonic()
            running = self.start(run, **settings)
            assert running.wait() == 0, running.output()
            self.seconds = time.monotonic() - started
            self._references[key] = run
        return self._references[key]

    def check_resumed(self, run: Path, reference: Path, **settings: Any) -> None:
        """`run` completes as if nothing had happened."""
        again = self.start(run, **settings)
        assert again.wait() == 0, f"{run.name} did not resume: {again.output()[-500:]}"
        self.check_equal(run, reference)

    def check_equal(self, run: Path, reference: Path) -> None:
        """The final state and every logged number, bit by bit."""
        problems = tiny.differences(tiny.final_state(run), tiny.final_state(reference))
        assert not problems, f"{run.name}: {problems[:3]}"
        ours, theirs = tiny.records(run), tiny.records(reference)
        unexpected = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]][:1]
        assert ours == theirs, f"{run.name}: records differ ({len(ours)} and {len(theirs)}), first: {unexpected}"

    def limit_s(self, seconds: float) -> float:
        return self.patience * seconds

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def log(self) -> Path:
        """A new file for the output of a process."""
        descriptor, name = tempfile.mkstemp(suffix=".log", dir=self.folder)
        os.close(descriptor)
        return Path(name)

    def forget(self, run: Path) -> None:
        shutil.rmtree(run, ignore_errors=True)
        (self.folder / f"{run.name}.log").unlink(missing_ok=True)


def newest_step(run: Path) -> int:
    found = CheckpointStore(run / "checkpoints").newest()
    return found[1]["progress"]["step"] if found else 0


def has_completed(run: Path) -> bool:
    """A signal that comes later finds no run to stop."""
    summary = run / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["status"] == "completed"


def wait_for(path: Path, content: str = "", seconds: float = LIMIT_S) -> bool:
    """Until `path` is there (a folder: a file with `content` in its name; a file: `content` in it)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.is_dir() and any(content in item.name and not item.name.startswith(".") for item in path.iterdir()):
            return True
        if path.is_file() and content in path.read_text(errors="replace"):
            return True
        time.sleep(0.003)
    return False
