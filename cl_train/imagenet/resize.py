"""A smaller copy of an image folder: same layout and names, one side limited, JPEG.

Decoding is most of the loader's time and grows with the number of pixels, so a smaller copy loads faster. The price: a
second lossy compression, and small crops are enlarged from fewer pixels, so that training images are less sharp.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import simplejpeg

from cl_train.config.schema import ConfigError
from cl_train.data.decode import BadImage, Encoded, read_file
from cl_train.data.folder import EXTENSIONS
from cl_train.data.images import resized
from cl_train.imagenet.output_folder import output_folder
from cl_train.system.process_pool import map_in_processes

_DEFAULT_MAX_SIDE = 400
_CHUNK = 32  # files per task
_SHOWN = 5


@dataclass(frozen=True)
class ImageSize:
    """Longest or shortest side in pixels (one of them is given), and JPEG quality. Images are never enlarged."""

    max_side: int | None
    short_side: int | None
    quality: int


@dataclass
class ResizeReport:
    """`bad`: (path, reason) of the images that cannot be decoded; they are not copied."""

    written: int = 0
    present: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)

    def add(self, other: ResizeReport) -> None:
        self.written += other.written
        self.present += other.present
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out
        self.bad += other.bad

    def __str__(self) -> str:
        sizes = f", {self.bytes_in / 2**20:,.1f} MiB became {self.bytes_out / 2**20:,.1f} MiB" if self.written else ""
        lines = [f"{self.written:,} images written, {self.present:,} existed already{sizes}"]
        if self.bad:
            lines.append(f"{len(self.bad):,} images cannot be decoded and were not copied:")
            lines += [f"  {path}: {reason}" for path, reason in self.bad[:_SHOWN]]
        return "\n".join(lines)


def resize_folder(
    root: Path,
    out: Path,
    max_side: int | None = None,
    short_side: int | None = None,
    quality: int = 90,
    workers: int | None = None,
) -> ResizeReport:
    """Copy every image below `root` to the same name below `out`, smaller, in parallel.

    After an interruption the same call continues: each copy is written to a temporary name, decoded to verify it, and
    then renamed, so that a copy that exists is complete.

    Args:
        max_side: longest side of a copy, pixels; 400 if `short_side` is not given either.
        short_side: shortest side of a copy, pixels.
        workers: processes; None = as many as cores.

    Raises:
        ConfigError: no such folder, `out` inside it, or `out` made with other settings.
        RuntimeError: a worker process died.
    """
    size = ImageSize(max_side or (None if short_side else _DEFAULT_MAX_SIDE), short_side, quality)
    _check(root, out, size)
    total = ResizeReport()
    with output_folder(out, asdict(size)):
        names = _image_names(root)
        chunks = [names[first : first + _CHUNK] for first in range(0, len(names), _CHUNK)]
        resize = partial(_resize_files, root, out, size)
        for report in map_in_processes(resize, chunks, workers, description="resize", unit="img", size=len):
            total.add(report)
    return total


def _check(root: Path, out: Path, size: ImageSize) -> None:
    problems = []
    if size.max_side is not None and size.short_side is not None:
        problems.append("give either max_side or short_side, not both")
    if not root.is_dir():
        problems.append(f"'{root}' is not a folder")
    elif out.resolve().is_relative_to(root.resolve()):
        problems.append(f"out='{out}' lies inside '{root}'")
    if problems:
        raise ConfigError(problems)


def _image_names(root: Path) -> list[str]:
    """Relative to `root`, sorted."""
    found = []
    for folder, folders, files in os.walk(root):
        folders.sort()
        images = (name for name in sorted(files) if name.lower().endswith(EXTENSIONS))
        found += [os.path.relpath(os.path.join(folder, name), root) for name in images]
    return found


def _resize_files(root: Path, out: Path, size: ImageSize, names: list[str]) -> ResizeReport:
    report = ResizeReport()
    for name in names:
        target = out / name
        if target.is_file():
            report.present += 1
            continue
        try:
            data = read_file(root / name)
            copy = _smaller(data, size)
        except BadImage as bad:
            report.bad.append((str(root / name), str(bad)))
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(target.name + ".part")
        temporary.write_bytes(copy)
        temporary.replace(target)
        report.written += 1
        report.bytes_in += len(data)
        report.bytes_out += len(copy)
    return report


def _smaller(data: bytes, size: ImageSize) -> bytes:
    """The image as a JPEG of the wanted size, decoded again to verify it; a small JPEG keeps its bytes."""
    encoded = Encoded(data)
    height, width = encoded.height, encoded.width
    limit, side = (size.max_side, max(height, width)) if size.max_side else (size.short_side, min(height, width))
    assert limit is not None
    pixels = encoded.decode()
    if side > limit:
        smaller = (max(1, round(height * limit / side)), max(1, round(width * limit / side)))
        pixels = resized(pixels, None, smaller)[0].permute(1, 2, 0).numpy()
    elif data.startswith(b"\xff\xd8") and not encoded.needs_pillow:
        return data
    copy: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=size.quality, colorsubsampling="420")
    if simplejpeg.decode_jpeg(copy, strict=True).shape != pixels.shape:
        raise BadImage("the smaller copy does not decode to the size that was written")
    return copy
