"""Do both memory formats compute the same? A step each in eval and in training mode, from equal
weights and images.

First in float64, where only code that depends on the layout differs by more than `FLOAT64_LIMIT`;
then in the precision under test, where both layouts are compared with the float64 run.
docs/benchmarks.md explains the limits.
"""

import math
import random
import statistics
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from cl_train.config.schema import ConfigError
from cl_train.measure.timed_step import (
    LossFunction,
    Workload,
    model_in_layout,
    noise,
    place_batch,
    settings_of,
    workload_of,
)
from cl_train.memory_format.convert import convert
from cl_train.memory_format.crashes import refuse_known_crash
from cl_train.memory_format.layout import (
    CHANNELS_LAST,
    CONTIGUOUS,
    Layout,
    classify,
    to_memory_format,
)
from cl_train.memory_format.model_call import call_model, output_tensors
from cl_train.models.sources import copy_model
from cl_train.step import backup
from cl_train.step.precision import Precision, autocast, kernel_selection
from cl_train.system.failures import explain_failure, failure_explained

FLOAT64_LIMIT = 1e-6
FLOAT32_LIMIT = 1e-3  # instead of FLOAT64_LIMIT, for a model that does not run in float64
# Times contiguous's error: sums run in another order, 8 was measured in correct models.
TOLERANCE = 16.0
MIN_LIMIT = 0.02  # or the square root of the dtype's epsilon
GRADIENT_LIMIT = 0.1  # a ReLU may change sign
MAX_LIMIT = 0.7  # values in a wrong order deviate by 1.4
# a tensor whose contiguous run deviates more, by rounding, is not checked in this precision
MAX_BASELINE_ERROR = 0.25
SMALL_IMAGE, BATCH_SIZE = 96, 4  # whether layouts agree does not depend on the size
# Recorded per tensor, to bound memory; a wrong layout changes nearly every element.
MOST_ELEMENTS = 2**16
EVAL = " in eval mode"
MODES = {"both": (False, True), "train": (True,), "infer": (False,)}  # the values of `training`

# Samples of the tensors of a step by name, in the order of computation. Kinds: "forward" ("input of
# X", "output of X"), "results" ("result 0", "loss"), "gradients", "statistics"; "eval forward",
# "eval results".
Samples = list[tuple[str, torch.Tensor]]
Record = dict[str, Samples]
Step = Callable[..., Record]  # of a layout, and a dtype


