"""From the `data` settings to both splits of a data set as batches on the device: images, or
synthetic data.
"""

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from cl_train.config.schema import AugmentConfig, ConfigError, DataConfig
from cl_train.data.decode import Pixels
from cl_train.data.device import Batch, DeviceFormat, Normalise, to_device
from cl_train.data.images import ImageSource, Indices, Split, read_folder, read_images
from cl_train.data.loader import HostLoader, Reader
from cl_train.data.loader_report import BadImages, WorkerTimes
from cl_train.data.order import SizeSchedule, permutation, repeated, shard_permutation
from cl_train.data.sample import read_imagenette, read_sample
from cl_train.data.stream import StreamLoader
from cl_train.data.tar_shards import ShardSplit, read_shards
from cl_train.data.transforms import ImageReader, ImageTransform, label_mix
from cl_train.data.user_dataset import DatasetReader, SampleForm, read_datasets
from cl_train.data.workers import check_open_files
from cl_train.system.distributed import Dist
from cl_train.system.files import cache_folder

log = logging.getLogger(__name__)
_CHECKOUT = Path(__file__).resolve().parents[2]
# For generated and downloaded data: in the checkout, or for an installed package in the user's
# cache.
DATA_DIR = (_CHECKOUT if (_CHECKOUT / "pyproject.toml").is_file() else cache_folder()) / "data"
_READERS: dict[str, Callable[..., ImageSource]] = {  # (root, cfg, training=), of `data.name`
    "sample": read_sample,
    "imagenet": read_folder,
    "folder": read_folder,
    "shards": read_shards,
    "dataset": read_datasets,
    "imagenette": read_imagenette,
}


class ImageData:
    """The training and validation images of one run, as this rank sees them.

    The order and the augmentation of an image do not depend on workers or world size; MixUp and
    CutMix combine a rank's images, so they depend on the world size. `fingerprint`: of the list of
    files and the classes, not of their content. `bad_images`: of this rank, so far.
    """

    def __init__(
        self,
        source: ImageSource,
        cfg: DataConfig,
        augment: AugmentConfig,
        batch_size: int,
        seed: int,
        dist: Dist,
        accumulate_steps: int = 1,
    ) -> None:
        """Without `source.train` the validation images stand for the training images too."""
        self.notes = source.notes
        self._cfg, self._augment, self._batch_size = cfg, augment, batch_size
        self._seed, self._dist = seed, dist
        self._global_batch_size = batch_size * dist.world_size * accumulate_steps
        training = source.train is not None
        if training and augment.repeats > self._global_batch_size:
            raise ConfigError(
                f"augment.repeats={augment.repeats} is more than the {self._global_batch_size}"
                " images of a step; raise batch_size"
            )
        if training and augment.repeats > 1 and isinstance(source.train, IterableDataset):
            raise ConfigError(
                "augment.repeats does not work with an IterableDataset: it controls its own order"
            )
        self.classes, self.num_classes = source.classes, len(source.classes)
        self.fingerprint = source.fingerprint
        self.bad_images = BadImages(skip=cfg.on_bad_image == "skip", limit=cfg.max_bad_images)
        self._mix = label_mix(augment, self.num_classes, seed, dist)
        val_sizes = SizeSchedule(((0, cfg.val_size or cfg.image_size),))
        self.val_loader = self.train_loader = self._loader(source.val, val_sizes, training=False)
        if training:
            self.train_loader = self._loader(source.train, size_schedule(cfg), training=True)
        self.workers, self.label_shape = self.train_loader.workers, self.train_loader.label_shape
        self.train_images, self.val_images = self.train_loader.samples, self.val_loader.samples
        if self.val_loader.label_shape != self.label_shape:
            raise ConfigError(
                "data.dataset: the labels of one split are vectors, those of the other are not"
            )
        if training and self.batch_count() == 0:
            raise ConfigError(
                f"{self.train_images} training images are fewer than one batch of all ranks,"
                f" {batch_size * dist.world_size} ({batch_size} x {dist.world_size}); lower"
                " batch_size"
            )
        loaders = {self.train_loader, self.val_loader}
        check_open_files(sum(loader.workers for loader in loaders))
        if training and isinstance(self.train_loader, StreamLoader) and dist.is_main:
            log.warning(
                "data.dataset is an IterableDataset, which controls its order: it divides its"
                " samples among ranks and workers, and resume is not exact (a resumed epoch begins"
                " the stream anew)"
            )

    def _loader(
        self, images: Any, sizes: SizeSchedule, *, training: bool
    ) -> HostLoader | StreamLoader:
        cfg, seed, dist, repeats = self._cfg, self._seed, self._dist, self._augment.repeats
        transform = ImageTransform(cfg, self._augment, seed, training=training)
        form = SampleForm(self.num_classes, sizes.image_sizes[-1], transform)
        if isinstance(images, IterableDataset):
            return StreamLoader(images, form, self._batch_size, cfg, dist, self.bad_images)
        if isinstance(images, Split):
            reader: Reader = ImageReader(images, cfg, transform)
        else:
            reader = DatasetReader(images, form, cfg.worker_timeout_s)
        shards = None
        if cfg.shuffle == "shards" and isinstance(images, ShardSplit):
            shards = images.by_shard()
        count, global_batch_size = len(reader), self._global_batch_size

        def order(epoch: int) -> Indices:  # refers to no loader: a cycle would keep its memory
            if shards:
                indices = shard_permutation(seed, epoch, shards)
            else:
                indices = permutation(seed, epoch, count)
            return repeated(indices, repeats, global_batch_size)

        return HostLoader(
            reader, sizes, self._batch_size, cfg, dist, self.bad_images, order if training else None
        )

    def batch_count(self) -> int:
        """Full batches of all ranks in an epoch; the remaining images are dropped."""
        return self.train_loader.batch_count()

    @property
    def times(self) -> WorkerTimes:
        """Seconds that the workers have spent on the training images."""
        return WorkerTimes(*self.train_loader.times.sum(0).tolist())

    def train(
        self, epoch: int, form: DeviceFormat, first_batch: int = 0
    ) -> Generator[Batch, None, None]:
        """Yields this rank's share of the ranks' batches of `epoch`, from `first_batch` on."""
        normalise = Normalise(self._cfg.mean, self._cfg.std, form)
        yield from to_device(self.train_loader.batches(epoch, first_batch), normalise, self._mix)

    def validation(self, form: DeviceFormat) -> Iterator[Batch]:
        """Yields rank r's images `r::world_size`: no padding, no duplicates.

        With on_bad_image=skip, bad ones are left out.
        """
        return to_device(self.val_loader.batches(), Normalise(self._cfg.mean, self._cfg.std, form))

    def validation_indices(self) -> list[int]:
        """Returns the images of this rank's last `validation`; none for an IterableDataset."""
        if isinstance(self.val_loader, StreamLoader):
            return []
        bad = self.bad_images.reasons
        indices = range(self._dist.rank, self.val_images, self._dist.world_size)
        return [index for index in indices if not bad or self.validation_name(index) not in bad]

    def validation_name(self, index: int) -> str:
        assert isinstance(self.val_loader, HostLoader)
        return self.val_loader.reader.name(index)

    def validation_pixels(self, index: int) -> Pixels:
        """Returns validation image `index` as the model sees it, uint8 [H, W, 3].

        Raises BadImage.
        """
        assert isinstance(self.val_loader, HostLoader)
        reader, size = self.val_loader.reader, self.val_loader.sizes.image_size_at(0)
        pixels = torch.empty(size, size, 3, dtype=reader.dtype)
        reader.read(pixels.permute(2, 0, 1), index, epoch=0, random_index=index)
        if pixels.is_floating_point():
            pixels = 255 * (
                pixels * torch.tensor(self._cfg.std) + torch.tensor(self._cfg.mean)
            ).clamp(0, 1)
        return np.asarray(pixels.to(torch.uint8))

    def close(self) -> None:
        """End the workers and free their memory."""
        self.train_loader.close()
        self.val_loader.close()


