"""`channels_last_collate`: batches in channels_last for `torch.utils.data.DataLoader`, with one copy per image."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

_PIL_MODES = ("L", "RGB", "RGBA")
_FEW_CHANNELS = 4


def channels_last_collate(samples: Sequence[Any]) -> Any:
    """Collate samples as `default_collate` does, with images in channels_last.

    `DataLoader(dataset, collate_fn=channels_last_collate)`. Samples are images, or tuples, lists or dicts that hold
    images, at any depth. An image is a PIL image (mode L, RGB or RGBA), an ndarray [H, W, C], or a tensor [C, H, W] of
    any strides, uint8 or floating point. It is copied once, into a batch [N, C, H, W] of the same dtype with strides
    (H*W*C, 1, W*C, C), which is in shared memory when this runs in a DataLoader worker. Everything else (labels, boxes,
    names) is collated by `default_collate`; tuples that hold images stay tuples, which it would turn into lists.

    Raises:
        ValueError: samples of different structure, or images of different shape or dtype; names the sample's index.
    """
    if not samples:
        raise ValueError("cannot collate an empty list of samples")
    with torch.no_grad():
        return _collate(list(samples))


def _collate(members: list[Any]) -> Any:
    """One batch of the members at one place of every sample."""
    first = members[0]
    if isinstance(first, (Mapping, tuple, list, Tensor, np.ndarray, Image.Image)):
        expected = _form(first)
        for index, member in enumerate(members):
            if (found := _form(member)) != expected:
                raise ValueError(f"cannot collate: sample {index} has {found}, sample 0 has {expected}")
    if _is_image(first):
        return _stack(members)
    if isinstance(first, Mapping):
        return {key: _collate([member[key] for member in members]) for key in first}
    if isinstance(first, (tuple, list)) and _holds_image(first):
        columns = [_collate(list(column)) for column in zip(*members, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    return default_collate(members)


def _is_image(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 3 and (value.dtype == torch.uint8 or value.is_floating_point())
    if isinstance(value, np.ndarray):
        return value.ndim == 3 and (value.dtype == np.uint8 or value.dtype.kind == "f")
    return isinstance(value, Image.Image)


def _holds_image(value: Any) -> bool:
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return _is_image(value) or any(map(_holds_image, members))


def _form(value: Any) -> tuple[Any, ...]:
    """The properties that must be the same in all samples."""
    kind = type(value).__name__
    if isinstance(value, Image.Image):
        return "PIL image", value.size[::-1], f"mode {value.mode}"
    if isinstance(value, (Tensor, np.ndarray)):
        return kind, tuple(value.shape), value.dtype if _is_image(value) else ""
    if isinstance(value, Mapping):
        return kind, sorted(map(str, value))
    return kind, len(value) if isinstance(value, (tuple, list)) else ""


def _stack(images: list[Any]) -> Tensor:
    """Images of equal size -> [N, C, H, W] with channels_last strides, also where N, C, H or W is 1."""
    first = images[0]
    if 0 in (first.size if isinstance(first, Image.Image) else first.shape):
        raise ValueError(f"cannot collate images without pixels: {_form(first)}")
    if isinstance(first, Tensor):
        if first.device.type != "cpu" or first.layout != torch.strided:
            raise ValueError(f"cannot collate {first.layout} images on {first.device}: use dense ones on the CPU")
        channels, height, width = first.shape
        batch = _empty((len(images), height, width, channels), first.dtype)
        if channels > _FEW_CHANNELS or all(image.stride(0) == 1 for image in images):
            torch.cat([image.permute(1, 2, 0) for image in images], out=batch.view(-1, width, channels))
        else:
            for row, image in zip(batch, images, strict=True):
                for channel in range(channels):  # contiguous images: half the time of one strided copy
                    row[:, :, channel].copy_(image[channel])
        return batch.permute(0, 3, 1, 2)
    if isinstance(first, Image.Image) and first.mode not in _PIL_MODES:
        raise ValueError(f"cannot collate PIL images of mode {first.mode}: use image.convert('RGB')")
    arrays = [np.asarray(image) for image in images]
    shape = (len(arrays), *arrays[0].shape, 1)[:4]  # a grey PIL image gives [H, W]
    batch = _empty(shape, torch.from_numpy(np.empty(0, arrays[0].dtype)).dtype)
    np.concatenate(arrays, out=batch.numpy().reshape(-1, *arrays[0].shape[1:]))
    return batch.permute(0, 3, 1, 2)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised batch; in a worker in shared memory, so that sending it to the parent does not copy it again."""
    size = math.prod(shape) * dtype.itemsize
    if get_worker_info() is None:  # NumPy asks for huge pages, which fault in faster
        return torch.from_numpy(np.empty(size, np.uint8)).view(dtype).view(shape)
    memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
    return memory.view(dtype).view(shape)
