"""The list of images of `root/train/<class>/*` and `root/val/<class>/*`, checked before anything else happens."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cl_train.config.schema import ConfigError
from cl_train.system.files import cache_folder

SUFFIXES = (".jpg", ".jpeg", ".png")
_CACHED_FROM = 50_000  # images: below this, listing takes less than a second
_INDEX_VERSION = 1
_SETTLED_NS = 2_000_000_000
_SHOWN = 5  # names in a message; a folder can hold a thousand


@dataclass(frozen=True)
class Split:
    """The images of one folder (`train` or `val`), sorted by class and name.

    Names are one block of bytes, not a list of strings: a forked worker that reads a list of 1.28 million strings
    copies its memory page by page, because reading a string changes its reference count.
    """

    folder: Path
    names: bytes  # paths relative to `folder`, one after the other
    starts: npt.NDArray[np.int64]  # [images + 1]
    labels: npt.NDArray[np.int64]  # [images]

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> bytes:
        name = self.names[self.starts[index] : self.starts[index + 1]]
        return os.path.join(os.fsencode(self.folder), name)


@dataclass(frozen=True)
class Folder:
    """Both splits of a data set with the same classes; the label of a class is its place in the sorted names."""

    classes: tuple[str, ...]
    train: Split
    val: Split

    def fingerprint(self) -> str:
        """Of the classes, and of every image's name in both splits (not of the files' content)."""
        digest = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        for split in (self.train, self.val):
            digest.update(split.names)
            digest.update(split.starts.tobytes())
            digest.update(split.labels.tobytes())
        return digest.hexdigest()[:16]


def read_folder(root: Path, cache: Path | None = None) -> Folder:
    """List both splits of `root`, or take the list from `cache` where no folder has changed since it was written.

    Raises:
        ConfigError: with every problem found.
    """
    problems = _layout_problems(root)
    if problems:
        raise ConfigError(problems)
    known = read_index(cache, root) if cache is not None else None
    if known is not None:
        return known
    folder = _list_folder(root)
    if cache is not None and len(folder.train) + len(folder.val) >= _CACHED_FROM:
        write_index(cache, folder)
    return folder


def _list_folder(root: Path) -> Folder:
    train_classes, val_classes = _class_names(root / "train"), _class_names(root / "val")
    problems = _class_problems(root, train_classes, val_classes)
    if problems:
        raise ConfigError(problems)
    train, val = _list_split(root / "train", train_classes), _list_split(root / "val", train_classes)
    problems = [line for split in (train, val) for line in _empty_classes(split, train_classes)]
    if problems:
        raise ConfigError(problems)
    return Folder(tuple(train_classes), train, val)


def index_path(root: Path) -> Path:
    """Where the list of `root` is kept: in the user's cache folder."""
    return cache_folder() / f"index-{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]}.npz"


def write_index(cache: Path, folder: Folder) -> None:
    """Keep the list, with every folder's modification time. Without a word where the cache cannot be written."""
    folders = _folders_of(folder)
    times = _modified_ns(folders)
    if time.time_ns() - int(times.max()) < _SETTLED_NS:  # a change within the clock's grain would go unseen
        return
    arrays = {"version": np.array(_INDEX_VERSION), "folders": _as_bytes(folders), "times": times}
    arrays["classes"] = _as_bytes([os.fsencode(name) for name in folder.classes])
    for name, split in (("train", folder.train), ("val", folder.val)):
        arrays |= {f"{name}_names": np.frombuffer(split.names, np.uint8), f"{name}_starts": split.starts}
        arrays[f"{name}_labels"] = split.labels
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_suffix(f".{os.getpid()}.npz")
        np.savez(temporary, allow_pickle=False, **arrays)
        temporary.replace(cache)


def read_index(cache: Path, root: Path) -> Folder | None:
    """The kept list; None where there is none, or where a folder was changed, added or removed since."""
    try:
        with open(cache, "rb") as file, np.load(file, allow_pickle=False) as stored:
            if int(stored["version"]) != _INDEX_VERSION:
                return None
            folders = _as_list(stored["folders"])
            if not np.array_equal(_modified_ns(folders), stored["times"]):
                return None
            classes = tuple(os.fsdecode(name) for name in _as_list(stored["classes"]))
            return Folder(classes, _stored_split(stored, root, "train"), _stored_split(stored, root, "val"))
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def _stored_split(stored: Mapping[str, Any], root: Path, name: str) -> Split:
    return Split(root / name, stored[f"{name}_names"].tobytes(), stored[f"{name}_starts"], stored[f"{name}_labels"])