class SyntheticData:
    """Has the public members of `ImageData`, without loading.

    All steps get the same batch of noise, one per format and size: do not write into it.
    """

    def __init__(
        self, cfg: DataConfig, sizes: SizeSchedule, batch_size: int, *, seed: int, world_size: int
    ) -> None:
        self.num_classes, self.workers, self.label_shape = cfg.synthetic_classes, 0, ()
        self.classes = tuple(f"class_{label}" for label in range(self.num_classes))
        self.train_images, self.val_images = cfg.synthetic_images, batch_size * world_size
        self.fingerprint = (
            f"synthetic-{self.train_images}-{self.num_classes}-{cfg.image_size}-{seed}"
        )
        self.bad_images, self.times = BadImages(skip=True, limit=0), WorkerTimes()
        self._sizes, self._val_size = sizes, cfg.val_size or cfg.image_size
        self._batch_size, self._world_size, self._seed = batch_size, world_size, seed
        self._batch = cache(self._noise)

    def batch_count(self) -> int:
        return self.train_images // (self._batch_size * self._world_size)

    def train(
        self, epoch: int, form: DeviceFormat, first_batch: int = 0
    ) -> Generator[Batch, None, None]:
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
        return Batch(form.place(images), targets.to(form.device))


Data = ImageData | SyntheticData


def build_data(
    cfg: DataConfig,
    augment: AugmentConfig,
    *,
    batch_size: int,
    seed: int,
    dist: Dist,
    accumulate_steps: int = 1,
    training: bool = True,
) -> Data:
    """Returns the data of `cfg` for this rank, in batches of `batch_size`, one per micro-step.

    Without `training` the validation images stand for the training images too. Raises ConfigError:
    data that is missing, or does not fit the settings or memory.
    """
    if cfg.name == "synthetic":
        return SyntheticData(
            cfg, size_schedule(cfg), batch_size, seed=seed, world_size=dist.world_size
        )
    root = DATA_DIR / cfg.name if cfg.root is None else Path(cfg.root).expanduser()
    source = _READERS[cfg.name](root, cfg, training=training)
    for note in source.notes if dist.is_main else ():
        log.info("%s", note)
    if not training:
        source = replace(source, train=None)
    return ImageData(source, cfg, augment, batch_size, seed, dist, accumulate_steps)


def size_schedule(cfg: DataConfig) -> SizeSchedule:
    """Returns the sizes of the training images."""
    points = tuple((epoch, size) for epoch, size in cfg.size_schedule)
    return SizeSchedule(points or ((0, cfg.image_size),))


def images_of_folder(
    cfg: DataConfig, classes: tuple[str, ...], batch_size: int, dist: Dist
) -> ImageData:
    """Returns, for predictions, all images below `data.root` or its folder of validation images."""
    assert cfg.root is not None
    source = read_images(Path(cfg.root).expanduser(), classes, cfg.extensions)
    cfg = replace(cfg, max_bad_images=len(source.val))
    return ImageData(source, cfg, AugmentConfig(), batch_size, 0, dist)
