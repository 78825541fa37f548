"""Which dimensions of a tensor are channels and which are pixels, followed through views.

Memory that an operator has written has axes: the stride and the kind of each dimension of the
written tensor. The strides of a view show along which axes its dimensions run, whatever operator
made it. Few operators that write need a rule: most keep the number of dimensions.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import NamedTuple

import torch

from cl_train.memory_format.layout import StrideOrder


@dataclass(frozen=True)
class Kind:
    """What a dimension counts."""

    role: str
    # For a dimension that runs along several axes: their sizes and kinds, the fastest first.
    parts: "tuple[tuple[int, Kind], ...]" = field(default=(), compare=False)


# The batch, broadcast and unknown dimensions are OTHER.
OTHER, PIXEL, CHANNEL = map(Kind, ("other", "pixel", "channel"))

Kinds = tuple[Kind, ...]  # of the dimensions of a tensor


class Axes(NamedTuple):
    """The dimensions of memory, the fastest first."""

    strides: tuple[int, ...]  # bytes
    kinds: Kinds


NO_IMAGE = Axes((), ())


def image_kinds(rank: int) -> Kinds:
    """Returns the kinds of an image [N,C,H,W], a video [N,C,D,H,W] or a signal [N,C,L]."""
    return (OTHER, CHANNEL, *[PIXEL] * (rank - 2))


def is_shared_by_batch(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and len(tensor) > 1 and tensor.stride(0) == 0


def axes_of(tensor: torch.Tensor, kinds: Kinds) -> Axes:
    """Returns the axes of memory into which `tensor`, with dimensions of `kinds`, was written."""
    axes = []
    for size, stride, kind in zip(tensor.shape, tensor.stride(), kinds, strict=True):
        if size < 2 or stride == 0:
            continue
        stride *= tensor.element_size()
        parts = kind.parts
        if math.prod(part for part, _ in parts) != size:
            parts = ((size, Kind(kind.role)),)
        for part, part_kind in parts:
            axes.append((stride, part_kind))
            stride *= part
    axes.sort(key=itemgetter(0))
    return Axes(tuple(stride for stride, _ in axes), tuple(kind for _, kind in axes))


def kinds_of(tensor: torch.Tensor, axes: Axes) -> Kinds:
    """Returns the kinds of the dimensions of `tensor`, a view of memory with these axes."""
    itemsize = tensor.element_size()
    kinds = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size < 2 or stride == 0:
            kinds.append(OTHER)
            continue
        first = bisect_right(axes.strides, stride * itemsize) - 1
        last = bisect_right(axes.strides, stride * itemsize * (size - 1)) - 1
        if first == last:
            kinds.append(axes.kinds[first] if first >= 0 else OTHER)
        else:
            kinds.append(_merged_kind(axes, max(first, 0), last, stride * itemsize, size))
    return tuple(kinds)


def _merged_kind(axes: Axes, first: int, last: int, stride: int, size: int) -> Kind:
    """Returns the kind of a dimension that runs along these axes: the one with the most elements.

    Groups of pixels beside many channels are features of a patch; few channels beside many pixels
    are the finer pixels of a depth-to-space.
    """
    starts = [max(start, stride) for start in axes.strides[first : last + 1]]
    sizes = [end // start for start, end in zip(starts, [*starts[1:], stride * size], strict=True)]
    parts = tuple(zip(sizes, axes.kinds[first : last + 1], strict=True))
    elements = {OTHER: 1, CHANNEL: 1, PIXEL: 1}
    for part, kind in parts:
        if kind != OTHER:
            elements[kind] *= part
    return replace(max(elements, key=elements.__getitem__), parts=parts)


def stride_order(tensor: torch.Tensor, kinds: Kinds) -> StrideOrder:
    """Returns whether memory goes from channel to channel (channels_last) or from pixel to pixel.

    "ambiguous": there is only one channel or one pixel, or no element. "other": it is expanded.
    """
    if not tensor.numel():
        return "ambiguous"
    nearest: dict[Kind, int] = {}
    for size, stride, kind in zip(tensor.shape, tensor.stride(), kinds, strict=True):
        if size < 2:
            continue
        if stride == 0:
            return "other"
        nearest[kind] = min(stride, nearest.get(kind, stride))
    if CHANNEL not in nearest or PIXEL not in nearest:
        return "ambiguous"
    return "channels_last" if nearest[CHANNEL] < nearest[PIXEL] else "contiguous"


def kept_kinds(rank: int, operands: Iterable[Kinds], reduced: Sequence[int] | None) -> Kinds | None:
    """Returns the output's kinds, from the operand with most known ones; None: none has its rank.

    `reduced`: dimensions that the operator removes.
    """
    candidates = []
    for kinds in operands:
        if len(kinds) > rank and reduced is not None:
            gone = {dim % len(kinds) for dim in reduced}
            kinds = tuple(kind for dim, kind in enumerate(kinds) if dim not in gone)
        if len(kinds) == rank:
            candidates.append(kinds)
    return max(candidates, key=lambda kinds: rank - kinds.count(OTHER), default=None)
