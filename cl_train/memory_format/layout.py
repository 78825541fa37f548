"""The memory format of a tensor and of a model's parameters, and its name in records.

A channels_last tensor [N,C,H,W] stores its elements pixel by pixel: C-stride < W-stride < H-stride
< N-stride, but for dimensions of size 1 (pytorch/pytorch#23403). Video, [N,C,D,H,W], has the same
two formats; torch calls the second one `channels_last_3d`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from cl_train.errors import ConfigError
from cl_train.system.tensors import map_tensors

StrideOrder = Literal["channels_last", "contiguous", "ambiguous", "other"]

MEMORY_FORMAT_NAMES = {
    torch.contiguous_format: "contiguous",
    torch.channels_last: "channels_last",
    torch.channels_last_3d: "channels_last_3d",
}
MEMORY_FORMATS = {name: memory_format for memory_format, name in MEMORY_FORMAT_NAMES.items()}
# By the number of dimensions of a tensor
CHANNELS_LAST_BY_DIM = {4: torch.channels_last, 5: torch.channels_last_3d}
COMPILED = "_orig_mod"  # torch.compile's name for the module it wraps, a part of saved names
CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)


def classify(tensor: torch.Tensor) -> StrideOrder:
    """Returns the memory format of a tensor [N,C,H,W] or [N,C,D,H,W], also a slice, by its strides.

    "ambiguous": both orders hold (C == 1, H == W == 1, or no elements). "other": the tensor has
    another number of dimensions or another order, is expanded (stride 0), or has no strides
    (sparse).
    """
    if tensor.layout != torch.strided or tensor.dim() not in CHANNELS_LAST_BY_DIM:
        return "other"
    if tensor.numel() == 0:
        return "ambiguous"
    is_contiguous = _strides_descend(tensor, range(tensor.dim()))
    is_channels_last = _strides_descend(tensor, (0, *range(2, tensor.dim()), 1))
    if is_contiguous and is_channels_last:
        return "ambiguous"
    return "channels_last" if is_channels_last else "contiguous" if is_contiguous else "other"


def _strides_descend(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    extent = 1  # elements from the first to the last of the dimensions seen so far, innermost first
    for size, stride in [(tensor.size(dim), tensor.stride(dim)) for dim in reversed(order)]:
        if size > 1 and stride < extent:
            return False
        extent += stride * (size - 1)
    return True


def to_memory_format(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """Returns `tensor` with the strides of `memory_format`; the same object if it has them already.

    Unlike `.contiguous(memory_format=...)` it changes the strides of [N,1,H,W] and [N,C,1,1] too.
    channels_last means channels_last_3d for a tensor [N,C,D,H,W].
    """
    if memory_format != torch.contiguous_format:
        memory_format = CHANNELS_LAST_BY_DIM[tensor.dim()]
    strides = torch.empty(tensor.shape, device="meta", memory_format=memory_format).stride()
    if tensor.stride() == strides:
        return tensor
    return tensor.clone(memory_format=memory_format)


def images_in(memory_format: torch.memory_format, values: Any) -> Any:
    """Returns `values` in new containers, tensors of 4 and 5 dimensions in `memory_format`."""

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        is_image = tensor.dim() in CHANNELS_LAST_BY_DIM
        return to_memory_format(tensor, memory_format) if is_image else tensor

    return map_tensors(placed, values)


def memory_format_of(tensors: Iterable[torch.Tensor]) -> str:
    """Returns the one format of the tensors of 4 or 5 dimensions, or "mixed"; if all are ambiguous,
    their strides decide.
    """
    strided = [t for t in tensors if not nn.parameter.is_lazy(t) and t.layout == torch.strided]
    images = [tensor for tensor in strided if tensor.dim() in CHANNELS_LAST_BY_DIM]
    orders = {classify(tensor) for tensor in images} - {"ambiguous"}
    if orders:
        return orders.pop() if orders in ({"channels_last"}, {"contiguous"}) else "mixed"
    is_marked = any(to_memory_format(t, torch.contiguous_format) is not t for t in images)
    return "channels_last" if is_marked else "contiguous"


def model_memory_format(model: Any) -> str:
    """Returns the memory format of the parameters of a module or an exported program."""
    return memory_format_of(model.parameters())


def uncompiled(model: Any) -> Any:
    """Returns the model without the wrapper of `torch.compile`, which adds a part to each name."""
    children = model.named_children() if isinstance(model, nn.Module) else ()
    return dict(children).get(COMPILED, model)


def named_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers of a module or exported program, tied ones under each name."""
    if isinstance(model, torch.export.ExportedProgram):
        named = {**model.state_dict, **model.constants}
        return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    parameters = model.named_parameters(remove_duplicate=False)
    return dict([*parameters, *model.named_buffers(remove_duplicate=False)])


def refuse_lazy(model: Any) -> None:
    """Raises ConfigError: this is no model, or a tensor of it has no shape yet."""
    if not isinstance(model, nn.Module | torch.export.ExportedProgram):
        raise ConfigError(f"a {type(model).__name__} is no model: give a torch.nn.Module")
    for name, tensor in named_tensors(model).items():
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{name} is lazy: run one batch through the model first")
