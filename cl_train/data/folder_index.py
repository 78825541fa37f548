"""The list of a large folder's images, kept in the user's cache folder: listing a million files can take minutes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cl_train.data.source import Indices
from cl_train.system.files import cache_folder

_VERSION = 2
_SETTLED_NS = 2_000_000_000
StoredSplit = tuple[bytes, Indices, Indices]  # names, starts, labels


@dataclass(frozen=True)
class StoredIndex:
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    splits: dict[str, StoredSplit]


def index_path(root: Path, options: str) -> Path:
    """Where the list of `root` is kept; another one for other `options`."""
    key = os.fsencode(root.resolve()) + options.encode()
    return cache_folder() / f"index-{hashlib.sha256(key).hexdigest()[:16]}.npz"


def save(path: Path, index: StoredIndex, roots: list[Path]) -> None:
    """Keep the list with the modification time of every folder. Does nothing if the cache cannot be written."""
    folders = _folders_below(roots, index.classes)
    times = _modified_ns(folders)
    if time.time_ns() - int(times.max()) < _SETTLED_NS:  # a change within the clock's resolution would go unnoticed
        return
    arrays = {"version": np.array(_VERSION), "folders": _pack(folders), "times": times}
    arrays["classes"] = _pack([os.fsencode(name) for name in index.classes])
    arrays["notes"] = _pack([os.fsencode(note) for note in index.notes])
    for name, (names, starts, labels) in index.splits.items():
        arrays |= {f"{name}_names": np.frombuffer(names, np.uint8), f"{name}_starts": starts, f"{name}_labels": labels}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(temporary, allow_pickle=False, **arrays)
        temporary.replace(path)


def load(path: Path) -> StoredIndex | None:
    """The stored list; None if there is none, or if a folder was changed, added or removed since."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            if int(stored["version"]) != _VERSION:
                return None
            if not np.array_equal(_modified_ns(_unpack(stored["folders"])), stored["times"]):
                return None
            classes, notes = (
                tuple(os.fsdecode(name) for name in _unpack(stored[key]) if name) for key in ("classes", "notes")
            )
            splits = {
                name: (stored[f"{name}_names"].tobytes(), stored[f"{name}_starts"], stored[f"{name}_labels"])
                for name in ("train", "val")
            }
            return StoredIndex(classes, notes, splits)
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def _folders_below(roots: list[Path], classes: tuple[str, ...]) -> list[bytes]:
    """The roots and every folder below them: a new image changes the time of one.

    Class folders are walked one by one, as any of them may be a link.
    """
    found = []
    for root in dict.fromkeys(roots):
        found.append(os.fsencode(root))
        for name in classes:
            found += [os.fsencode(path) for path, _, _ in os.walk(root / name)]
    return found


def _modified_ns(folders: list[bytes]) -> Indices:
    return np.array([os.stat(folder).st_mtime_ns for folder in folders], dtype=np.int64)


def _pack(names: list[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"\0".join(names), dtype=np.uint8)


def _unpack(joined: npt.NDArray[np.uint8]) -> list[bytes]:
    return joined.tobytes().split(b"\0")
