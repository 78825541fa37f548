"""Check a folder of images: counts, classes, files that are not images; with `deep` every image is decoded."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cl_train.config.schema import ConfigError
from cl_train.data.decode import JPEG_MAGIC, PNG_MAGIC, BadImage, Encoded, read_file
from cl_train.data.folder import EXTENSIONS, files_below
from cl_train.data.source import listed
from cl_train.system.processes import map_in_processes

CLASSES, TRAIN_IMAGES, VAL_IMAGES = 1000, 1_281_167, 50_000
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
    """One class folder. bad: files with the reason."""

    name: str
    images: int
    bad: list[str]


def verify(root: Path, *, deep: bool = False, official_counts: bool = True, workers: int | None = None) -> Report:
    """Check `root/train` and `root/val`.

    Args:
        deep: decode every image.
        official_counts: 1,000 classes, 1,281,167 and 50,000 images are expected.
        workers: processes; None = as many as cores.

    Raises ConfigError if there is no such folder or one cannot be read, RuntimeError if a worker process died.
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
    for folder, names in files_below(path):
        for file in (os.path.join(folder, name) for name in names if not name.startswith(".")):
            try:
                _check_image(file, deep)
                images += 1
            except BadImage as error:
                bad.append(f"{file}: {error}")
    return _Class(os.path.basename(path), images, sorted(bad))


def _check_image(path: str, deep: bool) -> None:
    if not path.lower().endswith(EXTENSIONS):
        raise BadImage(f"its name does not end in {', '.join(EXTENSIONS)}")
    if deep:
        Encoded(read_file(path)).decode()
    elif not read_file(path, first=8).startswith((JPEG_MAGIC, PNG_MAGIC)):
        raise BadImage("not an image: its first bytes are of another format")


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
        if bad := [file for item in classes for file in item.bad]:
            yield "\n  ".join([f"{split}: {len(bad)} files are not usable images:", *bad[:_SHOWN]])
