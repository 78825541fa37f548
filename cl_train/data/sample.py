"""The sample data: ten classes of textures, generated with ImageNet's layout and proportions.

A class is a pattern; everything else, such as the mean colour, differs in every image.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from cl_train.config.schema import DataConfig
from cl_train.data.decode import Pixels
from cl_train.data.images import ImageSource, list_folder
from cl_train.errors import ConfigError
from cl_train.system.files import lock_file
from cl_train.system.processes import map_in_processes

Field = npt.NDArray[np.floating[Any]]

VERSION = "6"  # of the images; a folder of another version or size is generated again
_SIZES = (*3 * ((500, 375),), (375, 500), (500, 333), (333, 500), (640, 480), (400, 300))
_QUALITY = 90
_NOISE = 11.0  # grain, grey levels; determines the size of the files
_SEED = 2012


@dataclass(frozen=True)
class SampleSpec:
    """Images, and the scale of their sides: at 1 files are as large as ImageNet's, 100 kB."""

    train_per_class: int = 110
    val_per_class: int = 22
    scale: float = 1.0


# what data=sample makes: 160 x 120 pixels, generated and decoded in seconds
FIRST_RUN = SampleSpec(scale=0.32)


def _wave(x: Field, duty: float = 0.5) -> Field:
    """A smooth square wave of period 1: 1 in the share `duty` of it."""
    height = 3 * (np.sin(2 * np.pi * x) - np.cos(np.pi * duty))
    return (0.5 + 0.5 * np.tanh(height)).astype(np.float32)


def _turned(x: Field, y: Field, degrees: float) -> Field:
    return x * np.float32(np.cos(np.radians(degrees))) + y * np.float32(np.sin(np.radians(degrees)))


def _clouds(x: Field, y: Field) -> Field:
    waves = [
        np.sin(2 * np.pi * (0.21 * _turned(x, y, degrees) + degrees / 50))
        for degrees in (10, 43, 81, 117, 152)
    ]
    return (0.5 + 0.5 * np.tanh(sum(waves))).astype(np.float32)


def _from_centre(x: Field, y: Field) -> Field:
    """The distance from each unit cell's centre; odd rows are shifted by half a cell."""
    x = x + np.floor(y) / 2
    return np.hypot(x - np.floor(x) - 0.5, y - np.floor(y) - 0.5)


_lines = partial(_wave, duty=0.3)
Pattern = Callable[[Field, Field], Field]  # from coordinates in periods to 0 to 1
PATTERNS: dict[str, Pattern] = {  # sorted by name
    "clouds": _clouds,
    "columns": lambda x, y: _wave(x),
    "diagonals": lambda x, y: _wave(_turned(x, y, 45)),
    "dots": lambda x, y: _wave(0.5 - _from_centre(x, y)),
    "grid": lambda x, y: np.maximum(_lines(x), _lines(y)),
    # a hash of the cell's place
    "mosaic": lambda x, y: (
        np.sin(12.9898 * np.floor(1.5 * x) + 78.233 * np.floor(1.5 * y)) * 43758.5453 % 1 < 0.5
    ),
    "rings": lambda x, y: _wave(3.2 * _from_centre(x / 2, y / 2)),
    "rows": lambda x, y: _wave(y),
    "triangles": lambda x, y: np.max([_lines(_turned(x, y, d)) for d in (30, 90, 150)], axis=0),
    "zigzags": lambda x, y: _wave(y + 1.4 * np.abs(x / 2 - np.floor(x / 2) - 0.5)),
}


def render(pattern: Pattern, width: int, height: int, rng: np.random.Generator) -> Pixels:
    """One image, uint8 [height, width, 3]."""
    period = np.float32(rng.uniform(45, 70) * max(width, height) / 500)
    x = np.arange(width, dtype=np.float32)[None, :] / period + np.float32(rng.uniform(0, 64))
    y = np.arange(height, dtype=np.float32)[:, None] / period + np.float32(rng.uniform(0, 64))
    degrees = rng.uniform(-7, 7)
    shape = pattern(_turned(x, y, degrees) * rng.choice((-1, 1)), _turned(y, -x, degrees))
    dark = light = np.zeros(3)
    while abs((dark - light) @ (0.299, 0.587, 0.114)) < 110:  # grey levels, in either order
        dark, light = rng.uniform(10, 245, (2, 3))
    dark, light = dark.astype(np.float32), light.astype(np.float32)
    image = dark + shape[:, :, None] * (light - dark)
    slope = rng.uniform(-30, 30, 2)
    horizontal, vertical = np.linspace(-1, 1, width), np.linspace(-1, 1, height)
    image += horizontal[None, :, None] * slope[0] + vertical[:, None, None] * slope[1]
    grain = rng.integers(0, 256, (height, width), dtype=np.uint8).astype(np.float32)
    image += ((grain - 127.5) * np.float32(_NOISE / 74))[:, :, None]
    return image.clip(0, 255).astype(np.uint8)


def _write_image(folder: Path, scale: float, place: tuple[str, int, int]) -> None:
    split, label, number = place
    philox = np.random.Philox(key=[_SEED, split == "val"], counter=[0, label, number, 0])
    rng = np.random.Generator(philox)
    name, pattern = list(PATTERNS.items())[label]
    path = folder / split / name / f"{name}_{number:05d}.JPEG"
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = (round(side * scale) for side in rng.choice(_SIZES))
    Image.fromarray(render(pattern, width, height, rng)).save(path, quality=_QUALITY)


def write_sample(folder: Path, spec: SampleSpec, processes: int | None = None) -> None:
    """Writes `folder/{train,val}/<class>/*.JPEG`; `processes`: None = one per core."""
    counts = {"train": spec.train_per_class, "val": spec.val_per_class}
    places = [
        (split, label, number)
        for split, count in counts.items()
        for label in range(len(PATTERNS))
        for number in range(count)
    ]
    write, what = partial(_write_image, folder, spec.scale), "generating the sample data"
    list(map_in_processes(write, places, processes, description=what, unit="image"))


def ensure_sample(folder: Path, spec: SampleSpec = SampleSpec()) -> Path:
    """Generates the sample if it is missing; several processes may do so. Returns `folder`. Raises
    ConfigError: it holds something else.
    """
    marker, version = folder / "VERSION", f"{VERSION} {spec}\n"

    def is_made() -> bool:
        return marker.is_file() and marker.read_text() == version

    if is_made():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(folder.parent / f".{folder.name}.lock", waiting_for="the sample data"):
        if is_made():  # by another process
            return folder
        if folder.exists() and not marker.is_file():
            raise ConfigError(f"'{folder}' is not the sample data: move it away")
        temporary = folder.parent / f".{folder.name}.writing"
        shutil.rmtree(temporary, ignore_errors=True)
        write_sample(temporary, spec)
        (temporary / "VERSION").write_text(version)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    return folder


def list_sample(root: Path, cfg: DataConfig, *, training: bool) -> ImageSource:
    """Lists `data.root` if it is given, else the sample data, which it generates in `root`."""
    folder = ensure_sample(root, FIRST_RUN) if cfg.root is None else root
    return list_folder(folder, cfg, training=training)
