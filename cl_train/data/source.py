"""The source of encoded images: what folders and shards have in common."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_NAMED = 5  # in a message; a folder can hold a thousand
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """The encoded images of one split, in a fixed order, with their labels. Subclasses implement `read`.

    Loader workers are forked from the process that created the object. The index is in a few arrays, because a worker
    that reads a list of a million Python objects copies its memory page by page. A file that stays open must be read
    with `pread`, because all workers share its position.

    Attributes:
        names: uint8, the encoded names, one after the other.
        starts: int64 [images + 1], where each name starts.
        labels: int64 [images], each in [0, number of classes).
    """

    names: npt.NDArray[np.uint8]
    starts: Indices
    labels: Indices

    def __len__(self) -> int:
        return len(self.labels)

    def stored_name(self, index: int) -> bytes:
        return self.names[self.starts[index] : self.starts[index + 1]].tobytes()

    def name(self, index: int) -> str:
        """The name of image `index` in messages: a path, or a path and a member."""
        return os.fsdecode(self.stored_name(index))

    def read(self, index: int) -> bytes:
        """The encoded file of image `index`. Raises `cl_train.data.decode.BadImage` if it cannot be read."""
        raise NotImplementedError


@dataclass(frozen=True)
class ImageSource:
    """Both splits of a data set with the same classes.

    Attributes:
        classes: names in the order of the labels.
        fingerprint: identifies the list of images, their labels and the classes, not the files' contents.
        notes: remarks for the user about the source, one sentence each; logged once per run.
    """

    classes: tuple[str, ...]
    train: Split
    val: Split
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
