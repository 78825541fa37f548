"""Folders of images: `root/train/<class>/*` and `root/val/<class>/*`, or one folder of classes that is split in two."""

import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import AnyStr, NoReturn

import numpy as np

from cl_train.config.schema import ConfigError, DataConfig
from cl_train.data.decode import FORMATS, read_file
from cl_train.data.source import ImageSource, Split, fingerprint, listed, load_index, packed, save_index

VAL_NAMES = ("val", "valid", "validation", "test")
EXTENSIONS = (".jpg", ".jpeg", ".png")
_CACHED_FROM = 50_000  # images; listing fewer takes less than a second
_SETTLED_NS = 2_000_000_000  # a second change within the resolution of modification times would not be noticed
_SHOWN = 5  # kinds of ignored files in a message


@dataclass(frozen=True)
class FolderSplit(Split):
    """The images of one split, sorted by class and name. Their names are paths relative to `folder`."""

    folder: Path

    def name(self, index: int) -> str:
        return os.path.join(self.folder, super().name(index))

    def read(self, index: int) -> bytes:
        return read_file(self.name(index))


def read_folder(root: Path, cfg: DataConfig | None = None, *, training: bool = True) -> ImageSource:
    """List the images below `root`, or take the list from the user's cache folder. Raises ConfigError: a folder that is
    missing or cannot be read, no classes, different classes in the splits, or classes without images."""
    cfg = cfg or DataConfig()
    layout = (cfg.val_split, cfg.val_fraction, *cfg.extensions, *([] if training else ["evaluation"]))
    key = f"folder {root.resolve()}{layout}"
    try:
        base, val = _split_folders(root, cfg, training)
        splits = partial(FolderSplit, folder=base), partial(FolderSplit, folder=val)
        return load_index(key, *splits) or _index(base, val, cfg, key)
    except OSError as error:
        _unreadable(error)


def files_below(folder: AnyStr) -> Iterator[tuple[AnyStr, list[AnyStr]]]:
    """`folder` and each folder below it, with the names of its files. Raises ConfigError if one cannot be read."""
    for below, _, names in os.walk(folder, onerror=_unreadable):
        yield below, names


def _unreadable(error: OSError) -> NoReturn:
    raise ConfigError(f"'{os.fsdecode(error.filename)}' cannot be read: {error.strerror}") from None


def read_images(root: Path, classes: Sequence[str], extensions: Sequence[str]) -> FolderSplit:
    """All images below `root`, or below its folder of validation images if it has one, sorted by name. An image below
    the folder of a class has its label, others -100. Raises ConfigError: no images."""
    folder = next((root / name for name in VAL_NAMES if (root / name).is_dir()), root)
    suffixes, top = tuple(os.fsencode(extension.lower()) for extension in extensions), os.fsencode(folder)
    paths = (os.path.join(below, name) for below, names in files_below(top) for name in names)
    names = sorted(os.path.relpath(path, top) for path in paths if path.lower().endswith(suffixes))
    if not names:
        raise ConfigError(f"data.root '{root}' has no images ({', '.join(extensions)}) in it or in a folder below")
    label_of = {os.fsencode(name): label for label, name in enumerate(classes)}
    labels = [label_of.get(name.partition(b"/")[0], -100) for name in names]
    return FolderSplit(*packed(names), np.array(labels, np.int64), folder)


def _split_folders(root: Path, cfg: DataConfig, training: bool) -> tuple[Path, Path]:
    """The folders that hold the classes of both splits; the same folder if it is to be split, or without training."""
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
    if val is not None and (train.is_dir() or not training):
        return train if training else val, val
    lacking = ["'train'"] if training and not train.is_dir() else []
    if val is None:
        lacking.append(" or ".join(f"'{name}'" for name in val_names))
    found = listed(sorted(os.listdir(root)))
    raise ConfigError(
        f"data.root '{root}' has no folder {' and no folder '.join(lacking)}. Found: {found}. Classes without a split:"
        " data.val_fraction=0.1; ImageNet's archives: cl-train prepare_imagenet; no data: data=sample"
    )


def _index(base: Path, val: Path, cfg: DataConfig, key: str) -> ImageSource:
    settled_ns = time.time_ns() - _SETTLED_NS
    classes = _class_names(base)
    if (others := _class_names(val)) != classes:
        pairs = ((base, set(classes) - set(others)), (val, set(others) - set(classes)))
        parts = [f"only in {folder.name}: {listed(sorted(names))}" for folder, names in pairs if names]
        raise ConfigError(f"'{base}' and '{val}' have different classes; {'; '.join(parts)}")
    listings = {folder: _list(folder, classes, cfg) for folder in dict.fromkeys((base, val))}
    files = listings[base][0], listings[val][0]
    if cfg.val_fraction is not None:
        files = _divide(files[0], cfg.val_fraction)
    splits = _split(files[0], base), _split(files[1], val)
    notes = tuple(note for _, _, note in listings.values() if note)
    source = ImageSource(tuple(classes), *splits, fingerprint(classes, splits, ("names", "starts", "labels")), notes)
    if sum(map(len, splits)) >= _CACHED_FROM:
        save_index(key, source, [folder for _, folders, _ in listings.values() for folder in folders], settled_ns)
    return source


def _class_names(folder: Path) -> list[str]:
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    classes = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    if not classes:
        found = [entry.name for entry in entries]
        is_flat = any(name.startswith("ILSVRC2012_val_") for name in found)
        advice = "; cl-train prepare_imagenet sorts the validation images into classes" if is_flat else ""
        raise ConfigError(f"'{folder}' has no class folders (one folder per class). Found: {listed(found)}{advice}")
    return classes


def _list(folder: Path, classes: list[str], cfg: DataConfig) -> tuple[list[list[bytes]], list[bytes], str]:
    """The image files of each class, relative to `folder`; the folders that were read; a note on ignored files. FIFOs
    and dangling links with the name of an image are listed as well: the reader reports them."""
    top, suffixes = os.fsencode(folder), tuple(os.fsencode(extension.lower()) for extension in cfg.extensions)
    images, folders, ignored, note = list[list[bytes]](), [top], list[str](), ""
    for class_name in classes:
        of_class = list[bytes]()
        for below, names in files_below(os.path.join(top, os.fsencode(class_name))):
            folders.append(below)
            prefix = below[len(top) + 1 :] + b"/"
            for name in names:
                if name.lower().endswith(suffixes):
                    of_class.append(prefix + name)
                elif not name.startswith(b"."):
                    ignored.append(os.fsdecode(prefix + name))
        images.append(sorted(of_class))
    if ignored:
        kinds = Counter(os.path.splitext(path)[1].lower() for path in ignored)
        shown = ", ".join(f"{count} {kind or 'without extension'}" for kind, count in kinds.most_common(_SHOWN))
        readable = sorted(kinds.keys() & FORMATS.keys())
        advice = f"; data.extensions=[{','.join([*EXTENSIONS, *readable])}] reads them" if readable else ""
        note = f"{len(ignored)} files in '{folder}' are ignored ({shown}), such as '{ignored[0]}'{advice}"
    least = 1 if cfg.val_fraction is None else 2
    if empty := [name for name, files in zip(classes, images, strict=True) if len(files) < least]:
        what = f"{'no' if least == 1 else 'fewer than two'} images ({', '.join(cfg.extensions)})"
        raise ConfigError(f"'{folder}': {what} for {len(empty)} of {len(classes)} classes: {listed(empty)}. {note}")
    return images, folders, note


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
