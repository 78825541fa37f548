"""Runs modules by themselves again, in both layouts, on copies of what they read in a step.

Code that asks for the layout, perhaps only at one size or in one precision, runs other operators or
reads memory by strides: the modules that do so are compared.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from cl_train.measure.kernels import (
    Errors,
    KernelCheck,
    WrongCall,
    compared,
    copied,
    limit_by_exact,
    norm_of,
    same_strides,
)
from cl_train.measure.parity_step import ParityStep, Results, Roots, leaf
from cl_train.memory_format.audit_report import Origin
from cl_train.memory_format.convert import CONTIGUOUS, convert
from cl_train.models.sources import copy_model
from cl_train.step.precision import Precision
from cl_train.step.train_step import compiled
from cl_train.system.tensors import map_tensors, tensors_in

# Limits of the relative distance of whole steps; fp32 if a model cannot run in float64.
CODE_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3}
# Share of the typical element of a step's gradients; a smaller gradient is zero but for rounding.
FLOAT64_ELEMENT = 1e-3


@dataclass
class _Visit:
    """What a module read in a step, and the gradients of what it returned."""

    is_training: bool
    call: Any  # args, kwargs
    gradients: list[torch.Tensor | None] = field(default_factory=list)


@dataclass
class _VisitAgain(ParityStep):
    gradients: Sequence[torch.Tensor | None] = ()

    def call(self, batch: Any) -> Any:
        args, kwargs = batch
        return self.model(*args, **kwargs)

    def results(self, output: Any, is_training: bool) -> list[torch.Tensor]:
        return _numbers(output)

    def roots(self, output: Any, results: list[torch.Tensor]) -> Roots:
        pairs = zip(results, self.gradients, strict=False)
        given = [(one, gradient) for one, gradient in pairs if gradient is not None]
        if self.dtype is None:
            return [(one, gradient.to(one.dtype)) for one, gradient in given]
        # A hook of the module may have given the gradient other strides.
        return [(one, torch.empty_like(one).copy_(gradient)) for one, gradient in given]


def modules_of_other_code(plain: KernelCheck, converted: KernelCheck) -> list[str]:
    differing = (plain.operators - converted.operators) + (converted.operators - plain.operators)
    return list(dict.fromkeys(module for module, _, _ in differing))


def wrong_modules(
    step: ParityStep, names: Iterable[str], *, compile: bool = False
) -> list[WrongCall]:
    """Returns the innermost modules of a channels_last step whose results differ, as calls.

    compile: compare the compiled modules, without dropout.
    """
    modules, wrong = dict(step.model.named_modules()), dict[str, WrongCall]()
    for name, visits in _visits_of(step, list(names)).items():
        for visit in visits:
            errors = _errors(modules[name], visit, step, compile)
            failed = [what for what, (error, _) in errors.items() if not error <= 1]
            if failed and name not in wrong:
                kind = "compiled code" if compile else "code"
                wrong[name] = wrong_code(modules[name], name, failed[0], errors, kind)
    return [call for name, call in wrong.items() if not any(_is_inside(name, one) for one in wrong)]


def wrong_code(
    module: nn.Module, name: str, what: str, errors: Errors, kind: str = "code"
) -> WrongCall:
    direction: Any = "backward" if what.startswith("gradient") else "forward"
    return WrongCall(kind, Origin(direction, name, type(module).__name__), None, *errors[what])


def _numbers(output: Any) -> list[torch.Tensor]:
    return [t for t in tensors_in(output) if t.is_floating_point() or t.is_complex()]


def _is_inside(name: str, other: str) -> bool:
    return other != name and other.startswith(f"{name}." if name else "")


def _visits_of(step: ParityStep, names: list[str]) -> dict[str, list[_Visit]]:
    """Runs the step; returns the first visit of each module in each mode."""
    visits: dict[str, list[_Visit]] = {name: [] for name in names}

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if all(visit.is_training != module.training for visit in visits[name]):
            visits[name].append(_Visit(module.training, copied((args, kwargs), same_strides)))

    def leave(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        visit = visits[name][-1]
        if not module.training or visit.gradients:
            return
        for number, tensor in enumerate(_numbers(output)):
            visit.gradients.append(None)
            if tensor.requires_grad:
                tensor.register_hook(partial(note, visit, number))

    def note(visit: _Visit, number: int, gradient: torch.Tensor) -> None:
        visit.gradients[number] = same_strides(gradient)

    with ExitStack() as hooks:
        for name, module in step.model.named_modules():
            if name in visits:
                entering, leaving = partial(enter, name), partial(leave, name)
                hooks.enter_context(module.register_forward_pre_hook(entering, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(leaving, with_kwargs=True))
        step.run()
    return visits


def _errors(module: nn.Module, visit: _Visit, step: ParityStep, compile: bool) -> Errors:
    converted = copy_model(module)
    for part in converted.modules() if compile else ():
        for name in ("p", "drop_prob"):  # dropout of torch, torchvision and timm
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    plain = copy_model(converted)
    convert(plain, CONTIGUOUS)

    def run(model: nn.Module, read: Any, precision: Precision, **given: Any) -> Results:
        (call, gradients), modes = read, (visit.is_training,)
        inputs = map_tensors(leaf, call)
        again = partial(_VisitAgain, model, inputs, precision, step.workload, modes, step.seed)
        return again(gradients=gradients, dtype=step.dtype, **given).run()

    read = visit.call, visit.gradients
    contiguous = copied(read, torch.Tensor.contiguous)
    called = compiled(converted) if compile else converted
    found = run(called, read, step.precision, is_compiled=compile)
    expected = run(plain, contiguous, step.precision, is_reference=True)
    if step.dtype is not None:
        return code_errors(found, expected, step.dtype)
    # How much a module rounds depends on the module: contiguous against float64 shows it.
    wide = copy_model(plain).double()
    exact = run(wide, copied(contiguous, _in_float64), Precision("fp32"), is_reference=True)
    limit = partial(limit_by_exact, dtype=step.precision.input_dtype)
    return compared(found, expected, exact, limit)


def code_errors(found: Results, expected: Results, dtype: torch.dtype) -> Errors:
    """Returns the errors of code in float64, in which rounding hides nothing, or in fp32."""
    # Gradients that are zero in theory, as of a bias before BatchNorm, are rounding errors: the
    # norm of typical elements is added to the norm of each gradient.
    gradients = [one for name, one in expected.items() if name.startswith("gradient")]
    squares = sum(norm_of(one) ** 2 for one in gradients if one.is_floating_point())
    element = math.sqrt(squares / max(1, sum(one.numel() for one in gradients)))
    element *= FLOAT64_ELEMENT if dtype == torch.float64 else 1.0

    def limit(name: str, y: torch.Tensor, _: torch.Tensor) -> float:
        floor = element * math.sqrt(y.numel()) if name.startswith("gradient") else 0.0
        return CODE_LIMITS[dtype] * (norm_of(y) + floor)

    return compared(found, expected, expected, limit)


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
