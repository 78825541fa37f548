"""Do both memory formats compute the same? Equal weights, a few training steps, each compared with float64.

Copies of a model take the same steps on the same images: a float64 reference, and in the precision under test one
contiguous and one channels_last. The layouts round differently, so their results are never bit-equal; what is compared
is their *distance to the reference*. The contiguous side shows how far rounding alone leads, and channels_last may be
`TOLERANCE` times as far: the tolerance follows the dtype and the model by itself.

Gradients jump where an activation lies within rounding of a kink (ReLU at 0, a tie in max-pooling): a single such flip
is rare in fp32 and thousands of times as large as rounding. So a second contiguous copy gets images nudged by somewhat
more than rounding, which flips more of them, and the larger of the two distances counts.

A wrong permutation is an error of the size of the values, orders of magnitude beyond all that.
"""

from __future__ import annotations

import copy
import math
import statistics
from dataclasses import dataclass, field

import torch
from torch import nn

from cl_train.config.schema import OptimConfig
from cl_train.memory_format import convert as memory_format
from cl_train.step.optim import build_optimizer
from cl_train.step.precision import (
    MasterWeights,
    Precision,
    autocast,
    build_scaler,
    cast_model,
    kernel_selection,
    trainable_parameters,
)
from cl_train.step.train_step import logits_of, loss_of

TOLERANCE = 4.0
# Relative rounding that any fp32 kernel is granted: long sums (a batch's mean, the gradient of a bias) are added up
# pairwise in one layout and one after the other in the other.
ROUNDING_OF_SUMS = 64 * torch.finfo(torch.float32).eps
OTHER_IMAGES = 2  # tried where gradients alone differ
PARITY_IMAGE_SIZE = 96  # no larger than need be: layouts agree or differ whatever the size
LEARNING_RATE = 0.01
LOSS_SCALE = 128.0  # small enough that fp16 never overflows, for then a step would be skipped and sides diverge
_RANDOM_LAYERS = ("Dropout", "DropPath", "StochasticDepth")


@dataclass(frozen=True)
class Check:
    """One compared quantity. Errors are relative distances to the float64 reference (L2 norms)."""

    what: str  # "logits", "loss", or "gradient of <parameter>", "statistics of", "output of", "input of <module>"
    step: int  # 1-based
    contiguous_error: float
    channels_last_error: float
    allowed_error: float

    @property
    def passed(self) -> bool:
        return self.channels_last_error <= self.allowed_error


@dataclass(frozen=True)
class ParityReport:
    """The outcome of `check_parity`; `first_divergence` names a module (and where in it), None when all agree."""

    passed: bool
    precision: str
    steps: int
    first_divergence: str | None
    worst: Check | None  # by error / allowed error
    failed: list[Check] = field(default_factory=list)

    def __str__(self) -> str:
        if self.passed:
            assert self.worst is not None
            return (
                f"parity ({self.precision}, {self.steps} steps): both layouts agree; nearest to the limit is "
                f"{self.worst.what}, {self.worst.channels_last_error:.1e} from float64 (contiguous "
                f"{self.worst.contiguous_error:.1e}, allowed {self.worst.allowed_error:.1e})"
            )
        first = self.failed[0]
        return (
            f"parity ({self.precision}): channels_last computes something else, first in {self.first_divergence}: "
            f"{first.what} is {first.channels_last_error:.1e} from float64 (contiguous {first.contiguous_error:.1e}); "
            f"{len(self.failed)} checks failed"
        )


def fitting_image_size(model: nn.Module, image_size: int, channels: int = 3) -> int:
    """The smaller of `PARITY_IMAGE_SIZE` and `image_size` where the model takes it, else `image_size`.

    Tried on shapes alone: transformers take one size only, and Inception's auxiliary head has a smallest one.
    """
    small = min(image_size, PARITY_IMAGE_SIZE)
    shapes_only = copy.deepcopy(model).to("meta").train()
    dtype = next(shapes_only.parameters()).dtype
    try:
        with torch.no_grad():
            shapes_only(torch.empty(2, channels, small, small, device="meta", dtype=dtype))
    except Exception:  # whatever a model raises where the size is not its own
        return image_size
    return small


def check_parity(
    model: nn.Module,
    *,
    image_size: int,
    precision: Precision,
    device: torch.device,
    batch_size: int = 4,
    input_channels: int = 3,
    conversion: str = "full",
    steps: int = 3,
    seed: int = 0,
) -> ParityReport:
    """Train three copies of `model` for `steps` steps and compare logits, loss, gradients and BatchNorm statistics.

    `model`, and the random generators, stay as they are. Dropout and stochastic depth are off: their masks follow
    memory order, so they differ between layouts by design.

    Where the forward pass agrees and a gradient does not, other images are tried, `OTHER_IMAGES` times at most: an
    activation on a kink flips for few of them, wrong code is wrong for all.

    Args:
        model: fp32, any layout, any device; small batches and images will do.
        precision: what the two layouts compute in.
        conversion: as in `memory_format.convert`.
        seed: of the images.

    Returns:
        `first_divergence` is the module that got what the reference got and gave something else: by the outputs of the
        first forward pass, or, where those agree, by the gradients, last layer first.
    """
    cuda = [device] if device.type == "cuda" else []
    shape = (batch_size, input_channels, image_size, image_size)
    with (
        torch.random.fork_rng(devices=cuda),
        kernel_selection(tf32=precision.tf32, autotune=torch.backends.cudnn.benchmark),
    ):
        for number in range(1 + OTHER_IMAGES):
            torch.manual_seed(seed + number)
            report = _compare_sides(model, torch.randn(shape), precision, device, conversion, steps)
            if report.passed or not report.failed[0].what.startswith("gradient of"):
                break
    return report