def _folders_of(folder: Folder) -> list[bytes]:
    """Both split folders and everything below them that is a folder: a new image changes one of their times.

    Class folders are walked one by one, as any of them may be a link.
    """
    found = []
    for split in (folder.train, folder.val):
        found.append(os.fsencode(split.folder))
        for name in folder.classes:
            found += [os.fsencode(path) for path, _, _ in os.walk(split.folder / name)]
    return found


def _modified_ns(folders: list[bytes]) -> npt.NDArray[np.int64]:
    return np.array([os.stat(folder).st_mtime_ns for folder in folders], dtype=np.int64)


def _as_bytes(names: list[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"\0".join(names), dtype=np.uint8)


def _as_list(joined: npt.NDArray[np.uint8]) -> list[bytes]:
    return joined.tobytes().split(b"\0")


def _layout_problems(root: Path) -> list[str]:
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        return [f"data.root '{root}' {what}; give the folder that holds train/ and val/, or try data=sample"]
    found = _shown(sorted(entry.name for entry in os.scandir(root)))
    missing = [name for name in ("train", "val") if not (root / name).is_dir()]
    advice = "python scripts/prepare_imagenet.py makes the folders from ImageNet's archives; no data? use data=sample"
    return [f"data.root '{root}' has no folder '{name}'. Found: {found}. {advice}" for name in missing]


def _class_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def _class_problems(root: Path, train: list[str], val: list[str]) -> list[str]:
    problems = []
    for name, classes in (("train", train), ("val", val)):
        if not classes:
            files = sorted(entry.name for entry in os.scandir(root / name))
            flat = [file for file in files if file.startswith("ILSVRC2012_val_")]
            if flat:
                problems.append(
                    f"'{root / name}' holds {len(flat)} files such as {flat[0]} and no class folders: the validation"
                    " images are not sorted yet; python scripts/prepare_imagenet.py moves them into class folders"
                )
            else:
                problems.append(f"'{root / name}' has no class folders (one folder per class). Found: {_shown(files)}")
    if not problems and train != val:
        only_train, only_val = sorted(set(train) - set(val)), sorted(set(val) - set(train))
        parts = [f"only in train: {_shown(only_train)}"] if only_train else []
        parts += [f"only in val: {_shown(only_val)}"] if only_val else []
        problems.append(f"train and val of '{root}' have different classes; {'; '.join(parts)}")
    return problems


def _list_split(folder: Path, classes: list[str]) -> Split:
    names: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(_images_below(os.fsencode(folder), os.fsencode(name)))
        names += found
        labels += [label] * len(found)
    starts = np.zeros(len(names) + 1, dtype=np.int64)
    np.cumsum([len(name) for name in names], out=starts[1:])
    return Split(folder, b"".join(names), starts, np.array(labels, dtype=np.int64))


def _images_below(folder: bytes, relative: bytes) -> list[bytes]:
    """Names of the image files below `folder/relative`.

    A FIFO or a dangling link with an image's name stays in: the reader refuses it by name, silence would hide it.
    """
    found = []
    suffixes = tuple(os.fsencode(suffix) for suffix in SUFFIXES)
    for entry in os.scandir(os.path.join(folder, relative)):
        name = os.path.join(relative, entry.name)
        if entry.is_dir(follow_symlinks=False):
            found += _images_below(folder, name)
        elif entry.name.lower().endswith(suffixes):
            found.append(name)
    return found


def _empty_classes(split: Split, classes: list[str]) -> list[str]:
    counts = np.bincount(split.labels, minlength=len(classes))
    empty = [name for name, count in zip(classes, counts, strict=True) if count == 0]
    if not empty:
        return []
    kinds = ", ".join(SUFFIXES)
    return [f"'{split.folder}': no image ({kinds}) for {len(empty)} of {len(classes)} classes: {_shown(empty)}"]


def _shown(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
