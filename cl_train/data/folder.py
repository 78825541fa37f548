"""Folders of images: `root/train/<class>/*` and `root/val/<class>/*`, or one folder of classes that is split in two.

Lists them, and for `data.on_bad_image=skip` finds files that are not images by their first bytes.
"""

import hashlib
import os
import re
import stat
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from cl_train.config.schema import ConfigError, DataConfig
from cl_train.data import index_cache
from cl_train.data.decode import FORMATS, JPEG_MAGIC, PNG_MAGIC, read_file
from cl_train.data.source import ImageSource, Split, fingerprint, listed, packed

VAL_NAMES = ("val", "valid", "validation", "test")
EXTENSIONS = (".jpg", ".jpeg", ".png")
_CACHED_FROM = 50_000  # images; listing fewer takes less than a second
_SETTLED_NS = 2_000_000_000  # a second change within the resolution of modification times would not be noticed
_SHOWN = 5  # kinds of ignored files in a message
_CHECKED = 10_000  # files of a split: less than a second on a local disk, ten seconds over a network
_STARTS = (JPEG_MAGIC, PNG_MAGIC, b"BM", b"II*\0", b"MM\0*", b"RIFF")  # BMP, TIFF in both byte orders, WEBP


@dataclass(frozen=True)
class FolderSplit(Split):
    """The images of one split, sorted by class and name. Their names are paths relative to `folder`."""

    folder: Path

    def name(self, index: int) -> str:
        return os.fsdecode(self.path(index))

    def read(self, index: int) -> bytes:
        return read_file(self.path(index))

    def path(self, index: int) -> bytes:
        return os.path.join(os.fsencode(self.folder), self.stored_name(index))


@dataclass
class _Listing:
    """The image files of each class, relative to `folder`; the folders that were read, and the files ignored."""

    folder: Path
    files: list[list[bytes]] = field(default_factory=list)
    folders: list[bytes] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)  # by extension
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


def read_folder(root: Path, cfg: DataConfig | None = None) -> ImageSource:
    """List the images below `root`; `val_split`, `val_fraction` and `extensions` of `cfg` determine which.

    The list of a large folder is kept in the user's cache folder. Raises ConfigError for a missing folder, no classes,
    different classes in the splits, or classes without images.
    """
    cfg = cfg or DataConfig()
    base, val = _split_folders(root, cfg)
    layout = (cfg.val_split, cfg.val_fraction, *cfg.extensions)
    stored_at = index_cache.cache_path("folder", f"{root.resolve()}{layout}")
    splits = partial(FolderSplit, folder=base), partial(FolderSplit, folder=val)
    return index_cache.load(stored_at, *splits) or _index(base, val, cfg, stored_at)


def _index(base: Path, val: Path, cfg: DataConfig, stored_at: Path) -> ImageSource:
    settled_ns = time.time_ns() - _SETTLED_NS
    classes = _class_names(base, val)
    listings = {folder: _list(folder, classes, cfg) for folder in dict.fromkeys((base, val))}
    if cfg.val_fraction is None:
        files = listings[base].files, listings[val].files
    else:
        files = _divide(listings[base].files, cfg.val_fraction)
    notes = tuple(note for listing in listings.values() if (note := listing.note()))
    splits = _split(files[0], base), _split(files[1], val)
    source = ImageSource(tuple(classes), *splits, fingerprint(classes, splits, ("names", "starts", "labels")), notes)
    if sum(map(len, splits)) >= _CACHED_FROM:
        folders = [folder for listing in listings.values() for folder in listing.folders]
        index_cache.save(stored_at, source, folders, settled_ns)
    return source


def _split_folders(root: Path, cfg: DataConfig) -> tuple[Path, Path]:
    """The folders that hold the classes of both splits; the same folder if it is to be split."""
    if re.match(r"\w+:/", str(root)):
        raise ConfigError(f"data.root '{root}' is a URL, and data is read from the file system: copy or mount it")
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise ConfigError(f"data.root '{root}' {what}; give the folder that holds train/ and val/, or try data=sample")
    train, val_names = root / "train", [cfg.val_split] if cfg.val_split else VAL_NAMES
    val = next((root / name for name in val_names if (root / name).is_dir()), None)
    if cfg.val_fraction is not None:
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


