"""The sample data: ten classes of textures, generated with ImageNet's layout, file sizes and oddities.

A class is a pattern (stripes, rings, meshes, ...). Its period, place, angle, colours and light differ in every image,
and each pattern looks the same after a flip or in a crop: a small network learns the classes with the usual
augmentation, and neither a constant guess nor the mean colour says anything about them.
"""

from __future__ import annotations

import io
import shutil
import sys
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

VERSION = "5"  # of the images; another version is generated anew
TRAIN_PER_CLASS, VAL_PER_CLASS = 110, 22
_SIZES = ((500, 375), (375, 500), (500, 333), (500, 400), (333, 500), (640, 480), (480, 360), (400, 300), (800, 600))
_SIZE_SHARES = (0.45, 0.13, 0.15, 0.06, 0.05, 0.06, 0.04, 0.04, 0.02)


@dataclass(frozen=True)
class SampleForm:
    """How many images, and what they look like."""

    train_per_class: int = TRAIN_PER_CLASS
    val_per_class: int = VAL_PER_CLASS
    scale: float = 1.0  # of both sides
    quality: int = 90
    noise: float = 11.0  # grain, grey levels; sets the size of the files
    seed: int = 2012


def _wave(x: Field) -> Field:
    """A smooth square wave of period 1."""
    return (0.5 + 0.5 * np.tanh(3 * np.sin(2 * np.pi * x))).astype(np.float32)


def _cell(x: Field, y: Field) -> tuple[Field, Field]:
    """Coordinates from the centre of each unit cell, -0.5 to 0.5."""
    return x - np.floor(x) - 0.5, y - np.floor(y) - 0.5


def _inside(distance: Field) -> Field:
    """1 where the distance is negative, with a soft edge."""
    return (1 / (1 + np.exp(np.clip(distance * 30, -30, 30)))).astype(np.float32)


def _rows(x: Field, y: Field, rng: np.random.Generator) -> Field:
    return _wave(y + np.float32(0.06 * rng.random()) * np.sin(x))


def _columns(x: Field, y: Field, rng: np.random.Generator) -> Field:
    return _wave(x + np.float32(0.06 * rng.random()) * np.sin(y))


def _diagonals(x: Field, y: Field, rng: np.random.Generator) -> Field:
    return _wave((x + np.float32(rng.choice([-1, 1])) * y) * np.float32(0.7))


def _checks(x: Field, y: Field, rng: np.random.Generator) -> Field:
    return _wave(x / 2) + _wave(y / 2) - 2 * _wave(x / 2) * _wave(y / 2)


def _discs(x: Field, y: Field, rng: np.random.Generator) -> Field:
    u, v = _cell(x + np.floor(y) / 2, y)  # every second row is shifted by half a cell
    return _inside(np.sqrt(u * u + v * v) - np.float32(rng.uniform(0.26, 0.32)))


def _rings(x: Field, y: Field, rng: np.random.Generator) -> Field:
    u, v = _cell(x * np.float32(0.7), y * np.float32(0.7))
    return _inside(np.abs(np.sqrt(u * u + v * v) - np.float32(0.33)) - np.float32(0.07))


def _meshes(x: Field, y: Field, rng: np.random.Generator) -> Field:
    u, v = np.abs(np.stack(_cell(x * np.float32(0.8), y * np.float32(0.8))))
    return _inside(np.minimum(u, v) - np.float32(rng.uniform(0.08, 0.12)))


def _mosaic(x: Field, y: Field, rng: np.random.Generator) -> Field:
    """Cells that are on or off by chance; the tile repeats after 64 cells, which no image reaches."""
    tile = (rng.random((64, 64)) < 0.5).astype(np.float32)
    cells = np.floor(np.stack((y, x)) * np.float32(1.5)).astype(np.int64) % 64
    return tile[cells[0], cells[1]]


def _zigzags(x: Field, y: Field, rng: np.random.Generator) -> Field:
    return _wave(y + np.float32(1.4) * np.abs(x / 2 - np.floor(x / 2) - np.float32(0.5)))


