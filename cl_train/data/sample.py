"""The sample data: ten classes of textures, generated with ImageNet's layout, file sizes and unusual files.

A class is a pattern (stripes, rings, meshes, ...). Period, position, angle, colours and brightness differ in every
image, and a pattern is the same after a flip or in a crop: a small network learns the classes with the usual
augmentation, and the mean colour of an image does not reveal its class.
"""

import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from cl_train.data.decode import Pixels
from cl_train.system.locks import lock_file
from cl_train.system.process_pool import map_in_processes

Field = npt.NDArray[np.floating[Any]]
Pattern = Callable[[Field, Field, np.random.Generator], Field]  # coordinates in periods -> 0..1

VERSION = "5"  # of the images; a folder of another version is generated again
_SIZES = ((500, 375), (375, 500), (500, 333), (500, 400), (333, 500), (640, 480), (480, 360), (400, 300), (800, 600))
_SIZE_SHARES = (0.45, 0.13, 0.15, 0.06, 0.05, 0.06, 0.04, 0.04, 0.02)
_QUALITY = 90
_NOISE = 11.0  # grain, grey levels; determines the size of the files
_SEED = 2012


@dataclass(frozen=True)
class SampleSpec:
    """Number and appearance of the images."""

    train_per_class: int = 110
    val_per_class: int = 22
    scale: float = 1.0  # of both sides


def _wave(x: Field) -> Field:
    """A smooth square wave of period 1."""
    return (0.5 + 0.5 * np.tanh(3 * np.sin(2 * np.pi * x))).astype(np.float32)


def _cell(x: Field, y: Field) -> tuple[Field, Field]:
    """Coordinates from the centre of each unit cell, -0.5 to 0.5."""
    return x - np.floor(x) - 0.5, y - np.floor(y) - 0.5


def _inside(distance: Field) -> Field:
    """1 where the distance is negative, with a soft edge."""
    return (1 / (1 + np.exp(np.clip(distance * 30, -30, 30)))).astype(np.float32)


def _discs(x: Field, y: Field, rng: np.random.Generator) -> Field:
    u, v = _cell(x + np.floor(y) / 2, y)  # every second row is shifted by half a cell
    return _inside(np.sqrt(u * u + v * v) - rng.uniform(0.26, 0.32))


def _rings(x: Field, y: Field, rng: np.random.Generator) -> Field:
    u, v = _cell(x * 0.7, y * 0.7)
    return _inside(np.abs(np.sqrt(u * u + v * v) - 0.33) - 0.07)


def _meshes(x: Field, y: Field, rng: np.random.Generator) -> Field:
    u, v = np.abs(np.stack(_cell(x * 0.8, y * 0.8)))
    return _inside(np.minimum(u, v) - rng.uniform(0.08, 0.12))


def _mosaic(x: Field, y: Field, rng: np.random.Generator) -> Field:
    """Cells that are on or off at random; the tile repeats after 64 cells, more than an image has."""
    tile = (rng.random((64, 64)) < 0.5).astype(np.float32)
    cells = np.floor(np.stack((y, x)) * 1.5).astype(np.int64) % 64
    return tile[cells[0], cells[1]]


def _clouds(x: Field, y: Field, rng: np.random.Generator) -> Field:
    total = np.zeros_like(x + y)
    for angle in rng.uniform(0, np.pi) + np.arange(5) * np.pi / 5 + rng.uniform(-0.2, 0.2, 5):
        along = x * np.float32(np.cos(angle)) + y * np.float32(np.sin(angle))
        total += np.sin(np.float32(2 * np.pi * 0.12) * along + np.float32(rng.uniform(0, 2 * np.pi)))
    return (0.5 + 0.5 * np.tanh(total)).astype(np.float32)


PATTERNS: dict[str, Pattern] = {
    "checks": lambda x, y, rng: _wave(x / 2) + _wave(y / 2) - 2 * _wave(x / 2) * _wave(y / 2),
    "clouds": _clouds,
    "columns": lambda x, y, rng: _wave(x + 0.06 * rng.random() * np.sin(y)),
    "diagonals": lambda x, y, rng: _wave((x + float(rng.choice([-1, 1])) * y) * 0.7),
    "discs": _discs,
    "meshes": _meshes,
    "mosaic": _mosaic,
    "rings": _rings,
    "rows": lambda x, y, rng: _wave(y + 0.06 * rng.random() * np.sin(x)),
    "zigzags": lambda x, y, rng: _wave(y + 1.4 * np.abs(x / 2 - np.floor(x / 2) - 0.5)),
}


