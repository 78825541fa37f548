"""Check a folder of images: counts, classes, files that are not images; with `deep` every image is decoded."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cl_train.config.schema import ConfigError
from cl_train.data.decode import JPEG_MAGIC, PNG_MAGIC, BadImage, Encoded, read_file
from cl_train.data.folder import EXTENSIONS, why_no_image
from cl_train.data.source import listed
from cl_train.imagenet.archives import CLASSES, DONE, TRAIN_IMAGES, VAL_IMAGES, done_count
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
class _Class:
    """One class folder. bad: files with the reason. missing: files deleted since the folder was created."""

    name: str
    images: int
    bad: list[str]
    missing: int


def verify(root: Path, *, deep: bool = False, official_counts: bool = True, workers: int | None = None) -> Report:
    """Check `root/train` and `root/val`.

    Args:
        deep: decode every image.
        official_counts: 1,000 classes, 1,281,167 and 50,000 images are expected.
        workers: processes; None = as many as cores.

    Raises ConfigError if there is no such folder, RuntimeError if a worker process died.
    """
    absent = [name for name in ("train", "val") if not (root / name).is_dir()]
    if absent:
        raise ConfigError([f"'{root}' has no folder '{name}'" for name in absent])
    found: dict[str, list[_Class]] = {}
    for split in ("train", "val"):
        entries = os.scandir(root / split)
        paths = sorted(entry.path for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        check = partial(_check_class, deep=deep)
        found[split] = list(map_in_processes(check, paths, workers, description=split, unit="class"))
    images = {split: sum(item.images for item in of_split) for split, of_split in found.items()}
    classes = {split: len(of_split) for split, of_split in found.items()}
    return Report(images, classes, list(_problems(found, images, official_counts)))


def _check_class(path: str, deep: bool) -> _Class:
    images, bad = 0, []
    for folder, folders, names in os.walk(path):
        folders.sort()
        for file in (os.path.join(folder, name) for name in sorted(names) if name != DONE):
            if reason := _why_unusable(file, deep):
                bad.append(f"{file}: {reason}")
            else:
                images += 1
    return _Class(os.path.basename(path), images, bad, max(0, (done_count(Path(path)) or 0) - images - len(bad)))


def _why_unusable(path: str, deep: bool) -> str | None:
    if not path.lower().endswith(EXTENSIONS):
        return f"its name does not end in {', '.join(EXTENSIONS)}"
    if not deep:
        return why_no_image(path, (JPEG_MAGIC, PNG_MAGIC))
    try:
        Encoded(read_file(path)).decode()
    except BadImage as error:
        return str(error)
    return None


def _problems(found: dict[str, list[_Class]], images: dict[str, int], official_counts: bool) -> Iterator[str]:
    names = {split: {item.name for item in classes} for split, classes in found.items()}
    for split, other, official in (("train", "val", TRAIN_IMAGES), ("val", "train", VAL_IMAGES)):
        classes = found[split]
        if official_counts and (len(classes), images[split]) != (CLASSES, official):
            official_text = f"ILSVRC2012 has {official:,} in {CLASSES:,} (another data set: expect=any)"
            yield f"{split}: {images[split]:,} images in {len(classes):,} classes; {official_text}"
        if only := sorted(names[split] - names[other]):
            yield f"{len(only)} classes are in {split} only: {listed(only)}"
        if empty := [item.name for item in classes if not item.images]:
            yield f"{split}: {len(empty)} classes have no image: {listed(empty)}"
        if lost := [item for item in classes if item.missing]:
            count = sum(item.missing for item in lost)
            yield f"{split}: {count} files were deleted after unpacking, for example in {lost[0].name}"
        if bad := [file for item in classes for file in item.bad]:
            yield "\n  ".join([f"{split}: {len(bad)} files are not usable images:", *bad[:_SHOWN]])