def _clouds(x: Field, y: Field, rng: np.random.Generator) -> Field:
    total = np.zeros_like(x + y)
    for angle in rng.uniform(0, np.pi) + np.arange(5) * np.pi / 5 + rng.uniform(-0.2, 0.2, 5):
        along = x * np.float32(np.cos(angle)) + y * np.float32(np.sin(angle))
        total += np.sin(np.float32(2 * np.pi * 0.12) * along + np.float32(rng.uniform(0, 2 * np.pi)))
    return (0.5 + 0.5 * np.tanh(total)).astype(np.float32)


PATTERNS: dict[str, Pattern] = {
    "checks": _checks,
    "clouds": _clouds,
    "columns": _columns,
    "diagonals": _diagonals,
    "discs": _discs,
    "meshes": _meshes,
    "mosaic": _mosaic,
    "rings": _rings,
    "rows": _rows,
    "zigzags": _zigzags,
}


def render(pattern: Pattern, width: int, height: int, rng: np.random.Generator, noise: float) -> Pixels:
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
    image += ((grain - 127.5) * np.float32(noise / 74))[:, :, None]
    return image.clip(0, 255).astype(np.uint8)


def _two_colours(rng: np.random.Generator) -> tuple[Field, Field]:
    """Two random colours that differ by at least 90 grey levels in brightness, in either order."""
    weights = np.array([0.299, 0.587, 0.114])
    while True:
        first, second = rng.uniform(10, 245, (2, 3))
        if abs((first - second) @ weights) >= 90:
            return first.astype(np.float32), second.astype(np.float32)


def _encode(pixels: Pixels, number: int, quality: int) -> bytes:
    """Mostly JPEG 4:2:0; each 40th grey, each 97th CMYK, number 13 a PNG (named .JPEG, as one is in ImageNet)."""
    image = Image.fromarray(pixels)
    buffer = io.BytesIO()
    if number == 13:
        image.resize((150, 112)).save(buffer, "PNG")
    elif number % 97 == 96:
        image.convert("CMYK").save(buffer, "JPEG", quality=quality)
    else:
        (image.convert("L") if number % 40 == 39 else image).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _write_image(folder: Path, form: SampleForm, job: tuple[str, int, int]) -> None:
    split, label, number = job
    rng = np.random.Generator(np.random.Philox(key=[form.seed, split == "val"], counter=[0, label, number, 0]))
    name = sorted(PATTERNS)[label]
    width, height = _SIZES[int(rng.choice(len(_SIZES), p=_SIZE_SHARES))]
    width, height = round(width * form.scale), round(height * form.scale)
    pixels = render(PATTERNS[name], width, height, rng, form.noise)
    odd = label * form.train_per_class + number if split == "train" else -1
    (folder / split / name / f"{name}_{number:05d}.JPEG").write_bytes(_encode(pixels, odd, form.quality))


def write_sample(folder: Path, form: SampleForm = SampleForm(), processes: int | None = None) -> None:
    """Write `folder/{train,val}/<class>/*.JPEG`: the same pixels for the same form, for any number of processes."""
    jobs = []
    for split, count in (("train", form.train_per_class), ("val", form.val_per_class)):
        for label, name in enumerate(sorted(PATTERNS)):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            jobs += [(split, label, number) for number in range(count)]
    for _ in map_in_processes(partial(_write_image, folder, form), jobs, processes, description="sample", unit="img"):
        pass


def ensure_sample(folder: Path, form: SampleForm = SampleForm()) -> Path:
    """Generate the sample if it is missing; returns its folder. Safe for several runs and ranks at once."""
    marker = folder / "VERSION"
    if _is_current(marker):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(folder.parent / f".{folder.name}.lock", waiting_for="the sample data"):
        if _is_current(marker):  # another process was faster
            return folder
        print(f"Generating the sample data in {folder}", file=sys.stderr, flush=True)
        temporary = folder.parent / f".{folder.name}.writing"
        shutil.rmtree(temporary, ignore_errors=True)
        write_sample(temporary, form)
        (temporary / "VERSION").write_text(VERSION + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    return folder


def _is_current(marker: Path) -> bool:
    return marker.is_file() and marker.read_text().strip() == VERSION
