"""Output folders that repeated calls complete, and the check of a folder's counts and files."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cl_train.config.fields import suggest_path
from cl_train.config.schema import IMAGE_FORMATS
from cl_train.data.decode import JPEG_MAGIC, PNG_MAGIC, BadImage, EncodedImage, read_file
from cl_train.data.images import EXTENSIONS, VAL_NAMES, class_names, listed
from cl_train.data.walk import files_below
from cl_train.errors import ConfigError
from cl_train.system.files import claim_output, lock_file, read_json, replacing, write_json
from cl_train.system.processes import map_in_processes
from cl_train.system.tables import counted

CLASSES, IMAGES = 1000, {"train": 1_281_167, "val": 50_000}
SHOWN = 10  # bad files
_MAGIC = (JPEG_MAGIC, PNG_MAGIC, b"RIFF", b"BM", b"II*\0", b"MM\0*")  # WebP, BMP, TIFF
SETTINGS, _LOCK = ".settings.json", ".settings.lock"


@contextmanager
def resumable_folder(
    out: Path, settings: dict[str, Any], *, overwrite: bool, outside: Sequence[Path] = ()
) -> Iterator[None]:
    """Creates and locks `out` for the block; calls with the same settings go on in it. A file with
    its final name is whole. Raises ConfigError: `out` was started with other settings, holds files
    of something else without `overwrite`, or lies in one of the folders `outside`, which are read.
    """
    for folder in outside:
        if out.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"out={out} lies inside '{folder}', which is read: give another")
    record = out / SETTINGS
    claim_output(out, overwrite=overwrite, markers=(SETTINGS, _LOCK))
    with lock_file(out / _LOCK, waiting_for=str(out)):
        is_started = {*os.listdir(out)} - {SETTINGS, _LOCK} and record.is_file()
        start = read_json(record) if is_started else settings
        changed = [f"{key}={start.get(key)}" for key in settings if start.get(key) != settings[key]]
        if changed:
            what = f"out={out} was started with {', '.join(changed)}"
            raise ConfigError(f"{what}: give another folder")
        write_json(record, settings)
        yield


def write_image(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name, which a repeated call uses again, and renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, path.with_name(f".{path.name}.part")) as temporary:
        temporary.write_bytes(data)


def verify(
    root: Path,
    *,
    deep: bool = False,
    expect: str = "imagenet",
    extensions: Sequence[str] = EXTENSIONS,
    workers: int | None = None,
) -> tuple[list[str], list[str]]:
    """Checks the images of a folder of classes, for the numbers of ImageNet or `expect="any"`;
    `deep` decodes every image. Returns a line for each split, and the problems. Raises ConfigError:
    a folder cannot be read; RuntimeError: a worker process died.
    """
    folders = _split_folders(root, expect)
    # By split and class: the number of images; other files, with the reason.
    contents: dict[str, dict[str, tuple[int, list[str]]]] = {}
    for split, folder in folders.items():
        names = class_names(folder)
        check = partial(_check_class, folder, deep, extensions)
        results = map_in_processes(check, names, workers, description=split, unit="class")
        contents[split] = dict(zip(names, results, strict=True))
    lines, problems = [], []
    for split, classes in contents.items():
        images = sum(count for count, _ in classes.values())
        lines.append(f"{split}: {images:,} images in {len(classes):,} classes")
        if expect == "imagenet" and (len(classes), images) != (CLASSES, IMAGES[split]):
            expected = f"ILSVRC2012 has {IMAGES[split]:,} in {CLASSES:,}"
            problems.append(f"{lines[-1]}; {expected} (another data set: expect=any)")
        for other in contents:
            if only := sorted(classes.keys() - contents[other]):
                problems.append(f"{counted(len(only), 'class')} in {split} only: {listed(only)}")
        if empty := [name for name, (count, _) in classes.items() if not count]:
            problems.append(
                f"{split}: {counted(len(empty), 'class')} without an image: {listed(empty)}"
            )
        if bad := [file for _, files in classes.values() for file in files]:
            title = f"{split}: not usable as images: {counted(len(bad), 'file')}"
            skip = "remove them, or train with data.on_bad_image=skip"
            problems.append("\n  ".join([title, *bad[:SHOWN], skip]))
    return lines, problems


def _split_folders(root: Path, expect: str) -> dict[str, Path]:
    """Returns the folder of each split; `root` itself if it holds classes. Raises ConfigError:
    ImageNet lacks one.
    """
    if not root.is_dir():
        raise ConfigError(f"data.root '{root}' is not a folder{suggest_path(root)}")
    names = ("train", "val") if expect == "imagenet" else ("train", *VAL_NAMES)
    splits = {name: root / name for name in names if (root / name).is_dir()}
    if expect == "imagenet" and len(splits) < 2:
        absent = [name for name in names if name not in splits]
        advice = "(another data set: expect=any)"
        raise ConfigError([f"'{root}' has no folder '{name}' {advice}" for name in absent])
    return splits or {root.name: root}


def _check_class(
    folder: Path, deep: bool, extensions: Sequence[str], name: str
) -> tuple[int, list[str]]:
    found = files_below(folder / name, extensions)
    reason = f"its name does not end in {', '.join(extensions)}"
    images, bad = 0, [f"{folder / name / other}: {reason}" for other in found.others]
    formats = tuple(dict.fromkeys(IMAGE_FORMATS[extension.lower()] for extension in extensions))
    for image in found.images:
        path = folder / name / os.fsdecode(image)
        try:
            if deep:
                EncodedImage(read_file(path), formats=formats).decode()
            elif not read_file(path, first=8).startswith(_MAGIC):
                raise BadImage("not an image: its first bytes are of another format")
            images += 1
        except BadImage as error:
            bad.append(f"{path}: {error}")
    return images, sorted(bad)
