"""What the faults share: tiny runs, undisturbed ones to compare with, and what was lost.

Each row is a test with one fault, which is planted with a small count in the ordinary tests, and
often by `--full`.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.conftest import write_images
from tests.faults import plants, tiny
from tests.faults.forkserver import Forked, Function, train_script
from tests.processes import wait_until
from tests.ranks import fork_ranks


class Bench:
    """Images, a folder, undisturbed runs, and how often the row that runs tried, and lost."""

    def __init__(self, folder: Path, is_full: bool) -> None:
        self.folder = folder
        self.images = folder / "images"
        self._is_full = is_full
        # 51 and 15: neither divides by the batch of 8.
        write_images(self.images, {"train": 17, "val": 5})
        self._references: dict[str, Path] = {}
        self.begin_row()

    def begin_row(self) -> None:
        self.tried = 0
        self.lost: list[str] = []
        self.random = Random(1)

    def end_row(self, name: str) -> None:
        print(f"{name}: {len(self.lost)} of {self.tried} lost")
        assert self.tried and not self.lost, self.lost

    def count(self, quick: Any, full: Any) -> Any:
        """How often a fault is planted."""
        return full if self._is_full else quick

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """One more try, which the first exception or failed assertion in the block loses."""
        self.tried += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            self.lost.append(f"{type(error).__name__}: {error}")

    def words(self, run: Path, **settings: Any) -> list[str]:
        """The command line of a tiny run; `settings` with `__` for the dot of a key."""
        values: dict[str, Any] = {
            "model": "tests.networks:dropout", "data": "folder", "data.root": f"'{self.images}'",
            "data.image_size": 32, "data.workers": 0, "batch_size": 8, "epochs": tiny.EPOCHS,
            "precision": "fp32", "device": "cpu", "ema_decay": 0.9, "optim.lr": 0.5,
            "log_every": 2, "warmup_steps": 2, "checkpoint.every_steps": 1, "checkpoint.keep": 3,
            "resume": "auto", "hydra.run.dir": f"'{run}'",
        }  # fmt: skip
        values |= {key.replace("__", "."): value for key, value in settings.items()}
        return [f"{key}={value}" for key, value in values.items() if value is not None]

    def fork(self, function: Function, environment: Mapping[str, str] = {}) -> Forked:
        return Forked(function, self.new_folder() / "log", environment)

    def start(
        self, run: Path, *hooks: Function, environment: Mapping[str, str] = {}, **settings: Any
    ) -> Forked:
        """train.py after these hooks, which plant faults."""
        return self.fork(partial(train_script, self.words(run, **settings), *hooks), environment)

    def start_ranks(
        self,
        run: Path,
        world: int,
        *hooks: Function,
        environment: Mapping[str, str] = {},
        **settings: Any,
    ) -> list[Forked]:
        """What torchrun would start, at the same global batch, without its imports."""
        if world == 1:
            return [self.start(run, *hooks, environment=environment, **settings)]
        settings = {"batch_size": 8 // world} | settings
        script = partial(train_script, self.words(run, **settings), *hooks)
        return fork_ranks([script] * world, self.new_folder(), environment)

    def run(
        self,
        run: Path,
        *hooks: Function,
        code: int = 0,
        said: str = "",
        world: int = 1,
        **settings: Any,
    ) -> str:
        """A run to its end, with this exit code; rank 0's output, with the pattern `said`."""
        ranks = self.start_ranks(run, world, *hooks, **settings)
        codes = [rank.wait() for rank in ranks]
        output = ranks[0].output()
        told = f"{run.name}: exit codes {codes}: {output[-600:]}"
        assert codes == [code] * world and "Traceback" not in output, told
        assert re.search(said, output), told
        return output

    def reference(self, world: int = 1, **settings: Any) -> Path:
        """An undisturbed run with these settings; it is run once."""
        key = "-".join([str(world), *(f"{name}={value}" for name, value in settings.items())])
        if key not in self._references:
            run = self.folder / f"reference-{len(self._references)}"
            self.run(run, world=world, **settings)
            self._references[key] = run
        return self._references[key]

    def check_resumed(self, run: Path, reference: Path, **settings: Any) -> None:
        """`run` completes as if nothing had happened."""
        self.run(run, **settings)
        tiny.check_equal(run, reference)

    def hold(self, run: Path, **settings: Any) -> tuple[Forked, Path]:
        """A run in its first, second or third step, which waits until the file is deleted, while a
        thread may still write a checkpoint.
        """
        hold = run.with_suffix(".hold")
        hold.unlink(missing_ok=True)
        step = self.random.randint(1, 3)
        running = self.start(run, partial(plants.hold_step, hold, step), **settings)
        wait_for(hold)
        time.sleep(self.random.uniform(0, 0.05))
        return running, hold

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))


def wait_for(path: Path, content: str = "") -> None:
    """Until there is a folder with `content` in the name of a file, or a file that holds it."""

    def is_there() -> bool:
        if path.is_dir():
            return any(content in name and not name.startswith(".") for name in os.listdir(path))
        return path.is_file() and content in path.read_text(errors="replace")

    wait_until(is_there)
