"""Copies of a model: in memory, or of its shapes only."""

import copy
import io
import warnings

import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.memory_format.layout import refuse_lazy


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first tensor; the CPU for a model without tensors."""
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))


def copy_model(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """A deep copy of `model` on `device` (None: each tensor where it is); `model` and its layout are unchanged.

    `copy_model(model, "meta")` copies shapes and strides only, and allocates nothing. A result that a module keeps as
    an attribute (`torch.nn.utils.weight_norm`'s weight), which `copy.deepcopy` refuses, is copied as a constant; the
    module computes it anew in each forward pass. A compiled model gives an eager copy.

    Raises ConfigError: lazy modules that have not seen a batch, or an attribute that cannot be copied.
    """
    model = getattr(model, "_orig_mod", model)
    refuse_lazy(model)
    memo: dict[int, object] = {}
    try:
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                if id(module) not in memo:
                    memo[id(module)] = _copy_scripted(module, device)
                continue
            for value in [*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()]:
                if isinstance(value, torch.Tensor) and id(value) not in memo:
                    memo[id(value)] = _copy_tensor(value, device)
        return copy.deepcopy(model, memo)
    except Exception as error:  # the attributes of a user's module may raise any exception
        raise ConfigError(f"the model cannot be copied ({type(error).__name__}: {str(error)[:200]})") from error


def _copy_scripted(module: torch.jit.ScriptModule, device: torch.device | str | None) -> torch.jit.ScriptModule:
    """A copy through TorchScript's file format: `copy.deepcopy` returns parameters with an autograd graph.

    TorchScript does not support the meta device: such a copy keeps its memory.
    """
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(module, buffer)
        buffer.seek(0)
        return torch.jit.load(buffer, None if str(device) == "meta" else device)


def _copy_tensor(tensor: torch.Tensor, device: torch.device | str | None) -> torch.Tensor:
    copied = tensor.detach().to(device or tensor.device, copy=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad and tensor.is_leaf)