@dataclass(frozen=True)
class Check:
    """One compared tensor.

    Errors are relative L2 distances to the reference, the contiguous float64 run.
    """

    # "input of", "output of", "gradient of", "statistics of" a module or parameter; "result 0";
    # "loss"
    what: str
    # "torch.float64" or the precision under test, with " in eval mode" where that is so
    computed_in: str
    contiguous_error: float
    channels_last_error: float
    allowed_error: float

    @property
    def failed(self) -> bool:
        return self.channels_last_error > self.allowed_error

    @property
    def is_gradient(self) -> bool:
        return self.what.startswith("gradient of ")

    @property
    def is_exact(self) -> bool:
        return self.computed_in.startswith(str(torch.float64))

    def __str__(self) -> str:
        errors = (self.channels_last_error, self.contiguous_error, self.allowed_error)
        converted, plain, allowed = (f"{100 * error:.2g} %" for error in errors)
        text = (
            f"{self.what} in {self.computed_in}: channels_last deviates {converted} from the "
            f"reference, contiguous {plain}, the limit is {allowed}"
        )
        if self.is_gradient and not self.is_exact and not self.failed:
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
        """Plain values, of the failed checks the first ten; an infinite error is None, as JSON has
        none.
        """

        def plain(check: Check) -> dict[str, Any]:
            return {
                name: None if value == math.inf else value for name, value in vars(check).items()
            }

        worst = plain(self.worst) if self.worst else None
        return {
            **vars(self),
            "failed": list(map(plain, self.failed[:10])),
            "worst": worst,
            "text": str(self),
        }

    def __str__(self) -> str:
        if self.passed is None:
            text = "cannot be checked"
        elif self.passed:
            exactness = ""
            if self.times_less_exact is not None and self.times_less_exact >= 1.5:
                times = f"{self.times_less_exact:.2g} times"
                exactness = f"channels_last is {times} less exact in {self.precision}; "
            text = f"the layouts agree; {exactness}nearest to the limit: {self.worst}"
        elif not self.failed:
            text = f"channels_last fails, and contiguous does not: {self.first_divergence}"
        else:
            count = f"{len(self.failed)} checks failed, the first: {self.failed[0]}"
            text = (
                f"channels_last computes something else, first in {self.first_divergence}; {count}"
            )
        return (
            f"parity ({self.precision}, batch {self.batch}):"
            f" {text}{f'; {self.note}' if self.note else ''}"
        )


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

    Dropout and other random operators draw equal numbers in all runs. A crash in channels_last is a
    difference.

    Args:
        model: fp32, in any layout, on any device.
        batch, device: as in `compare_layouts`.
        image_size: side of RGB images in pixels, or the shape of one input; at most 96 px where the
            model takes that.
        batch_size: default: 4.
        loss: scalar of the model's output; default: a sum with fixed random weights over all its
            tensors.
        output: the part of the output to compare, such as "out" or "0"; default: all of it.
        precision: what the two layouts compute in besides float64.
        conversion: "full" or "conv", as in `convert`.
        mode: "train" (training mode, with backward), "infer" (eval mode, forward only) or "both".
        seed: of the images and of the model's random numbers.

    Raises:
        ConfigError: the model does not run on this batch in the contiguous layout, or needs more
            memory than there is.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    workload = workload_of(
        model,
        batch_size or BATCH_SIZE,
        image_size,
        settings_of(model, precision, device),
        device,
        mode=mode,
        modes=MODES,
        loss=loss,
        output=output,
    )
    if batch is None:
        batch = noise((workload.batch_size, *_small_input(model, workload.input_shape)), seed)
    layout = Layout(conversion=conversion)
    shape = str(list(batch.shape)) if isinstance(batch, torch.Tensor) else type(batch).__name__
    report = partial(ParityReport, precision=workload.precision.name, batch=shape)
    images = [
        leaf
        for leaf in tree_leaves(batch)
        if isinstance(leaf, torch.Tensor) and leaf.dim() in CHANNELS_LAST
    ]
    is_converted = any(
        classify(to_memory_format(one, layout.memory_format)) != "ambiguous" for one in images
    )
    if not is_converted and not convert(copy_model(model, "meta"), conversion).changed:
        return report(
            None, note="no input and no weight has another order in memory in channels_last"
        )
    step = partial(_step, model, replace(workload, batch=batch), seed)
    if True in MODES[mode]:
        try:
            _refuse_known_crash(model, replace(workload, batch=batch))
        except ConfigError as error:
            return report(False, first_divergence=str(error))
    return report(**_compare_layouts(model, step, layout, workload.precision, shape))


def _refuse_known_crash(model: nn.Module, workload: Workload) -> None:
    """Raises ConfigError: a step in channels_last is known to crash."""
    precision, device = workload.precision, workload.device
    copied = model_in_layout(model, CONTIGUOUS, precision, device)
    images = place_batch(workload.batch, device, precision.input_dtype, torch.contiguous_format)

    def forward() -> None:
        with autocast(precision, device), suppress(Exception):  # it is told by the comparison
            call_model(copied, images)

    refuse_known_crash(copied, forward)


