"""Write an encoded image into its row of a batch: read, decode, crop, resize, flip. uint8 throughout.

The decoder writes into a scratch buffer and the resize writes into the row: after decoding, each pixel is written once,
and no memory is allocated per image.
"""

from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data.bottleneck import WorkerTimes
from cl_train.data.decode import Encoded, Pixels, formats_of
from cl_train.data.source import Split
from cl_train.data.transforms import ImageTransform

_SCRATCH_PIXELS = 1_000_000  # images up to this size are decoded into a buffer that is kept


class ImageReader:
    """Reads the images of a split into rows of a batch.

    Attributes:
        dtype: of the rows.
        label_shape: () of int64 labels; [classes] of the float32 vectors that a Dataset may give.
        times: seconds spent in `read`; set by the loader.
    """

    dtype = torch.uint8
    label_shape: tuple[int, ...] = ()

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
