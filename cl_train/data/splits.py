"""Both splits of a data set as batches on the device: images, or synthetic data."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from cl_train.config.schema import ConfigError, DataConfig
from cl_train.data.batch import Batch, DeviceFormat
from cl_train.data.bottleneck import WorkerTimes
from cl_train.data.decode import Pixels
from cl_train.data.device import MixLabels, Normalise, to_device
from cl_train.data.loader import BadImages, HostLoader
from cl_train.data.order import SizeSchedule
from cl_train.system.distributed import Dist


@dataclass
class ImageData:
    """Training and validation images of one run, as this rank sees them.

    The order and the augmentation of an image depend only on the seed, the epoch and the image, not on workers or world
    size. MixUp and CutMix combine the images of a rank's batch, so they depend on the world size.
    """

    classes: tuple[str, ...]
    fingerprint: str  # of the list of files and the classes
    train_loader: HostLoader
    val_loader: HostLoader
    dist: Dist
    bad_images: BadImages  # found so far by this rank
    mean: list[float]
    std: list[float]
    mix: MixLabels | None = None

    def __post_init__(self) -> None:
        self.num_classes, self.workers = len(self.classes), self.train_loader.workers
        self.train_images, self.val_images = self.train_loader.samples, self.val_loader.samples

    def batch_count(self, epoch: int) -> int:
        """Full global batches of an epoch; the remaining images are dropped."""
        return self.train_loader.batch_count(epoch)

    def check_batches(self) -> None:
        """Raises ConfigError: there are fewer training images than one batch of all ranks."""
        if self.batch_count(0) == 0:
            size, ranks = self.train_loader.batch_size, self.dist.world_size
            raise ConfigError(
                f"{self.train_images} training images are fewer than one global batch of {size * ranks} ({size} x"
                f" {ranks}); lower batch_size"
            )

    @property
    def times(self) -> WorkerTimes:
        """Seconds that the workers have spent on the training images."""
        return self.train_loader.times

    def train(self, epoch: int, form: DeviceFormat, first_batch: int = 0) -> Generator[Batch, None, None]:
        """This rank's share of global batch `first_batch`, `first_batch + 1`, ... of `epoch`."""
        normalise = Normalise(self.mean, self.std, form)
        yield from to_device(self.train_loader.batches(epoch, first_batch), normalise, self.mix)

    def validation(self, form: DeviceFormat) -> Iterator[Batch]:
        """Rank r's images `r::world_size`: no padding, no duplicates. With on_bad_image=skip, bad ones are left out."""
        return to_device(self.val_loader.batches(), Normalise(self.mean, self.std, form))

    def validation_indices(self) -> list[int]:
        """The images of this rank's last `validation`, in its order; empty for an IterableDataset, which has none."""
        if self.val_loader.is_stream:
            return []
        bad = self.bad_images.reasons
        own = range(self.dist.rank, self.val_images, self.dist.world_size)
        return [index for index in own if not bad or self.validation_name(index) not in bad]

    def validation_name(self, index: int) -> str:
        return self.val_loader.reader.name(index)

    def validation_pixels(self, index: int) -> Pixels:
        """Validation image `index` as the model sees it: uint8 [H, W, 3], not normalised."""
        pixels = self.val_loader.validation_sample(index)
        if pixels.is_floating_point():
            pixels = 255 * (pixels * torch.tensor(self.std) + torch.tensor(self.mean)).clamp(0, 1)
        return np.asarray(pixels.to(torch.uint8))

    def close(self) -> None:
        """End the workers and free the shared memory."""
        self.train_loader.close()
        self.val_loader.close()


class SyntheticData:
    """One batch of noise per DeviceFormat and shape, shared by all steps: do not write into it. Otherwise as
    `ImageData`. It measures training without loading."""

    def __init__(self, cfg: DataConfig, sizes: SizeSchedule, batch_size: int, *, seed: int, world_size: int) -> None:
        self.num_classes, self.workers = cfg.synthetic_classes, 0
        self.classes = tuple(f"class_{label}" for label in range(self.num_classes))
        self.train_images, self.val_images = cfg.synthetic_images, batch_size * world_size
        self.fingerprint = f"synthetic-{self.train_images}-{self.num_classes}-{cfg.image_size}-{seed}"
        self.bad_images, self.times = BadImages(skip=True, limit=0), WorkerTimes()
        self._sizes, self._batch_size, self._val_size = sizes, batch_size, cfg.val_size or cfg.image_size
        self._seed, self._world_size = seed, world_size
        self._batches: dict[tuple[DeviceFormat, int, int], Batch] = {}

    def batch_count(self, epoch: int) -> int:
        return self.train_images // (self._batch_size * self._world_size)

    def train(self, epoch: int, form: DeviceFormat, first_batch: int = 0) -> Generator[Batch, None, None]:
        for _ in range(first_batch, self.batch_count(epoch)):
            yield self._batch(form, self._batch_size, self._sizes.image_size_at(epoch))

    def validation(self, form: DeviceFormat) -> Iterator[Batch]:
        yield self._batch(form, self._batch_size, self._val_size)

    def validation_indices(self) -> list[int]:
        return []

    def close(self) -> None:
        self._batches.clear()

    def _batch(self, form: DeviceFormat, batch_size: int, image_size: int) -> Batch:
        key = (form, batch_size, image_size)
        if key not in self._batches:
            generator = torch.Generator().manual_seed(self._seed)
            images = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
            targets = torch.randint(self.num_classes, (batch_size,), generator=generator)
            images = images.to(form.device, form.dtype, memory_format=form.memory_format)
            self._batches[key] = Batch(images, targets.to(form.device))
        return self._batches[key]


Data = ImageData | SyntheticData
