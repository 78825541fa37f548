"""Folders of images: `root/train/<class>/*` and `root/val/<class>/*`, or one folder of classes that is split in two."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cl_train.config.schema import ConfigError
from cl_train.data import folder_index
from cl_train.data.decode import FORMATS, read_file
from cl_train.data.source import ImageSource, Indices, listed

VAL_NAMES = ("val", "valid", "validation", "test")
EXTENSIONS = (".jpg", ".jpeg", ".png")
_CACHED_FROM = 50_000  # images; listing fewer takes less than a second
_SHOWN = 5  # names in a message; a folder can hold a thousand


@dataclass(frozen=True)
class FolderSplit:
    """The images of one split below `folder`, sorted by class and name; implements `cl_train.data.source.Split`."""

    folder: Path
    names: bytes  # paths relative to `folder`, one after the other
    starts: Indices  # [images + 1]
    labels: Indices  # [images]

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return os.fsdecode(self.path(index))

    def read(self, index: int) -> bytes:
        return read_file(self.path(index))

    def path(self, index: int) -> bytes:
        return os.path.join(os.fsencode(self.folder), self.names[self.starts[index] : self.starts[index + 1]])


@dataclass(frozen=True)
class FolderLayout:
    """How images lie below a root.

    val_split: folder of the validation images; None = the first of `VAL_NAMES` that exists. val_fraction: this share of
    each class's training images is the validation split. extensions: of image files, in lower case.
    """

    val_split: str | None = None
    val_fraction: float | None = None
    extensions: tuple[str, ...] = EXTENSIONS


@dataclass
class _Listing:
    """The image files of each class, relative to `folder`, and what was ignored."""

    folder: Path
    files: list[list[bytes]]
    ignored: Counter[str]  # by extension
    example: str = ""

    def note(self) -> str:
        if not self.ignored:
            return ""
        kinds = ", ".join(f"{count} {kind or 'without extension'}" for kind, count in self.ignored.most_common(_SHOWN))
        readable = ",".join([*EXTENSIONS, *(kind for kind in sorted(self.ignored) if kind in FORMATS)])
        advice = f"; data.extensions=[{readable}] reads them" if self.ignored.keys() & FORMATS.keys() else ""
        return (
            f"{self.ignored.total()} files in '{self.folder}' are ignored ({kinds}), such as '{self.example}'{advice}"
        )


def read_folder(root: Path, layout: FolderLayout = FolderLayout(), *, cache: bool = False) -> ImageSource:
    """List the images below `root`.

    Args:
        cache: keep the list of a large data set in the user's cache folder, and use it as long as no folder changes.

    Raises:
        ConfigError: no such folder, no classes, different classes in the splits, or classes without images.
    """
    base, val = _split_folders(root, layout)
    key = folder_index.index_path(root, repr(layout))
    if cache and (stored := folder_index.load(key)) is not None:
        return _image_source(stored, base, val)
    classes = _class_names(base)
    _check_classes(classes, base, val)
    listings = [_list(folder, classes, layout) for folder in dict.fromkeys((base, val))]
    if layout.val_fraction is None:
        splits = [_pack_names(listing.files) for listing in listings]
    else:
        splits = [_pack_names(files) for files in _divide(listings[0].files, layout.val_fraction)]
    notes = tuple(note for listing in listings if (note := listing.note()))
    index = folder_index.FolderIndex(tuple(classes), notes, splits[0], splits[1])
    if cache and sum(len(labels) for _, _, labels in splits) >= _CACHED_FROM:
        folder_index.save(key, index, [base, val])
    return _image_source(index, base, val)


def _image_source(index: folder_index.FolderIndex, base: Path, val: Path) -> ImageSource:
    digest = hashlib.sha256("\0".join(index.classes).encode("utf-8", "surrogateescape"))
    for names, starts, labels in (index.train, index.val):
        digest.update(names + starts.tobytes() + labels.tobytes())
    splits = FolderSplit(base, *index.train), FolderSplit(val, *index.val)
    return ImageSource(index.classes, *splits, digest.hexdigest()[:16], notes=index.notes)


def _split_folders(root: Path, layout: FolderLayout) -> tuple[Path, Path]:
    """The folders that hold the classes of both splits; the same folder if it is to be split."""
    if re.match(r"\w+:/", str(root)):
        raise ConfigError(f"data.root '{root}' is a URL, and data is read from the file system: copy or mount it")
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise ConfigError(f"data.root '{root}' {what}; give the folder that holds train/ and val/, or try data=sample")
    train, val_names = root / "train", [layout.val_split] if layout.val_split else VAL_NAMES
    val = next((root / name for name in val_names if (root / name).is_dir()), None)
    if layout.val_fraction is not None:
        if val is not None and train.is_dir():
            raise ConfigError(f"'{val}' exists: use it without data.val_fraction, or move it away")
        return (train, train) if train.is_dir() else (root, root)
    if val is not None and train.is_dir():
        return train, val
    missing = ["'train'"] * (not train.is_dir()) + [" or ".join(f"'{name}'" for name in val_names)] * (val is None)
    found = listed(sorted(entry.name for entry in os.scandir(root)))
    raise ConfigError(
        f"data.root '{root}' has no folder {' and no folder '.join(missing)}. Found: {found}. Classes without a split:"
        " data.val_fraction=0.1; ImageNet's archives: cl-train prepare_imagenet; no data: data=sample"
    )


def _class_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def _check_classes(classes: list[str], train: Path, val: Path) -> None:
    for folder in (train, val):
        if not _class_names(folder):
            files = sorted(entry.name for entry in os.scandir(folder))
            flat = any(file.startswith("ILSVRC2012_val_") for file in files)
            advice = "; cl-train prepare_imagenet sorts the validation images into classes" if flat else ""
            raise ConfigError(f"'{folder}' has no class folders (one folder per class). Found: {listed(files)}{advice}")
    val_classes = _class_names(val)
    if classes != val_classes:
        only = ((train, set(classes) - set(val_classes)), (val, set(val_classes) - set(classes)))
        parts = [f"only in {folder.name}: {listed(sorted(names))}" for folder, names in only if names]
        raise ConfigError(f"'{train}' and '{val}' have different classes; {'; '.join(parts)}")


def _list(folder: Path, classes: list[str], layout: FolderLayout) -> _Listing:
    listing = _Listing(folder, [], Counter())
    suffixes = tuple(os.fsencode(extension.lower()) for extension in layout.extensions)
    for name in classes:
        found: list[bytes] = []
        _find_images(os.fsencode(folder), os.fsencode(name), suffixes, listing, found)
        listing.files.append(sorted(found))
    least = 1 if layout.val_fraction is None else 2
    if empty := [name for name, files in zip(classes, listing.files, strict=True) if len(files) < least]:
        what = f"{'no' if least == 1 else 'fewer than two'} images ({', '.join(layout.extensions)})"
        raise ConfigError(
            f"'{folder}': {what} for {len(empty)} of {len(classes)} classes: {listed(empty)}. {listing.note()}"
        )
    return listing


def _find_images(
    root: bytes, relative: bytes, suffixes: tuple[bytes, ...], listing: _Listing, found: list[bytes]
) -> None:
    """Add the images below `root/relative` to `found`, including FIFOs and dangling links, which the reader reports."""
    for entry in os.scandir(os.path.join(root, relative)):
        name = os.path.join(relative, entry.name)
        if entry.is_dir(follow_symlinks=False):
            _find_images(root, name, suffixes, listing, found)
        elif entry.name.lower().endswith(suffixes):
            found.append(name)
        elif not entry.name.startswith(b"."):
            listing.ignored[os.fsdecode(os.path.splitext(entry.name)[1].lower())] += 1
            listing.example = listing.example or os.fsdecode(name)


def _divide(files: list[list[bytes]], val_fraction: float) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """Per class, the share with the smallest hashes of their names: adding a file moves at most one other."""
    train, val = [], []
    for names in files:
        count = min(len(names) - 1, max(1, round(len(names) * val_fraction)))
        chosen = set(sorted(names, key=lambda name: hashlib.sha256(name).digest())[:count])
        train.append([name for name in names if name not in chosen])
        val.append([name for name in names if name in chosen])
    return train, val


def _pack_names(files: list[list[bytes]]) -> folder_index.PackedSplit:
    names = [name for of_class in files for name in of_class]
    starts = np.cumsum([0, *map(len, names)], dtype=np.int64)
    labels = np.repeat(np.arange(len(files), dtype=np.int64), [len(of_class) for of_class in files])
    return b"".join(names), starts, labels