def _compare_sides(
    model: nn.Module, images: torch.Tensor, precision: Precision, device: torch.device, conversion: str, steps: int
) -> ParityReport:
    nudge = torch.randn_like(images) * images.abs() * _nudge_size(precision)
    reference = _Side(model, Precision("fp64"), torch.float64, device)
    plain, nudged = (_Side(model, precision, None, device) for _ in range(2))
    converted = _Side(model, precision, None, device, conversion)
    checks: list[Check] = []
    for step in range(1, steps + 1):
        is_first = step == 1
        exact = reference.step(images, is_traced=is_first)
        contiguous = [plain.step(images, is_traced=is_first), nudged.step(images + nudge, is_traced=is_first)]
        checks += _compare(step, exact, contiguous, converted.step(images, is_traced=is_first))
    failed = [check for check in checks if not check.passed]
    worst = max(checks, key=_badness, default=None)
    first = _first_divergence(failed[0], model) if failed else None
    return ParityReport(not failed, precision.name, steps, first, worst, failed)


def _nudge_size(precision: Precision) -> float:
    """Relative to the image's values."""
    return max(ROUNDING_OF_SUMS, torch.finfo(precision.input_dtype).eps)


# --- one side ---------------------------------------------------------------------------------------------------------

Named = list[tuple[str, torch.Tensor]]


@dataclass
class _Facts:
    """What one step computed, in the order of execution, `gradients` backwards; all but these as float64 on the CPU."""

    trace: Named
    results: Named
    gradients: Named
    statistics: Named


