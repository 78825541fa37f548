"""The list of a large folder's images, cached in the user's cache folder: listing a million files can take minutes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cl_train.data.source import Indices
from cl_train.system.files import cache_folder

_SETTLED_NS = 2_000_000_000
PackedSplit = tuple[bytes, Indices, Indices]  # names, one after the other; starts; labels


@dataclass(frozen=True)
class FolderIndex:
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    train: PackedSplit
    val: PackedSplit


def index_path(root: Path, options: str) -> Path:
    """The path of the cached list of `root` for these `options`."""
    key = os.fsencode(root.resolve()) + options.encode()
    return cache_folder() / f"folder-{hashlib.sha256(key).hexdigest()[:16]}.npz"


def save(path: Path, index: FolderIndex, roots: list[Path]) -> None:
    """Store the list with the modification time of every folder. Does nothing if the cache cannot be written."""
    folders = [os.fsencode(root) for root in roots]
    for root in roots:
        for name in index.classes:  # each class folder may be a link, which os.walk would not follow
            folders += [os.fsencode(path) for path, _, _ in os.walk(root / name)]
    times = _modified_ns(folders)
    if time.time_ns() - int(times.max()) < _SETTLED_NS:  # changes within mtime resolution would be missed
        return
    texts = {"folders": folders, "classes": map(os.fsencode, index.classes), "notes": map(os.fsencode, index.notes)}
    arrays: dict[str, Any] = {key: np.frombuffer(b"\0".join(names), np.uint8) for key, names in texts.items()}
    arrays["times"] = times
    for key, (names, starts, labels) in (("train", index.train), ("val", index.val)):
        arrays |= {f"{key}_names": np.frombuffer(names, np.uint8), f"{key}_starts": starts, f"{key}_labels": labels}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(temporary, allow_pickle=False, **arrays)
        temporary.replace(path)


def load(path: Path) -> FolderIndex | None:
    """The stored list; None if there is none, or if a folder was changed, added or removed since."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            folders, classes, notes = (
                [name for name in stored[key].tobytes().split(b"\0") if name] for key in ("folders", "classes", "notes")
            )
            if not np.array_equal(_modified_ns(folders), stored["times"]):
                return None
            train, val = (
                (stored[f"{key}_names"].tobytes(), stored[f"{key}_starts"], stored[f"{key}_labels"])
                for key in ("train", "val")
            )
            return FolderIndex(tuple(map(os.fsdecode, classes)), tuple(map(os.fsdecode, notes)), train, val)
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def _modified_ns(folders: list[bytes]) -> Indices:
    return np.array([os.stat(folder).st_mtime_ns for folder in folders], dtype=np.int64)
