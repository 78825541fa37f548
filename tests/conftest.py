"""What the tests share: tiny images on disk, the real configuration shrunk, and runs of the real
loop.

torch is imported where it is used: the process of pytest-xdist that distributes the tests needs
none.
"""

import gc
import json
import os
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cl_train.config.schema import PRECISIONS, Config
from tests.faults.forkserver import kill_left

# Tests compute little: threads that wait for each other would cost more than they give, above all
# on a busy machine.
os.environ["OMP_NUM_THREADS"] = "1"
if not Path("/dev/nvidia0").exists():  # kernels for a GPU take much longer to compile
    # No pool of processes, each of which imports torch.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# tf32 is fp32 on a CPU.
CPU_PRECISIONS = [name for name in PRECISIONS if name not in ("auto", "tf32")]
SHRUNK = (
    "data=folder data.image_size=32 data.workers=0 model=tests.networks:small device=cpu"
    " precision=fp32 epochs=2 batch_size=32 log_every=1 warmup_steps=1 optim.lr=0.4"
)
CLASS_COLOURS = {"blue": (30, 40, 220), "green": (20, 200, 60), "red": (220, 30, 40)}


def write_images(folder: Path, counts: dict[str, int], size: tuple[int, int] = (48, 40)) -> None:
    """JPEGs of noise around a colour per class, in ImageNet's layout: a network of one layer tells
    them apart.
    """
    random = np.random.default_rng(0)
    for split, count in counts.items():
        for name, colour in CLASS_COLOURS.items():
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for index in range(count):
                pixels = np.array(colour) + random.normal(0, 25, (size[1], size[0], 3))
                image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
                image.save(folder / split / name / f"{index:03d}.JPEG", quality=90)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below `folder`; only of a file the bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage collections, which took a tenth of the time, pass over what was imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()
    kill_left()


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory) -> Path:
    """3 classes, 32 training and 7 validation images each."""
    folder = tmp_path_factory.mktemp("images")
    write_images(folder, {"train": 32, "val": 7})
    return folder


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory) -> Path:
    """XDG_CACHE_HOME in which the sample data is generated once: the processes of pytest-xdist
    share it.
    """
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache"


@pytest.fixture
def tiny(image_folder) -> Callable[..., Config]:
    """The real configuration, shrunk: a small network on small images, two epochs of three
    steps.
    """
    from cl_train.config.command_line import check_command_line

    def compose(*overrides: str) -> Config:
        return check_command_line([*SHRUNK.split(), f"data.root={image_folder}", *overrides])[0]

    return compose


@pytest.fixture
def train(tiny, tmp_path) -> Callable[..., "Run"]:
    """Run the real loop with overrides, in this process; gives its folder's records."""
    from cl_train.training import loop

    def run(*overrides: str, folder: Path | None = None) -> Run:
        where = folder or tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        where.mkdir(exist_ok=True)
        cfg = tiny(*overrides)
        run_whole = loop.evaluate if cfg.evaluate_only else loop.train
        return Run(where, run_whole(cfg, where).exit_code)

    return run


class Run:
    """The records that a run left."""

    def __init__(self, folder: Path, exit_code: int) -> None:
        self.folder, self.exit_code = folder, exit_code

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def records(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records("train")]

    @property
    def steps(self) -> list[int]:
        return [record["step"] for record in self.records("train")]

    @property
    def log(self) -> str:
        return (self.folder / "train.log").read_text()

    def saved_step(self, name: str | None = None) -> int:
        return self.checkpoint(name)["progress"]["step"]

    def checkpoint(self, name: str | None = None) -> dict[str, Any]:
        import torch

        path = max((self.folder / "checkpoints").glob(name or "step-*.pt"))
        return torch.load(path, weights_only=True)


@pytest.fixture
def quick_auto(monkeypatch, tmp_path) -> None:
    """`channels_last=auto` measures two short rounds, and knows no earlier choice."""
    from cl_train.measure import auto, paired
    from cl_train.measure.alternate import Stop

    monkeypatch.setattr(paired, "BLOCK_S", 0.0)
    quick = partial(paired.benchmark, stop=Stop.after(2))
    monkeypatch.setattr(auto, "benchmark", lambda *given, stop: quick(*given))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def without_inductor(monkeypatch) -> None:
    """`torch.compile` traces and differentiates as always, and runs the graphs without compiling
    C++ for a minute.
    """
    import torch

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.fixture(autouse=True)
def same_switches() -> Any:
    """One thread; a run may change torch's process-wide switches, the next test starts from the
    same ones.
    """
    import torch

    torch.set_num_threads(1)
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)
