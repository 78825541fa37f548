"""Which data set, which loader: from the `data` settings to batches on the device."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Protocol

import torch

from cl_train.config.schema import AugmentConfig, ConfigError, DataConfig
from cl_train.data.augment import image_augment, label_mix
from cl_train.data.bad_images import BadImages
from cl_train.data.batch import Batch, DeviceFormat
from cl_train.data.crops import CropRange, default_val_resize
from cl_train.data.dataset import dataset_loaders, load_datasets
from cl_train.data.decode import FORMATS
from cl_train.data.folder import FolderLayout, read_folder
from cl_train.data.image_data import ImageData
from cl_train.data.image_loader import default_workers
from cl_train.data.imagenette import ensure_imagenette
from cl_train.data.images import ImageReader, ImageSettings, WorkerTimes
from cl_train.data.loader import HostLoader, Loader, LoaderSettings
from cl_train.data.order import permutation, shard_permutation
from cl_train.data.sample import ensure_sample
from cl_train.data.shards import read_shards
from cl_train.data.source import ImageSource, Indices
from cl_train.data.synthetic import SyntheticData
from cl_train.system.distributed import Dist
from cl_train.system.files import cache_folder
from cl_train.system.memory import available_bytes

log = logging.getLogger(__name__)
_CHECKOUT = Path(__file__).resolve().parents[2]
# For generated and downloaded data: in the checkout, or for an installed package in the user's cache.
DATA_DIR = (_CHECKOUT if (_CHECKOUT / "pyproject.toml").is_file() else cache_folder()) / "data"


class Data(Protocol):
    """Training and validation images of one run, as this rank sees them.

    The order and the augmentation depend on the seed, the epoch and the image alone: never on workers or world size.
    """

    classes: tuple[str, ...]
    num_classes: int
    train_images: int
    val_images: int
    fingerprint: str  # of the list of files and the classes
    batches_per_epoch: int  # full global batches; the rest of an epoch is dropped
    workers: int  # of this process
    bad_images: BadImages  # met so far by this rank

    @property
    def times(self) -> WorkerTimes:
        """Seconds that the workers have spent on the training images."""
        ...

    def train(self, epoch: int, form: DeviceFormat, first_batch: int = 0) -> Generator[Batch, None, None]:
        """This rank's share of global batch `first_batch`, `first_batch + 1`, ... of `epoch`."""
        ...

    def validation(self, form: DeviceFormat) -> Iterator[Batch]:
        """Rank r's images `r::world_size`: no padding, no duplicates. With on_bad_image=skip, bad ones are left out."""
        ...

    def close(self) -> None:
        """End workers and threads, give back shared memory."""
        ...


def build_data(cfg: DataConfig, augment: AugmentConfig, *, batch_size: int, seed: int, dist: Dist) -> Data:
    """The data of `cfg` for this rank, in batches of `batch_size` images per rank.

    Raises:
        ConfigError: a missing folder, no or different classes, too few images, not enough memory.
    """
    if cfg.name == "synthetic":
        return SyntheticData(
            images=cfg.synthetic_images,
            classes=cfg.synthetic_classes,
            size=cfg.image_size,
            batch_size=batch_size,
            seed=seed,
            world_size=dist.world_size,
        )
    settings = LoaderSettings(
        batch_size=batch_size,
        workers=cfg.workers if cfg.workers is not None else default_workers(dist.world_size),
        prefetch=cfg.prefetch,
        worker_timeout_s=cfg.worker_timeout_s,
        pin_memory=dist.device.type == "cuda",
        rank=dist.rank,
        world_size=dist.world_size,
    )
    data = _image_data(cfg, augment, settings, seed)
    if dist.is_main:
        for note in data.notes:
            log.info("%s", note)
    _check_size(data.train_loader, settings)
    _check_memory(data.train_loader.shared_bytes + data.val_loader.shared_bytes, cfg.prefetch)
    return data


