"""From the `data` settings to both splits of a data set as batches on the device: images, or synthetic data."""

import logging
import pkgutil
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from cl_train.config.schema import DATA_SETS, AugmentConfig, ConfigError, DataConfig
from cl_train.data.device import Batch, DeviceFormat, Normalise, to_device
from cl_train.data.images import ImageSource, Indices, Pixels, Split, read_images
from cl_train.data.loader import BadImages, HostLoader, Reader, WorkerTimes
from cl_train.data.order import SizeSchedule, permutation, repeated, shard_permutation
from cl_train.data.tar_shards import ShardSplit
from cl_train.data.transforms import ImageReader, ImageTransform, label_mix
from cl_train.data.user_dataset import DatasetReader, StreamReader
from cl_train.system.distributed import Dist
from cl_train.system.files import cache_folder

log = logging.getLogger(__name__)
_CHECKOUT = Path(__file__).resolve().parents[2]
# For generated and downloaded data: in the checkout, or for an installed package in the user's cache.
DATA_DIR = (_CHECKOUT if (_CHECKOUT / "pyproject.toml").is_file() else cache_folder()) / "data"


class ImageData:
    """Training and validation images of one run, as this rank sees them. The order and the augmentation of an image do
    not depend on workers or world size; MixUp and CutMix combine a rank's images, so they depend on the world size.
    `fingerprint`: of the list of files and the classes. `bad_images`: found so far by this rank."""

    def __init__(
        self, source: ImageSource, cfg: DataConfig, augment: AugmentConfig, batch_size: int, seed: int, dist: Dist
    ) -> None:
        """Without `source.train` the validation images stand for the training images too."""
        self._cfg, self._augment, self._batch_size, self._seed, self._dist = cfg, augment, batch_size, seed, dist
        training = source.train is not None
        of_all_ranks = f"batch of all ranks, {batch_size * dist.world_size} ({batch_size} x {dist.world_size})"
        if training and augment.repeats > batch_size * dist.world_size:
            raise ConfigError(f"augment.repeats={augment.repeats} is more than the {of_all_ranks}; raise batch_size")
        if training and augment.repeats > 1 and isinstance(source.train, IterableDataset):
            raise ConfigError("augment.repeats does not work with an IterableDataset, which controls its own order")
        self.classes, self.num_classes, self.fingerprint = source.classes, len(source.classes), source.fingerprint
        self.bad_images = BadImages(skip=cfg.on_bad_image == "skip", limit=cfg.max_bad_images)
        self._mix = label_mix(augment, self.num_classes, seed, dist)
        val_sizes = SizeSchedule(((0, cfg.val_size or cfg.image_size),))
        self.val_loader = self.train_loader = self._loader(source.val, val_sizes, training=False)
        if training:
            self.train_loader = self._loader(source.train, size_schedule(cfg), training=True)
        self.workers, self.label_shape = self.train_loader.workers, self.train_loader.reader.label_shape
        self.train_images, self.val_images = self.train_loader.samples, self.val_loader.samples
        if self.val_loader.reader.label_shape != self.label_shape:
            raise ConfigError("data.dataset: the labels of one split are vectors, those of the other are not")
        if training and self.batch_count() == 0:
            too_few = f"{self.train_images} training images are fewer than one {of_all_ranks}"
            raise ConfigError(f"{too_few}; lower batch_size")
        if training and self.train_loader.is_stream and dist.is_main:
            does = "its order depends on data.workers, and it divides its samples among ranks and workers"
            log.warning("data.dataset is an IterableDataset: %s; a resumed epoch reads the skipped batches again", does)

    def _loader(self, images: Any, sizes: SizeSchedule, *, training: bool) -> HostLoader:
        cfg, seed, dist, repeats = self._cfg, self._seed, self._dist, self._augment.repeats
        transform = ImageTransform(cfg, self._augment, seed, training=training)
        if isinstance(images, Split):
            reader: Reader = ImageReader(images, cfg, transform)
        else:
            kind = StreamReader if isinstance(images, IterableDataset) else DatasetReader
            reader = kind(images, self.num_classes, sizes.image_sizes[-1], transform, cfg.worker_timeout_s, dist)
        shards = images.by_shard() if cfg.shuffle == "shards" and isinstance(images, ShardSplit) else None
        count, global_batch_size = len(reader), self._batch_size * dist.world_size

        def order(epoch: int) -> Indices:  # refers to no loader: a cycle would keep its memory
            indices = shard_permutation(seed, epoch, shards) if shards else permutation(seed, epoch, count)
            return repeated(indices, repeats, global_batch_size)

        return HostLoader(reader, sizes, self._batch_size, cfg, dist, self.bad_images, order if training else None)

    def batch_count(self) -> int:
        """Full batches of all ranks in an epoch; the remaining images are dropped."""
        return self.train_loader.batch_count()

    @property
    def times(self) -> WorkerTimes:
        """Seconds that the workers have spent on the training images."""
        return WorkerTimes(*self.train_loader.times.sum(0).tolist())

    def train(self, epoch: int, form: DeviceFormat, first_batch: int = 0) -> Generator[Batch, None, None]:
        """This rank's share of the ranks' batch `first_batch`, `first_batch + 1`, ... of `epoch`."""
        normalise = Normalise(self._cfg.mean, self._cfg.std, form)
        yield from to_device(self.train_loader.batches(epoch, first_batch), normalise, self._mix)

    def validation(self, form: DeviceFormat) -> Iterator[Batch]:
        """Rank r's images `r::world_size`: no padding, no duplicates. With on_bad_image=skip, bad ones are left out."""
        return to_device(self.val_loader.batches(), Normalise(self._cfg.mean, self._cfg.std, form))

    def validation_indices(self) -> list[int]:
        """The images of this rank's last `validation`, in its order; empty for an IterableDataset, which has none."""
        if self.val_loader.is_stream:
            return []
        bad = self.bad_images.reasons
        indices = range(self._dist.rank, self.val_images, self._dist.world_size)
        return [index for index in indices if not bad or self.validation_name(index) not in bad]

    def validation_name(self, index: int) -> str:
        return self.val_loader.reader.name(index)

    def validation_pixels(self, index: int) -> Pixels:
        """Validation image `index` as the model sees it: uint8 [H, W, 3], not normalised. Raises BadImage."""
        reader, size = self.val_loader.reader, self.val_loader.sizes.image_size_at(0)
        pixels = torch.empty(size, size, 3, dtype=reader.dtype)
        reader.read(pixels.permute(2, 0, 1), index, epoch=0, random_index=index)
        if pixels.is_floating_point():
            pixels = 255 * (pixels * torch.tensor(self._cfg.std) + torch.tensor(self._cfg.mean)).clamp(0, 1)
        return np.asarray(pixels.to(torch.uint8))

    def close(self) -> None:
        """End the workers and free their memory."""
        self.train_loader.close()
        self.val_loader.close()


