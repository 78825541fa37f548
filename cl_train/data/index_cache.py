"""Lists of a data set's images, kept as arrays in the user's cache folder: listing a million files can take minutes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cl_train.system.files import cache_folder

Arrays = Mapping[str, Any]


def cache_path(kind: str, key: bytes) -> Path:
    return cache_folder() / f"{kind}-{hashlib.sha256(key).hexdigest()[:16]}.npz"


def save(path: Path, arrays: Arrays) -> None:
    """Does nothing if the cache cannot be written: the images are then listed at every start."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(temporary, allow_pickle=False, **arrays)
        temporary.replace(path)


def load(path: Path, keys: Iterable[str]) -> Arrays | None:
    """None if there is no file, or if it is damaged or lacks one of `keys`."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            return {key: stored[key] for key in keys}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None
