"""Do both memory formats compute the same? Three questions, as docs/benchmarks.md explains:

1. Does every operator call of a step compute the same in channels_last (`kernels.py`)?
2. Does code that runs other operators in channels_last (`code_paths.py`)?
3. Does the code as a whole, in float64 and at a small size, where rounding hides nothing?
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from cl_train.errors import ConfigError
from cl_train.measure.code_paths import (
    MOST_MODULES,
    Visit,
    errors_of_visit,
    modules_of_other_code,
    visits_of,
)
from cl_train.measure.kernels import KernelCheck, WrongCall
from cl_train.measure.parity_step import ParityStep, Record, Samples
from cl_train.measure.timed_step import LossFunction, Workload, device_of, image_shape, noise
from cl_train.memory_format.audit_report import Origin
from cl_train.memory_format.convert import CONTIGUOUS, Layout, convert
from cl_train.memory_format.layout import CHANNELS_LAST_BY_DIM, classify, uncompiled
from cl_train.models.facts import facts_of, image_shapes, refuse_known_crash
from cl_train.models.sources import copy_model
from cl_train.step.precision import resolve_precision
from cl_train.step.train_step import StepSettings
from cl_train.system.failures import explain_failure, failure_explained
from cl_train.system.tensors import tensors_in
from cl_train.system.torch_state import own_torch_state

FLOAT64_LIMIT = 1e-6
FLOAT32_LIMIT = 1e-3  # for a model that does not run in float64
# Of the typical element of a step's gradients: below it a gradient is rounding, zero in theory.
FLOAT64_ELEMENT = 1e-3
SMALL_SIZES = (48, 64, 96)  # pixels; the first that the model takes
SMALL_BATCH = 4  # the fewest whose BatchNorm has gradients
EVAL = " in eval mode"
MODES = {"both": (False, True), "train": (True,), "infer": (False,)}  # values of `training`
BATCH_SIZE = 4


@dataclass(frozen=True)
class Check:
    """One tensor of the whole step: the relative L2 distance of the layouts, and its limit."""

    # "input of", "output of", "gradient of" a module or parameter; "buffer"; "result 0"; "loss"
    what: str
    computed_in: str  # "torch.float64", with " in eval mode" where that is so
    error: float
    allowed_error: float

    @property
    def failed(self) -> bool:
        return self.error > self.allowed_error

    def __str__(self) -> str:
        deviates = f"channels_last deviates {100 * self.error:.2g} %"
        limit = f"the limit is {100 * self.allowed_error:g} %"
        return f"{self.what} in {self.computed_in}: {deviates}, {limit}"


@dataclass(frozen=True)
class ParityReport:
    """The outcome of `check_parity`."""

    passed: bool | None  # None: inconclusive, for the reason in `note`
    precision: str
    batch: str  # what the model ran on, such as "[4, 3, 224, 224]"
    # The operator with its module and line, the module whose input agrees and whose output does
    # not, or an error's text.
    first_divergence: str | None = None
    worst: str | None = None  # what is nearest to its limit, or above it
    failed: list[str] = field(default_factory=list)
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, of what failed the first ten."""
        return {**vars(self), "failed": self.failed[:10], "text": str(self)}

    def __str__(self) -> str:
        if self.passed is None:
            text = "inconclusive"
        elif self.passed:
            text = f"the layouts agree; nearest to the limit: {self.worst}"
        elif not self.failed:
            text = f"channels_last fails, and contiguous does not: {self.first_divergence}"
        else:
            text = f"channels_last computes something else, first in {self.first_divergence}; "
            text += f"{len(self.failed)} checks failed, the first: {self.failed[0]}"
        note = f"; {self.note}" if self.note else ""
        return f"parity ({self.precision}, batch {self.batch}): {text}{note}"


@own_torch_state
def check_parity(
    model: nn.Module,
    *,
    batch: Any = None,
    image_size: int | tuple[int, ...] = 224,
    batch_size: int | None = None,
    loss: LossFunction | None = None,
    output: str | None = None,
    precision: str = "fp32",
    device: torch.device | str | None = None,
    conversion: str = "full",
    mode: str = "both",
    compile: bool = False,
    seed: int = 0,
) -> ParityReport:
    """Compare a step of copies of `model` in both layouts: each operator call by itself, and the
    code as a whole in float64.

    Random operators draw equal numbers in all runs. A crash in channels_last is a difference.

    Args:
        model: fp32, in any layout, on any device; where its parameters are constant, such as a
            scale of zero, the copies hold other values.
        batch, image_size, device: as in `compare_layouts`.
        batch_size: default: 4.
        loss: scalar of the model's output; default: a sum with fixed random weights.
        output: the part of the output to compare; default: all of it.
        precision: of the step whose operators are compared.
        conversion: "full" or "conv", as in `convert`.
        mode: "train" (training mode, with backward), "infer" (eval mode, forward only) or "both".
        compile: also compare the compiled model as a whole.
        seed: of the images and of the model's random numbers.

    Raises:
        ConfigError: the model does not run on this batch in the contiguous layout, or needs more
            memory than there is.
    """
    model = uncompiled(model)
    if mode not in MODES:
        raise ConfigError(f"mode={mode}; use {', '.join(MODES)}")
    device = device_of(model, device)
    settings = StepSettings(resolve_precision(precision, device), compile=compile)
    size, shape = batch_size or BATCH_SIZE, image_shape(image_size)
    workload = Workload(size, shape, settings, device, batch=batch, loss=loss, output=output)
    return parity_of(model, workload, Layout(conversion=conversion), MODES[mode], seed)


