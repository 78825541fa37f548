"""Indexes of data sets, kept in the user's cache folder: listing a million files can take minutes.

An index is valid while size and modification time of each file and folder it was made from remain the same.
"""

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cl_train.data.source import ImageSource, Split
from cl_train.system.files import cache_folder, replacing


def cache_path(kind: str, key: str) -> Path:
    return cache_folder() / f"{kind}-{hashlib.sha256(os.fsencode(key)).hexdigest()[:16]}.npz"


def save(path: Path, source: ImageSource, made_from: Sequence[str | bytes], unchanged_since_ns: int) -> None:
    """Does nothing if one of the files and folders in `made_from` was modified later than `unchanged_since_ns`, or if
    the cache cannot be written: the index is then made again at the next start."""
    with contextlib.suppress(OSError):
        status = _status(made_from)
        if max(modified_ns for _, modified_ns in status) > unchanged_since_ns:
            return
        header = {name: getattr(source, name) for name in ("classes", "fingerprint", "notes")}
        header |= {"made_from": list(map(os.fsdecode, made_from)), "status": status}
        arrays = {
            f"{name}/{key}": value
            for name, split in (("train", source.train), ("val", source.val))
            for key, value in vars(split).items()
            if isinstance(value, np.ndarray)
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)


def load(
    path: Path, train: Callable[..., Split], val: Callable[..., Split], made_from: Sequence[str] | None = None
) -> ImageSource | None:
    """The stored source, with splits that `train` and `val` make of their arrays; None if there is none, or if it is
    damaged or not valid.

    `made_from`: the files that it must be made from; None = those that it names.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            header = json.loads(stored["header"].tobytes())
            known = header["made_from"]
            if (made_from is not None and known != list(made_from)) or header["status"] != _status(known):
                return None
            arrays: dict[str, dict[str, Any]] = {"train": {}, "val": {}}
            for key in stored.files:
                if key != "header":
                    split, name = key.split("/")
                    arrays[split][name] = stored[key]
            classes, notes = tuple(header["classes"]), tuple(header["notes"])
            return ImageSource(classes, train(**arrays["train"]), val(**arrays["val"]), header["fingerprint"], notes)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):  # TypeError: an array is missing
        return None


def _status(paths: Sequence[str | bytes]) -> list[list[int]]:
    """Size and time of the last modification in ns."""
    return [[status.st_size, status.st_mtime_ns] for status in map(os.stat, paths)]
