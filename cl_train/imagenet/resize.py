"""A smaller copy of an image folder: same layout and names, longer or shorter side limited, JPEG again.

Decoding is most of the loader's time and grows with the pixels and bytes, so a smaller copy loads faster. Price: a
second lossy compression, and small crops are enlarged from fewer pixels than before: augmentation is softer.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from tqdm import tqdm

from cl_train.config.schema import ConfigError, setting
from cl_train.data.decode import BadImage, Encoded, read_file
from cl_train.data.folder import SUFFIXES
from cl_train.data.images import resized

_RECORD = ".resize.json"
_TEMPORARY = ".part"
_DEFAULT_MAX_SIDE = 400
_CHUNK = 32  # files per task
_SHOWN = 5


@dataclass
class ResizeSettings:
    """What `python scripts/prepare_imagenet.py resize` takes."""

    root: str | None = setting(None, "folder with the images")
    out: str | None = setting(None, "folder for the copies; made if it is missing")
    max_side: int | None = setting(None, "longest side of a copy, pixels; 400 if short_side is not given", minimum=8)
    short_side: int | None = setting(None, "shortest side of a copy, pixels", minimum=8)
    quality: int = setting(90, "JPEG quality of the copies", minimum=1, maximum=100)
    workers: int | None = setting(None, "processes; null = all cores", minimum=1)


@dataclass(frozen=True)
class ResizeForm:
    """What the copies look like: exactly one of the two sides is given, pixels. Images are never enlarged."""

    max_side: int | None
    short_side: int | None
    quality: int


@dataclass
class ResizeReport:
    """What was done. `bad`: (path, reason) of images that could not be decoded; they are left out of the copy."""

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
        lines = [f"{self.written:,} images written, {self.present:,} were there already{sizes}"]
        if self.bad:
            lines.append(f"left out, because they cannot be decoded: {len(self.bad):,}")
            lines += [f"  {path}: {reason}" for path, reason in self.bad[:_SHOWN]]
        return "\n".join(lines)


def resize_folder(
    root: str | Path | None,
    out: str | Path | None,
    max_side: int | None = None,
    short_side: int | None = None,
    quality: int = 90,
    workers: int | None = None,
) -> ResizeReport:
    """Copy every image below `root` to the same name below `out`, smaller and in parallel; see ResizeSettings.

    Resumable: a copy that is there is complete, since each is written to a temporary name, decoded once to verify it,
    and then renamed.

    Raises:
        ConfigError: no such root, `out` inside it, or `out` made with other settings.
    """
    if root is None or out is None:
        raise ConfigError("give root=FOLDER (the images) and out=FOLDER (for the copies)")
    if max_side is None and short_side is None:
        max_side = _DEFAULT_MAX_SIDE
    source, target, form = Path(root).expanduser(), Path(out).expanduser(), ResizeForm(max_side, short_side, quality)
    _check(source, target, form)
    target.mkdir(parents=True, exist_ok=True)
    (target / _RECORD).write_text(json.dumps(asdict(form)) + "\n")
    names = list(_image_names(source))
    chunks = (names[first : first + _CHUNK] for first in range(0, len(names), _CHUNK))
    return _run(
        lambda chunk: (source, target, chunk, form), chunks, len(names), workers or len(os.sched_getaffinity(0))
    )


def _run(arguments: Callable[[list[str]], Any], chunks: Iterator[list[str]], images: int, count: int) -> ResizeReport:
    total = ResizeReport()
    running: set[Future[ResizeReport]] = set()
    with (
        warnings.catch_warnings(),
        ProcessPoolExecutor(count, multiprocessing.get_context("fork")) as pool,
        tqdm(total=images, unit="img", disable=None) as bar,
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # fork of a threaded process; the children only transcode
        while True:
            for chunk in islice(chunks, max(0, 4 * count - len(running))):
                running.add(pool.submit(_resize_files, *arguments(chunk)))
            if not running:
                return total
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                report = future.result()
                bar.update(report.written + report.present + len(report.bad))
                total.add(report)


def _check(source: Path, target: Path, form: ResizeForm) -> None:
    problems = []
    if form.max_side is not None and form.short_side is not None:
        problems.append("give either max_side or short_side, not both")
    if not source.is_dir():
        problems.append(f"'{source}' is not a folder")
    elif target.resolve().is_relative_to(source.resolve()):
        problems.append(f"the target '{target}' lies inside the source '{source}'")
    record = target / _RECORD
    if record.is_file() and json.loads(record.read_text()) != asdict(form):
        problems.append(f"'{target}' was made with other settings: {record.read_text().strip()}; choose another target")
    if problems:
        raise ConfigError(problems)


def _image_names(source: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(source):
        folders.sort()
        for name in sorted(files):
            if name.lower().endswith(SUFFIXES):
                yield os.path.relpath(os.path.join(folder, name), source)


def _resize_files(source: Path, target: Path, names: list[str], form: ResizeForm) -> ResizeReport:
    torch.set_num_threads(1)
    report = ResizeReport()
    for name in names:
        out = target / name
        if out.is_file():
            report.present += 1
            continue
        try:
            data = read_file(source / name)
            copy = _smaller(data, form)
        except BadImage as bad:
            report.bad.append((str(source / name), str(bad)))
            continue
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.with_name(out.name + _TEMPORARY)
        temporary.write_bytes(copy)
        temporary.replace(out)
        report.written += 1
        report.bytes_in += len(data)
        report.bytes_out += len(copy)
    return report


def _smaller(data: bytes, form: ResizeForm) -> bytes:
    """The image as a JPEG of the wanted size, decoded again to verify it; a small JPEG keeps its bytes."""
    encoded = Encoded(data)
    height, width = encoded.height, encoded.width
    limit, side = (form.max_side, max(height, width)) if form.max_side else (form.short_side, min(height, width))
    assert limit is not None
    pixels = encoded.decode()
    if side <= limit:
        if data.startswith(b"\xff\xd8") and encoded.simple:
            return data
    else:
        size = (max(1, round(height * limit / side)), max(1, round(width * limit / side)))
        pixels = resized(pixels, None, size)[0].permute(1, 2, 0).numpy()
    copy: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=form.quality, colorsubsampling="420")
    again = simplejpeg.decode_jpeg(copy, strict=True)
    if again.shape != pixels.shape:
        raise BadImage("the smaller copy does not decode to the size that was written")
    return copy
