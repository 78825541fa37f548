"""The list of a large folder's images, stored with the modification time of each folder; valid while none changes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cl_train.data import index_cache
from cl_train.data.source import Indices

_SETTLED_NS = 2_000_000_000
_TEXTS, _SPLITS, _ARRAYS = (
    ("folders", "classes", "notes"),
    ("train", "val"),
    ("names", "starts", "labels"),
)  # the keys of a file
PackedSplit = tuple[bytes, Indices, Indices]  # names, one after the other; starts; labels


@dataclass(frozen=True)
class FolderIndex:
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    train: PackedSplit
    val: PackedSplit


def index_path(root: Path, options: str) -> Path:
    """The path of the cached list of `root` for these `options`."""
    return index_cache.cache_path("folder", os.fsencode(root.resolve()) + options.encode())


def save(path: Path, index: FolderIndex, roots: list[Path]) -> None:
    folders = [os.fsencode(root) for root in roots]
    for root in roots:
        for name in index.classes:  # each class folder may be a link, which os.walk would not follow
            folders += [os.fsencode(path) for path, _, _ in os.walk(root / name)]
    times = _modified_ns(folders)
    if time.time_ns() - int(times.max()) < _SETTLED_NS:  # changes within mtime resolution would be missed
        return
    texts = {"folders": folders, "classes": map(os.fsencode, index.classes), "notes": map(os.fsencode, index.notes)}
    arrays: dict[str, Any] = {key: np.frombuffer(b"\0".join(names), np.uint8) for key, names in texts.items()}
    for key, (names, starts, labels) in (("train", index.train), ("val", index.val)):
        arrays |= {f"{key}_names": np.frombuffer(names, np.uint8), f"{key}_starts": starts, f"{key}_labels": labels}
    index_cache.save(path, arrays | {"times": times})


def load(path: Path) -> FolderIndex | None:
    """The stored list; None if there is none, or if a folder was changed, added or removed since."""
    stored = index_cache.load(path, (*_TEXTS, "times", *(f"{key}_{array}" for key in _SPLITS for array in _ARRAYS)))
    try:
        if stored is None or not np.array_equal(_modified_ns(_names(stored["folders"])), stored["times"]):
            return None
    except OSError:
        return None
    classes, notes = (tuple(map(os.fsdecode, _names(stored[key]))) for key in _TEXTS[1:])
    train, val = (
        (stored[f"{key}_names"].tobytes(), stored[f"{key}_starts"], stored[f"{key}_labels"]) for key in _SPLITS
    )
    return FolderIndex(classes, notes, train, val)


def _names(stored: np.ndarray[Any, Any]) -> list[bytes]:
    return [name for name in stored.tobytes().split(b"\0") if name]


def _modified_ns(folders: list[bytes]) -> Indices:
    return np.array([os.stat(folder).st_mtime_ns for folder in folders], dtype=np.int64)
