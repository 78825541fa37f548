"""Indexes of data sets, kept in the user's cache folder: listing a million files can take minutes.

An index is valid while size and modification time of each file and folder it was made from remain the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cl_train.system.files import cache_folder

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Index:
    """The classes of a data set, notes for the user, and the arrays of both splits."""

    classes: tuple[str, ...]
    notes: tuple[str, ...]
    train: Arrays
    val: Arrays


def cache_path(kind: str, key: str) -> Path:
    return cache_folder() / f"{kind}-{hashlib.sha256(os.fsencode(key)).hexdigest()[:16]}.npz"


def save(path: Path, index: Index, made_from: Sequence[str | bytes], unchanged_since_ns: int) -> None:
    """Does nothing if one of the files and folders in `made_from` was modified later than `unchanged_since_ns`, or if
    the cache cannot be written: the index is then made again at the next start."""
    with contextlib.suppress(OSError):
        status = _status(made_from)
        if max(modified_ns for _, modified_ns in status) > unchanged_since_ns:
            return
        paths = list(map(os.fsdecode, made_from))
        header = {"classes": index.classes, "notes": index.notes, "made_from": paths, "status": status}
        arrays = {f"{split}_{name}": array for split in ("train", "val") for name, array in vars(index)[split].items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(temporary, allow_pickle=False, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)
        temporary.replace(path)


def load(path: Path, array_names: Sequence[str], made_from: Sequence[str] | None = None) -> Index | None:
    """The stored index with these arrays of each split; None if there is none, or if it is damaged or not valid.

    `made_from`: the files that it must be made from; None = those that it names.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            header = json.loads(stored["header"].tobytes())
            if made_from is not None and header["made_from"] != list(made_from):
                return None
            if header["status"] != _status(header["made_from"]):
                return None
            train, val = ({name: stored[f"{split}_{name}"] for name in array_names} for split in ("train", "val"))
            return Index(tuple(header["classes"]), tuple(header["notes"]), train, val)
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def _status(paths: Sequence[str | bytes]) -> list[list[int]]:
    """Size and time of the last modification in ns."""
    return [[status.st_size, status.st_mtime_ns] for status in map(os.stat, paths)]