class SyntheticData:
    """As `ImageData`, without loading: a batch of noise per format and size for all steps; do not write into it."""

    def __init__(self, cfg: DataConfig, sizes: SizeSchedule, batch_size: int, *, seed: int, world_size: int) -> None:
        self.num_classes, self.workers, self.label_shape = cfg.synthetic_classes, 0, ()
        self.classes = tuple(f"class_{label}" for label in range(self.num_classes))
        self.train_images, self.val_images = cfg.synthetic_images, batch_size * world_size
        self.fingerprint = f"synthetic-{self.train_images}-{self.num_classes}-{cfg.image_size}-{seed}"
        self.bad_images, self.times = BadImages(skip=True, limit=0), WorkerTimes()
        self._sizes, self._batch_size, self._val_size = sizes, batch_size, cfg.val_size or cfg.image_size
        self._world_size, self._seed, self._batch = world_size, seed, cache(self._noise)

    def batch_count(self) -> int:
        return self.train_images // (self._batch_size * self._world_size)

    def train(self, epoch: int, form: DeviceFormat, first_batch: int = 0) -> Generator[Batch, None, None]:
        for _ in range(first_batch, self.batch_count()):
            yield self._batch(form, self._sizes.image_size_at(epoch))

    def validation(self, form: DeviceFormat) -> Iterator[Batch]:
        yield self._batch(form, self._val_size)

    def validation_indices(self) -> list[int]:
        return []

    def close(self) -> None:
        self._batch.cache_clear()

    def _noise(self, form: DeviceFormat, size: int) -> Batch:
        generator = torch.Generator().manual_seed(self._seed)
        images = torch.randn(self._batch_size, 3, size, size, generator=generator)
        targets = torch.randint(self.num_classes, (self._batch_size,), generator=generator)
        return Batch(images.to(form.device, form.dtype, memory_format=form.memory_format), targets.to(form.device))


Data = ImageData | SyntheticData


def build_data(
    cfg: DataConfig, augment: AugmentConfig, *, batch_size: int, seed: int, dist: Dist, training: bool = True
) -> Data:
    """The data of `cfg` for this rank. Without `training` the validation images stand for the training images too.
    Raises ConfigError: data that is missing, or does not fit the settings or memory."""
    if cfg.name == "synthetic":
        return SyntheticData(cfg, size_schedule(cfg), batch_size, seed=seed, world_size=dist.world_size)
    root = DATA_DIR / cfg.name if cfg.root is None else Path(cfg.root).expanduser()
    read = pkgutil.resolve_name(f"cl_train.data.{DATA_SETS[cfg.name].read}")
    source: ImageSource = read(root, cfg, training=training)
    for note in source.notes if dist.is_main else ():
        log.info("%s", note)
    return ImageData(source if training else replace(source, train=None), cfg, augment, batch_size, seed, dist)


def size_schedule(cfg: DataConfig) -> SizeSchedule:
    """The sizes of the training images."""
    return SizeSchedule(tuple((epoch, size) for epoch, size in cfg.size_schedule) or ((0, cfg.image_size),))


def images_of_folder(cfg: DataConfig, classes: tuple[str, ...], batch_size: int, dist: Dist) -> ImageData:
    """For predictions: all images below `data.root`, or of its folder of validation images, as `validation`."""
    assert cfg.root is not None
    images = read_images(Path(cfg.root).expanduser(), classes, cfg.extensions)
    cfg, source = replace(cfg, max_bad_images=len(images)), ImageSource(classes, None, images, "")
    return ImageData(source, cfg, AugmentConfig(), batch_size, 0, dist)
