"""One fixed batch on the device, again and again: what training costs without any loading."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch

from cl_train.data.bad_images import BadImages
from cl_train.data.batch import Batch, DeviceFormat
from cl_train.data.images import WorkerTimes


class SyntheticData:
    """Normal noise with random labels, made once per DeviceFormat and handed out by reference: do not write into it."""

    def __init__(self, *, images: int, classes: int, size: int, batch_size: int, seed: int, world_size: int) -> None:
        self.num_classes = classes
        self.classes = tuple(f"class_{number}" for number in range(classes))
        self.train_images, self.val_images = images, batch_size * world_size
        self.fingerprint = f"synthetic-{images}-{classes}-{size}-{seed}"
        self.batches_per_epoch = images // (batch_size * world_size)
        self.workers = 0
        self.bad_images = BadImages(skip=True, limit=0)
        self.times = WorkerTimes()
        self._shape = (batch_size, 3, size, size)
        self._seed = seed
        self._batches: dict[DeviceFormat, Batch] = {}

    def train(self, epoch: int, form: DeviceFormat, first_batch: int = 0) -> Generator[Batch, None, None]:
        batch = self._batch(form)
        for _ in range(first_batch, self.batches_per_epoch):
            yield batch

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
