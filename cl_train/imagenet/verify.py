"""Check a folder of images: counts, classes, files that are no images; with `deep` every image is decoded."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cl_train.config.schema import ConfigError
from cl_train.data.decode import JPEG_MAGIC, BadImage, Encoded, read_file
from cl_train.data.folder import EXTENSIONS
from cl_train.imagenet.archives import CLASSES, DONE, TRAIN_IMAGES, VAL_IMAGES, done_count
from cl_train.system.process_pool import map_in_processes

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_SHOWN = 10


@dataclass
class ClassReport:
    """What was found in one class folder."""

    name: str
    images: int = 0
    png_named_jpeg: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)  # (path, reason)
    missing: int = 0  # files that have gone since the folder was made


@dataclass
class Report:
    """Counts by split, and what was found wrong: `problems` is empty if there is nothing."""

    images: dict[str, int]
    classes: dict[str, int]
    bad: list[tuple[str, str]]
    problems: list[str]
    notes: list[str]

    def __str__(self) -> str:
        counts = [f"{name}: {n:,} images in {self.classes[name]:,} classes" for name, n in self.images.items()]
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([*counts, *notes, *self.problems, f"{len(self.problems)} problems found"])


def verify(root: Path, *, deep: bool = False, official_counts: bool = True, workers: int | None = None) -> Report:
    """Check `root/train` and `root/val`.

    Args:
        deep: decode every image.
        official_counts: 1,000 classes, 1,281,167 and 50,000 images are expected.
        workers: processes; None = as many as cores.

    Raises:
        ConfigError: there is no such folder.
        RuntimeError: a worker process died.
    """
    absent = [name for name in ("train", "val") if not (root / name).is_dir()]
    if absent:
        raise ConfigError([f"'{root}' has no folder '{name}'" for name in absent])
    reports: dict[str, list[ClassReport]] = {}
    for split in ("train", "val"):
        entries = os.scandir(root / split)
        paths = sorted(entry.path for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        check = partial(check_class, deep=deep)
        reports[split] = list(map_in_processes(check, paths, workers, description=split, unit="class"))
    images = {split: sum(report.images for report in found) for split, found in reports.items()}
    classes = {split: len(found) for split, found in reports.items()}
    every = [report for found in reports.values() for report in found]
    bad = [item for report in every for item in report.bad]
    problems = _class_problems(reports) + (_count_problems(images, classes) if official_counts else [])
    if bad:
        listed = [f"  {path}: {why}" for path, why in bad[:_SHOWN]]
        more = [f"  ... and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
        problems.append("\n".join([f"{len(bad)} files are not usable images:", *listed, *more]))
    pngs = sum(report.png_named_jpeg for report in every)
    notes = (
        [f"{pngs} PNG files are named .JPEG (ImageNet has one, n02105855_2933); they can be decoded"] if pngs else []
    )
    return Report(images, classes, bad, problems, notes)


def check_class(path: str, deep: bool = False) -> ClassReport:
    """Check every file below a class folder."""
    report = ClassReport(os.path.basename(path))
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            if name == DONE:
                continue
            file = os.path.join(folder, name)
            reason = _fault_of(file, deep, report)
            if reason is None:
                report.images += 1
            else:
                report.bad.append((file, reason))
    report.missing = max(0, (done_count(Path(path)) or 0) - report.images - len(report.bad))
    return report


def _fault_of(path: str, deep: bool, report: ClassReport) -> str | None:
    """Why a file is not a usable image; None if it is one."""
    if not path.lower().endswith(EXTENSIONS):
        return f"its name does not end in {', '.join(EXTENSIONS)}"
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
        incomplete = [report for report in reports[split] if report.missing]
        if incomplete:
            count = sum(report.missing for report in incomplete)
            problems.append(f"{split}: {count} files were deleted after unpacking, for example in {incomplete[0].name}")
    return problems


def _count_problems(images: dict[str, int], classes: dict[str, int]) -> list[str]:
    advice = "for another data set, use expect=any"
    problems = []
    for split, expected in (("train", TRAIN_IMAGES), ("val", VAL_IMAGES)):
        if classes[split] != CLASSES:
            problems.append(f"{split}: {classes[split]:,} classes; ILSVRC2012 has {CLASSES:,} ({advice})")
        if images[split] != expected:
            problems.append(f"{split}: {images[split]:,} images; ILSVRC2012 has {expected:,} ({advice})")
    return problems
