"""Convolutions whose kernel is known to write outside its memory: refused before they run.

One is known: oneDNN's weight gradient of a 1x1 convolution with a stride, in channels_last on a
CPU. With torch 2.15 on AVX-512, 96 of 434 random shapes wrote there, all with fewer than 16 input
channels, one group, no padding, pixels left over by the stride, and either more than 1,024 output
pixels or several threads; none of 357 shapes without one of these did.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_MOST_CHANNELS = 15
_MOST_PIXELS = 1024
_DTYPES = (torch.float32, torch.bfloat16)


def has_narrow_pointwise(model: nn.Module) -> bool:
    """Whether a trained weight on a CPU is one of those that may crash."""
    weights = [p for p in model.parameters() if p.requires_grad and p.device.type == "cpu"]
    return any(_is_narrow(weight) for weight in weights)


def _is_narrow(weight: torch.Tensor) -> bool:
    return weight.dim() == 4 and weight.shape[2:] == (1, 1) and weight.shape[1] <= _MOST_CHANNELS


class KnownCrash(TorchDispatchMode):
    """Notes the first convolution of a forward pass whose gradient would crash in channels_last on
    a CPU. The pass may be in either layout, and of shapes alone ("meta").
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        parameters = [item for item in model.named_parameters() if item[1].requires_grad]
        self._names = {tuple(p.shape): name for name, p in parameters if _is_narrow(p)}
        self.found: str | None = None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_searched = self._names and self.found is None
        if is_searched and function is torch.ops.aten.convolution.default:
            image, weight, _, stride, padding, _, is_transposed, _, groups = args
            is_plain = not is_transposed and groups == 1 and not any(padding)
            is_plain &= image.dtype in _DTYPES and image.dim() == 4
            if is_plain and _is_narrow(weight) and _leaves_pixels(image.shape[2:], stride):
                name = self._names.get(tuple(weight.shape), "a convolution")
                self.found = _describe(name, image, weight, max(stride))
        return function(*args, **(kwargs or {}))


def _describe(name: str, image: torch.Tensor, weight: torch.Tensor, stride: int) -> str:
    where = f"{name.removesuffix('.weight')} (stride {stride}, {weight.shape[1]} input channels"
    what = "PyTorch's oneDNN writes outside its memory in the weight gradient of this 1x1"
    version = "convolution in channels_last on a CPU (seen with torch 2.15)"
    return f"{where}, images {list(image.shape)}): {what} {version}: train it contiguous"


def _leaves_pixels(sizes: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the stride leaves pixels over, and the output is large or several threads write."""
    steps = list(zip(sizes, stride, strict=True))
    written = math.prod((size - 1) // step + 1 for size, step in steps)
    is_left = any((size - 1) % step > 0 for size, step in steps)
    return is_left and (written > _MOST_PIXELS or torch.get_num_threads() > 1)
