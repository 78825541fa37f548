"""For any training loop: `image_loader`, the loader of train.py, and `channels_last_collate` for
`torch.utils.data.DataLoader`.
"""

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from cl_train.config.schema import AugmentConfig
from cl_train.config.validation import checked_config
from cl_train.data.build import ImageData, build_data
from cl_train.data.device import IMAGENET_MEAN, IMAGENET_STD, DeviceFormat, Normalise, to_device
from cl_train.data.images import EXTENSIONS
from cl_train.data.loader import DataSettings
from cl_train.errors import ConfigError
from cl_train.system.distributed import Dist
from cl_train.system.torch_state import each_in_own_state, own_torch_state


class ImageLoader(AbstractContextManager["ImageLoader"]):
    """Iterates over the batches of one split; `image_loader` makes it. `classes` are in the order
    of the labels; `bad_images` has names and reasons so far.
    """

    def __init__(self, data: ImageData, split: str, normalise: Normalise | None) -> None:
        self.classes, self.bad_images, self._normalise = data.classes, data.bad_images, normalise
        self._loader = data.train_loader if split == "train" else data.val_loader
        self._epoch = self._first_batch = 0
        # a loader that is no longer used ends its workers
        weakref.finalize(self, self._loader.close).atexit = False

    def __len__(self) -> int:
        """Batches per epoch of this rank."""
        return self._loader.batch_count()

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        """Starts the next iteration at batch `first_batch` of `epoch`; later ones are the following
        epochs.
        """
        self._epoch, self._first_batch = epoch, first_batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return each_in_own_state(self._batches())

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self._loader.batches(self._epoch, self._first_batch)
        self.set_epoch(self._epoch + 1)
        if self._normalise is None:
            for host in batches:
                yield host.images.clone(), host.targets.clone()
        else:
            for batch in to_device(batches, self._normalise):
                yield batch.images, batch.targets

    def close(self) -> None:
        """Ends the workers. A later iteration starts new ones."""
        self._loader.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


@own_torch_state
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
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    rank: int | None = None,
    world_size: int | None = None,
    skip_bad_images: bool = False,
    val_fraction: float | None = None,
    extensions: Sequence[str] = EXTENSIONS,
) -> ImageLoader:
    """Returns a loader of the images in a folder, which loads them as train.py does.

    Training images get torchvision's RandomResizedCrop and horizontal flip; order and random
    numbers depend only on `seed` and the epoch; the last, smaller batch is dropped. Validation
    images are resized and centre-cropped, and each comes once. Each iteration is the next epoch;
    `set_epoch(epoch, first_batch)` resumes at any batch.

    Args:
        root: folder that holds `train/<class>/*` and `val/<class>/*`.
        split: "train" or "val".
        batch_size: images per rank.
        workers: processes; None = usable cores / ranks of this machine, at most 32; 0 = none.
        device: where batches go; None = uint8 batches stay on the host, not normalised.
        dtype, memory_format, mean, std: of batches on a device: (x / 255 - mean) / std.
        rank, world_size: None = those of `torch.distributed` if it is initialised, else 0 and 1.
        skip_bad_images: replace unreadable images by the following ones, in val leave them out;
            `bad_images` of the loader lists them.
        val_fraction, extensions: as the settings `data.val_fraction` and `data.extensions`.

    Returns:
        An iterable over (images [N, 3, image_size, image_size], targets int64 [N]). It has a
        length; `close()`, or the end of a `with` block, ends its workers.

    Raises:
        ConfigError: a wrong type or range, no such folder, no classes, or less than a batch. The
            message names settings `data.*`, which are arguments of the same names here.
        BadImageError, WorkerError: while iterating; the message names the image.
    """
    dist = _dist(rank, world_size, torch.device(device or "cpu"))
    if split not in ("train", "val") or not isinstance(batch_size, int):
        raise ConfigError(
            f"split={split!r}, batch_size={batch_size!r}: expected 'train' or 'val', and a whole"
            " number"
        )
    settings = {
        "name": "folder",
        "root": str(root),
        "image_size": image_size,
        "workers": workers,
        "mean": list(mean),
        "std": list(std),
        "val_fraction": val_fraction,
        "extensions": list(extensions),
        "on_bad_image": "skip" if skip_bad_images else "error",
        "max_bad_images": "100%",
    }
    cfg = checked_config({"batch_size": batch_size, "seed": seed, "data": settings}).data
    augment, is_training = AugmentConfig(crop_scale_min=0.08, flip=0.5), split == "train"
    data = build_data(DataSettings(cfg, augment, batch_size, seed, dist, training=is_training))
    assert isinstance(data, ImageData)
    data.bad_images.remedy = "skip_bad_images=True"
    normalise = None
    if device is not None:
        normalise = Normalise(mean, std, DeviceFormat(dist.device, dtype, memory_format))
    return ImageLoader(data, split, normalise)


