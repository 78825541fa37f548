"""One fixed batch on the device, again and again: the cost of training without any loading."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch

from cl_train.config.schema import DataConfig
from cl_train.data.bad_images import BadImages
from cl_train.data.batch import Batch, DeviceFormat
from cl_train.data.images import WorkerTimes


class SyntheticData:
    """Normal noise with random labels, made once per DeviceFormat and shared by all steps: do not write into it.

    The members are those of `cl_train.data.image_data.ImageData`.
    """

    def __init__(self, cfg: DataConfig, *, batch_size: int, seed: int, world_size: int) -> None:
        self.num_classes, self.workers = cfg.synthetic_classes, 0
        self.classes = tuple(f"class_{label}" for label in range(self.num_classes))
        self.train_images, self.val_images = cfg.synthetic_images, batch_size * world_size
        self.fingerprint = f"synthetic-{self.train_images}-{self.num_classes}-{cfg.image_size}-{seed}"
        self.batches_per_epoch = self.train_images // (batch_size * world_size)
        self.bad_images, self.times = BadImages(skip=True, limit=0), WorkerTimes()
        self._shape, self._seed = (batch_size, 3, cfg.image_size, cfg.image_size), seed
        self._batches: dict[DeviceFormat, Batch] = {}

    def train(self, epoch: int, form: DeviceFormat, first_batch: int = 0) -> Generator[Batch, None, None]:
        for _ in range(first_batch, self.batches_per_epoch):
            yield self._batch(form)

    def validation(self, form: DeviceFormat) -> Iterator[Batch]:
        yield self._batch(form)

    def close(self) -> None:
        self._batches.clear()

    def _batch(self, form: DeviceFormat) -> Batch:
        if form not in self._batches:
            generator = torch.Generator().manual_seed(self._seed)
            images = torch.randn(self._shape, generator=generator)
            targets = torch.randint(self.num_classes, (self._shape[0],), generator=generator)
            images = images.to(form.device, form.dtype, memory_format=form.memory_format)
            self._batches[form] = Batch(images, targets.to(form.device))
        return self._batches[form]
