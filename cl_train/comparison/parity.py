"""Do both memory formats compute the same? A step each in eval and in training mode, from equal weights and images.

First in float64, where only code that depends on the layout differs by more than `FLOAT64_LIMIT`; then in the precision
under test, where both layouts are compared with the float64 run. docs/benchmarks.md explains the limits. Gradients that
are zero in theory (a bias before BatchNorm) consist of rounding errors; their errors are relative to the typical size
of all gradients.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from cl_train.comparison.parity_run import Record, Task, run_step
from cl_train.comparison.timed_model import CONTIGUOUS, Layout, LossFunction, noise
from cl_train.config.schema import ConfigError
from cl_train.memory_format.convert import convert
from cl_train.memory_format.crashes import Crash, OutOfMemory, in_child
from cl_train.memory_format.layout import CHANNELS_LAST, classify, to_memory_format
from cl_train.memory_format.model_call import explain_failure, failure_explained
from cl_train.models.sources import copy_model, device_of
from cl_train.step.precision import Precision, resolve_precision

FLOAT64_LIMIT = 1e-6
FLOAT32_LIMIT = 1e-3  # instead of FLOAT64_LIMIT, for a model that does not run in float64
TOLERANCE = 16.0  # times contiguous's error: sums run in another order, 8 was measured in correct models
MIN_LIMIT, GRADIENT_LIMIT = 0.02, 0.1  # or the square root of the dtype's epsilon; gradients: a ReLU may change sign
MAX_LIMIT = 0.7  # values in a wrong order deviate by 1.4
MAX_BASELINE_ERROR = 0.25  # a tensor whose contiguous run deviates more, by rounding, is not checked in this precision
SMALL_IMAGE, BATCH_SIZE = 96, 4  # whether layouts agree does not depend on the size
EVAL = " in eval mode"
MODES = {"both": ("infer", "train"), "train": ("train",), "infer": ("infer",)}


@dataclass(frozen=True)
class Check:
    """One compared tensor. Errors are relative L2 distances to the reference, the contiguous float64 run."""

    what: str  # "input of", "output of", "gradient of", "statistics of" a module or parameter; "result 0"; "loss"
    computed_in: str  # "torch.float64" or the precision under test, with " in eval mode" where that is so
    contiguous_error: float
    channels_last_error: float
    allowed_error: float

    @property
    def share_of_limit(self) -> float:
        return self.channels_last_error / self.allowed_error if self.allowed_error else math.inf

    def __str__(self) -> str:
        return (
            f"{self.what} in {self.computed_in}: channels_last deviates {percent(self.channels_last_error)} from the "
            f"reference, contiguous {percent(self.contiguous_error)}, the limit is {percent(self.allowed_error)}"
        )


@dataclass(frozen=True)
class ParityReport:
    """The outcome of `check_parity`.

    `passed` is None if the check is inconclusive, with the reason in `note`. `first_divergence` names the module that
    received what the reference received and returned something else, or the error of channels_last where contiguous
    has none; None when all agree.
    """

    passed: bool | None
    precision: str
    batch: str  # what the model ran on, such as "[4, 3, 96, 96]"
    first_divergence: str | None = None
    worst: Check | None = None  # by error / allowed error
    failed: list[Check] = field(default_factory=list)
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, of the failed checks the first ten; an infinite error is None, as JSON has none."""

        def plain(check: Check) -> dict[str, Any]:
            return {name: None if value == math.inf else value for name, value in asdict(check).items()}

        worst = plain(self.worst) if self.worst else None
        return {**vars(self), "failed": [plain(check) for check in self.failed[:10]], "worst": worst, "text": str(self)}

    def __str__(self) -> str:
        what = f"parity ({self.precision}, batch {self.batch})"
        note = f"; {self.note}" if self.note else ""
        if self.passed is None:
            return f"{what}: cannot be checked{note}"
        if self.passed:
            return f"{what}: the layouts agree; nearest to the limit: {self.worst}{note}"
        if not self.failed:
            return f"{what}: channels_last fails, and contiguous does not: {self.first_divergence}{note}"
        first = f"{len(self.failed)} checks failed, the first: {self.failed[0]}"
        return f"{what}: channels_last computes something else, first in {self.first_divergence}; {first}{note}"