def parity_of(
    model: nn.Module, workload: Workload, layout: Layout, modes: Sequence[bool], seed: int = 0
) -> ParityReport:
    """As `check_parity`, of the step of `workload`, with noise if it has no batch."""
    given = workload.batch
    if given is None:
        given = noise((workload.batch_size, *workload.input_shape), seed)
    shape = str(list(given.shape)) if isinstance(given, torch.Tensor) else type(given).__name__
    asked = workload.precision.name, shape

    images = [tensor for tensor in tensors_in(given) if tensor.dim() in CHANNELS_LAST_BY_DIM]
    is_converted = any(classify(tensor) != "ambiguous" for tensor in images)
    if not is_converted and not convert(copy_model(model, "meta"), layout).changed:
        note = "no input and no weight has another order in memory in channels_last"
        return ParityReport(None, *asked, note=note)

    tested = replace(workload, batch=given)
    plain, converted = KernelCheck(replays=False), KernelCheck()
    remedy = "give another batch or image_size, or mode=train or infer alone"
    with failure_explained(f"the model does not run on a batch {shape}", remedy):
        contiguous_step = ParityStep.of(model, tested, modes, CONTIGUOUS, seed)
        has_gradient = contiguous_step.run(plain)
    del contiguous_step
    if True in modes and not has_gradient:
        note = "there was no backward pass; mode=infer compares the forward pass alone"
        return ParityReport(None, *asked, note=note)
    try:
        if workload.device.type == "cpu" and True in modes:
            refuse_known_crash(model, given)
        step = ParityStep.of(model, tested, modes, layout, seed)
        step.run(converted)
    except Exception as error:
        return ParityReport(False, *asked, first_divergence=explain_failure(error))
    try:
        differing = [*converted.wrong, *_wrong_code(plain, converted, step)]
        if not differing and workload.settings.compile:
            differing = _wrong_visits(step, visits_of(step, [""]), compile=True)
    except Exception as error:  # a module may not run by itself
        note = "modules that run other code in channels_last cannot be compared by themselves"
        return ParityReport(None, *asked, note=f"{note}: {explain_failure(error)}")
    if differing:
        failed = [str(one) for one in differing]
        return ParityReport(False, *asked, differing[0].where, failed[0], failed)

    small = workload.batch
    if small is None:
        small = noise((SMALL_BATCH, *_small_input(model, workload.input_shape)), seed)
    step_of = partial(ParityStep.of, model, replace(workload, batch=small), modes, seed=seed)
    code = _compare_code(model, step_of, layout, asked)
    if code.passed and converted.worst is not None:
        code = replace(code, worst=str(converted.worst))
    if converted.unchecked:
        names = ", ".join(sorted(converted.unchecked))
        code = replace(code, note="; ".join(filter(None, (code.note, f"not replayed: {names}"))))
    return code


def _wrong_code(plain: KernelCheck, converted: KernelCheck, step: ParityStep) -> list[WrongCall]:
    """The modules whose other operators in channels_last compute something else."""
    names = modules_of_other_code(plain, converted)[:MOST_MODULES]
    return _wrong_visits(step, visits_of(step, names)) if names else []


def _wrong_visits(
    step: ParityStep, visits: dict[str, list[Visit]], *, compile: bool = False
) -> list[WrongCall]:
    """The first result of each module that differs."""
    wrong: list[WrongCall] = []
    modules = dict(step.model.named_modules())
    for name, visit in ((name, visit) for name, each in visits.items() for visit in each):
        errors = errors_of_visit(modules[name], visit, step, compile=compile)
        failed = [(n, *error) for n, error in enumerate(errors) if not error[0] <= 1]
        if failed and all(one.origin.module != name for one in wrong):
            number, error, relative = failed[0]
            origin = Origin("forward", name, type(modules[name]).__name__)
            if visit.is_training and number >= len(visit.gradients):
                origin = replace(origin, direction="backward")
            what = "compiled code" if compile else "code"
            wrong.append(WrongCall(what, origin, (), error, relative))
    return wrong