class _Side:
    """One copy of the model with its optimizer."""

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        dtype: torch.dtype | None,
        device: torch.device,
        conversion: str | None = None,
    ) -> None:
        self.model = copy.deepcopy(model).to(device=device, dtype=dtype).train()
        _switch_off_randomness(self.model)
        cast_model(self.model, precision)
        memory_format.convert(self.model, memory_format=torch.contiguous_format)
        if conversion is not None:
            memory_format.convert(self.model, conversion)
        self._images = {
            "dtype": dtype or precision.input_dtype,
            "device": device,
            "memory_format": torch.contiguous_format if conversion is None else torch.channels_last,
        }
        self._precision, self._device = precision, device
        self._masters = MasterWeights(self.model) if precision.master_weights else None
        self._parameters = trainable_parameters(self.model, self._masters)
        self._optimizer = build_optimizer(OptimConfig(weight_decay=0.0), self.model, self._parameters, LEARNING_RATE)
        self._scaler = build_scaler(precision, device, init_scale=LOSS_SCALE)
        self._order: list[str] = []

    def step(self, images: torch.Tensor, *, is_traced: bool) -> _Facts:
        trace: Named = []
        handles = self._watch(trace) if is_traced else []
        with autocast(self._precision, self._device):
            output = self.model(images.to(**self._images))  # type: ignore[call-overload]
            logits = logits_of(output)
            targets = torch.arange(len(logits), device=self._device) % logits.shape[1]
            loss = loss_of(output, targets)
        for handle in handles:
            handle.remove()
        self._scaler.scale(loss).backward()
        if self._masters is not None:
            self._masters.take_gradients()
        if self._precision.scales_loss:
            self._scaler.unscale_(self._optimizer)
        gradients = [
            (name, _exact(parameter.grad))
            for name, parameter in self._in_backward_order()
            if parameter.grad is not None
        ]
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._masters is not None:
            self._masters.publish()
        self._optimizer.zero_grad(set_to_none=True)
        return _Facts(trace, [("logits", _exact(logits)), ("loss", _exact(loss))], gradients, _statistics(self.model))

    def _watch(self, trace: Named) -> list[torch.utils.hooks.RemovableHandle]:
        """Copy every module's inputs and outputs as it runs: before a later in-place operator writes over them."""

        def before(name: str) -> object:
            def hook(module: nn.Module, inputs: tuple[object, ...]) -> None:
                self._order.append(name)
                trace.extend((f"input of {name}", _exact(item)) for item in inputs if isinstance(item, torch.Tensor))

            return hook

        def after(name: str) -> object:
            def hook(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
                if isinstance(output, torch.Tensor):
                    trace.append((f"output of {name}", _exact(output)))

            return hook

        handles = []
        for name, module in self.model.named_modules():
            handles.append(module.register_forward_pre_hook(before(name or "the model")))
            handles.append(module.register_forward_hook(after(name or "the model")))
        return handles

    def _in_backward_order(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters, that of the module that ran last first."""
        position = {name: index for index, name in enumerate(self._order)}
        named = list(self._parameters.items())
        return sorted(named, key=lambda item: -position.get(item[0].rpartition(".")[0], -1))


def _statistics(model: nn.Module) -> Named:
    """Running means and standard deviations, one vector per BatchNorm: a mean's error counts in units of the spread."""
    return [
        (name, torch.cat([_exact(module.running_mean), _exact(module.running_var).sqrt()]))
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.running_mean is not None
        and module.running_var is not None
    ]


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """A float64 copy on the CPU, in logical order. Waits for the device."""
    return tensor.detach().to("cpu", torch.float64, copy=True, memory_format=torch.contiguous_format)


def _switch_off_randomness(model: nn.Module) -> None:
    for module in model.modules():
        if any(word in type(module).__name__ for word in _RANDOM_LAYERS):
            module.eval()
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign, misc]
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


# --- comparing --------------------------------------------------------------------------------------------------------


def _compare(step: int, exact: _Facts, contiguous: list[_Facts], converted: _Facts) -> list[Check]:
    """Checks in the order in which a divergence would spread: forward, results, backward, statistics.

    After the first step a gradient is compared as a whole: its smaller parts have gone their own ways.
    """
    checks = []
    for name in ("trace", "results", "gradients", "statistics"):
        lists = [getattr(facts, name) for facts in (exact, *contiguous, converted)]
        if name == "gradients" and step > 1:
            checks.append(_compare_whole(step, lists[0], lists[1:-1], lists[-1]))
            continue
        prefix = {"gradients": "gradient of ", "statistics": "statistics of "}.get(name, "")
        checks += _compare_lists(step, prefix, lists[0], lists[1:-1], lists[-1], by_list=name == "gradients")
    return checks


def _compare_lists(
    step: int, prefix: str, exact: Named, contiguous: list[Named], converted: Named, by_list: bool
) -> list[Check]:
    """One check per tensor.

    A single tensor's rounding error may be small by luck (a loss is one number), so the contiguous side's typical error
    in the list counts as its error where that is larger.

    Args:
        by_list: measure against the list's root mean square too. Some gradients are zero in theory, such as that of a
            bias before BatchNorm, and have no size of their own.
    """
    assert all([name for name, _ in other] == [name for name, _ in exact] for other in (*contiguous, converted))
    if not exact:
        return []
    squares = sum(_square(tensor) for _, tensor in exact) if by_list else 0.0
    typical_size = math.sqrt(squares / sum(tensor.numel() for _, tensor in exact))
    rows = []
    for index, (name, truth) in enumerate(exact):
        size = math.sqrt(_square(truth)) + typical_size * math.sqrt(truth.numel())
        rounding = max(_distance(other[index][1], truth, size) for other in contiguous)
        rows.append((name, rounding, _distance(converted[index][1], truth, size)))
    typical = max(statistics.median(rounding for _, rounding, _ in rows), ROUNDING_OF_SUMS)
    return [Check(prefix + name, step, a, b, TOLERANCE * max(a, typical)) for name, a, b in rows]


def _compare_whole(step: int, exact: Named, contiguous: list[Named], converted: Named) -> Check:
    """The list as if it were one long vector."""
    size = math.sqrt(sum(_square(truth) for _, truth in exact))

    def distance(named: Named) -> float:
        parts = [_distance(tensor, truth, 1.0) for (_, tensor), (_, truth) in zip(named, exact, strict=True)]
        return math.hypot(*parts) / (size or 1.0)

    rounding = max(distance(named) for named in contiguous)
    allowed = TOLERANCE * max(rounding, ROUNDING_OF_SUMS)
    return Check("gradient of all parameters", step, rounding, distance(converted), allowed)


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())


def _distance(tensor: torch.Tensor, truth: torch.Tensor, size: float) -> float:
    """L2 distance / size; infinite where shapes differ or values are not finite."""
    if tensor.shape != truth.shape:
        return math.inf
    distance = float((_exact(tensor) - _exact(truth)).norm()) / (size or 1.0)
    return distance if math.isfinite(distance) else math.inf


def _badness(check: Check) -> float:
    return check.channels_last_error / check.allowed_error


def _first_divergence(check: Check, model: nn.Module) -> str:
    """The module to look at. Where a module's *input* is wrong first, the code between modules is: its parent's."""
    kind, _, name = check.what.partition(" of ")
    if kind == "output":
        return _described(name, model)
    if kind == "input":
        parent = name.rpartition(".")[0]
        return f"{_described(parent or 'the model', model)}, in its own forward, before it calls {name}"
    if kind == "gradient" and check.step == 1:
        return f"{_described(name.rpartition('.')[0], model)}, in backward (its forward agrees)"
    if kind == "statistics":
        return f"{_described(name, model)}, in its running statistics (its output agrees)"
    return f"the model as a whole ({check.what}, step {check.step})"


def _described(name: str, model: nn.Module) -> str:
    module = model if name == "the model" else model.get_submodule(name)
    return f"{name} ({type(module).__name__})"
