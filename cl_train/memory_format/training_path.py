"""The formats of tensors outside the model in a training step: batch, MixUp, loss gradient, EMA, optimizer state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from cl_train.memory_format.audit import describe
from cl_train.memory_format.audit_report import LayoutCheck
from cl_train.memory_format.layout import CHANNELS_LAST, classify
from cl_train.step.precision import MasterWeights

Mix = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
StrideMatch = Literal["equal", "spurious", "real"]


def stride_match(state: torch.Tensor, parameter: torch.Tensor) -> StrideMatch:
    """How the strides of `state` (a gradient, a moment, an EMA weight) differ from those of its parameter.

    "spurious": only in size-1 dimensions, so that the bytes are in the same order; DDP warns about such gradients of
    1x1 convolutions. "real": the bytes are in another order, and DDP or a fused optimizer copies
    (pytorch/pytorch#47163).
    """
    if state.stride() == parameter.stride():
        return "equal"
    strides = zip(parameter.shape, state.stride(), parameter.stride(), strict=True)
    return "real" if any(size > 1 and one != other for size, one, other in strides) else "spurious"


def compare_strides(
    what: str, states: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> LayoutCheck:
    """One check of tensors that should have their parameters' strides; those of other shapes are left out."""
    found: dict[str, StrideMatch] = {
        name: stride_match(state, parameters[name])
        for name, state in states.items()
        if name in parameters and state.shape == parameters[name].shape and state.layout == torch.strided
    }
    counts = Counter(found.values())
    real = [name for name, match in found.items() if match == "real"]
    detail = f"{counts['equal']} equal, {counts['spurious']} spurious (size-1 dimensions only), {counts['real']} real"
    if real:
        return LayoutCheck(what, "lost", f"{detail}: {', '.join(real[:3])}{' ...' if len(real) > 3 else ''}")
    return LayoutCheck(what, "ambiguous" if counts["spurious"] else "kept", detail)


def check_training_path(
    model: nn.Module,
    images: torch.Tensor,
    targets: torch.Tensor,
    *,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    mixes: Mapping[str, Mix] | None = None,
    ema: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    masters: MasterWeights | None = None,
) -> list[LayoutCheck]:
    """Run one step and check the tensors outside the model. Changes weights and optimizer state.

    Args:
        images, targets: a batch as the loader hands it to the model.
        loss: a function of the model's output and the targets.
        mixes: MixUp, CutMix and the like, by name.
        ema: the module that holds the moving average of the weights.
        optimizer: over the model's parameters, or over `masters`, with or without state.
        masters: the fp32 weights of `precision=fp16_o2`.
    """
    checks = [LayoutCheck("batch", _match(images, images), describe(images))]
    for name, mix in (mixes or {}).items():
        mixed, _ = mix(images, targets)
        checks.append(LayoutCheck(name, _match(mixed, images), describe(mixed)))
    output = model(images)
    output_images = [leaf for leaf in tree_leaves(output) if _is_image(leaf)]
    for tensor in output_images:  # a hook, because retain_grad() would store a contiguous copy

        def check_gradient(gradient: torch.Tensor, tensor: torch.Tensor = tensor) -> None:
            checks.append(LayoutCheck("gradient of the loss", _match(gradient, tensor), describe(gradient)))

        tensor.register_hook(check_gradient)
    loss(output, targets).backward()
    if not output_images:
        checks.append(LayoutCheck("gradient of the loss", "contiguous", "logits have no image dimensions"))
    parameters = dict(model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    checks.append(compare_strides("gradients (DDP buckets)", gradients, parameters))
    if ema is not None:
        checks.append(compare_strides("EMA weights", dict(ema.named_parameters()), parameters))
    updated: Mapping[str, torch.Tensor] = parameters
    if masters is not None:
        updated = masters.masters
        checks.append(compare_strides("fp32 master weights", updated, parameters))
        masters.take_gradients()
    if optimizer is not None:
        optimizer.step()
        checks.extend(_check_optimizer(optimizer, updated))
    return checks


def _check_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> Iterator[LayoutCheck]:
    states: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    names = {id(parameter): name for name, parameter in parameters.items()}
    for parameter, state in optimizer.state.items():
        for kind, value in state.items():
            if isinstance(value, torch.Tensor) and id(parameter) in names and value.shape == parameter.shape:
                states[kind][names[id(parameter)]] = value
    for kind, by_name in states.items():
        yield compare_strides(f"optimizer: {kind}", by_name, parameters)


def _is_image(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() in CHANNELS_LAST and leaf.requires_grad


def _match(tensor: torch.Tensor, expected: torch.Tensor) -> Literal["kept", "lost", "ambiguous", "contiguous"]:
    """Whether `tensor` has the format of `expected`."""
    layout = classify(tensor)
    if layout == "ambiguous":
        return "ambiguous"
    if classify(expected) == "channels_last":
        return "kept" if layout == "channels_last" else "lost"
    return "contiguous"
