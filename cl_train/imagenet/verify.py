"""Check a folder of images: counts, classes, files that are not images; with `deep` every image is decoded."""

import os
from functools import partial
from pathlib import Path

from cl_train.config.schema import ConfigError
from cl_train.data.decode import JPEG_MAGIC, PNG_MAGIC, BadImage, Encoded, read_file
from cl_train.data.folder import EXTENSIONS, files_below
from cl_train.data.source import listed
from cl_train.system.processes import map_in_processes

CLASSES, TRAIN_IMAGES, VAL_IMAGES = 1000, 1_281_167, 50_000
_SHOWN = 10


def verify(
    root: Path, *, deep: bool = False, expect: str = "imagenet", workers: int | None = None
) -> tuple[list[str], list[str]]:
    """Check `root/train` and `root/val`, for the numbers of ImageNet or `expect="any"`; `deep` decodes every image.

    Returns a line for each split, and the problems. Raises ConfigError: a folder cannot be read; RuntimeError: a worker
    process died.
    """
    absent = [name for name in ("train", "val") if not (root / name).is_dir()]
    if absent:
        raise ConfigError([f"'{root}' has no folder '{name}'" for name in absent])
    found: dict[str, dict[str, tuple[int, list[str]]]] = {}  # by split and class: images; other files, with the reason
    for split in ("train", "val"):
        names = sorted(entry.name for entry in os.scandir(root / split) if entry.is_dir() and entry.name[0] != ".")
        check = partial(_check_class, root / split, deep)
        results = map_in_processes(check, names, workers, description=split, unit="class")
        found[split] = dict(zip(names, results, strict=True))
    lines, problems = [], []
    for split, other, official in (("train", "val", TRAIN_IMAGES), ("val", "train", VAL_IMAGES)):
        classes = found[split]
        images = sum(count for count, _ in classes.values())
        lines.append(f"{split}: {images:,} images in {len(classes):,} classes")
        if expect == "imagenet" and (len(classes), images) != (CLASSES, official):
            problems.append(f"{lines[-1]}; ILSVRC2012 has {official:,} in {CLASSES:,} (another data set: expect=any)")
        if only := sorted(classes.keys() - found[other]):
            problems.append(f"{len(only)} classes are in {split} only: {listed(only)}")
        if empty := [name for name, (count, _) in classes.items() if not count]:
            problems.append(f"{split}: {len(empty)} classes have no image: {listed(empty)}")
        if bad := [file for _, files in classes.values() for file in files]:
            problems.append("\n  ".join([f"{split}: {len(bad)} files are not usable images:", *bad[:_SHOWN]]))
    return lines, problems


def _check_class(folder: Path, deep: bool, name: str) -> tuple[int, list[str]]:
    images, bad = 0, []
    for below, names in files_below(str(folder / name)):
        for path in (os.path.join(below, name) for name in names if not name.startswith(".")):
            try:
                if not path.lower().endswith(EXTENSIONS):
                    raise BadImage(f"its name does not end in {', '.join(EXTENSIONS)}")
                if deep:
                    Encoded(read_file(path)).decode()
                elif not read_file(path, first=8).startswith((JPEG_MAGIC, PNG_MAGIC)):
                    raise BadImage("not an image: its first bytes are of another format")
                images += 1
            except BadImage as error:
                bad.append(f"{path}: {error}")
    return images, sorted(bad)
