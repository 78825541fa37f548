"""From the `data` settings to batches on the device: choose the data set and the loader."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from cl_train.config.schema import AugmentConfig, ConfigError, DataConfig
from cl_train.data.augment import image_augment, label_mix
from cl_train.data.bad_images import BadImages
from cl_train.data.crops import CropRange
from cl_train.data.decode import formats_of
from cl_train.data.file_check import check_files
from cl_train.data.folder import FolderLayout, read_folder
from cl_train.data.image_loader import default_workers
from cl_train.data.image_reader import ImageReader, ImageSettings
from cl_train.data.imagenette import ensure_imagenette
from cl_train.data.loader import HostLoader, Loader, LoaderSettings
from cl_train.data.order import permutation, shard_permutation
from cl_train.data.sample import ensure_sample
from cl_train.data.shards import read_shards
from cl_train.data.size_schedule import SizeSchedule
from cl_train.data.source import ImageSource, Indices
from cl_train.data.splits import Data, ImageData, SyntheticData
from cl_train.data.user_dataset import dataset_loader, load_datasets
from cl_train.system.distributed import Dist
from cl_train.system.files import cache_folder

log = logging.getLogger(__name__)
_CHECKOUT = Path(__file__).resolve().parents[2]
# For generated and downloaded data: in the checkout, or for an installed package in the user's cache.
DATA_DIR = (_CHECKOUT if (_CHECKOUT / "pyproject.toml").is_file() else cache_folder()) / "data"


def build_data(cfg: DataConfig, augment: AugmentConfig, *, batch_size: int, seed: int, dist: Dist) -> Data:
    """The data of `cfg` for this rank, in batches of `batch_size` images per rank.

    Raises:
        ConfigError: a missing folder, no or different classes, too few images, not enough memory.
    """
    sizes = size_schedule(cfg, batch_size)
    if cfg.name == "synthetic":
        return SyntheticData(cfg, sizes, seed=seed, world_size=dist.world_size)
    settings = LoaderSettings(
        sizes=sizes,
        workers=cfg.workers if cfg.workers is not None else default_workers(dist.world_size),
        prefetch=cfg.prefetch,
        worker_timeout_s=cfg.worker_timeout_s,
        pin_memory=dist.device.type == "cuda",
        rank=dist.rank,
        world_size=dist.world_size,
        repeats=augment.repeats,
    )
    images = ImageSettings(
        seed=seed,
        val_resize=cfg.val_resize,
        interpolation=cfg.interpolation,
        val_interpolation=cfg.val_interpolation,
        crop=CropRange(augment.crop_scale_min, augment.crop_scale_max, augment.crop_ratio_min, augment.crop_ratio_max),
        flip=augment.flip,
        decoder=cfg.decoder,
        formats=formats_of(cfg.extensions),
        augment=image_augment(augment, cfg.mean),
    )
    bad_images = BadImages(skip=cfg.on_bad_image == "skip", limit=cfg.max_bad_images)
    classes, fingerprint, train, val = _loaders(cfg, images, settings, bad_images, is_main=dist.is_main)
    if train.batch_count() == 0:
        raise ConfigError(
            f"{train.samples} training images are fewer than one global batch of {batch_size * dist.world_size}"
            f" ({batch_size} x {dist.world_size}); lower batch_size"
        )
    mix = label_mix(augment, len(classes), seed)
    return ImageData(classes, fingerprint, train, val, settings, bad_images, cfg.mean, cfg.std, mix)


def size_schedule(cfg: DataConfig, batch_size: int) -> SizeSchedule:
    """The sizes of training images and batches; `batch_size` per rank, of the largest images."""
    points = tuple((epoch, size) for epoch, size in cfg.size_schedule) or ((0, cfg.image_size),)
    return SizeSchedule(points, batch_size, cfg.scale_batch)


def _loaders(
    cfg: DataConfig, images: ImageSettings, settings: LoaderSettings, bad_images: BadImages, *, is_main: bool
) -> tuple[tuple[str, ...], str, Loader, Loader]:
    """Classes, fingerprint, and the loaders of both splits."""
    val_size = cfg.val_size or cfg.image_size
    val_settings = replace(settings, sizes=SizeSchedule.constant(val_size, settings.sizes.batch_size))
    if cfg.name == "dataset":
        train_sets, val_sets, classes = load_datasets(cfg.dataset, settings.sizes.image_sizes, val_size)
        train = dataset_loader(train_sets, "train", len(classes), images, settings, bad_images)
        val = dataset_loader(val_sets, "val", len(classes), images, val_settings, bad_images)
        return classes, f"{cfg.dataset}-{train.samples}-{val.samples}", train, val
    source = _source(cfg)
    if cfg.on_bad_image == "skip":
        check_files(source, cfg.max_bad_images)
    for note in source.notes if is_main else ():
        log.info("%s", note)
    shards = source.train_shards if cfg.shuffle == "shards" else None

    def order(epoch: int) -> Indices:
        if shards:
            return shard_permutation(images.seed, epoch, shards)
        return permutation(images.seed, epoch, len(source.train))

    return (
        source.classes,
        source.fingerprint,
        HostLoader(ImageReader(source.train, images, training=True), settings, bad_images, order),
        HostLoader(ImageReader(source.val, images, training=False), val_settings, bad_images, None),
    )


def _source(cfg: DataConfig) -> ImageSource:
    if cfg.name == "imagenette":
        root = ensure_imagenette(Path(cfg.root or DATA_DIR / "imagenette").expanduser(), download=cfg.download)
    elif cfg.root is not None:
        root = Path(cfg.root).expanduser()
    elif cfg.name == "sample":
        root = ensure_sample(DATA_DIR / "sample")
    else:
        raise ConfigError(f"data={cfg.name} needs data.root=FOLDER")
    if cfg.name == "shards":
        return read_shards(root)
    return read_folder(root, FolderLayout(cfg.val_split, cfg.val_fraction, tuple(cfg.extensions)), cache=True)
