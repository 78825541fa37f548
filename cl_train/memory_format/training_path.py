"""The layouts around a model: batch, MixUp and CutMix, the loss's gradient, average, gradients, optimizer state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from cl_train.memory_format.audit import describe
from cl_train.memory_format.audit_report import Surrounding
from cl_train.memory_format.convert import classify

Mix = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Mismatch = Literal["equal", "spurious", "real"]


def mismatch(state: torch.Tensor, parameter: torch.Tensor) -> Mismatch:
    """How the strides of `state` (a gradient, a moment, an average) differ from those of its parameter.

    "spurious": only where the size is 1, so that the bytes are the same, as with the gradients of 1x1 convolutions that
    DDP warns about; "real": the bytes are in another order, and DDP or a fused optimizer copies
    (pytorch/pytorch#47163).
    """
    if state.stride() == parameter.stride():
        return "equal"
    pairs = zip(parameter.shape, state.stride(), parameter.stride(), strict=True)
    return "real" if any(size > 1 and ours != theirs for size, ours, theirs in pairs) else "spurious"


def compare_strides(
    what: str, states: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> Surrounding:
    """One line about tensors that should have their parameters' strides; those of other shapes are left out."""
    found: dict[str, Mismatch] = {
        name: mismatch(state, parameters[name])
        for name, state in states.items()
        if name in parameters and state.shape == parameters[name].shape
    }
    counts = Counter(found.values())
    real = [name for name, kind in found.items() if kind == "real"]
    detail = f"{counts['equal']} equal, {counts['spurious']} spurious (size-1 dimensions only), {counts['real']} real"
    if real:
        return Surrounding(what, "lost", f"{detail}: {', '.join(real[:3])}{' ...' if len(real) > 3 else ''}")
    return Surrounding(what, "ambiguous" if counts["spurious"] else "kept", detail)


def surroundings(
    model: nn.Module,
    images: torch.Tensor,
    targets: torch.Tensor,
    *,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    mixes: Mapping[str, Mix] | None = None,
    average: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Surrounding]:
    """Run one step and look at the layouts around the model. Changes weights and optimizer state: give it copies.

    Args:
        images, targets: a batch as the loader hands it to the model.
        loss: of the model's output and the targets.
        mixes: by name, MixUp, CutMix and the like.
        average: the moving average's module.
        optimizer: over the model's parameters, with or without state.
    """
    found = [Surrounding("batch", _judge(images, images), describe(images))]
    for name, mix in (mixes or {}).items():
        mixed, _ = mix(images, targets)
        found.append(Surrounding(name, _judge(mixed, images), describe(mixed)))
    output = model(images)
    images_out = _images(output)
    for tensor in images_out:  # hooks, as retain_grad() would keep a contiguous copy

        def note(gradient: torch.Tensor, tensor: torch.Tensor = tensor) -> None:
            found.append(Surrounding("gradient of the loss", _judge(gradient, tensor), describe(gradient)))

        tensor.register_hook(note)
    loss(output, targets).backward()
    if not images_out:
        found.append(Surrounding("gradient of the loss", "contiguous", "logits: no image dimensions"))
    parameters = dict(model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    found.append(compare_strides("gradients (DDP buckets)", gradients, parameters))
    if average is not None:
        found.append(compare_strides("moving average", dict(average.named_parameters()), parameters))
    if optimizer is not None:
        optimizer.step()
        found.extend(_optimizer_lines(optimizer, parameters))
    return found


def _optimizer_lines(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> Iterable[Surrounding]:
    by_kind: dict[str, dict[str, torch.Tensor]] = {}
    names = {id(parameter): name for name, parameter in parameters.items()}
    for parameter, state in optimizer.state.items():
        for kind, value in state.items():
            if isinstance(value, torch.Tensor) and id(parameter) in names and value.shape == parameter.shape:
                by_kind.setdefault(kind, {})[names[id(parameter)]] = value
    for kind, states in by_kind.items():
        yield compare_strides(f"optimizer: {kind}", states, parameters)


def _images(output: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() in (4, 5) and leaf.requires_grad]


def _judge(tensor: torch.Tensor, like: torch.Tensor) -> Literal["kept", "lost", "ambiguous", "contiguous"]:
    """`tensor` should be laid out as `like` is."""
    layout = classify(tensor)
    if layout == "ambiguous":
        return "ambiguous"
    if classify(like) == "channels_last":
        return "kept" if layout == "channels_last" else "lost"
    return "contiguous"
