"""From the `data` settings to batches on the device: choose the data set and the loader."""

import logging
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from cl_train.config.schema import AugmentConfig, ConfigError, DataConfig
from cl_train.data.folder import read_folder, read_images
from cl_train.data.image_reader import ImageReader
from cl_train.data.loader import BadImages, HostLoader, Reader
from cl_train.data.order import SizeSchedule, permutation, repeated, shard_permutation
from cl_train.data.sample import FIRST_RUN, ensure_imagenette, ensure_sample
from cl_train.data.shards import ShardSplit, read_shards
from cl_train.data.source import ImageSource, Indices, Split
from cl_train.data.splits import Data, ImageData, SyntheticData
from cl_train.data.transforms import label_mix
from cl_train.data.user_dataset import DatasetReader, StreamReader, load_datasets
from cl_train.system.distributed import Dist
from cl_train.system.files import cache_folder

log = logging.getLogger(__name__)
_CHECKOUT = Path(__file__).resolve().parents[2]
# For generated and downloaded data: in the checkout, or for an installed package in the user's cache.
DATA_DIR = (_CHECKOUT if (_CHECKOUT / "pyproject.toml").is_file() else cache_folder()) / "data"


def build_data(
    cfg: DataConfig, augment: AugmentConfig, *, batch_size: int, seed: int, dist: Dist, training: bool = True
) -> Data:
    """The data of `cfg` for this rank, in batches of `batch_size` images per rank. Without `training` only the
    validation images are needed, and stand for the training images too.

    Raises ConfigError: a missing folder, no classes or different ones in the splits, too few images, too many repeats,
    or insufficient memory.
    """
    sizes = size_schedule(cfg)
    if cfg.name == "synthetic":
        return SyntheticData(cfg, sizes, batch_size, seed=seed, world_size=dist.world_size)
    if training and augment.repeats > batch_size * dist.world_size:
        raise ConfigError(
            f"augment.repeats={augment.repeats} is more than one global batch of {batch_size * dist.world_size}; raise"
            " batch_size"
        )
    bad_images = BadImages(skip=cfg.on_bad_image == "skip", limit=cfg.max_bad_images)
    data = image_data(cfg, augment, sizes, batch_size, seed, dist, bad_images, training=training)
    if training:
        data.check_batches()
    return data


def size_schedule(cfg: DataConfig) -> SizeSchedule:
    """The sizes of the training images."""
    return SizeSchedule(tuple((epoch, size) for epoch, size in cfg.size_schedule) or ((0, cfg.image_size),))


def image_data(
    cfg: DataConfig,
    augment: AugmentConfig,
    sizes: SizeSchedule,
    batch_size: int,
    seed: int,
    dist: Dist,
    bad_images: BadImages,
    source: ImageSource | None = None,
    *,
    training: bool = True,
) -> ImageData:
    """The images of a folder, of shards, of the user's datasets, or of `source`."""
    val_size = cfg.val_size or cfg.image_size
    train_images: Any
    val_images: Any
    shards: tuple[Indices, ...] | None = None
    if cfg.name == "dataset":
        train_images, val_images, classes, fingerprint = load_datasets(cfg.dataset, cfg.image_size, val_size)
    else:
        source = source or _source(cfg, dist, training)
        train_images, val_images, classes, fingerprint = source.train, source.val, source.classes, source.fingerprint
        if cfg.shuffle == "shards" and isinstance(source.train, ShardSplit):
            shards = source.train.by_shard()

    def loader(images: Any, sizes: SizeSchedule, *, training: bool) -> HostLoader:
        settings = (cfg, augment, seed)
        if isinstance(images, Split):
            reader: Reader = ImageReader(images, *settings, training=training)
        elif not isinstance(images, IterableDataset):
            size = sizes.image_sizes[-1]
            reader = DatasetReader(images, len(classes), size, *settings, training=training)
        elif training and augment.repeats > 1:
            raise ConfigError("augment.repeats does not work with an IterableDataset, which controls its own order")
        else:
            size = sizes.image_sizes[-1]
            reader = StreamReader(images, len(classes), size, *settings, training=training, dist=dist)

        def order(epoch: int) -> Indices:
            indices = shard_permutation(seed, epoch, shards) if shards else permutation(seed, epoch, len(reader))
            return repeated(indices, augment.repeats, batch_size * dist.world_size)

        return HostLoader(reader, sizes, batch_size, cfg, dist, bad_images, order if training else None)

    val_sizes = SizeSchedule(((0, val_size),))
    val = loader(val_images, val_sizes, training=False)
    train = loader(train_images, sizes, training=True) if training else val
    if training and train.is_stream and dist.is_main:
        log.warning(
            "data.dataset is an IterableDataset: it controls its order, which depends on data.workers; a resumed epoch"
            " reads the skipped batches again; it must divide its samples among ranks and workers itself"
        )
    mix = label_mix(augment, len(classes), seed, dist)
    return ImageData(classes, fingerprint, train, val, dist, bad_images, cfg.mean, cfg.std, mix)


def images_of_folder(cfg: DataConfig, classes: tuple[str, ...], batch_size: int, dist: Dist) -> ImageData:
    """For predictions: all images below `data.root`, or of its folder of validation images, as `validation`."""
    assert cfg.root is not None
    images = read_images(Path(cfg.root).expanduser(), classes, cfg.extensions)
    bad_images = BadImages(skip=cfg.on_bad_image == "skip", limit=len(images))
    sizes, source = SizeSchedule(((0, cfg.image_size),)), ImageSource(classes, images, images, "")
    return image_data(cfg, AugmentConfig(), sizes, batch_size, 0, dist, bad_images, source)


def _source(cfg: DataConfig, dist: Dist, training: bool) -> ImageSource:
    if cfg.name == "imagenette":
        root = ensure_imagenette(Path(cfg.root or DATA_DIR / "imagenette").expanduser(), download=cfg.download)
    elif cfg.name == "sample" and cfg.root is None:
        root = ensure_sample(DATA_DIR / "sample", FIRST_RUN)
    else:
        assert cfg.root is not None, "config/rules.py requires data.root"
        root = Path(cfg.root).expanduser()
    if cfg.name == "shards":
        source = read_shards(root)
    else:
        assert cfg.name in ("folder", "imagenet", "imagenette", "sample"), cfg.name
        source = read_folder(root, cfg, training=training)
    for note in source.notes if dist.is_main else ():
        log.info("%s", note)
    return source