def _class_names(train: Path, val: Path) -> list[str]:
    """The class folders, which must be the same in both splits."""
    classes: dict[Path, list[str]] = {}
    for folder in (train, val):
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        classes[folder] = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        if not classes[folder]:
            found, flat = [entry.name for entry in entries], any(e.name.startswith("ILSVRC2012_val_") for e in entries)
            advice = "; cl-train prepare_imagenet sorts the validation images into classes" if flat else ""
            raise ConfigError(f"'{folder}' has no class folders (one folder per class). Found: {listed(found)}{advice}")
    if classes[train] != classes[val]:
        only = ((folder, set(classes[folder]) - set(classes[other])) for folder, other in ((train, val), (val, train)))
        parts = [f"only in {folder.name}: {listed(sorted(names))}" for folder, names in only if names]
        raise ConfigError(f"'{train}' and '{val}' have different classes; {'; '.join(parts)}")
    return classes[train]


def _list(folder: Path, classes: list[str], cfg: DataConfig) -> _Listing:
    """FIFOs and dangling links with the name of an image are listed as well: the reader reports them."""
    root, suffixes = os.fsencode(folder), tuple(os.fsencode(extension.lower()) for extension in cfg.extensions)
    listing = _Listing(folder, folders=[root])
    for name in classes:
        files: list[bytes] = []
        pending = [os.fsencode(name)]
        while pending:
            below = pending.pop()
            listing.folders.append(os.path.join(root, below))
            for entry in os.scandir(listing.folders[-1]):
                path = os.path.join(below, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                elif entry.name.lower().endswith(suffixes):
                    files.append(path)
                elif not entry.name.startswith(b"."):
                    listing.ignored[os.fsdecode(os.path.splitext(entry.name)[1].lower())] += 1
                    listing.example = listing.example or os.fsdecode(path)
        listing.files.append(sorted(files))
    least = 1 if cfg.val_fraction is None else 2
    if empty := [name for name, files in zip(classes, listing.files, strict=True) if len(files) < least]:
        what = f"{'no' if least == 1 else 'fewer than two'} images ({', '.join(cfg.extensions)})"
        raise ConfigError(
            f"'{folder}': {what} for {len(empty)} of {len(classes)} classes: {listed(empty)}. {listing.note()}"
        )
    return listing


def _divide(files: list[list[bytes]], val_fraction: float) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """Per class, the share with the smallest hashes of their names: adding a file moves at most one other."""
    train, val = [], []
    for names in files:
        count = min(len(names) - 1, max(1, round(len(names) * val_fraction)))
        chosen = set(sorted(names, key=lambda name: hashlib.sha256(name).digest())[:count])
        train.append([name for name in names if name not in chosen])
        val.append([name for name in names if name in chosen])
    return train, val


def _split(files: list[list[bytes]], folder: Path) -> FolderSplit:
    labels = np.repeat(np.arange(len(files), dtype=np.int64), [len(of_class) for of_class in files])
    return FolderSplit(*packed([name for of_class in files for name in of_class]), labels, folder)


# --- files that are not images ----------------------------------------------------------------------------------------


def check_files(source: ImageSource, max_bad_images: int) -> None:
    """For on_bad_image=skip, before training. Of a large folder a random part is checked.

    Raises ConfigError if more than `max_bad_images` files are not images, or if a class has no image at all.
    """
    for split in (source.train, source.val):
        if not isinstance(split, FolderSplit):  # shards are checked when they are written
            continue
        count = len(split)
        checked = np.sort(np.random.default_rng(0).permutation(count)[:_CHECKED])
        bad = {int(index): reason for index in checked if (reason := why_no_image(split.path(int(index))))}
        problems = []
        if len(bad) > max_bad_images:
            problems.append(
                f"{len(bad)} of {len(checked)} files are not images, more than data.max_bad_images={max_bad_images}"
            )
        if bad and len(checked) == count:
            left = np.delete(split.labels, list(bad))
            lost = [source.classes[label] for label in np.setdiff1d(split.labels, left)]
            problems += [f"no file of {listed(lost)} is an image"] if lost else []
        if problems:
            first, reason = next(iter(bad.items()))
            raise ConfigError(
                f"'{split.folder}': {'; '.join(problems)}; the first: '{split.name(first)}': {reason}. cl-train "
                "prepare_imagenet verify lists them"
            )


def why_no_image(path: str | bytes, starts: tuple[bytes, ...] = _STARTS) -> str | None:
    """The reason why a file is not an image, from its kind and first bytes; None if it may be one."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "not a regular file"
        with open(path, "rb", buffering=0) as file:
            start = file.read(8)
    except OSError as error:
        return error.strerror
    if not start:
        return "the file is empty"
    return None if start.startswith(starts) else "not an image: its first bytes are of another format"
