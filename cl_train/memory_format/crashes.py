"""Convolutions whose kernel is known to write outside its memory: refused before they run.

One is known: oneDNN's weight gradient of a 1x1 convolution with a stride, in channels_last on a
CPU. Where the stride leaves pixels over at an edge, processes die, at once or later, or train on
overwritten memory. Measured with torch 2.15 on AVX-512, by a page behind each buffer that cannot be
written: 96 of 434 random shapes wrote there, all with fewer than 16 input channels, one group, no
padding, pixels left over, and either more than 1,024 output pixels or several threads; none of 357
shapes without one of these did.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cl_train.errors import ConfigError
from cl_train.step.backup import state_restored

_MOST_CHANNELS = 15
_MOST_PIXELS = 1024
_DTYPES = (torch.float32, torch.bfloat16)


def refuse_known_crash(model: nn.Module, forward: Callable[[], object]) -> None:
    """Raises ConfigError if a step of `model` in channels_last is known to crash.

    `forward` runs the model on the batch that trains, in either layout: only the gradient crashes.
    It is called for models that have a small 1x1 weight, and leaves no trace.
    """
    parameters = [item for item in model.named_parameters() if item[1].requires_grad]
    names = {tuple(weight.shape): name for name, weight in parameters if _may_crash(weight)}
    if not names:
        return
    recorder = _Convolutions()
    with state_restored(model, torch.device("cpu")), torch.no_grad(), recorder:
        forward()
    for image, weight, stride in recorder.crashing:
        name = names.get(tuple(weight), "a convolution").removesuffix(".weight")
        where = f"{name} (stride {max(stride)}, {weight[1]} input channels, images {list(image)})"
        what = "PyTorch's oneDNN writes outside its memory in the weight gradient of this 1x1"
        version = "convolution in channels_last on a CPU (seen with torch 2.15)"
        raise ConfigError(f"{where}: {what} {version}: train it contiguous")


def _may_crash(weight: torch.Tensor) -> bool:
    is_1x1 = weight.dim() == 4 and weight.shape[2:] == (1, 1)
    return weight.device.type == "cpu" and is_1x1 and weight.shape[1] <= _MOST_CHANNELS


class _Convolutions(TorchDispatchMode):
    """Records image, weight and stride of convolutions whose weight gradient would crash."""

    def __init__(self) -> None:
        super().__init__()
        self.crashing: list[tuple[torch.Size, torch.Size, list[int]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.convolution.default:
            image, weight, _, stride, padding, _, is_transposed, _, groups = args
            is_plain = not is_transposed and groups == 1 and not any(padding)
            is_plain &= image.dtype in _DTYPES and image.dim() == 4
            if is_plain and _may_crash(weight) and _leaves_pixels(image.shape[2:], stride):
                self.crashing.append((image.shape, weight.shape, stride))
        return function(*args, **(kwargs or {}))


def _leaves_pixels(sizes: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the stride leaves some over, and enough are written."""
    steps = list(zip(sizes, stride, strict=True))
    written = math.prod((size - 1) // step + 1 for size, step in steps)
    is_left = any((size - 1) % step > 0 for size, step in steps)
    return is_left and (written > _MOST_PIXELS or torch.get_num_threads() > 1)
