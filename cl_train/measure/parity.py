"""Do both memory formats compute the same? A step each in eval and in training mode, from equal
weights and images.

First in float64, where only code that depends on the layout differs by more than `FLOAT64_LIMIT`;
then in the precision under test, where both layouts are compared with the float64 run.
docs/benchmarks.md explains the limits.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from cl_train.errors import ConfigError
from cl_train.measure.parity_step import Record, Samples, recorded_step
from cl_train.measure.timed_step import LossFunction, Workload, device_of, image_shape, noise
from cl_train.memory_format.convert import CONTIGUOUS, Layout, convert
from cl_train.memory_format.layout import CHANNELS_LAST_BY_DIM, classify, uncompiled
from cl_train.models.facts import facts_of, image_shapes
from cl_train.models.sources import copy_model
from cl_train.step.precision import Precision, resolve_precision
from cl_train.step.train_step import StepSettings
from cl_train.system.failures import explain_failure, failure_explained
from cl_train.system.tensors import tensors_in

FLOAT64_LIMIT = 1e-6
FLOAT32_LIMIT = 1e-3  # instead of FLOAT64_LIMIT, for a model that does not run in float64
# Times contiguous's error: sums run in another order, 8 was measured in correct models.
TOLERANCE = 16.0
MIN_LIMIT = 0.02  # or the square root of the dtype's epsilon
GRADIENT_LIMIT = 0.1  # a ReLU may change sign
MAX_LIMIT = 0.7  # values in a wrong order deviate by 1.4
# A tensor whose contiguous run deviates more, by rounding, is not checked in this precision.
MAX_BASELINE_ERROR = 0.25
SMALL_IMAGE, BATCH_SIZE = 96, 4  # whether layouts agree does not depend on the size
EVAL = " in eval mode"
MODES = {"both": (False, True), "train": (True,), "infer": (False,)}  # values of `training`

Step = Callable[..., Record]  # of a layout, and a dtype


@dataclass(frozen=True)
class Check:
    """One compared tensor; errors are relative L2 distances to the contiguous float64 run."""

    # "input of", "output of", "gradient of", "statistics of" a module or parameter; "result 0";
    # "loss"
    what: str
    computed_in: str  # "torch.float64" or the precision, with " in eval mode" where that is so
    contiguous_error: float
    channels_last_error: float
    allowed_error: float

    @property
    def failed(self) -> bool:
        return self.channels_last_error > self.allowed_error

    @property
    def is_gradient(self) -> bool:
        return self.what.startswith("gradient of ")

    def to_dict(self) -> dict[str, Any]:
        """An infinite error is None: JSON has none."""
        return {name: None if value == math.inf else value for name, value in vars(self).items()}

    def __str__(self) -> str:
        errors = (self.channels_last_error, self.contiguous_error, self.allowed_error)
        converted, plain, allowed = (f"{100 * error:.2g} %" for error in errors)
        deviates = f"channels_last deviates {converted} from the reference, contiguous {plain}"
        text = f"{self.what} in {self.computed_in}: {deviates}, the limit is {allowed}"
        is_exact = self.computed_in.startswith(str(torch.float64))
        if self.is_gradient and not is_exact and not self.failed:
            text += " (rounding flips the sign of an activation near 0, and its gradient with it)"
        return text


@dataclass(frozen=True)
class ParityReport:
    """The outcome of `check_parity`."""

    passed: bool | None  # None: inconclusive, for the reason in `note`
    precision: str
    batch: str  # what the model ran on, such as "[4, 3, 96, 96]"
    # The module whose input agrees and whose output does not, or an error's text.
    first_divergence: str | None = None
    worst: Check | None = None  # by error / allowed error
    failed: list[Check] = field(default_factory=list)
    note: str = ""
    # Median over gradients (or outputs) of channels_last's error / contiguous's, in `precision`.
    times_less_exact: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, of the failed checks the first ten."""
        worst = self.worst and self.worst.to_dict()
        failed = [check.to_dict() for check in self.failed[:10]]
        return {**vars(self), "failed": failed, "worst": worst, "text": str(self)}

    def __str__(self) -> str:
        if self.passed is None:
            text = "cannot be checked"
        elif self.passed:
            text = "the layouts agree; "
            if self.times_less_exact is not None and self.times_less_exact >= 1.5:
                times = f"{self.times_less_exact:.2g} times"
                text += f"channels_last is {times} less exact in {self.precision}; "
            text += f"nearest to the limit: {self.worst}"
        elif not self.failed:
            text = f"channels_last fails, and contiguous does not: {self.first_divergence}"
        else:
            text = f"channels_last computes something else, first in {self.first_divergence}; "
            text += f"{len(self.failed)} checks failed, the first: {self.failed[0]}"
        note = f"; {self.note}" if self.note else ""
        return f"parity ({self.precision}, batch {self.batch}): {text}{note}"


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
    seed: int = 0,
) -> ParityReport:
    """Compare copies of `model` in both layouts: outputs, results, gradients and BatchNorm
    statistics of one step.

    Random operators draw equal numbers in all runs. A crash in channels_last is a difference.

    Args:
        model: fp32, in any layout, on any device.
        batch, image_size, device: as in `compare_layouts`; noise is at most 96 px large where the
            model takes that.
        batch_size: default: 4.
        loss: scalar of the model's output; default: a sum with fixed random weights.
        output: the part of the output to compare; default: all of it.
        precision: what the two layouts compute in besides float64.
        conversion: "full" or "conv", as in `convert`.
        mode: "train" (training mode, with backward), "infer" (eval mode, forward only) or "both".
        seed: of the images and of the model's random numbers.

    Raises:
        ConfigError: the model does not run on this batch in the contiguous layout, or needs more
            memory than there is.
    """
    model = uncompiled(model)
    if mode not in MODES:
        raise ConfigError(f"mode={mode}; use {', '.join(MODES)}")
    device = device_of(model, device)
    settings = StepSettings(resolve_precision(precision, device))
    size = batch_size or BATCH_SIZE
    input_shape = image_shape(image_size)
    if batch is None:
        batch = noise((size, *_small_input(model, input_shape)), seed)
    workload = Workload(size, input_shape, settings, device, batch=batch, loss=loss, output=output)
    shape = str(list(batch.shape)) if isinstance(batch, torch.Tensor) else type(batch).__name__
    report = partial(ParityReport, precision=workload.precision.name, batch=shape)

    images = [tensor for tensor in tensors_in(batch) if tensor.dim() in CHANNELS_LAST_BY_DIM]
    is_converted = any(classify(tensor) != "ambiguous" for tensor in images)
    if not is_converted and not convert(copy_model(model, "meta"), conversion).changed:
        note = "no input and no weight has another order in memory in channels_last"
        return report(None, note=note)

    step = partial(recorded_step, model, workload, MODES[mode], seed)
    remedy = "give another batch or image_size, or mode=train or infer alone"
    with failure_explained(f"the model does not run on a batch {shape}", remedy):
        plain = step(CONTIGUOUS)
    layout = Layout(conversion=conversion)
    return _compare_layouts(report, model, step, plain, layout, workload.precision)


