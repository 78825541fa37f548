"""Runs any model on any batch, and makes a scalar loss of its outputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from cl_train.errors import ConfigError
from cl_train.system.tensors import tensors_in


def call_model(model: nn.Module, batch: Any) -> Any:
    """Calls `model` with `batch`: its input, a tuple or list of its inputs, a dict of its
    arguments, or a list of images [C,H,W], which is the one input of a detection model.
    """
    if isinstance(batch, dict):
        return model(**batch)
    is_list = isinstance(batch, list)
    if is_list and all(isinstance(item, torch.Tensor) and item.dim() == 3 for item in batch):
        return model(batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def output_tensors(output: Any, key: str | int | None = None) -> list[torch.Tensor]:
    """Returns the floating-point (or complex) tensors of a model's output, at any depth; with `key`
    (a dict's key, an attribute, a tuple's index) those of an entry. Raises ConfigError: there are
    none.
    """
    values = output if key is None else _entry(output, key)
    tensors = tensors_in(values)
    numbers = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    if not numbers:
        what = f"{'the output' if key is None else f'output={key}'} is a {type(values).__name__}"
        advice = "select an entry (output=KEY, output_entry=KEY), pass a loss, or backward=false"
        raise ConfigError(f"{what} without a float tensor to differentiate: {advice}")
    return numbers


def mean_square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns a loss whose gradient has the output's strides; that of a plain mean is expanded."""
    sums = [tensor.abs().float().square().sum() / max(tensor.numel(), 1) for tensor in tensors]
    return torch.stack(sums).sum()


def _entry(output: Any, key: str | int) -> Any:
    try:
        if isinstance(output, Mapping):
            return output[key]
        if isinstance(output, list | tuple) and str(key).lstrip("-").isdigit():
            return output[int(key)]
        return getattr(output, str(key))
    except (LookupError, AttributeError):
        keys = f" ({', '.join(map(str, output))})" if isinstance(output, Mapping) else ""
        what = f"the model's output, a {type(output).__name__}{keys}, has no such entry"
        raise ConfigError(f"output={key}: {what}") from None