def _small_input(model: nn.Module, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one input; transformers take one size only, and Inception's auxiliary head has a
    minimum size.
    """
    small = (
        (*wanted[:-2], *(min(side, SMALL_IMAGE) for side in wanted[-2:]))
        if len(wanted) >= 3
        else wanted
    )
    shapes_only = copy_model(model, "meta").train()
    dtype = next(
        (p.dtype for p in shapes_only.parameters() if p.is_floating_point()), torch.float32
    )
    try:
        shapes_only(torch.empty((2, *small), device="meta", dtype=dtype))
    except (
        Exception
    ):  # a model may raise any exception for a wrong image size, or because it reads values
        return wanted
    return small


# --- the comparison -------------------------------------------------------------------------------


def _compare_layouts(
    model: nn.Module, step: Step, layout: Layout, precision: Precision, shape: str
) -> dict[str, Any]:
    """The fields of the report."""
    remedy = "give another batch or image_size, or mode=train or infer alone"
    with failure_explained(f"the model does not run on a batch {shape}", remedy):
        plain = step(CONTIGUOUS)
    exact_dtype, exact_limit, note = torch.float64, FLOAT64_LIMIT, ""
    try:
        reference = step(CONTIGUOUS, exact_dtype)
    except Exception as error:  # a model that creates or expects fp32 tensors
        exact_dtype, exact_limit = torch.float32, FLOAT32_LIMIT
        note = f"compared in fp32, as the model does not run in float64 ({explain_failure(error)})"
        reference = step(CONTIGUOUS, exact_dtype)
    results = [
        tensor for kind in ("eval results", "results") for _, tensor in reference.get(kind, [])
    ]
    if not any(tensor.isfinite().any() for tensor in results):
        return {"passed": None, "note": "the contiguous model returns nothing that is finite"}
    try:
        converted, rounded = step(layout, exact_dtype), step(layout)
    except Exception as error:
        return {"passed": False, "first_divergence": explain_failure(error), "note": note}
    exactly = partial(
        _compare, reference, reference, computed_in=str(exact_dtype), limit=lambda *_: exact_limit
    )
    checks = exactly(converted)
    is_exactly_equal = not any(check.failed for check in checks)
    if not is_exactly_equal:
        again = exactly(step(CONTIGUOUS, exact_dtype))
        if any(check.failed for check in again):
            why = (
                "two contiguous runs differ: the model draws random numbers that torch.manual_seed "
                "does not control"
            )
            return {"passed": None, "note": why}

    limit = partial(_limit, precision=precision)
    rounded_checks = _compare(reference, plain, rounded, precision.name, limit)
    visible = [check for check in rounded_checks if check.contiguous_error <= MAX_BASELINE_ERROR]
    notes = [note] if note else []
    if hidden := len(rounded_checks) - len(visible):
        notes.append(
            f"{hidden} of {len(rounded_checks)} tensors only compared exactly: too inaccurate in "
            f"{precision.name}"
        )
    if is_exactly_equal and exact_dtype == torch.float64:
        visible = [_decided_by_float64(check) for check in visible]
        if any(check.failed for check in visible):
            notes.append("in float64 the layouts agree")
    checks += visible

    failed = [check for check in checks if check.failed]
    relative = [check.channels_last_error / (check.allowed_error or 1.0) for check in checks]
    return {
        "passed": not failed,
        "first_divergence": _first_divergence(failed[0], model) if failed else None,
        "worst": checks[relative.index(max(relative))] if checks else None,
        "failed": failed,
        "note": "; ".join(notes),
        "times_less_exact": _times_less_exact(visible),
    }


def _decided_by_float64(check: Check) -> Check:
    """Where float64 agrees, a gradient may deviate up to `MAX_LIMIT`: the model is ill-conditioned.

    Single gradients of mobileone_s0 deviate by 38 % in fp32, and by 4e-13 in float64.
    """
    return replace(check, allowed_error=MAX_LIMIT) if check.is_gradient and check.failed else check


def _times_less_exact(checks: list[Check]) -> float | None:
    of_gradients = [check for check in checks if check.is_gradient]
    ratios = [
        check.channels_last_error / check.contiguous_error
        for check in of_gradients or checks
        if check.contiguous_error > 0 and math.isfinite(check.channels_last_error)
    ]
    return statistics.median(ratios) if ratios else None


def _limit(kind: str, contiguous_error: float, precision: Precision) -> float:
    is_tf32 = precision.tf32 and precision.input_dtype == torch.float32
    dtype = torch.float16 if is_tf32 else precision.input_dtype  # TF32 has the mantissa of float16
    floor = max(MIN_LIMIT, math.sqrt(torch.finfo(dtype).eps))
    return min(
        MAX_LIMIT,
        max(TOLERANCE * contiguous_error, floor, GRADIENT_LIMIT if kind == "gradients" else 0.0),
    )


def _compare(
    reference: Record,
    plain: Record,
    converted: Record,
    computed_in: str,
    limit: Callable[[str, float], float],
) -> list[Check]:
    """Checks in the order in which a difference spreads: forward, results, gradients,
    statistics.
    """
    checks: list[Check] = []
    for kind, expected in reference.items():
        where = computed_in + (EVAL if kind.startswith("eval") else "")
        names, called = ([name for name, _ in record[kind]] for record in (reference, converted))
        if names != called:
            unexpected = next(
                (one for one, two in zip(called, names, strict=False) if one != two),
                "the last tensor",
            )
            return [*checks, Check(f"order of calls at {unexpected}", where, 0.0, math.inf, 0.0)]
        # Gradients that are zero in theory (a bias before BatchNorm) are rounding errors: the norm
        # of a tensor of typical elements is added to that of each gradient.
        true = (
            torch.cat([one for _, one in expected])
            if kind == "gradients" and expected
            else torch.zeros(1)
        )
        element = float(true.square().mean().sqrt())
        plain_errors, errors = (
            [
                _error(found, true, element)
                for (_, found), (_, true) in zip(record[kind], expected, strict=True)
            ]
            for record in (plain, converted)
        )
        typical = statistics.median(plain_errors) if plain_errors else 0.0
        checks += [
            Check(name, where, plain_error, error, limit(kind, max(plain_error, typical)))
            for name, plain_error, error in zip(names, plain_errors, errors, strict=True)
        ]
    return checks


def _error(found: torch.Tensor, true: torch.Tensor, element: float) -> float:
    """L2 distance / L2 norm; infinite where the shapes differ or only one is not finite."""
    if found.shape != true.shape:
        return math.inf
    if torch.allclose(found, true, rtol=0, atol=0, equal_nan=True):
        return 0.0
    size = float(true.norm()) + element * math.sqrt(true.numel())
    error = float((found - true).norm()) / (size or 1.0)
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
    eval_mode = "," + EVAL if check.computed_in.endswith(EVAL) else ""
    return (
        f"{module or 'the model'} ({type(model.get_submodule(module)).__name__}){where}{eval_mode}"
    )


# --- one step, recorded ---------------------------------------------------------------------------


def _step(
    model: nn.Module,
    workload: Workload,
    seed: int,
    layout: Layout,
    dtype: torch.dtype | None = None,
) -> Record:
    """A fresh copy in eval mode (forward), then in training mode (forward, loss, backward), as
    `workload.mode` says.

    Random numbers are equal in all steps. With `dtype` the weights and inputs have it, and there is
    no autocast.
    """
    device, loss_of, modes = workload.device, workload.loss, MODES[workload.mode]
    precision = workload.precision if dtype is None else Precision("fp32")
    model = model_in_layout(model, layout, precision, device)
    if dtype is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on complex parameters, which keep their dtype
            model.to(dtype)
    batch = place_batch(
        workload.batch, device, dtype or precision.input_dtype, layout.memory_format
    )
    record: Record = {}
    kernels = kernel_selection(tf32=precision.tf32, autotune=False)
    with backup.random_state_restored(device), kernels, EqualRandomness(seed):
        for (
            training
        ) in modes:  # the last in front: a difference of both modes is reported in training
            key = (
                workload.output if training is modes[-1] else None
            )  # which may exist in training only
            gradients, what = (nullcontext(), "") if training else (torch.no_grad(), "eval ")
            with autocast(precision, device), gradients, _watched(model.train(training)) as forward:
                output = call_model(model, batch)
                results = output_tensors(output, key)
                if training:
                    loss = loss_of(output) if loss_of is not None else _weighted_sum(results)
            named = [(f"result {index}", sample(tensor)) for index, tensor in enumerate(results)]
            if training and loss_of is not None:
                named.append(("loss", sample(loss)))
            done = {f"{what}forward": forward, f"{what}results": named}
            if training:
                done |= _backward(model, loss, forward)
            record = done | record
    return record


def _backward(model: nn.Module, loss: torch.Tensor, forward: Samples) -> Record:
    """The gradients of `loss`, those of modules that were called last first, and the statistics of
    the forward pass.
    """
    if loss.requires_grad:
        loss.backward()
    called = {what.partition(" of ")[2]: index for index, (what, _) in enumerate(forward)}
    parameters = sorted(
        model.named_parameters(), key=lambda item: -called.get(item[0].rpartition(".")[0], -1)
    )
    statistics: Samples = []
    for name, module in model.named_modules():
        mean, variance = (getattr(module, f"running_{what}", None) for what in ("mean", "var"))
        if isinstance(mean, torch.Tensor) and isinstance(
            variance, torch.Tensor
        ):  # the spread is the unit of both
            statistics.append(
                (f"statistics of {name}", torch.cat([sample(mean), sample(variance).sqrt()]))
            )
    gradients = [
        (f"gradient of {name}", sample(one.grad))
        for name, one in parameters
        if one.grad is not None
    ]
    return {"gradients": gradients, "statistics": statistics}


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Up to `MOST_ELEMENTS` evenly spaced elements in logical order, float64 on the CPU.

    Waits for the device.
    """
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    step = (
        math.ceil(tensor.numel() / MOST_ELEMENTS) | 1 if tensor.numel() > MOST_ELEMENTS else 1
    )  # odd: no alias
    return tensor.reshape(-1)[::step].to("cpu", torch.float64, copy=True)


def _weighted_sum(results: list[torch.Tensor]) -> torch.Tensor:
    """A loss for outputs of any shape: fixed random weights, so that the gradients of the elements
    differ.
    """
    total = torch.zeros((), dtype=torch.float64)
    for tensor in results:
        values = (
            torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        ).double()
        weights = torch.empty_like(values).copy_(noise(tuple(values.shape)))
        total = total + (values * weights).sum().cpu() / math.sqrt(values.numel() or 1)
    return total


@contextmanager
def _watched(model: nn.Module) -> Iterator[Samples]:
    """Record inputs and outputs as modules run, before a later in-place operator overwrites
    them.
    """
    forward: Samples = []
    seen: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    def note(what: str, module: nn.Module, *values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                known = seen.get(id(value))
                if known is None or known[0]() is not value or known[1] != value._version:
                    known = seen[id(value)] = (weakref.ref(value), value._version, sample(value))
                forward.append((what, known[2]))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule) and name:
                continue  # its modules are called from TorchScript, which does not run hooks
            before, after = (
                partial(note, f"{what} of {name or 'the model'}") for what in ("input", "output")
            )
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(
                module.register_forward_hook(lambda one, _, output, do=after: do(one, output))
            )
        yield forward


class EqualRandomness(TorchDispatchMode):
    """While active, random operators draw the same logical values for every memory format, dtype
    and device.

    `torch.rand_like(x)` fills memory in storage order. Here the model receives the results of
    random operators on contiguous float64 copies of their arguments on the CPU, seeded by the
    number of the call. Fused attention, whose kernels draw their own numbers, is only seeded.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        random.seed(seed)
        np.random.seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.seed += 1
        torch.manual_seed(self.seed)
        if "attention" in func.name():
            return func(*args, **kwargs)
        drawn_args, drawn_kwargs = tree_map(_plain, args), tree_map(_plain, kwargs)
        for name in ("memory_format", "pin_memory", "layout"):
            drawn_kwargs.pop(name, None)
        result = func(*args, **kwargs)  # has the right layout, dtype and device, but other values
        torch.manual_seed(self.seed)
        drawn = func(*drawn_args, **drawn_kwargs)
        for index, argument in enumerate(func._schema.arguments[: len(args)]):
            if argument.alias_info is not None and argument.alias_info.is_write:
                args[index].copy_(drawn_args[index])
        for target, source in zip(tree_leaves(result), tree_leaves(drawn), strict=True):
            if isinstance(target, torch.Tensor) and all(
                target is not argument for argument in args
            ):
                target.copy_(source)
        return result


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = torch.float64 if value.is_floating_point() else None
        return value.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value