def _small_input(model: nn.Module, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one input: at most `SMALL_IMAGE` pixels, where the model runs on that."""
    small = (*wanted[:-2], *(min(side, SMALL_IMAGE) for side in wanted[-2:]))
    try:
        facts_of(model, image_shapes(model, 2, *small))
    except Exception:  # a model may raise any, for a size that it does not take
        return wanted
    return small


def _reference(step: Step) -> tuple[Record, torch.dtype, list[str]]:
    """The contiguous step in float64, or with a note in fp32."""
    try:
        return step(CONTIGUOUS, torch.float64), torch.float64, []
    except Exception as error:  # a model that creates or expects fp32 tensors
        note = f"compared in fp32, as the model does not run in float64 ({explain_failure(error)})"
    return step(CONTIGUOUS, torch.float32), torch.float32, [note]


def _compare_layouts(
    report: Callable[..., ParityReport],
    model: nn.Module,
    step: Step,
    plain: Record,
    layout: Layout,
    precision: Precision,
) -> ParityReport:
    """`plain` is the contiguous step in the precision under test."""
    reference, dtype, notes = _reference(step)
    exact_limit = FLOAT64_LIMIT if dtype == torch.float64 else FLOAT32_LIMIT
    results = [*reference.get("eval results", []), *reference.get("results", [])]
    if not any(tensor.isfinite().any() for _, tensor in results):
        return report(None, note="the contiguous model returns nothing that is finite")

    try:
        converted, rounded = step(layout, dtype), step(layout)
    except Exception as error:
        return report(False, first_divergence=explain_failure(error), note="; ".join(notes))

    def compared_exactly(record: Record) -> list[Check]:
        return _compare(reference, reference, record, str(dtype), lambda *_: exact_limit)

    checks = compared_exactly(converted)
    is_exactly_equal = not any(check.failed for check in checks)
    if not is_exactly_equal:
        again = compared_exactly(step(CONTIGUOUS, dtype))
        if any(check.failed for check in again):
            why = "the model draws random numbers that torch.manual_seed does not control"
            return report(None, note=f"two contiguous runs differ: {why}")

    limit = partial(_limit, precision=precision)
    rounded_checks = _compare(reference, plain, rounded, precision.name, limit)
    visible = [check for check in rounded_checks if check.contiguous_error <= MAX_BASELINE_ERROR]
    if hidden := len(rounded_checks) - len(visible):
        count = f"{hidden} of {len(rounded_checks)} tensors"
        notes.append(f"{count} only compared exactly: too inaccurate in {precision.name}")
    if is_exactly_equal and dtype == torch.float64:
        # The model is ill-conditioned: gradients of mobileone_s0 deviate by 38 % in fp32.
        visible = [
            replace(check, allowed_error=MAX_LIMIT) if check.is_gradient and check.failed else check
            for check in visible
        ]
        if any(check.failed for check in visible):
            notes.append("in float64 the layouts agree")

    checks += visible
    failed = [check for check in checks if check.failed]
    return report(
        not failed,
        first_divergence=_first_divergence(failed[0], model) if failed else None,
        worst=max(checks, key=lambda one: one.channels_last_error / (one.allowed_error or 1.0)),
        failed=failed,
        note="; ".join(notes),
        times_less_exact=_times_less_exact(visible),
    )


def _times_less_exact(checks: list[Check]) -> float | None:
    gradients = [check for check in checks if check.is_gradient]
    ratios = [
        check.channels_last_error / check.contiguous_error
        for check in gradients or checks
        if check.contiguous_error > 0 and math.isfinite(check.channels_last_error)
    ]
    return statistics.median(ratios) if ratios else None


def _limit(kind: str, contiguous_error: float, precision: Precision) -> float:
    is_tf32 = precision.tf32 and precision.input_dtype == torch.float32
    dtype = torch.float16 if is_tf32 else precision.input_dtype  # TF32 has the mantissa of float16
    floor = max(MIN_LIMIT, math.sqrt(torch.finfo(dtype).eps))
    if kind == "gradients":
        floor = max(floor, GRADIENT_LIMIT)
    return min(MAX_LIMIT, max(TOLERANCE * contiguous_error, floor))


def _compare(
    reference: Record,
    plain: Record,
    converted: Record,
    computed_in: str,
    limit: Callable[[str, float], float],
) -> list[Check]:
    """Checks in the order of `Record`, in which a difference spreads."""
    checks: list[Check] = []
    for kind, expected in reference.items():
        where = computed_in + (EVAL if kind.startswith("eval") else "")
        names, called = ([name for name, _ in record[kind]] for record in (reference, converted))
        if names != called:
            differing = (one for one, two in zip(called, names, strict=False) if one != two)
            place = next(differing, "the last tensor")
            return [*checks, Check(f"order of calls at {place}", where, 0.0, math.inf, 0.0)]

        # Gradients that are zero in theory (a bias before BatchNorm) are rounding errors: the norm
        # of a tensor of typical elements is added to that of each gradient.
        element = 0.0
        if kind == "gradients" and expected:
            element = float(torch.cat([true for _, true in expected]).square().mean().sqrt())

        plain_errors = _errors(plain[kind], expected, element)
        typical = statistics.median(plain_errors) if plain_errors else 0.0
        errors = _errors(converted[kind], expected, element)
        for name, plain_error, error in zip(names, plain_errors, errors, strict=True):
            allowed = limit(kind, max(plain_error, typical))
            checks.append(Check(name, where, plain_error, error, allowed))
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
    kind, _, name = check.what.partition(" of ")
    parent = name.rpartition(".")[0]
    places = {
        "output": (name.removeprefix("the model"), ""),
        "input": (parent, f", in the forward code before submodule {name} is called"),
        "gradient": (parent, ", in backward (its forward agrees)"),
        "statistics": (name, ", in its running statistics (its output agrees)"),
    }
    if kind not in places:
        return f"the model as a whole ({check.what})"
    module, where = places[kind]
    mode = "," + EVAL if check.computed_in.endswith(EVAL) else ""
    return f"{module or 'the model'} ({type(model.get_submodule(module)).__name__}){where}{mode}"