def _image_data(cfg: DataConfig, augment: AugmentConfig, settings: LoaderSettings, seed: int) -> ImageData:
    images = ImageSettings(
        size=cfg.image_size,
        val_resize=cfg.val_resize or default_val_resize(cfg.image_size),
        crop=CropRange(augment.crop_scale_min, augment.crop_scale_max, augment.crop_ratio_min, augment.crop_ratio_max),
        flip=augment.flip,
        decoder=cfg.decoder,
        formats=_formats(cfg.extensions),
        seed=seed,
        augment=image_augment(augment, cfg.mean),
    )
    bad_images = BadImages(skip=cfg.on_bad_image == "skip", limit=cfg.max_bad_images)
    train: Loader
    val: Loader
    if cfg.name == "dataset":
        if cfg.dataset is None:
            raise ConfigError("data=dataset needs data.dataset=package.module:function")
        datasets, classes = load_datasets(cfg.dataset, cfg.image_size)
        notes: tuple[str, ...] = ()
        fingerprint = f"{cfg.dataset}-{'-'.join(str(len(dataset)) for dataset in datasets)}"
        train, val = dataset_loaders(datasets, len(classes), images, settings, bad_images)
    else:
        source = _source(cfg)
        classes, fingerprint, notes = source.classes, source.fingerprint, source.notes

        def order(epoch: int) -> Indices:
            shards = source.train_shards if cfg.shuffle == "shards" else None
            return shard_permutation(seed, epoch, shards) if shards else permutation(seed, epoch, len(source.train))

        train = HostLoader(ImageReader(source.train, images, training=True), settings, bad_images, order)
        val = HostLoader(ImageReader(source.val, images, training=False), settings, bad_images, None)
    return ImageData(
        classes,
        fingerprint,
        train,
        val,
        settings,
        notes=notes,
        bad_images=bad_images,
        mean=cfg.mean,
        std=cfg.std,
        mix=label_mix(augment, len(classes), seed),
    )


def _formats(extensions: list[str]) -> tuple[str, ...]:
    unknown = [extension for extension in extensions if extension.lower() not in FORMATS]
    if unknown or not extensions:
        raise ConfigError(f"data.extensions={extensions}: use some of {', '.join(FORMATS)}")
    return tuple(dict.fromkeys(FORMATS[extension.lower()] for extension in extensions))


def _check_size(train: Loader, settings: LoaderSettings) -> None:
    if len(train) == 0:
        raise ConfigError(
            f"{train.samples} training images are fewer than one global batch of"
            f" {settings.batch_size * settings.world_size} ({settings.batch_size} x {settings.world_size});"
            " lower batch_size"
        )


def _check_memory(need: int, prefetch: int) -> None:
    """Batches lie in anonymous shared memory: the size of /dev/shm does not matter, free memory does."""
    free = available_bytes(torch.device("cpu"))
    if free is not None and need > free:
        raise ConfigError(
            f"the loader's batches need {need / 2**30:.1f} GiB of shared memory, and {free / 2**30:.1f} GiB are free:"
            f" lower batch_size or data.prefetch={prefetch}"
        )


def _source(cfg: DataConfig) -> ImageSource:
    if cfg.name == "shards":
        return read_shards(_root(cfg))
    layout = FolderLayout(cfg.val_split, cfg.val_fraction, tuple(cfg.extensions))
    return read_folder(_root(cfg), layout, cache=True)


def _root(cfg: DataConfig) -> Path:
    if cfg.name == "imagenette":
        return ensure_imagenette(Path(cfg.root or DATA_DIR / "imagenette").expanduser(), download=cfg.download)
    if cfg.root is not None:
        return Path(cfg.root).expanduser()
    if cfg.name == "sample":
        return ensure_sample(DATA_DIR / "sample")
    raise ConfigError(f"data={cfg.name} needs data.root=FOLDER, the folder that holds train/ and val/")
