"""Check that gradients, EMA weights, optimizer state and master weights have the strides of the parameters."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from cl_train.step.precision import MasterWeights


@dataclass(frozen=True)
class LayoutCheck:
    """Whether gradients, optimizer state or EMA weights have the strides of the parameters."""

    what: str
    outcome: Literal["kept", "lost", "ambiguous"]
    detail: str


def compare_strides(
    what: str, states: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> LayoutCheck:
    """One check of tensors (gradients, moments, EMA weights) that should have their parameters' strides.

    Strides that differ in size-1 dimensions only leave the bytes in the same order: "ambiguous". Otherwise DDP or a
    fused optimizer copies (pytorch/pytorch#47163): "lost". Sparse tensors are ignored.
    """
    states = {name: state for name, state in states.items() if state.layout == torch.strided}
    lost, ambiguous = [], 0
    for name, state in states.items():
        strides = list(zip(state.shape, state.stride(), parameters[name].stride(), strict=True))
        if any(size > 1 and one != other for size, one, other in strides):
            lost.append(name)
        elif any(one != other for _, one, other in strides):
            ambiguous += 1
    detail = f"{len(lost)} mismatches in {len(states)} tensors"
    if ambiguous:
        detail += f", and {ambiguous} in size-1 dimensions only, which cost nothing"
    if lost:
        return LayoutCheck(what, "lost", f"{detail}: {', '.join(lost[:3])}{' ...' if len(lost) > 3 else ''}")
    return LayoutCheck(what, "ambiguous" if ambiguous else "kept", detail)


def check_training_path(
    model: nn.Module,
    step: Callable[[], torch.Tensor],
    *,
    ema: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    masters: MasterWeights | None = None,
) -> list[LayoutCheck]:
    """Run one training step and check the state outside the model. Changes weights and optimizer state.

    Args:
        step: runs the model and returns the loss, a scalar.
        ema: the module that holds the moving average of the weights.
        optimizer: over the model's parameters, or over `masters`, the fp32 weights of `precision=fp16_o2`.
    """
    step().backward()
    parameters: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    checks = [compare_strides("gradients (DDP buckets)", gradients, parameters)]
    if ema is not None:
        checks.append(compare_strides("EMA weights", dict(ema.named_parameters()), parameters))
    if masters is not None:
        checks.append(compare_strides("fp32 master weights", masters.by_name, parameters))
        masters.copy_gradients_from_model()
        parameters = masters.by_name
    if optimizer is not None:
        optimizer.step()
        names = {id(parameter): name for name, parameter in parameters.items()}
        states: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for parameter, state in optimizer.state.items():
            for kind, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    states[kind][names[id(parameter)]] = value
        checks += [compare_strides(f"optimizer: {kind}", by_name, parameters) for kind, by_name in states.items()]
    return checks
