"""JPEGs of the size and weight of ImageNet's, for measuring a run that loads them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("first", "second")


def write_jpegs(root: Path, *, distinct: int, copies: int, size: tuple[int, int]) -> int:
    """Write train/ and val/ of two classes under `root`; returns the number of training images.

    Smooth shapes with noise: about 110 kB at 500 x 375 and quality 90, as ImageNet's files have. Each of `distinct`
    images appears under `copies` names, as hard links: what is measured is decoding, not a disk.
    """
    random = np.random.default_rng(0)
    for name in CLASSES:
        for split in ("train", "val"):
            (root / split / name).mkdir(parents=True, exist_ok=True)
    for number in range(distinct):
        name = CLASSES[number % len(CLASSES)]
        coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
            size, Image.Resampling.BICUBIC
        )
        noise = random.normal(0, 12, (size[1], size[0], 3))
        image = Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8))
        original = root / "train" / name / f"{number:05d}_000.JPEG"
        image.save(original, quality=90)
        for copy in range(1, copies):
            link = original.with_name(f"{number:05d}_{copy:03d}.JPEG")
            link.unlink(missing_ok=True)
            os.link(original, link)
        if number < 2 * len(CLASSES):
            image.save(root / "val" / name / original.name, quality=90)
    return distinct * copies