def _dist(rank: int | None, world_size: int | None, device: torch.device) -> Dist:
    if rank is None and world_size is None:
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return Dist(0, 1, device)
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ConfigError(
            f"rank={rank}, world_size={world_size}: give both, with 0 <= rank < world_size"
        )
    return Dist(rank, world_size, device)


# --- collation with one copy per image ------------------------------------------------------------


@own_torch_state
def channels_last_collate(samples: Sequence[Any]) -> Any:
    """Collate samples as `default_collate` does, with images in channels_last:
    `DataLoader(dataset, collate_fn=channels_last_collate)`.

    Samples are images, or tuples, lists or dicts that hold images, at any depth. An image is a PIL
    image (mode L, RGB or RGBA), an ndarray [H, W, C], or a tensor [C, H, W] of any strides, uint8
    or floating point. It is copied once, into a batch [N, C, H, W] of the same dtype with strides
    (H*W*C, 1, W*C, C). Everything else (labels, boxes, names) is collated by `default_collate`;
    tuples that hold images stay tuples, which it would turn into lists.

    Raises:
        ValueError: no samples; a PIL image of another mode; or samples that differ in structure,
            or in the shape or dtype of an image: the message names the sample's index.
    """
    if not samples:
        raise ValueError("cannot collate an empty list of samples")
    with torch.no_grad():
        return _collate(list(samples))


def _collate(members: list[Any]) -> Any:
    first = members[0]
    if isinstance(first, (Mapping, tuple, list, Tensor, np.ndarray, Image.Image)):
        forms = list(map(_described, members))
        for index, form in enumerate(forms):
            if form != forms[0]:
                raise ValueError(
                    f"cannot collate: sample {index} has {form}, sample 0 has {forms[0]}"
                )
    if _is_image(first):
        return _stack(members)
    if isinstance(first, Mapping):
        return {key: _collate([member[key] for member in members]) for key in first}
    if isinstance(first, (tuple, list)) and _holds_image(first):
        columns = [_collate(list(column)) for column in zip(*members, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    return default_collate(members)


def _is_image(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        dtype = str(value.dtype).removeprefix("torch.")
        return value.ndim == 3 and (dtype == "uint8" or "float" in dtype)
    return isinstance(value, Image.Image)


def _holds_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_image, value.values()))
    if isinstance(value, (tuple, list)):
        return any(map(_holds_image, value))
    return _is_image(value)


def _described(value: Any) -> tuple[Any, ...]:
    kind = type(value).__name__
    if isinstance(value, Image.Image):
        return "PIL image", value.size[::-1], f"mode {value.mode}"
    if isinstance(value, (Tensor, np.ndarray)):
        return kind, tuple(value.shape), value.dtype if _is_image(value) else ""
    if isinstance(value, Mapping):
        return kind, sorted(map(str, value))
    return kind, len(value) if isinstance(value, (tuple, list)) else ""


def _stack(images: list[Any]) -> Tensor:
    """Returns images of equal size as one batch [N, C, H, W] in channels_last, also where N, C, H
    or W is 1.
    """
    first = images[0]
    if isinstance(first, Tensor):
        channels, height, width = first.shape
        batch = _empty((len(images), height, width, channels), first.dtype)
        if channels > 4 or all(image.stride(0) == 1 for image in images):
            rows = batch.view(-1, width, channels)
            torch.cat([image.permute(1, 2, 0) for image in images], out=rows)
        else:
            for row, image in zip(batch, images, strict=True):
                # contiguous images: this takes half the time of one strided copy
                for channel in range(channels):
                    row[:, :, channel].copy_(image[channel])
        return batch.permute(0, 3, 1, 2)
    if isinstance(first, Image.Image) and first.mode not in ("L", "RGB", "RGBA"):
        raise ValueError(
            f"cannot collate PIL images of mode {first.mode}: use image.convert('RGB')"
        )
    arrays = [np.asarray(image) for image in images]
    shape = (len(arrays), *arrays[0].shape, 1)[:4]  # a grey PIL image gives [H, W]
    batch = _empty(shape, torch.from_numpy(np.empty(0, arrays[0].dtype)).dtype)
    np.concatenate(arrays, out=batch.numpy().reshape(-1, *arrays[0].shape[1:]))
    return batch.permute(0, 3, 1, 2)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised tensor. In a worker it is in shared memory, so that sending it does
    not copy it.
    """
    size = math.prod(shape) * dtype.itemsize
    if get_worker_info() is None:  # NumPy asks for huge pages, which fault in faster
        return torch.from_numpy(np.empty(size, np.uint8)).view(dtype).view(shape)
    memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
    return memory.view(dtype).view(shape)
