"""Code that runs other operators in channels_last, and whether it computes the same.

A model may ask for the layout, `if x.is_contiguous()`, in one precision, at one size or for an odd
batch only. Then its step in channels_last runs other operators, or reads memory by strides, and the
modules that do so are run again by themselves, on copies of what they read in the step: forward and
backward, in both layouts.
"""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from cl_train.measure.kernels import (
    Errors,
    KernelCheck,
    compare_with_exact,
    copied,
    same_strides,
)
from cl_train.measure.parity_step import ContiguousResults, EqualRandomness, ParityStep
from cl_train.memory_format.convert import CONTIGUOUS, convert
from cl_train.memory_format.model_call import output_tensors
from cl_train.models.sources import copy_model
from cl_train.step.backup import random_state_restored
from cl_train.step.precision import Precision, autocast
from cl_train.step.train_step import compiled
from cl_train.system.tensors import map_tensors, tensors_in

MOST_MODULES = 64  # that are run again


@dataclass
class Visit:
    """What a module read in a step, and the gradients of what it returned."""

    is_training: bool
    args: Any
    kwargs: Any
    gradients: list[torch.Tensor | None] = field(default_factory=list)


def modules_of_other_code(plain: KernelCheck, converted: KernelCheck) -> list[str]:
    """The modules that ran other operators in channels_last, in their order."""
    differing = (plain.operators - converted.operators) + (converted.operators - plain.operators)
    return list(dict.fromkeys(module for module, _, _ in differing))


def visits_of(step: ParityStep, names: list[str]) -> dict[str, list[Visit]]:
    """The first visit of each module in each mode."""
    visits: dict[str, list[Visit]] = {name: [] for name in names}

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if all(visit.is_training != module.training for visit in visits[name]):
            call = copied((args, kwargs), same_strides)
            visits[name].append(Visit(module.training, *call))

    def leave(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        visit = visits[name][-1]
        if not module.training or visit.gradients:
            return
        for number, tensor in enumerate(output_tensors(output)):
            visit.gradients.append(None)
            if tensor.requires_grad:
                tensor.register_hook(partial(note, visit, number))

    def note(visit: Visit, number: int, gradient: torch.Tensor) -> None:
        visit.gradients[number] = same_strides(gradient)

    with ExitStack() as hooks:
        for name in names:
            module = dict(step.model.named_modules())[name]
            entering, leaving = partial(enter, name), partial(leave, name)
            hooks.enter_context(module.register_forward_pre_hook(entering, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(leaving, with_kwargs=True))
        step.run()
    return visits


def errors_of_visit(
    module: nn.Module, visit: Visit, step: ParityStep, *, compile: bool = False
) -> Errors:
    """Of all that the module returns and writes, and of the gradients of all that it reads;
    compile: of the compiled module in channels_last, without dropout.
    """
    converted = copy_model(module)
    for part in converted.modules() if compile else ():
        for name in ("p", "drop_prob"):  # of torch's, torchvision's and timm's
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    plain = copy_model(converted)
    convert(plain, CONTIGUOUS)
    run = partial(_results, step, visit.is_training, compile)
    call = (visit.args, visit.kwargs, visit.gradients)
    contiguous = copied(call, torch.Tensor.contiguous)
    found = run(compiled(converted) if compile else converted, step.precision, call)
    run = partial(run, is_reference=True)
    expected = run(plain, step.precision, contiguous)
    # The rounding of a whole module is its own: that of contiguous against float64 tells it.
    exact = run(copy_model(plain).double(), Precision("fp32"), copied(contiguous, _in_float64))
    return compare_with_exact(found, expected, exact, step.precision.input_dtype)


def _results(
    step: ParityStep,
    is_training: bool,
    compile: bool,
    model: nn.Module,
    precision: Precision,
    call: Any,
    *,
    is_reference: bool = False,
) -> list[torch.Tensor]:
    *given, gradients = call
    leaves = map_tensors(_leaf, given)
    # An in-place module takes no leaves, a compiled one warns of others.
    args, kwargs = leaves if compile else map_tensors(torch.clone, leaves)
    model.train(is_training)
    # A model is not compiled below a mode that sees its operators.
    randomness = nullcontext() if compile else EqualRandomness(step.seed)
    restored = random_state_restored(step.workload.device)
    contiguous = ContiguousResults() if is_reference else nullcontext()
    with restored, randomness, contiguous, torch.set_grad_enabled(is_training):
        with autocast(precision, step.workload.device):
            outputs = output_tensors(model(*args, **kwargs))
        pairs = [
            (output, gradient.to(output.dtype))
            for output, gradient in zip(outputs, gradients, strict=False)
            if gradient is not None and output.requires_grad
        ]
        wanted = [one for one in (*tensors_in(leaves), *model.parameters()) if one.requires_grad]
        found: tuple[torch.Tensor | None, ...] = ()
        if pairs:
            results, given_gradients = zip(*pairs, strict=True)
            found = torch.autograd.grad(results, wanted, given_gradients, allow_unused=True)
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return [one.detach() for one in (*outputs, *found, *buffers) if one is not None]


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())
