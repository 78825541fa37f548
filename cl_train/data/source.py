"""The source of encoded images: what folders and shards have in common, and the cache of their indexes.

Listing a million files can take minutes. A stored index is valid while size and modification time of each file and
folder it was made from remain the same.
"""

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cl_train.system.files import cache_folder, replacing

_NAMED = 5  # in a message; a folder can hold a thousand
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """The encoded images of one split, in a fixed order. Subclasses implement `read`.

    `names` holds the encoded names one after the other, each from its `starts`; `labels` are from 0. Arrays, because a
    forked worker that reads a list of a million Python objects copies its memory page by page.
    """

    names: npt.NDArray[np.uint8]
    starts: Indices
    labels: Indices

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """The name of image `index` in messages: a path, or a path and a member."""
        return os.fsdecode(self.names[self.starts[index] : self.starts[index + 1]].tobytes())

    def read(self, index: int) -> bytes:
        """The encoded file of image `index`. Raises `cl_train.data.decode.BadImage` if it cannot be read."""
        raise NotImplementedError


@dataclass(frozen=True)
class ImageSource:
    """Both splits of a data set; `classes` in the order of the labels. `fingerprint`: of the list of images, not of
    the files' contents. `notes`: remarks for the user, one sentence each."""

    classes: tuple[str, ...]
    train: Any  # Split, or the user's Dataset
    val: Any
    fingerprint: str
    notes: tuple[str, ...] = ()


def packed(names: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], Indices]:
    """`names` and `starts` of a `Split`."""
    return np.frombuffer(b"".join(names), np.uint8), np.cumsum([0, *map(len, names)], dtype=np.int64)


def fingerprint(classes: Sequence[str], splits: Sequence[Split], arrays: Sequence[str]) -> str:
    """Of the classes, and of each split's attributes `arrays`."""
    digest = hashlib.sha256("\0".join(classes).encode("utf-8", "surrogateescape"))
    for split in splits:
        for name in arrays:
            digest.update(getattr(split, name).data)
    return digest.hexdigest()[:16]


def listed(names: Sequence[object]) -> str:
    """For messages: the first few, and the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(str, names[:_NAMED])) + more if names else "nothing"


def _stored_at(key: str) -> Path:
    return cache_folder() / f"index-{hashlib.sha256(os.fsencode(key)).hexdigest()[:16]}.npz"


def save_index(key: str, source: ImageSource, made_from: Sequence[str | bytes], unchanged_since_ns: int) -> None:
    """Not if a file or folder in `made_from` was modified later than `unchanged_since_ns`, or the cache cannot be
    written: the index is then made again at the next start."""
    path = _stored_at(key)
    with contextlib.suppress(OSError):
        status = _status(made_from)
        if max(modified_ns for _, modified_ns in status) > unchanged_since_ns:
            return
        header = {name: getattr(source, name) for name in ("classes", "fingerprint", "notes")}
        header |= {"made_from": list(map(os.fsdecode, made_from)), "status": status}
        arrays = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
        for name in ("train", "val"):
            values = vars(getattr(source, name)).items()
            arrays |= {f"{name}/{key}": value for key, value in values if isinstance(value, np.ndarray)}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)


def load_index(key: str, train: Callable[..., Split], val: Callable[..., Split]) -> ImageSource | None:
    """The stored source, with splits that `train` and `val` make of their arrays; None: there is no valid one."""
    try:
        with open(_stored_at(key), "rb") as file, np.load(file, allow_pickle=False) as stored:
            header = json.loads(stored["header"].tobytes())
            if header["status"] != _status(header["made_from"]):
                return None
            first, second = (
                make(**{name.split("/")[1]: stored[name] for name in stored.files if name.startswith(split)})
                for split, make in (("train/", train), ("val/", val))
            )
            return ImageSource(tuple(header["classes"]), first, second, header["fingerprint"], tuple(header["notes"]))
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):  # TypeError: an array is missing
        return None


def _status(paths: Sequence[str | bytes]) -> list[list[int]]:
    """Size and time of the last modification in ns."""
    return [[status.st_size, status.st_mtime_ns] for status in map(os.stat, paths)]