def render(pattern: Pattern, width: int, height: int, rng: np.random.Generator) -> Pixels:
    """One image, uint8 [height, width, 3]."""
    period = rng.uniform(24, 48) * max(width, height) / 500
    angle = rng.uniform(-0.12, 0.12)
    x = np.arange(width, dtype=np.float32)[None, :] / np.float32(period) + np.float32(rng.random())
    y = np.arange(height, dtype=np.float32)[:, None] / np.float32(period) + np.float32(rng.random())
    cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    shape = pattern(x * cos - y * sin, x * sin + y * cos, rng)
    if rng.random() < 0.5:
        shape = 1 - shape
    dark, light = _two_colours(rng)
    image = dark + shape[:, :, None] * (light - dark)
    slope = rng.uniform(-30, 30, 2)
    image += np.linspace(-1, 1, width)[None, :, None] * slope[0] + np.linspace(-1, 1, height)[:, None, None] * slope[1]
    grain = rng.integers(0, 256, (height, width), dtype=np.uint8).astype(np.float32)
    image += ((grain - 127.5) * np.float32(_NOISE / 74))[:, :, None]
    return image.clip(0, 255).astype(np.uint8)


def _two_colours(rng: np.random.Generator) -> tuple[Field, Field]:
    """Two random colours that differ by at least 90 grey levels in brightness, in either order."""
    weights = np.array([0.299, 0.587, 0.114])
    while True:
        first, second = rng.uniform(10, 245, (2, 3))
        if abs((first - second) @ weights) >= 90:
            return first.astype(np.float32), second.astype(np.float32)


def _encode(pixels: Pixels, number: int) -> bytes:
    """Mostly JPEG 4:2:0; every 40th grey, every 97th CMYK, number 13 a PNG (named .JPEG, like one file of ImageNet)."""
    image = Image.fromarray(pixels)
    buffer = io.BytesIO()
    if number == 13:
        image.resize((150, 112)).save(buffer, "PNG")
    elif number % 97 == 96:
        image.convert("CMYK").save(buffer, "JPEG", quality=_QUALITY)
    else:
        (image.convert("L") if number % 40 == 39 else image).save(buffer, "JPEG", quality=_QUALITY)
    return buffer.getvalue()


def _write_image(folder: Path, spec: SampleSpec, place: tuple[str, int, int]) -> None:
    split, label, number = place
    rng = np.random.Generator(np.random.Philox(key=[_SEED, split == "val"], counter=[0, label, number, 0]))
    name = sorted(PATTERNS)[label]
    width, height = _SIZES[int(rng.choice(len(_SIZES), p=_SIZE_SHARES))]
    width, height = round(width * spec.scale), round(height * spec.scale)
    pixels = render(PATTERNS[name], width, height, rng)
    odd = label * spec.train_per_class + number if split == "train" else -1
    (folder / split / name / f"{name}_{number:05d}.JPEG").write_bytes(_encode(pixels, odd))


def write_sample(folder: Path, spec: SampleSpec = SampleSpec(), processes: int | None = None) -> None:
    """Write `folder/{train,val}/<class>/*.JPEG`: the same pixels for any number of processes (None: all cores)."""
    counts = {"train": spec.train_per_class, "val": spec.val_per_class}
    for split in counts:
        for name in PATTERNS:
            (folder / split / name).mkdir(parents=True, exist_ok=True)
    places = [
        (split, label, n) for split, count in counts.items() for label in range(len(PATTERNS)) for n in range(count)
    ]
    write = partial(_write_image, folder, spec)
    for _ in map_in_processes(write, places, processes, description="generating the sample data", unit="image"):
        pass


def ensure_sample(folder: Path, spec: SampleSpec = SampleSpec()) -> Path:
    """Generate the sample if it is missing, and return its folder.

    Safe for several runs and ranks at once: the first one takes a lock, writes a temporary folder and renames it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if _is_current(folder):
        return folder
    with lock_file(folder.parent / f".{folder.name}.lock", waiting_for="the sample data"):
        if _is_current(folder):  # another process was faster
            return folder
        temporary = folder.parent / f".{folder.name}.writing"
        shutil.rmtree(temporary, ignore_errors=True)
        write_sample(temporary, spec)
        (temporary / "VERSION").write_text(VERSION + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    return folder


def _is_current(folder: Path) -> bool:
    marker = folder / "VERSION"
    return marker.is_file() and marker.read_text().strip() == VERSION