def percent(error: float) -> str:
    """`12 %`, `0.035 %`, `3e-07 %`."""
    return f"{100 * error:.2g} %" if math.isfinite(error) else "infinitely far"


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
    """Compare `model` in both layouts: module outputs, results, gradients and BatchNorm statistics of one step.

    Copies run, one at a time: `model` and all random generators are unchanged. Dropout and other random operators
    draw equal numbers in all runs (see `parity_run.EqualRandomness`). A crash in channels_last is a difference.

    Args:
        model: fp32, in any layout, on any device.
        batch: input to use instead of noise: a tensor, a tuple of inputs or a dict of keyword arguments.
        image_size: side of RGB images in pixels, or the shape of one input. A side above 96 is reduced to 96 where the
            model takes that.
        batch_size: default: 4.
        loss: scalar of the model's output; default: a sum with fixed random weights over all its tensors.
        output: the part of the output to compare, such as "out" or "0"; default: all of it.
        precision: what the two layouts compute in besides float64.
        device: default: where the model is.
        conversion: "full" or "conv", as in `memory_format.convert`.
        mode: "train" (training mode, with backward), "infer" (eval mode, forward only) or "both".
        seed: of the images and of the model's random numbers.

    Raises:
        ConfigError: the model does not run on this batch in the contiguous layout, or needs more memory than there is.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    device = torch.device(device) if device is not None else device_of(model)
    if mode not in MODES:
        raise ConfigError(f"mode={mode}: must be one of {', '.join(MODES)}")
    if batch is None:
        batch = noise((batch_size or BATCH_SIZE, *_small_input(model, image_size)), seed)
    task = Task(model, batch, device, loss, output, seed, MODES[mode])
    resolved = resolve_precision(precision, device)
    report = partial(ParityReport, precision=resolved.name, batch=_shape_of(batch))
    layout = Layout("channels_last", torch.channels_last, conversion)
    if not _changes_anything(model, layout, batch):
        return report(None, note="no input and no weight has another order in memory in channels_last")
    try:
        return in_child(lambda: _compare_layouts(task, layout, resolved, report))
    except OutOfMemory:
        raise
    except Crash as crash:
        in_child(lambda: _contiguous_steps(task, resolved))  # a crash there is no difference, and is raised
        return report(False, first_divergence=str(crash))


def _contiguous_steps(task: Task, precision: Precision) -> tuple[Record, Record, torch.dtype, str]:
    """In `precision`, then in float64, or in fp32 if the model does not run in float64, for the reason returned."""
    what = f"the model does not run on a batch {_shape_of(task.batch)}"
    with failure_explained(what, "give another batch or image_size, or mode=train or infer alone"):
        plain = run_step(task, CONTIGUOUS, precision)
    fp32 = Precision("fp32")
    try:
        return plain, run_step(task, CONTIGUOUS, fp32, torch.float64), torch.float64, ""
    except Exception as error:  # a model that creates or expects fp32 tensors
        reason = f"compared in fp32, as the model does not run in float64 ({explain_failure(error)})"
        return plain, run_step(task, CONTIGUOUS, fp32, torch.float32), torch.float32, reason


def _compare_layouts(
    task: Task, layout: Layout, precision: Precision, report: Callable[..., ParityReport]
) -> ParityReport:
    plain, reference, exact_dtype, note = _contiguous_steps(task, precision)
    results = [tensor for kind in ("eval results", "results") for _, tensor in reference.get(kind, [])]
    if not any(tensor.isfinite().any() for tensor in results):
        return report(None, note="the contiguous model returns nothing that is finite")
    exact_limit = FLOAT64_LIMIT if exact_dtype == torch.float64 else FLOAT32_LIMIT
    exact_step = partial(run_step, task, precision=Precision("fp32"), dtype=exact_dtype)
    try:
        converted, rounded = exact_step(layout), run_step(task, layout, precision)
    except Exception as error:
        return report(False, first_divergence=explain_failure(error), note=note)
    exactly = partial(_compare, reference, reference, computed_in=str(exact_dtype), limit=lambda *_: exact_limit)
    checks = exactly(converted)
    if _failed(checks) and _failed(exactly(exact_step(CONTIGUOUS))):
        why = "two contiguous runs differ: the model draws random numbers that torch.manual_seed does not control"
        return report(None, note=why)
    limit = partial(_limit, precision=precision)
    rounded_checks = _compare(reference, plain, rounded, limit, precision.name)
    visible = [check for check in rounded_checks if check.contiguous_error <= MAX_BASELINE_ERROR]
    if hidden := len(rounded_checks) - len(visible):
        note += "; " if note else ""
        note += f"{hidden} of {len(rounded_checks)} tensors only compared exactly: too inaccurate in {precision.name}"
    checks += visible
    failed = _failed(checks)
    worst = max(checks, key=lambda check: check.share_of_limit, default=None)
    first = _first_divergence(failed[0], task.model) if failed else None
    return report(not failed, first_divergence=first, worst=worst, failed=failed, note=note)


def _failed(checks: list[Check]) -> list[Check]:
    return [check for check in checks if check.channels_last_error > check.allowed_error]


def _limit(kind: str, contiguous_error: float, precision: Precision) -> float:
    dtype = torch.float16 if precision.name == "tf32" else precision.input_dtype
    floor = max(MIN_LIMIT, math.sqrt(torch.finfo(dtype).eps))
    return min(MAX_LIMIT, max(TOLERANCE * contiguous_error, floor, GRADIENT_LIMIT if kind == "gradients" else 0.0))


def _compare(
    reference: Record, contiguous: Record, other: Record, limit: Callable[[str, float], float], computed_in: str
) -> list[Check]:
    """Checks in the order in which a difference spreads: forward, results, gradients, statistics."""
    checks: list[Check] = []
    dtype_or_precision = computed_in
    for kind, truths in reference.items():
        computed_in = dtype_or_precision + (EVAL if kind.startswith("eval") else "")
        plain, mine = contiguous[kind], other[kind]
        names = [name for name, _ in truths]
        if names != [name for name, _ in mine]:
            odd = next((one for (one, _), two in zip(mine, names, strict=False) if one != two), "the last tensor")
            return [*checks, Check(f"order of calls at {odd}", computed_in, 0.0, math.inf, 0.0)]
        sizes = _sizes([truth for _, truth in truths], kind)
        plain_errors, errors = (
            [_distance(tensor, truth, size) for (_, tensor), (_, truth), size in zip(found, truths, sizes, strict=True)]
            for found in (plain, mine)
        )
        typical = statistics.median(plain_errors) if plain_errors else 0.0
        checks += [
            Check(name, computed_in, plain_error, error, limit(kind, max(plain_error, typical)))
            for name, plain_error, error in zip(names, plain_errors, errors, strict=True)
        ]
    return checks


def _sizes(tensors: list[torch.Tensor], kind: str) -> list[float]:
    """L2 norm of each tensor; for gradients plus that of a tensor of typical elements."""
    elements = sum(tensor.numel() for tensor in tensors)
    squares = sum(float(tensor.square().sum()) for tensor in tensors)
    typical = math.sqrt(squares / elements) if kind == "gradients" and elements else 0.0
    return [float(tensor.norm()) + typical * math.sqrt(tensor.numel()) for tensor in tensors]


def _distance(tensor: torch.Tensor, truth: torch.Tensor, size: float) -> float:
    """L2 distance / size; infinite if the shapes differ or only one is not finite."""
    if tensor.shape != truth.shape:
        return math.inf
    if torch.allclose(tensor, truth, rtol=0, atol=0, equal_nan=True):
        return 0.0
    distance = float((tensor - truth).norm()) / (size or 1.0)
    return distance if math.isfinite(distance) else math.inf


def _first_divergence(check: Check, model: nn.Module) -> str:
    """The module to look at: if a module's *input* differs first, the code of its parent."""
    kind, _, name = check.what.partition(" of ")
    where = {
        "output": "",
        "input": f", in the forward code before submodule {name} is called",
        "gradient": ", in backward (its forward agrees)",
        "statistics": ", in its running statistics (its output agrees)",
    }
    if kind not in where:
        return f"the model as a whole ({check.what})"
    module = name if kind in ("output", "statistics") else name.rpartition(".")[0]
    module = "" if module == "the model" else module
    eval_mode = "," + EVAL if check.computed_in.endswith(EVAL) else ""
    return f"{module or 'the model'} ({type(model.get_submodule(module)).__name__}){where[kind]}{eval_mode}"


