"""`channels_last_collate`: batches in channels_last for `torch.utils.data.DataLoader`, with one copy per image."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    (H*W*C, 1, W*C, C), which lies in shared memory when this runs in a DataLoader's worker. Everything else (labels,
    boxes, names) becomes what `default_collate` makes of it, except that tuples stay tuples.

    Raises:
        ValueError: samples of different structure, or images of different shape or dtype; names the sample's index.
    """
    if not samples:
        raise ValueError("cannot collate an empty list of samples")
    with torch.no_grad():
        return _collate(list(samples))


def _collate(members: list[Any]) -> Any:
    """One batch of what stands at the same place in every sample."""
    first = members[0]
    if _is_image(first):
        return _stack(members)
    if isinstance(first, Mapping):
        _check_equal(members, lambda member: sorted(member, key=str) if isinstance(member, Mapping) else None, "keys")
        return {key: _collate([member[key] for member in members]) for key in first}
    if isinstance(first, (tuple, list)) and _holds_image(first):
        _check_equal(members, lambda member: len(member) if isinstance(member, (tuple, list)) else None, "length")
        columns = [_collate(list(column)) for column in zip(*members, strict=True)]
        if isinstance(first, tuple) and hasattr(first, "_fields"):
            return type(first)(*columns)
        return tuple(columns) if isinstance(first, tuple) else columns
    if isinstance(first, (Tensor, np.ndarray)):
        _check_equal(members, lambda member: tuple(getattr(member, "shape", ())), "shape")
    return default_collate(members)


def _is_image(value: Any) -> bool:
    if isinstance(value, Image.Image):
        return True
    if isinstance(value, Tensor):
        return value.ndim == 3 and (value.dtype == torch.uint8 or value.is_floating_point())
    return isinstance(value, np.ndarray) and value.ndim == 3 and (value.dtype == np.uint8 or value.dtype.kind == "f")


def _holds_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_image(member) for member in value.values())
    if isinstance(value, (tuple, list)):
        return any(_holds_image(member) for member in value)
    return _is_image(value)


def _check_equal(members: list[Any], property_of: Callable[[Any], Any], what: str) -> None:
    expected = property_of(members[0])
    for index, member in enumerate(members):
        if property_of(member) != expected:
            raise ValueError(
                f"sample {index}: {what} {property_of(member)} ({type(member).__name__}); sample 0: {what} {expected}"
                f" ({type(members[0]).__name__})"
            )


def _stack(images: list[Any]) -> Tensor:
    """Images of equal size -> [N, C, H, W] with channels_last strides, also where N, C, H or W is 1."""
    _check_images(images)
    if isinstance(images[0], Tensor):
        return _stack_tensors([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    arrays = [np.asarray(image) for image in images]
    shape = (len(arrays), *arrays[0].shape, 1)[:4]  # a grey PIL image gives [H, W]
    batch = _empty(shape, torch.from_numpy(np.empty(0, arrays[0].dtype)).dtype)
    np.concatenate(arrays, out=batch.numpy().reshape(-1, *arrays[0].shape[1:]))
    return batch.permute(0, 3, 1, 2)


def _stack_tensors(views: list[Tensor]) -> Tensor:
    """[H, W, C] each, of any strides -> contiguous [N, H, W, C]."""
    batch = _empty((len(views), *views[0].shape), views[0].dtype)
    channels = views[0].shape[2]
    if channels > _FEW_CHANNELS or all(view.stride(2) == 1 for view in views):
        torch.cat(views, out=batch.view(-1, *views[0].shape[1:]))
        return batch
    for row, view in zip(batch, views, strict=True):
        for channel in range(channels):  # from planes, one strided copy of all channels takes twice as long
            row[:, :, channel].copy_(view[:, :, channel])
    return batch


def _check_images(images: list[Any]) -> None:
    """That all are of the first one's kind, shape and dtype, or PIL images of one size and mode."""
    first = images[0]
    if isinstance(first, Image.Image):
        if first.mode not in _PIL_MODES:
            raise ValueError(f"sample 0 is a PIL image of mode {first.mode}: use image.convert('RGB')")
        size, mode = first.size, first.mode
        odd = (not isinstance(image, Image.Image) or image.size != size or image.mode != mode for image in images)
    else:
        kind, shape, dtype = Tensor if isinstance(first, Tensor) else np.ndarray, first.shape, first.dtype
        odd = (not isinstance(image, kind) or image.shape != shape or image.dtype != dtype for image in images)
    index = next((index for index, is_odd in enumerate(odd) if is_odd), None)
    if index is not None:
        raise ValueError(
            f"sample {index} is {_describe(images[index])}, sample 0 is {_describe(first)}: images of a batch need one"
            " size, number of channels and dtype"
        )


def _describe(image: Any) -> str:
    if isinstance(image, Image.Image):
        return f"a PIL image of shape ({image.height}, {image.width}, {len(image.getbands())}), mode {image.mode}"
    if isinstance(image, (Tensor, np.ndarray)):
        return f"a {type(image).__name__} of shape {tuple(image.shape)}, {image.dtype}"
    return f"a {type(image).__name__} of shape ()"


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised; in a worker in shared memory, so that the batch is not copied again on its way to the parent."""
    size = math.prod(shape) * dtype.itemsize
    if get_worker_info() is None:
        memory = torch.from_numpy(
            np.empty(size, np.uint8)
        )  # huge pages: page faults take a third of torch.empty's time
    else:
        memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
    return memory.view(dtype).view(shape)
