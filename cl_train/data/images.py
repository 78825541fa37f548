"""One image from its file into its row of a batch: read, decode, crop, resize, flip. uint8 all the way.

Every kind of worker uses this. Decoding writes into a scratch buffer and the resize straight into the row, so that an
image's pixels are written once after the decoder, and no memory is allocated per image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from cl_train.data import crops
from cl_train.data.decode import BadImage, Encoded, Pixels, read_file
from cl_train.data.folder import Split
from cl_train.data.order import sample_generator

_SCRATCH_PIXELS = 1_000_000  # images up to this size are decoded into a buffer that stays


@dataclass(frozen=True)
class ImageForm:
    """What an image becomes: the settings that a worker needs, as plain values."""

    size: int
    val_resize: int
    crop: crops.CropRange
    flip: float
    simple_decoder: bool
    exact_decode: bool
    seed: int
    augment: Callable[[Tensor, int], Tensor] | None = None  # (uint8 [3, size, size], seed) -> the same


@dataclass
class Times:
    """Seconds that workers spent on each part."""

    read_s: float = 0.0
    decode_s: float = 0.0
    resize_s: float = 0.0
    images: int = 0

    def add(self, other: Times) -> None:
        self.read_s += other.read_s
        self.decode_s += other.decode_s
        self.resize_s += other.resize_s
        self.images += other.images


class ImageReader:
    """Writes images of a split into rows. One per worker: it owns scratch memory."""

    def __init__(self, form: ImageForm) -> None:
        self._form = form
        self._pixels: Pixels = np.empty(_SCRATCH_PIXELS * 3, dtype=np.uint8)
        self._row = torch.empty(1, form.size, form.size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
        self.times = Times()

    def train(self, row: Tensor, split: Split, index: int, epoch: int, numbers_of: int) -> None:
        """Image `index`, augmented with the random numbers of image `numbers_of`, into `row`, uint8 [3, size, size].

        Raises BadImage.
        """
        form = self._form
        generator = sample_generator(form.seed, epoch, numbers_of)
        uniform = generator.random(crops.RANDOM_NUMBERS).tolist()
        encoded = self._open(split, index)
        box = crops.random_resized_crop(encoded.height, encoded.width, form.crop, uniform[1:])
        pixels, box = self._decode(encoded, box, form.size)
        self._resize(row, pixels, box, (form.size, form.size), flip=uniform[0] < form.flip)
        if form.augment is not None:
            row.copy_(form.augment(row, int(generator.integers(2**63))))

    def validation(self, row: Tensor, split: Split, index: int) -> None:
        """Image `index`, resized and centre-cropped with torchvision's arithmetic, into `row`. Raises BadImage."""
        form = self._form
        encoded = self._open(split, index)
        whole = crops.Box(0, 0, encoded.height, encoded.width)
        pixels, whole = self._decode(encoded, whole, form.val_resize)
        size = crops.resized_size(encoded.height, encoded.width, form.val_resize)
        start = perf_counter()
        image = resized(pixels, whole, size)
        box = crops.centre(*size, form.size)
        row.copy_(image[0, :, box.top : box.top + form.size, box.left : box.left + form.size])
        self.times.resize_s += perf_counter() - start

    def _open(self, split: Split, index: int) -> Encoded:
        start = perf_counter()
        data = read_file(split.path(index))
        self.times.read_s += perf_counter() - start
        return Encoded(data, simple=self._form.simple_decoder)

    def _decode(self, encoded: Encoded, box: crops.Box, target: int) -> tuple[Pixels, crops.Box]:
        start = perf_counter()
        factor = 1 if self._form.exact_decode else shrink_factor(box, target)
        pixels = encoded.decode(factor, self._pixels)
        self.times.decode_s += perf_counter() - start
        self.times.images += 1
        if pixels.shape[:2] == (encoded.height, encoded.width):
            return pixels, box
        return pixels, _shrunk(box, factor, pixels.shape[0], pixels.shape[1])

    def _resize(self, row: Tensor, pixels: Pixels, box: crops.Box, size: tuple[int, int], *, flip: bool) -> None:
        start = perf_counter()
        direct = not flip and row.stride(0) == 1
        target = row.unsqueeze(0) if direct else self._row
        resized(pixels, box, size, out=target)
        if not direct:
            if flip and row.stride(0) == 1:
                torch.ops.aten.flip.out(self._row, (3,), out=row.unsqueeze(0))
            else:
                row.copy_(torch.flip(self._row, (3,))[0] if flip else self._row[0])
        self.times.resize_s += perf_counter() - start


def shrink_factor(box: crops.Box, target: int) -> int:
    """The largest of 1, 2, 4, 8 by which `box` may be shrunk and still have at least `target` pixels a side."""
    return next((factor for factor in (8, 4, 2) if min(box.height, box.width) >= factor * target), 1)


def _shrunk(box: crops.Box, factor: int, height: int, width: int) -> crops.Box:
    """`box` on an image that the decoder shrank by `factor` to (height, width), to the nearest pixel on each side."""
    top, left = round(box.top / factor), round(box.left / factor)
    bottom = min(height, round((box.top + box.height) / factor))
    right = min(width, round((box.left + box.width) / factor))
    return crops.Box(top, left, bottom - top, right - left)


def resized(pixels: Pixels, box: crops.Box | None, size: tuple[int, int], out: Tensor | None = None) -> Tensor:
    """`box` of `pixels` (uint8 [H, W, 3]; None: all) at `size`, antialiased bilinear: uint8 [1, 3, h, w]."""
    crop = torch.from_numpy(pixels)
    if box is not None:
        crop = crop[box.top : box.top + box.height, box.left : box.left + box.width]
    image = crop.permute(2, 0, 1).unsqueeze(0)
    if out is None:
        return torch.ops.aten._upsample_bilinear2d_aa(image, size, False, None, None)
    return torch.ops.aten._upsample_bilinear2d_aa.out(image, size, False, None, None, out=out)


__all__ = ["BadImage", "ImageForm", "ImageReader", "Times", "shrink_factor"]
