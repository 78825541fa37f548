"""Folders of images: `root/train/<class>/*` and `root/val/<class>/*`, or one folder of classes that is split in two."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cl_train.config.schema import ConfigError
from cl_train.data import folder_index
from cl_train.data.decode import FORMATS, read_file
from cl_train.data.source import ImageSource, Indices

VAL_NAMES = ("val", "valid", "validation", "test")
EXTENSIONS = (".jpg", ".jpeg", ".png")
_CACHED_FROM = 50_000  # images: below this, listing takes less than a second
_SHOWN = 5  # names in a message; a folder can hold a thousand


@dataclass(frozen=True)
class FolderSplit:
    """The images of one split below `folder`, sorted by class and name: a `cl_train.data.source.Split`."""

    folder: Path
    names: bytes  # paths relative to `folder`, one after the other
    starts: Indices  # [images + 1]
    labels: Indices  # [images]

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return os.fsdecode(self._path(index))

    def read(self, index: int) -> bytes:
        return read_file(self._path(index))

    def _path(self, index: int) -> bytes:
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
    """Image files by class, and what else was found."""

    folder: Path
    files: list[list[bytes]]  # per class, relative to `folder`
    ignored: Counter[str] = field(default_factory=Counter)  # by extension
    example: str = ""


def read_folder(root: Path, layout: FolderLayout = FolderLayout(), *, cache: bool = False) -> ImageSource:
    """List the images below `root`.

    Args:
        cache: keep the list of a large data set in the user's cache folder, and use it as long as no folder changes.

    Raises:
        ConfigError: with every problem found.
    """
    base, val = _split_folders(root, layout)
    key = folder_index.index_path(root, repr(layout)) if cache else None
    stored = folder_index.load(key) if key else None
    if stored is not None:
        return _image_source(stored.classes, _stored(base, stored, "train"), _stored(val, stored, "val"), stored.notes)
    classes = _class_names(base)
    if problems := _class_problems(classes, base, val):
        raise ConfigError(problems)
    listings = [_list(folder, classes, layout.extensions) for folder in dict.fromkeys((base, val))]
    if problems := [problem for listing in listings for problem in _empty_classes(listing, classes, layout)]:
        raise ConfigError(problems)
    notes = tuple(note for listing in listings if (note := _ignored_note(listing)))
    if layout.val_fraction is not None:
        train_files, val_files = _divide(listings[0].files, layout.val_fraction)
    else:
        train_files, val_files = listings[0].files, listings[1].files
    train, validation = _split(base, train_files), _split(val, val_files)
    if key and len(train) + len(validation) >= _CACHED_FROM:
        named = (("train", train), ("val", validation))
        splits = {name: (split.names, split.starts, split.labels) for name, split in named}
        folder_index.save(key, folder_index.StoredIndex(tuple(classes), notes, splits), [base, val])
    return _image_source(tuple(classes), train, validation, notes)


def _split_folders(root: Path, layout: FolderLayout) -> tuple[Path, Path]:
    """The folders that hold the classes of both splits; the same one if it is to be divided."""
    if re.match(r"\w+:/", str(root)):
        raise ConfigError(
            f"data.root '{root}' is a URL; data is read from the file system: copy or mount it, and give that folder"
        )
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise ConfigError(f"data.root '{root}' {what}; give the folder that holds train/ and val/, or try data=sample")
    train = root / "train"
    val = next((root / n for n in ([layout.val_split] if layout.val_split else VAL_NAMES) if (root / n).is_dir()), None)
    if layout.val_fraction is not None:
        if val is not None and train.is_dir():
            raise ConfigError(f"'{val}' exists: use either its images (without data.val_fraction), or move it away")
        return (train, train) if train.is_dir() else (root, root)
    if val is not None and train.is_dir():
        return train, val
    wanted = f"'{layout.val_split}'" if layout.val_split else f"'val' (or {', '.join(VAL_NAMES[1:])})"
    missing = " and no folder ".join(
        name for name, found in (("'train'", train.is_dir()), (wanted, val is not None)) if not found
    )
    found = _shown(sorted(entry.name for entry in os.scandir(root)))
    raise ConfigError(
        f"data.root '{root}' has no folder {missing}. Found: {found}. Folders of classes without a split:"
        " data.val_fraction=0.1; ImageNet's archives: cl-train prepare_imagenet makes the folders; no data: data=sample"
    )


def _class_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def _class_problems(classes: list[str], train: Path, val: Path) -> list[str]:
    problems = []
    for folder in dict.fromkeys((train, val)):
        if not _class_names(folder):
            files = sorted(entry.name for entry in os.scandir(folder))
            problems.append(f"'{folder}' has no class folders (one folder per class). Found: {_shown(files)}.")
            if any(file.startswith("ILSVRC2012_val_") for file in files):
                problems[-1] += " The validation images are not sorted yet; cl-train prepare_imagenet sorts them"
    val_classes = _class_names(val)
    if not problems and classes != val_classes:
        only_train, only_val = sorted(set(classes) - set(val_classes)), sorted(set(val_classes) - set(classes))
        parts = [f"only in {train.name}: {_shown(only_train)}"] if only_train else []
        parts += [f"only in {val.name}: {_shown(only_val)}"] if only_val else []
        problems.append(f"'{train}' and '{val}' have different classes; {'; '.join(parts)}")
    return problems


def _list(folder: Path, classes: list[str], extensions: tuple[str, ...]) -> _Listing:
    listing = _Listing(folder, [])
    suffixes = tuple(os.fsencode(extension.lower()) for extension in extensions)
    for name in classes:
        found: list[bytes] = []
        _find_images(os.fsencode(folder), os.fsencode(name), suffixes, listing, found)
        listing.files.append(sorted(found))
    return listing


def _find_images(
    root: bytes, relative: bytes, suffixes: tuple[bytes, ...], listing: _Listing, found: list[bytes]
) -> None:
    """Add the image files below `root/relative` to `found`.

    A FIFO or a dangling link with an image's name is added too: the reader then reports it by name.
    """
    for entry in os.scandir(os.path.join(root, relative)):
        name = os.path.join(relative, entry.name)
        if entry.is_dir(follow_symlinks=False):
            _find_images(root, name, suffixes, listing, found)
        elif entry.name.lower().endswith(suffixes):
            found.append(name)
        elif not entry.name.startswith(b"."):
            listing.ignored[os.fsdecode(os.path.splitext(entry.name)[1].lower())] += 1
            listing.example = listing.example or os.fsdecode(name)


def _empty_classes(listing: _Listing, classes: list[str], layout: FolderLayout) -> list[str]:
    least = 1 if layout.val_fraction is None else 2
    empty = [name for name, files in zip(classes, listing.files, strict=True) if len(files) < least]
    if not empty:
        return []
    kinds = ", ".join(layout.extensions)
    what = "no image" if least == 1 else "fewer than two images"
    problem = f"'{listing.folder}': {what} ({kinds}) for {len(empty)} of {len(classes)} classes: {_shown(empty)}"
    return [f"{problem}. {note}" if (note := _ignored_note(listing)) else problem]


def _ignored_note(listing: _Listing) -> str:
    """What was ignored, and how to use it."""
    if not listing.ignored:
        return ""
    kinds = ", ".join(f"{count} {kind or 'without extension'}" for kind, count in listing.ignored.most_common(_SHOWN))
    readable = sorted(kind for kind in listing.ignored if kind in FORMATS)
    advice = f"; data.extensions=[{','.join([*EXTENSIONS, *readable])}] reads them" if readable else ""
    total = listing.ignored.total()
    return f"{total} files in '{listing.folder}' are ignored ({kinds}), such as '{listing.example}'{advice}"


def _divide(files: list[list[bytes]], val_fraction: float) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """Per class, the share with the smallest hashes of their names: a new file moves at most one other."""
    train, val = [], []
    for names in files:
        count = min(len(names) - 1, max(1, round(len(names) * val_fraction)))
        chosen = set(sorted(names, key=lambda name: hashlib.sha256(name).digest())[:count])
        train.append([name for name in names if name not in chosen])
        val.append([name for name in names if name in chosen])
    return train, val


def _split(folder: Path, files: list[list[bytes]]) -> FolderSplit:
    names = [name for of_class in files for name in of_class]
    starts = np.zeros(len(names) + 1, dtype=np.int64)
    np.cumsum([len(name) for name in names], out=starts[1:])
    labels = np.repeat(np.arange(len(files), dtype=np.int64), [len(of_class) for of_class in files])
    return FolderSplit(folder, b"".join(names), starts, labels)


def _stored(folder: Path, stored: folder_index.StoredIndex, name: str) -> FolderSplit:
    return FolderSplit(folder, *stored.splits[name])


def _image_source(
    classes: tuple[str, ...], train: FolderSplit, val: FolderSplit, notes: tuple[str, ...]
) -> ImageSource:
    digest = hashlib.sha256("\0".join(classes).encode("utf-8", "surrogateescape"))
    for split in (train, val):
        digest.update(split.names)
        digest.update(split.starts.tobytes())
        digest.update(split.labels.tobytes())
    return ImageSource(classes, train, val, digest.hexdigest()[:16], notes=notes)


def _shown(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
