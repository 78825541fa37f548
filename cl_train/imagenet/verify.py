"""Check a folder of images: counts, classes, files that are not images; with `deep` every image is decoded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cl_train.config.schema import ConfigError
from cl_train.data.decode import JPEG_MAGIC, BadImage, Encoded, read_file
from cl_train.data.file_check import why_no_image
from cl_train.data.folder import EXTENSIONS
from cl_train.imagenet.archives import CLASSES, DONE, TRAIN_IMAGES, VAL_IMAGES, done_count
from cl_train.imagenet.shards import PNG_MAGIC
from cl_train.system.process_pool import map_in_processes

_SHOWN = 10


@dataclass
class Report:
    """Counts by split, and the problems that were found."""

    images: dict[str, int]
    classes: dict[str, int]
    problems: list[str]

    def __str__(self) -> str:
        counts = [f"{name}: {n:,} images in {self.classes[name]:,} classes" for name, n in self.images.items()]
        return "\n".join([*counts, *self.problems, f"{len(self.problems)} problems found"])


@dataclass(frozen=True)
class ClassReport:
    """One class folder. bad: (path, reason). missing: files deleted since the folder was created."""

    name: str
    images: int
    bad: list[tuple[str, str]]
    missing: int


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
    return Report(images, classes, _problems(reports, official_counts))


def check_class(path: str, deep: bool = False) -> ClassReport:
    """Check every file below a class folder."""
    images, bad = 0, []
    for folder, folders, names in os.walk(path):
        folders.sort()
        for file in (os.path.join(folder, name) for name in sorted(names) if name != DONE):
            if reason := _why_unusable(file, deep):
                bad.append((file, reason))
            else:
                images += 1
    return ClassReport(os.path.basename(path), images, bad, max(0, (done_count(Path(path)) or 0) - images - len(bad)))


def _why_unusable(path: str, deep: bool) -> str | None:
    if not path.lower().endswith(EXTENSIONS):
        return f"its name does not end in {', '.join(EXTENSIONS)}"
    try:
        if deep:
            Encoded(read_file(path)).decode()
            return None
    except BadImage as error:
        return str(error)
    return why_no_image(path, (JPEG_MAGIC, PNG_MAGIC))


def _problems(reports: dict[str, list[ClassReport]], official_counts: bool) -> list[str]:
    problems = []
    names = {split: {report.name for report in found} for split, found in reports.items()}
    for split, other, official in (("train", "val", TRAIN_IMAGES), ("val", "train", VAL_IMAGES)):
        found = reports[split]
        images = sum(report.images for report in found)
        if official_counts and (len(found), images) != (CLASSES, official):
            official_text = f"ILSVRC2012 has {official:,} in {CLASSES:,} (another data set: expect=any)"
            problems.append(f"{split}: {images:,} images in {len(found):,} classes; {official_text}")
        if only := sorted(names[split] - names[other]):
            problems.append(f"{len(only)} classes are in {split} only: {', '.join(only[:_SHOWN])}")
        if empty := [report.name for report in found if not report.images]:
            problems.append(f"{split}: {len(empty)} classes have no image: {', '.join(empty[:_SHOWN])}")
        if lost := [report for report in found if report.missing]:
            count = sum(report.missing for report in lost)
            problems.append(f"{split}: {count} files were deleted after unpacking, for example in {lost[0].name}")
        if bad := [item for report in found for item in report.bad]:
            listed = [f"\n  {path}: {reason}" for path, reason in bad[:_SHOWN]]
            problems.append(f"{split}: {len(bad)} files are not usable images:{''.join(listed)}")
    return problems