def _small_input(model: nn.Module, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one input: of the first of `SMALL_SIZES` that the model takes, if smaller."""
    for size in SMALL_SIZES:
        small = (*wanted[:-2], *(min(side, size) for side in wanted[-2:]))
        try:
            facts_of(model, image_shapes(model, 2, *small))
        except Exception:  # a model may raise any, for a size that it does not take
            continue
        return small
    return wanted


# --- the code as a whole --------------------------------------------------------------------------


def _compare_code(
    model: nn.Module, step_of: Callable[..., ParityStep], layout: Layout, asked: tuple[str, str]
) -> ParityReport:
    dtype, notes = torch.float64, ""
    try:
        try:
            reference = step_of(CONTIGUOUS, dtype=dtype).record()
        except Exception as error:  # a model that creates or expects fp32 tensors
            why = explain_failure(error)
            notes = f"the code is compared in fp32, as the model does not run in float64 ({why})"
            dtype = torch.float32
            reference = step_of(CONTIGUOUS, dtype=dtype).record()
    except Exception as error:  # a scripted model takes no hooks
        note = f"its code cannot be compared as a whole: {explain_failure(error)}"
        return ParityReport(None, *asked, note=note)
    results = [*reference.get("eval results", []), *reference.get("results", [])]
    if not any(tensor.isfinite().any() for _, tensor in results):
        note = "the contiguous model returns nothing that is finite"
        return ParityReport(None, *asked, note=note)
    try:
        converted = step_of(layout, dtype=dtype).record()
    except Exception as error:
        why = explain_failure(error)
        return ParityReport(False, *asked, first_divergence=why, note=notes)

    checks = _compare(reference, converted, dtype)
    failed = [check for check in checks if check.failed]
    if failed:
        again = step_of(CONTIGUOUS, dtype=dtype).record()
        if any(check.failed for check in _compare(reference, again, dtype)):
            why = "the model draws random numbers that torch.manual_seed does not control"
            return ParityReport(None, *asked, note=f"two contiguous runs differ: {why}")
    worst = str(max(checks, key=lambda one: one.error / (one.allowed_error or 1.0)))
    first = _first_divergence(failed[0], model) if failed else None
    return ParityReport(not failed, *asked, first, worst, [*map(str, failed)], notes)


def _compare(reference: Record, converted: Record, dtype: torch.dtype) -> list[Check]:
    """Checks in the order of `Record`, in which a difference spreads."""
    limit = FLOAT64_LIMIT if dtype == torch.float64 else FLOAT32_LIMIT
    checks: list[Check] = []
    for kind, expected in reference.items():
        where = str(dtype) + (EVAL if kind.startswith("eval") else "")
        names, called = ([name for name, _ in record[kind]] for record in (reference, converted))
        if names != called:
            differing = (one for one, two in zip(called, names, strict=False) if one != two)
            place = next(differing, "the last tensor")
            return [*checks, Check(f"order of calls at {place}", where, math.inf, 0.0)]

        # Gradients that are zero in theory, of a bias before BatchNorm, are rounding errors: the
        # norm of a tensor of typical elements is added to that of each gradient.
        element = 0.0
        if kind == "gradients" and expected:
            element = float(torch.cat([true for _, true in expected]).square().mean().sqrt())
            element *= FLOAT64_ELEMENT if dtype == torch.float64 else 1.0
        errors = _errors(converted[kind], expected, element)
        pairs = zip(names, errors, strict=True)
        checks += [Check(name, where, error, limit) for name, error in pairs]
    return checks


def _errors(samples: Samples, expected: Samples, element: float) -> list[float]:
    pairs = zip(samples, expected, strict=True)
    return [_error(tensor, true, element) for (_, tensor), (_, true) in pairs]


def _error(tensor: torch.Tensor, true: torch.Tensor, element: float) -> float:
    """L2 distance / L2 norm; infinite where the shapes differ or only one is not finite."""
    if tensor.shape != true.shape:
        return math.inf
    if torch.allclose(tensor, true, rtol=0, atol=0, equal_nan=True):
        return 0.0
    size = float(true.norm()) + element * math.sqrt(true.numel())
    error = float((tensor - true).norm()) / (size or 1.0)
    return error if math.isfinite(error) else math.inf


def _first_divergence(check: Check, model: nn.Module) -> str:
    """The module to look at: if a module's *input* differs first, the code of its parent."""
    kind, _, name = check.what.replace("buffer ", "buffer of ").partition(" of ")
    parent = name.rpartition(".")[0]
    places = {
        "output": (name.removeprefix("the model"), ""),
        "input": (parent, f", in the forward code before submodule {name} is called"),
        "gradient": (parent, ", in backward (its forward agrees)"),
        "buffer": (parent, ", in its buffers (its output agrees)"),
    }
    if kind not in places:
        return f"the model as a whole ({check.what})"
    module, where = places[kind]
    mode = "," + EVAL if check.computed_in.endswith(EVAL) else ""
    return f"{module or 'the model'} ({type(model.get_submodule(module)).__name__}){where}{mode}"
