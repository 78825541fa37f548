"""The loader of train.py for any training loop."""

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cl_train.config.schema import AugmentConfig
from cl_train.config.validation import load
from cl_train.data.build import ImageData
from cl_train.data.device import DeviceFormat, Normalise, to_device
from cl_train.data.images import EXTENSIONS
from cl_train.system.distributed import Dist


class ImageLoader(AbstractContextManager["ImageLoader"]):
    """Iterates over the batches of one split; created by `image_loader`. `classes`: their names, in the order of the
    labels. `bad_images`: names and reasons of the images that could not be read so far."""

    def __init__(self, data: ImageData, normalise: Normalise | None) -> None:
        self.classes, self.bad_images = data.classes, data.bad_images
        self._loader, self._normalise = data.train_loader, normalise
        self._epoch = self._first_batch = 0
        weakref.finalize(self, self._loader.close).atexit = False  # a loader that is no longer used ends its workers

    def __len__(self) -> int:
        """Batches per epoch of this rank."""
        return self._loader.batch_count()

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Start the next iteration at batch `first_batch` of `epoch`; later iterations are the following epochs."""
        self._epoch, self._first_batch = epoch, first_batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self._loader.batches(self._epoch, self._first_batch)
        self.set_epoch(self._epoch + 1)
        if self._normalise is None:
            for host in batches:
                yield host.images.clone(), host.targets.clone()
        else:
            for batch in to_device(batches, self._normalise):
                yield batch.images, batch.targets

    def close(self) -> None:
        """End the workers. A later iteration starts new ones."""
        self._loader.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def image_loader(
    root: str | Path,
    split: str = "train",
    *,
    batch_size: int = 256,
    image_size: int = 224,
    workers: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.channels_last,
    mean: Sequence[float] = (0.485, 0.456, 0.406),
    std: Sequence[float] = (0.229, 0.224, 0.225),
    rank: int | None = None,
    world_size: int | None = None,
    skip_bad_images: bool = False,
    val_fraction: float | None = None,
    extensions: Sequence[str] = EXTENSIONS,
) -> ImageLoader:
    """Batches of a folder of images, loaded as in train.py.

        with image_loader("/datasets/imagenet", batch_size=256, device="cuda", dtype=torch.float16) as loader:
            for epoch in range(90):
                for images, targets in loader: ...

    Training images get torchvision's RandomResizedCrop and horizontal flip, in an order and with random numbers that
    depend only on `seed` and the epoch; the last, smaller batch is dropped. Validation images are resized and
    centre-cropped, each once. Each iteration is the next epoch; `set_epoch(epoch, first_batch)` resumes at any batch.

    Args:
        root, split: folder that holds `train/<class>/*` and `val/<class>/*`; "train" or "val".
        batch_size: images per rank.
        workers: processes; None = usable cores / ranks of this machine, at most 16; 0 = none.
        device: where batches go; None = uint8 batches stay on the host, not normalised.
        dtype, memory_format, mean, std: of batches on a device: (x / 255 - mean) / std.
        rank, world_size: None = those of `torch.distributed` if it is initialised, else 0 and 1.
        skip_bad_images: replace (val: leave out) images that cannot be read instead of raising; see `bad_images`.
        val_fraction, extensions: as the settings `data.val_fraction` and `data.extensions`.

    Returns:
        An iterable over (images, targets): images uint8, or `dtype` on a device, [N, 3, image_size, image_size];
        targets int64 [N]. It has a length, and workers that `close()`, or the end of a `with` block, ends.

    Raises:
        ConfigError: (a ValueError) a wrong type or range, or no such folder, no classes, too few images for a batch.
        BadImageError, WorkerError: while iterating; the message names the image.
        RuntimeError: another thread is iterating.
    """
    if split not in ("train", "val") or not isinstance(batch_size, int):
        raise ValueError(f"split={split!r}, batch_size={batch_size!r}: expected 'train' or 'val', and a whole number")
    settings: dict[str, Any] = {"name": "folder", "root": str(root), "image_size": image_size, "workers": workers}
    settings |= {"mean": list(mean), "std": list(std), "val_fraction": val_fraction, "extensions": list(extensions)}
    settings |= {"on_bad_image": "skip" if skip_bad_images else "error", "max_bad_images": sys.maxsize}
    cfg = load({"batch_size": batch_size, "seed": seed, "data": settings})
    dist = _dist(rank, world_size, torch.device(device or "cpu"))
    normalise = None if device is None else Normalise(mean, std, DeviceFormat(dist.device, dtype, memory_format))
    augment = AugmentConfig(crop_scale_min=0.08, flip=0.5)
    return ImageLoader(ImageData(cfg.data, augment, batch_size, seed, dist, training=split == "train"), normalise)


def _dist(rank: int | None, world_size: int | None, device: torch.device) -> Dist:
    """Those of `torch.distributed`, or the given ones. Raises ValueError: only one is given, or the rank is no rank."""
    if rank is None and world_size is None:
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, world_size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if joined else (0, 1)
    if not isinstance(rank, int) or not isinstance(world_size, int) or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}, world_size={world_size}: give both, with 0 <= rank < world_size")
    return Dist(rank, world_size, device)
