"""The source of encoded images: the interface that folders and shards implement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

_NAMED = 5  # in a message; a folder can hold a thousand
Indices = npt.NDArray[np.int64]


class Split(Protocol):
    """The encoded images of one split, in a fixed order, with their labels.

    Loader workers are forked from the process that created the object. Keep the index in a few arrays: a worker that
    reads a list of a million Python objects copies its memory page by page. A file that stays open must be read with
    `pread`, because all workers share its position.
    """

    @property
    def labels(self) -> Indices:
        """int64 [images], each in [0, number of classes)."""
        ...

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The name of image `index` in messages: a path, or a path and a member."""
        ...

    def read(self, index: int) -> bytes:
        """The encoded file of image `index`. Raises `cl_train.data.decode.BadImage` if it cannot be read."""
        ...


@dataclass(frozen=True)
class ImageSource:
    """Both splits of a data set with the same classes.

    Attributes:
        classes: names in the order of the labels.
        fingerprint: identifies the list of images, their labels and the classes, not the files' contents.
        train_shards: for each shard the indices of its training images, int64, in the order of the file; None if the
            images are not stored in shards.
        notes: remarks for the user about the source, one sentence each; logged once per run.
    """

    classes: tuple[str, ...]
    train: Split
    val: Split
    fingerprint: str
    train_shards: tuple[Indices, ...] | None = None
    notes: tuple[str, ...] = ()


def listed(names: Sequence[object]) -> str:
    """For messages: the first few, and the number of the others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(str, names[:_NAMED])) + more if names else "nothing"