# --- the input --------------------------------------------------------------------------------------------------------


def _small_input(model: nn.Module, image_size: int | tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one input, [C, H, W] or as `image_size`; at most 96 px where the model takes that.

    Only shapes are computed: transformers take one size only, and Inception's auxiliary head has a minimum size.
    """
    wanted = (3, image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    small = (*wanted[:-2], *(min(side, SMALL_IMAGE) for side in wanted[-2:])) if len(wanted) >= 3 else wanted
    shapes_only = copy_model(model, "meta").train()
    dtype = next((p.dtype for p in shapes_only.parameters() if p.is_floating_point()), torch.float32)
    try:
        shapes_only(torch.empty((2, *small), device="meta", dtype=dtype))
    except Exception:  # a model may raise any exception for a wrong image size, or because it reads values
        return wanted
    return small


def _changes_anything(model: nn.Module, layout: Layout, batch: Any) -> bool:
    """Whether a tensor of the batch or of the model has other strides in `layout`."""
    images = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() in CHANNELS_LAST]
    if any(classify(to_memory_format(image, layout.memory_format)) != "ambiguous" for image in images):
        return True
    return bool(convert(copy_model(model, "meta"), layout.conversion, memory_format=layout.memory_format).changed)


def _shape_of(batch: Any) -> str:
    return str(list(batch.shape)) if isinstance(batch, torch.Tensor) else type(batch).__name__
