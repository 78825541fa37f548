"""What a run of a model on shapes alone tells about it, before anything is trained or timed."""

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cl_train.errors import ConfigError
from cl_train.memory_format.crashes import KnownCrash, has_narrow_pointwise
from cl_train.memory_format.model_call import call_model, mean_square, output_tensors
from cl_train.models.sources import copy_model, dtype_of
from cl_train.step.backup import random_state_restored
from cl_train.step.precision import kernel_selection
from cl_train.step.utilisation import flop_counter
from cl_train.system.tensors import map_tensors, tensors_in

_META, _CPU = torch.device("meta"), torch.device("cpu")


@dataclass(frozen=True)
class ModelFacts:
    """Facts at one shape of the batch. FLOPs are those of convolutions and matrix products."""

    classes: int | None  # of logits [N, classes]; None: the model is no classifier
    gflop: float | None  # per image of a forward pass; None: unknown
    step_gflop: float | None  # per image of a forward and a backward pass, in training mode
    crash: str | None  # why a training step in channels_last on a CPU would crash

    def refuse_crash(self) -> None:
        """Raises ConfigError: torch is known to crash on a step in channels_last on a CPU."""
        if self.crash is not None:
            raise ConfigError(self.crash)


def facts_of(model: nn.Module, batch: Any, *, training: bool = True) -> ModelFacts:
    """Runs a copy of `model` on the shapes of `batch`, on the device "meta". A model that computes
    with values runs on its own device, without gradients, on two images of the batch (zeros if that
    has no values). Raises what the model raises.
    """
    own = next((tensor.device for tensor in model.parameters()), _CPU)
    with random_state_restored(own), kernel_selection(autotune=False):
        with suppress(Exception):  # it needs values, or an operator has no formula for its FLOPs
            return _facts(model, batch, _META, training)
        return _facts(model, batch, own, training)


def _facts(model: nn.Module, batch: Any, device: torch.device, training: bool) -> ModelFacts:
    copied = copy_model(model, device).train(training)
    batch = _on(device, batch, dtype_of(model))
    is_counted, counter, crash = device == _META, flop_counter(), KnownCrash(copied)
    gradients = nullcontext() if is_counted else torch.no_grad()
    with crash, gradients, counter if is_counted else nullcontext():
        output = call_model(copied, batch)
        gflop = counter.get_total_flops() / image_count(batch) / 1e9
        step_gflop = None
        if is_counted and training:
            with suppress(Exception):  # no gradient, or no output that has one
                mean_square(output_tensors(output)).backward()
                step_gflop = counter.get_total_flops() / image_count(batch) / 1e9
    logits = getattr(output, "logits", output)
    is_classifier = isinstance(logits, torch.Tensor) and logits.dim() == 2
    classes = int(logits.shape[1]) if is_classifier and logits.is_floating_point() else None
    return ModelFacts(classes, gflop if is_counted else None, step_gflop, crash.found)


def image_count(batch: Any) -> int:
    """How many images an input of a model holds."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
    first = min(tensors, key=lambda tensor: tensor.dim() not in (4, 5))
    return len(batch if isinstance(batch, list) and first.dim() == 3 else first)


def _on(device: torch.device, batch: Any, dtype: torch.dtype) -> Any:
    """Moves `batch` to `device`, in the dtype of the weights, as "meta" has no autocast."""

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        casted = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype)
        if device == _META:
            return casted.to(_META)
        return torch.zeros_like(casted, device=device) if tensor.is_meta else casted

    is_reduced = device != _META and isinstance(batch, torch.Tensor)
    return map_tensors(placed, batch[:2] if is_reduced else batch)


def image_shapes(model: nn.Module, *shape: int) -> torch.Tensor:
    """Returns a batch of this shape without values, in the dtype of the model."""
    return torch.empty(shape, device=_META, dtype=dtype_of(model))


def refuse_known_crash(model: nn.Module, batch: Any) -> None:
    """Raises ConfigError if a training step of `model`, on a CPU, would crash in channels_last."""
    if has_narrow_pointwise(model):
        facts_of(model, batch).refuse_crash()
