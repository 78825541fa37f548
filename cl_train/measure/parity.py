"""Do both memory formats compute the same? Three questions, as docs/benchmarks.md explains:

1. Does every operator call of a step compute the same in channels_last (`kernels.py`)?
2. Does code that runs other operators in channels_last (`code_paths.py`)?
3. Does the code as a whole, in float64 and at a small size, where rounding hides nothing?
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from cl_train.errors import ConfigError
from cl_train.measure.code_paths import (
    code_errors,
    modules_of_other_code,
    wrong_code,
    wrong_modules,
)
from cl_train.measure.kernels import KernelCheck, WrongCall
from cl_train.measure.parity_step import ParityStep
from cl_train.measure.timed_step import LossFunction, Workload, device_of, image_shape, noise
from cl_train.memory_format.convert import CONTIGUOUS, Layout, convert
from cl_train.memory_format.layout import CHANNELS_LAST_BY_DIM, classify, uncompiled
from cl_train.models.facts import facts_of, image_shapes, refuse_known_crash
from cl_train.models.sources import copy_model
from cl_train.step.precision import resolve_precision
from cl_train.step.train_step import StepSettings
from cl_train.system.failures import explain_failure, failure_explained
from cl_train.system.tensors import tensors_in
from cl_train.system.torch_state import own_torch_state

SMALL_SIZES = (48, 64, 96)  # pixels
SMALL_BATCH = 4  # the fewest whose BatchNorm has gradients
MODES = {"both": (False, True), "train": (True,), "infer": (False,)}  # values of `training`
BATCH_SIZE = 4
MOST_MODULES = 64  # of other code that are run again


@dataclass(frozen=True)
class ParityReport:
    passed: bool | None  # None: inconclusive, for the reason in `note`
    precision: str
    batch: str  # the shape that the model ran on, such as "[4, 3, 224, 224]", or a type
    first_divergence: str | None = None  # operator or code, with its module; or an error's text
    worst: str | None = None  # the result nearest to its limit, or the first above it
    failed: list[str] = field(default_factory=list)
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, with the first ten checks that failed."""
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
    code as a whole in float64. Random operators draw equal numbers; a crash is a difference.

    Args:
        model: fp32, in any layout; in the copies, constant parameters, such as a scale of zero, get
            other values.
        batch, image_size, device: as in `compare_layouts`.
        batch_size: images per step; default: 4.
        loss: maps the model's output to a scalar; default: a sum with fixed random weights.
        output: the part of the output to compare; default: all of it.
        precision: that of the step whose operators are compared.
        conversion: "full" or "conv", as in `convert`.
        mode: "train" (training mode, with backward), "infer" (eval mode, forward only) or "both".
        compile: also compare the compiled model as a whole.
        seed: seeds the images and the model's random numbers.

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
        results = ParityStep.of(model, tested, modes, CONTIGUOUS, seed).run(plain)
    if True in modes and not any(name.startswith("gradient") for name in results):
        note = "there was no backward pass; mode=infer compares the forward pass alone"
        return ParityReport(None, *asked, note=note)
    del results
    try:
        if workload.device.type == "cpu" and True in modes:
            refuse_known_crash(model, given)
        step = ParityStep.of(model, tested, modes, layout, seed)
        step.run(converted)
    except Exception as error:
        return ParityReport(False, *asked, first_divergence=explain_failure(error))
    differing, unknown = list(converted.wrong), ""
    try:
        names = modules_of_other_code(plain, converted)[:MOST_MODULES]
        differing += wrong_modules(step, names) if names else []
        if not differing and workload.settings.compile:
            differing = wrong_modules(step, [""], compile=True)
    except Exception as error:  # a module may not run by itself
        unknown = "modules that run other code in channels_last cannot be compared by themselves"
        unknown += f": {explain_failure(error)}"
    if differing:
        return _different(differing, asked)

    small = workload.batch
    if small is None:
        small = noise((SMALL_BATCH, *_small_input(model, workload.input_shape)), seed)
    step_of = partial(ParityStep.of, model, replace(workload, batch=small), modes, seed=seed)
    code = _compare_code(step_of, layout, asked)
    if code.passed and unknown:
        return ParityReport(None, *asked, note=unknown)
    if code.passed and converted.worst is not None:
        code = replace(code, worst=str(converted.worst))
    if converted.unchecked:
        names_of = ", ".join(sorted(converted.unchecked))
        code = replace(code, note="; ".join(filter(None, (code.note, f"not replayed: {names_of}"))))
    return code


def _different(wrong: list[WrongCall], asked: tuple[str, str], note: str = "") -> ParityReport:
    failed = [str(one) for one in wrong]
    return ParityReport(False, *asked, wrong[0].where, failed[0], failed, note)


def _small_input(model: nn.Module, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of an input of the first of `SMALL_SIZES` that the model takes, if smaller
    than `wanted`.
    """
    for size in SMALL_SIZES:
        small = (*wanted[:-2], *(min(side, size) for side in wanted[-2:]))
        try:
            facts_of(model, image_shapes(model, 2, *small))
        except Exception:  # a model may raise any, for a size that it does not take
            continue
        return small
    return wanted


def _compare_code(
    step_of: Callable[..., ParityStep], layout: Layout, asked: tuple[str, str]
) -> ParityReport:
    dtype, note = torch.float64, ""
    try:
        expected = step_of(CONTIGUOUS, dtype=dtype).run()
    except Exception as error:  # a model that creates or expects fp32 tensors
        why = explain_failure(error)
        note = f"the code is compared in fp32, as the model does not run in float64 ({why})"
        dtype = torch.float32
        expected = step_of(CONTIGUOUS, dtype=dtype).run()
    if not any(one.isfinite().any() for name, one in expected.items() if name.startswith("result")):
        note = "the contiguous model returns nothing that is finite"
        return ParityReport(None, *asked, note=note)
    try:
        step = step_of(layout, dtype=dtype)
        errors = code_errors(step.run(), expected, dtype)
    except Exception as error:
        return ParityReport(False, *asked, first_divergence=explain_failure(error), note=note)

    failed = [name for name, (error, _) in errors.items() if not error <= 1]
    if not failed:
        worst = max(errors, key=lambda name: errors[name])
        return ParityReport(True, *asked, None, str(wrong_code(step.model, "", worst, errors)))
    again = code_errors(step_of(CONTIGUOUS, dtype=dtype).run(), expected, dtype)
    if any(not error <= 1 for error, _ in again.values()):
        why = "the model draws random numbers that torch.manual_seed does not control"
        return ParityReport(None, *asked, note=f"two contiguous runs differ: {why}")
    wrong: list[WrongCall] = []
    with suppress(Exception):  # a module may not run by itself
        wrong = wrong_modules(step, dict(step.model.named_modules()))
    return _different(wrong or [wrong_code(step.model, "", failed[0], errors)], asked, note)
