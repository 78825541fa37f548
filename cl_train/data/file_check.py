"""Refuse a folder in which too many files are not images. Only their first bytes are read."""

from __future__ import annotations

import os
import stat

import numpy as np

from cl_train.config.schema import ConfigError
from cl_train.data.decode import JPEG_MAGIC, PNG_MAGIC
from cl_train.data.folder import FolderSplit
from cl_train.data.source import ImageSource, listed

_CHECKED = 10_000  # files of a split: less than a second on a local disk, ten seconds over a network
_STARTS = (JPEG_MAGIC, PNG_MAGIC, b"BM", b"II*\0", b"MM\0*", b"RIFF")  # BMP, TIFF in both byte orders, WEBP


def check_files(source: ImageSource, max_bad_images: int) -> None:
    """For on_bad_image=skip, before training. Of a large folder a random part is checked.

    Raises:
        ConfigError: more than `max_bad_images` files are not images, or a class has no image at all.
    """
    for split in (source.train, source.val):
        if not isinstance(split, FolderSplit):  # shards are checked when they are written
            continue
        count = len(split)
        checked = np.sort(np.random.default_rng(0).permutation(count)[:_CHECKED])
        bad = {int(index): reason for index in checked if (reason := why_no_image(split.path(int(index))))}
        problems = []
        if len(bad) > max_bad_images:
            problems.append(
                f"{len(bad)} of {len(checked)} files are not images, more than data.max_bad_images={max_bad_images}"
            )
        if bad and len(checked) == count:
            left = np.delete(split.labels, list(bad))
            lost = [source.classes[label] for label in np.setdiff1d(split.labels, left)]
            problems += [f"no file of {listed(lost)} is an image"] if lost else []
        if problems:
            first, reason = next(iter(bad.items()))
            raise ConfigError(
                f"'{split.folder}': {'; '.join(problems)}; the first: '{split.name(first)}': {reason}. cl-train "
                "prepare_imagenet verify lists them"
            )


def why_no_image(path: str | bytes, starts: tuple[bytes, ...] = _STARTS) -> str | None:
    """The reason why a file is not an image, from its kind and first bytes; None if it may be one."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "not a regular file"
        with open(path, "rb", buffering=0) as file:
            start = file.read(8)
    except OSError as error:
        return error.strerror
    if not start:
        return "the file is empty"
    return None if start.startswith(starts) else "not an image: its first bytes are of another format"
