"""Which data set, which loader: from the `data` settings to batches on the device."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Protocol

from cl_train.config.schema import AugmentConfig, ConfigError, DataConfig
from cl_train.data.augment import image_augment, label_mix
from cl_train.data.crops import CropRange, default_val_resize
from cl_train.data.device import Batch, DeviceFormat, MixLabels
from cl_train.data.device_decode import DeviceDecodedData, torchcodec_decoder
from cl_train.data.folder import Folder, index_path, read_folder
from cl_train.data.imagenette import ensure_imagenette
from cl_train.data.images import ImageForm, Times
from cl_train.data.loader import FolderData, LoaderSettings, shared_bytes
from cl_train.data.sample import ensure_sample
from cl_train.data.synthetic import SyntheticData
from cl_train.system.distributed import Dist

DATA_DIR = Path(__file__).resolve().parent.parent.parent / "data"
_MOST_WORKERS = 16


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
    skipped_images: int  # with on_bad_image=skip
    times: Times  # seconds that the workers spent, by part

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
        ConfigError: a missing folder, no or different classes, too few images, settings that exclude each other.
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
    form = _image_form(cfg, augment, seed)
    root = _root(cfg)
    folder = read_folder(root, index_path(root))
    settings = _loader_settings(cfg, batch_size, dist, has_policy=form.augment is not None)
    if len(folder.train) < batch_size * dist.world_size:
        raise ConfigError(
            f"{len(folder.train)} training images are fewer than one global batch of"
            f" {batch_size * dist.world_size} ({batch_size} x {dist.world_size}); lower batch_size"
        )
    _check_memory(shared_bytes(settings, form.size), settings)
    mix = label_mix(augment, len(folder.classes), seed)
    if cfg.decode == "gpu":
        return _device_decoded(cfg, folder, form, settings, mix)
    return FolderData(folder, form, settings, mix)


def _device_decoded(
    cfg: DataConfig, folder: Folder, form: ImageForm, settings: LoaderSettings, mix: MixLabels | None
) -> DeviceDecodedData:
    if form.augment is not None or cfg.on_bad_image == "skip":
        raise ConfigError(
            "data.decode=gpu does not go with augment.policy, augment.erase or data.on_bad_image=skip;"
            " use data.decode=cpu"
        )
    data = DeviceDecodedData(folder, form, settings, mix)
    data.decoder = torchcodec_decoder()
    return data


def _check_memory(need: int, settings: LoaderSettings) -> None:
    """Batches lie in anonymous shared memory, so /dev/shm may be as small as it likes; only free memory counts."""
    free = available_bytes()
    if free is not None and need > free:
        raise ConfigError(
            f"the loader's batches need {need / 2**30:.1f} GiB of shared memory, and {free / 2**30:.1f} GiB are free:"
            f" lower batch_size or data.prefetch={settings.prefetch}"
        )


def available_bytes() -> int | None:
    """Memory that can be had without swapping, as Linux reports it; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _root(cfg: DataConfig) -> Path:
    if cfg.name == "imagenette":
        return ensure_imagenette(Path(cfg.root or DATA_DIR / "imagenette").expanduser(), download=cfg.download)
    if cfg.root is not None:
        return Path(cfg.root).expanduser()
    if cfg.name == "sample":
        return ensure_sample(DATA_DIR / "sample")
    raise ConfigError(f"data={cfg.name} needs data.root=FOLDER, the folder that holds train/ and val/")


def _image_form(cfg: DataConfig, augment: AugmentConfig, seed: int) -> ImageForm:
    return ImageForm(
        size=cfg.image_size,
        val_resize=cfg.val_resize or default_val_resize(cfg.image_size),
        crop=CropRange(augment.crop_scale_min, augment.crop_scale_max, augment.crop_ratio_min, augment.crop_ratio_max),
        flip=augment.flip,
        simple_decoder=cfg.decoder != "pillow",
        exact_decode=cfg.exact_decode,
        seed=seed,
        augment=image_augment(augment, cfg.mean),
    )


def _loader_settings(cfg: DataConfig, batch_size: int, dist: Dist, *, has_policy: bool) -> LoaderSettings:
    workers = cfg.workers if cfg.workers is not None else default_workers(dist.world_size)
    if has_policy and cfg.worker_type == "thread" and workers > 0:
        raise ConfigError(
            "data.worker_type=thread cannot run augment.policy or augment.erase: torchvision draws their random numbers"
            " from one generator per process; use data.worker_type=process"
        )
    return LoaderSettings(
        batch_size=batch_size,
        workers=workers,
        worker_type="thread" if cfg.worker_type == "thread" else "process",
        prefetch=cfg.prefetch,
        device_prefetch=cfg.device_prefetch,
        pin_memory=cfg.pin_memory is not False and dist.device.type == "cuda",
        persistent_workers=cfg.persistent_workers,
        channels_last=cfg.memory_format == "channels_last",
        skip_bad_images=cfg.on_bad_image == "skip",
        max_bad_images=cfg.max_bad_images,
        worker_timeout_s=cfg.worker_timeout_s,
        mean=tuple(cfg.mean),
        std=tuple(cfg.std),
        rank=dist.rank,
        world_size=dist.world_size,
    )


def default_workers(world_size: int) -> int:
    """Usable cores / ranks of this machine, at most 16 and at least 1."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # torchrun's: the ranks of this machine
    return max(1, min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // here))
