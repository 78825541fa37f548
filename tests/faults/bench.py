"""What the faults share: runs to act on, undisturbed ones to compare with, and the count of what was lost."""

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cl_train.system.checkpoints import CheckpointStore
from tests.conftest import write_images
from tests.faults import tiny
from tests.faults.forkserver import ForkServer, Run
from tests.processes import free_ports, wait_until


@dataclass
class Outcome:
    """The tries of one row. The row passes if nothing was `lost`."""

    tried: int = 0
    lost: list[str] = field(default_factory=list)
    random: Random = field(default_factory=partial(Random, 1))

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """One more try, which is lost by the first assertion in the block that fails, or by an exception."""
        self.tried += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            self.lost.append(f"{type(error).__name__}: {error}")

    def numbers_until(self, count: int) -> Iterator[int]:
        """Of rounds, until `count` more were tries: some runs end before their fault."""
        tried = self.tried
        for number in range(10 * count + 10):
            if self.tried < tried + count:
                yield number


@dataclass
class Bench:
    """The server, images, a folder, and undisturbed runs to compare with."""

    server: ForkServer
    folder: Path
    patience: float = 1.0  # factor of the times within which a program must end: more than 1 on a busy machine

    def __post_init__(self) -> None:
        self.images = self.folder / "images"
        write_images(self.images, {"train": 17, "val": 5})  # 51 and 15: neither divides by the batch of 8
        self._references: dict[str, Path] = {}
        self.seconds = 0.0  # that the last undisturbed run took

    def start(
        self,
        run: Path,
        hook: str = "",
        plant: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **settings: Any,
    ) -> Run:
        """train.py after the function `hook` of plants.py, whose parameters are `plant`."""
        planted = {f"PLANT_{name}": str(value) for name, value in (plant or {}).items()}
        words, hook = tiny.words(self.images, run, **settings), hook and f"tests.faults.plants:{hook}"
        return self.server.start(words, self.new_log(), (environment or {}) | planted, hook)

    def start_ranks(self, run: Path, world: int, *planted: Any, **settings: Any) -> list[Run]:
        """What torchrun would start, without its five seconds of imports, at the same global batch."""
        if world == 1:
            return [self.start(run, *planted, **settings)]
        shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        shared |= {"MASTER_PORT": str(free_ports(1)[0])}
        environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
        settings = {"batch_size": 8 // world} | settings
        return [self.start(run, *planted, environment=environment, **settings) for environment in environments]

    def run(self, run: Path, code: int = 0, said: str = "", world: int = 1, **more: Any) -> str:
        """A run to its end, with this exit code; the output of rank 0, in which `said` (a pattern) is."""
        ranks = self.start_ranks(run, world, **more)
        codes, output = [rank.wait() for rank in ranks], ranks[0].output()
        assert codes == [code] * world, f"{run.name}: exit codes {codes}: {output[-600:]}"
        assert "Traceback" not in output and re.search(said, output), f"{run.name} says {output[-600:]}"
        return output

    def reference(self, world: int = 1, **settings: Any) -> Path:
        """An undisturbed run with these settings; it is run once."""
        key = "-".join([str(world), *(f"{name}={value}" for name, value in settings.items())])
        if key not in self._references:
            run, started = self.folder / f"reference-{len(self._references)}", time.monotonic()
            self.run(run, world=world, **settings)
            self.seconds, self._references[key] = time.monotonic() - started, run
        return self._references[key]

    def check_resumed(self, run: Path, reference: Path, **settings: Any) -> None:
        """`run` completes as if nothing had happened."""
        self.run(run, **settings)
        self.check_equal(run, reference)

    def check_equal(self, run: Path, reference: Path) -> None:
        """The final state and every logged number, bit by bit."""
        problems = tiny.differences(tiny.final_state(run), tiny.final_state(reference))
        assert not problems, f"{run.name}: {problems[:3]}"
        ours, theirs = tiny.records(run), tiny.records(reference)
        unexpected = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]][:1]
        assert ours == theirs, f"{run.name}: records differ ({len(ours)} and {len(theirs)}), first: {unexpected}"

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def new_log(self) -> Path:
        return self.new_folder() / "log"


def newest_step(run: Path) -> int:
    found = CheckpointStore(run / "checkpoints").newest()
    return found[1]["progress"]["step"] if found else 0


def wait_for(path: Path, content: str = "") -> None:
    """Until `path` is there: a folder with `content` in the name of a file, or a file with `content` in it."""

    def is_there() -> bool:
        if path.is_dir():
            return any(content in name and not name.startswith(".") for name in os.listdir(path))
        return path.is_file() and content in path.read_text(errors="replace")

    wait_until(is_there)
