"""Is a folder of images what it should be? Counts, classes, and files that are no images; `deep` decodes them all."""

from __future__ import annotations

import multiprocessing
import os
import stat
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from cl_train.config.schema import ConfigError, setting
from cl_train.data.decode import JPEG_MAGIC, BadImage, Encoded, read_file
from cl_train.data.folder import SUFFIXES
from cl_train.imagenet.archives import CLASSES, DONE, TRAIN_IMAGES, VAL_IMAGES

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_SHOWN = 10


@dataclass
class VerifySettings:
    """python scripts/prepare_imagenet.py verify root=/datasets/imagenet [--deep]"""

    root: str = setting("", "folder that holds train/ and val/")
    deep: bool = setting(False, "decode every image (--deep): about 10 minutes per core and 600,000 images")
    expect: str = setting("imagenet", "the official counts, or any", choices=("imagenet", "any"))
    workers: int | None = setting(None, "processes; null = all cores", minimum=1)


@dataclass
class ClassReport:
    """One class folder."""

    name: str
    images: int = 0
    png_named_jpeg: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)  # path, why
    missing: int = 0  # of the number that the marker of prepare_imagenet tells


@dataclass
class Report:
    """What was found; `problems` is empty where all is well."""

    images: dict[str, int]
    classes: dict[str, int]
    bad: list[tuple[str, str]]
    problems: list[str]
    notes: list[str]


def verify(settings: VerifySettings) -> Report:
    """Check `root/train` and `root/val`.

    Raises:
        ConfigError: there is no such folder, or a worker died (by a signal: out of memory, or a decoder's bug).
    """
    root = Path(settings.root)
    absent = [name for name in ("train", "val") if not settings.root or not (root / name).is_dir()]
    if absent:
        raise ConfigError([f"root={settings.root}: has no folder '{name}'" for name in absent])
    reports = {split: _check_split(root / split, settings) for split in ("train", "val")}
    images = {split: sum(report.images for report in found) for split, found in reports.items()}
    classes = {split: len(found) for split, found in reports.items()}
    bad = [item for found in reports.values() for report in found for item in report.bad]
    problems = _class_problems(reports)
    if settings.expect == "imagenet":
        problems += _count_problems(images, classes)
    if bad:
        listed = [f"{path}: {why}" for path, why in bad[:_SHOWN]]
        more = [f"... and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
        problems += [f"{len(bad)} files are no usable images:", *(f"  {line}" for line in listed + more)]
    pngs = sum(report.png_named_jpeg for found in reports.values() for report in found)
    notes = [f"{pngs} PNG named .JPEG (ImageNet has one, n02105855_2933): decoded all the same"] if pngs else []
    return Report(images, classes, bad, problems, notes)


def _check_split(folder: Path, settings: VerifySettings) -> list[ClassReport]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    check = partial(check_class, deep=settings.deep)
    paths = [str(folder / name) for name in names]
    context = multiprocessing.get_context("fork")
    reports = []
    with ProcessPoolExecutor(
        settings.workers or os.cpu_count(), context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        try:
            for report in tqdm(pool.map(check, paths), desc=folder.name, total=len(paths), unit="class", disable=None):
                reports.append(report)
        except BrokenProcessPool:
            raise ConfigError(
                f"a worker died while it checked {folder} after class {reports[-1].name if reports else 'none'}: "
                "out of memory? Try workers=1"
            ) from None
    return reports


def check_class(path: str, deep: bool = False) -> ClassReport:
    """Look at every file below a class folder."""
    report = ClassReport(os.path.basename(path))
    for file in _files_below(path):
        reason = _fault_of(file, deep, report)
        if reason is not None:
            report.bad.append((file, reason))
        else:
            report.images += 1
    try:
        with open(os.path.join(path, DONE), encoding="ascii") as marker:
            report.missing = max(0, int(marker.read()) - report.images - len(report.bad))
    except (OSError, ValueError):
        pass  # made by another program
    return report


def _files_below(folder: str) -> list[str]:
    found = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            found += _files_below(entry.path)
        elif entry.name != DONE:
            found.append(entry.path)
    return found


def _fault_of(path: str, deep: bool, report: ClassReport) -> str | None:
    """Why a file is no usable image; None where it is one."""
    if not path.lower().endswith(SUFFIXES):
        return f"not named like an image ({', '.join(SUFFIXES)})"
    try:
        if deep:
            data = read_file(path)
            Encoded(data).decode()
            start = data[:8]
        else:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                return "not a regular file"
            if status.st_size == 0:
                return "the file is empty"
            with open(path, "rb", buffering=0) as file:
                start = file.read(8)
    except BadImage as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    if start == _PNG_MAGIC:
        report.png_named_jpeg += not path.lower().endswith(".png")
    elif not start.startswith(JPEG_MAGIC):
        return "neither a JPEG nor a PNG"
    return None


def _class_problems(reports: dict[str, list[ClassReport]]) -> list[str]:
    problems = []
    names = {split: {report.name for report in found} for split, found in reports.items()}
    for split, other in (("train", "val"), ("val", "train")):
        only = sorted(names[split] - names[other])
        if only:
            problems.append(f"{len(only)} classes are in {split} only: {', '.join(only[:_SHOWN])}")
        empty = [report.name for report in reports[split] if not report.images]
        if empty:
            problems.append(f"{split}: {len(empty)} classes have no image: {', '.join(empty[:_SHOWN])}")
        gone = [report for report in reports[split] if report.missing]
        if gone:
            count = sum(report.missing for report in gone)
            problems.append(f"{split}: {count} files are gone since they were unpacked, such as from {gone[0].name}")
    return problems


def _count_problems(images: dict[str, int], classes: dict[str, int]) -> list[str]:
    expected = {"train": TRAIN_IMAGES, "val": VAL_IMAGES}
    advice = "another data set? expect=any"
    problems = [
        f"{split}: {found:,} classes, ILSVRC2012 has {CLASSES:,} ({advice})"
        for split, found in classes.items()
        if found != CLASSES
    ]
    problems += [
        f"{split}: {images[split]:,} images, ILSVRC2012 has {count:,} ({advice})"
        for split, count in expected.items()
        if images[split] != count
    ]
    return problems
