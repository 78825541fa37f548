"""Write an encoded image into its row of a batch: read, decode, crop, resize, flip. uint8 throughout.

The decoder writes into a scratch buffer and the resize writes into the row: after decoding, each pixel is written once,
and no memory is allocated per image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data import crops
from cl_train.data.augment import image_augment
from cl_train.data.decode import Encoded, Pixels, formats_of
from cl_train.data.order import SampleGenerator
from cl_train.data.source import Split

_SCRATCH_PIXELS = 1_000_000  # images up to this size are decoded into a buffer that is kept


@dataclass
class WorkerTimes:
    """Seconds that workers spent on each part of loading."""

    read_s: float = 0.0
    decode_s: float = 0.0
    resize_s: float = 0.0
    images: int = 0
    dataset_s: float = 0.0  # in the user's Dataset

    def add(self, other: "WorkerTimes") -> None:
        self.read_s += other.read_s
        self.decode_s += other.decode_s
        self.resize_s += other.resize_s
        self.images += other.images
        self.dataset_s += other.dataset_s


class ImageTransform:
    """Crops and resizes pixels into a row, uint8 [3, size, size] in channels_last, of any size."""

    def __init__(self, cfg: DataConfig, augment: AugmentConfig, seed: int, *, training: bool) -> None:
        self._cfg, self._augment, self._seed, self._training = cfg, augment, seed, training
        self._operations = image_augment(augment, cfg.mean) if training else None
        self._unflipped = torch.empty(0)
        self._generator = SampleGenerator()

    def __call__(self, row: Tensor, pixels: Pixels, epoch: int, random_index: int) -> None:
        """In training with the random numbers of sample `random_index` in `epoch`."""
        if self._training:
            self._random_crop(row, pixels, epoch, random_index)
        else:
            self._centre_crop(row, pixels)

    def _random_crop(self, row: Tensor, pixels: Pixels, epoch: int, random_index: int) -> None:
        """Random resized crop, flip and augmentation."""
        generator = self._generator.of_sample(self._seed, epoch, random_index)
        uniform = generator.random(crops.RANDOM_NUMBERS).tolist()
        box = crops.random_resized_crop(pixels.shape[0], pixels.shape[1], self._augment, uniform[1:])
        flip = uniform[0] < self._augment.flip
        out = row.unsqueeze(0)
        if flip and self._unflipped.shape != out.shape:
            self._unflipped = torch.empty_like(out)
        bicubic = self._cfg.interpolation == "bicubic"
        resized(pixels, box, row.shape[1:], out=self._unflipped if flip else out, bicubic=bicubic)
        if flip:
            torch.ops.aten.flip.out(self._unflipped, (3,), out=out)
        if self._operations is not None:
            row.copy_(self._operations(row, int(generator.integers(2**63))))

    def _centre_crop(self, row: Tensor, pixels: Pixels) -> None:
        """Resize and centre crop with torchvision's arithmetic."""
        side = row.shape[-1]
        short_side = self._cfg.val_resize or crops.default_val_resize(side)
        size = crops.resized_size(pixels.shape[0], pixels.shape[1], short_side)
        box = crops.centre(*size, side)
        image = resized(pixels, None, size, bicubic=self._cfg.val_interpolation == "bicubic")
        row.copy_(image[0, :, box.top : box.top + side, box.left : box.left + side])


class ImageReader:
    """Reads the images of a split into rows of a batch.

    Attributes:
        dtype: of the rows.
        times: seconds spent in `read`; set by the loader.
    """

    dtype = torch.uint8

    def __init__(self, split: Split, cfg: DataConfig, augment: AugmentConfig, seed: int, *, training: bool) -> None:
        self._split, self._decoder = split, (cfg.decoder, formats_of(cfg.extensions))
        self._transform = ImageTransform(cfg, augment, seed, training=training)
        self._scratch: Pixels = np.empty(_SCRATCH_PIXELS * 3, dtype=np.uint8)
        self.times = WorkerTimes()

    def __len__(self) -> int:
        return len(self._split)

    def name(self, index: int) -> str:
        return self._split.name(index)

    def read(self, row: Tensor, index: int, epoch: int, random_index: int) -> int:
        """Write image `index` into `row`, uint8 [3, size, size], with the random numbers of `random_index`; return its
        label. Raises BadImage."""
        begin = perf_counter()
        data = self._split.read(index)
        read = perf_counter()
        pixels = Encoded(data, *self._decoder).decode(self._scratch)
        decoded = perf_counter()
        self._transform(row, pixels, epoch, random_index)
        self.times.add(WorkerTimes(read - begin, decoded - read, perf_counter() - decoded, 1))
        return int(self._split.labels[index])


def resized(
    pixels: Pixels, box: crops.Box | None, size: Sequence[int], out: Tensor | None = None, *, bicubic: bool = False
) -> Tensor:
    """`box` of `pixels` (uint8 [H, W, 3]; None: all) at `size`, with antialiasing: uint8 [1, 3, h, w]."""
    if box is not None:  # sliced in NumPy, which takes a tenth of the time of slicing a tensor
        pixels = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    image = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
    resize = torch.ops.aten._upsample_bicubic2d_aa if bicubic else torch.ops.aten._upsample_bilinear2d_aa
    if out is None:
        return resize(image, size, False, None, None)
    return resize.out(image, size, False, None, None, out=out)
