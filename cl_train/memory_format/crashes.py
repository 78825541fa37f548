"""Convolutions whose kernel is known to write outside its memory: refused before they run.

One kernel is known: oneDNN's weight gradient of a 1x1 convolution with a stride, in channels_last
on a CPU. Where the stride leaves pixels over at the right or the lower edge, it writes beyond its
buffer: processes die, at once or later, or train on overwritten memory. Measured with torch 2.15 on
AVX-512, by a page behind each buffer that cannot be written: 96 of 434 random shapes wrote there,
all with fewer than 16 input channels, one group, no padding, pixels left over, and either more than
1,024 output pixels or several threads; none of 357 shapes without one of these did.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cl_train.config.schema import ConfigError
from cl_train.step.backup import state_restored

_MOST_CHANNELS = 15
_MOST_PIXELS = 1024
_DTYPES = (torch.float32, torch.bfloat16)


def refuse_known_crash(model: nn.Module, forward: Callable[[], object]) -> None:
    """Raises ConfigError if a step of `model` in channels_last is known to crash.

    `forward` runs the model on the batch that trains, in either layout, which is safe: only the
    gradient crashes. It is called for models that have a small 1x1 weight, and leaves no trace.
    """
    parameters = [item for item in model.named_parameters() if item[1].requires_grad]
    weights = {parameter: name for name, parameter in parameters if _may_crash(parameter)}
    if not weights:
        return
    recorder = _Convolutions()
    with state_restored(model, torch.device("cpu")), torch.no_grad(), recorder:
        forward()
    unsafe = [shapes for shapes in recorder.calls if _crashes(*shapes)]
    if unsafe:
        image, weight, stride = unsafe[0][:3]
        name = next((name for p, name in weights.items() if p.shape == weight), "a convolution")
        raise ConfigError(
            f"{name.removesuffix('.weight')}: PyTorch's oneDNN writes outside its memory in the "
            f"weight gradient of this 1x1 convolution (stride {max(stride)}, {weight[1]} input "
            f"channels, images {list(image)}) in channels_last on a CPU (seen with torch 2.15): "
            "train it contiguous"
        )


def _may_crash(weight: torch.Tensor) -> bool:
    is_1x1 = weight.dim() == 4 and weight.shape[2:] == (1, 1)
    return weight.device.type == "cpu" and is_1x1 and weight.shape[1] <= _MOST_CHANNELS


class _Convolutions(TorchDispatchMode):
    """Records the shapes of the convolutions of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.convolution.default:
            image, weight, _, stride, padding, _, is_transposed, _, groups = args
            if not is_transposed and groups == 1 and image.dtype in _DTYPES and _may_crash(weight):
                self.calls.append((image.shape, weight.shape, stride, padding))
        return function(*args, **(kwargs or {}))


def _crashes(image: torch.Size, weight: torch.Size, stride: list[int], padding: list[int]) -> bool:
    """Whether the weight gradient of a 1x1 convolution writes outside its memory."""
    if any(padding) or len(image) != 4:
        return False
    steps = list(zip(image[2:], stride, strict=True))
    leaves_pixels = any((size - 1) % step > 0 for size, step in steps)
    height, width = ((size - 1) // step + 1 for size, step in steps)
    return leaves_pixels and (height * width > _MOST_PIXELS or torch.get_num_threads() > 1)
