"""The memory formats of one model compared in one process, in alternating blocks, with the step that training runs.

`channels_last=auto` uses the fastest layout. That choice is cached in ${XDG_CACHE_HOME:-~/.cache}/cl_train/, one JSON
file per combination of what can change it.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cl_train.comparison.statistics import Interval, alternate, verdict_of
from cl_train.config.schema import OPTIMIZERS, ConfigError, OptimConfig
from cl_train.config.validation import suggest
from cl_train.data.device import Batch
from cl_train.memory_format.audit import audit
from cl_train.memory_format.convert import convert
from cl_train.memory_format.crashes import crash_safe
from cl_train.memory_format.layout import CONVOLUTIONS, MEMORY_FORMAT_NAMES, MEMORY_FORMATS, images_in, refuse_lazy
from cl_train.memory_format.model_call import (
    call_model,
    failure_explained,
    mean_square,
    output_tensors,
    random_state_restored,
)
from cl_train.models.sources import copy_model
from cl_train.step.cuda_graph import WARM_UP_STEPS, GraphedCall, Recorder, make_capturable
from cl_train.step.optim import build_optimizer
from cl_train.step.precision import Fp32Weights, Precision, autocast, cast_model, kernel_selection, resolve_precision
from cl_train.step.train_step import StepParts, train_step, update_weights
from cl_train.step.utilisation import describe, flops_of, utilisation
from cl_train.system.files import cache_folder, write_json
from cl_train.system.machine import (
    describe_environment,
    device_name,
    is_out_of_memory,
    keep_freed_memory,
    peak_memory_of_step_gib,
    release_memory,
    step_times_s,
)
from cl_train.system.processes import BUSY_PCT, TOO_BUSY_PCT, MachineLoad

log = logging.getLogger(__name__)

BLOCK_S = 0.25
AUTO_TIME_LIMIT_S = 20.0  # with warm-up under 5 % of a run of ten minutes, for slow models too
AUTO_CPU_BATCH = 8  # images at most in an eager step on a CPU, so that enough steps fit into the time limit
NOISY_WIDTH = 0.2  # of a ratio's interval: without a significant difference, a wider one is inconclusive
LEARNING_RATE = 1e-4  # costs as much as any other rate; random labels barely change the weights at this one

LossFunction = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """A memory format for the input and, with `conversion` (see `memory_format.convert`), for the model."""

    name: str
    memory_format: torch.memory_format
    conversion: str = "full"
    select: tuple[str, ...] = ()


CONTIGUOUS = Layout("contiguous", torch.contiguous_format)
CHANNELS_LAST = Layout("channels_last", torch.channels_last)
CHANNELS_LAST_CONV = Layout("channels_last_conv", torch.channels_last, "conv")
LAYOUTS = {layout.name: layout for layout in (CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_CONV)}


@dataclass(frozen=True)
class Workload:
    """The input, the loss and the settings of one step; `batch`, `loss` and `output` as in `paired.compare_layouts`."""

    batch_size: int
    input_shape: tuple[int, ...]  # of one image (C, H, W) or video (C, T, H, W)
    precision: Precision
    device: torch.device
    mode: str = "train"  # or "infer"
    compile: bool = False
    compile_mode: str = "default"
    cuda_graph: bool = False
    optim: OptimConfig = field(default_factory=OptimConfig)
    batch: Any = None
    loss: LossFunction | None = None
    output: str | None = None


class TimedModel:
    """`step` does what training (or inference) does per step; the original model is unchanged."""

    def __init__(self, model: nn.Module, layout: Layout, workload: Workload) -> None:
        self.layout, self.workload, precision = layout, workload, workload.precision
        self.model = model_in_layout(model, layout, precision, workload.device)
        batch = noise((workload.batch_size, *workload.input_shape)) if workload.batch is None else workload.batch
        self.inputs = place_batch(batch, workload.device, precision.input_dtype, layout.memory_format)
        self._batch = self._labelled_batch()
        self.model.train(workload.mode == "train")
        self._parts: StepParts | None = None
        if workload.mode == "train":
            weights = Fp32Weights(self.model, precision)
            parameters = weights.trainable()
            if not parameters:
                raise ConfigError("no parameter of the model requires a gradient: measure mode=infer")
            optimizer = build_optimizer(workload.optim, self.model, parameters, LEARNING_RATE)
            if workload.cuda_graph:
                make_capturable(optimizer, workload.device)
            scaler = torch.amp.GradScaler(workload.device.type, enabled=precision.scales_loss)
            self._parts = StepParts(self.model, weights, optimizer, scaler, precision, workload.device)
        if workload.compile:
            self.model.compile(mode=workload.compile_mode)
        self.step: Callable[[], object] = self.eager_step
        if workload.cuda_graph:
            self.step = GraphedCall(self.eager_step, Recorder(workload.device))

    def _labelled_batch(self) -> Batch | None:
        """The batch for the training step of classifiers; None for other kinds of models or losses."""
        workload = self.workload
        if workload.loss is not None or workload.output is not None or not isinstance(self.inputs, torch.Tensor):
            return None
        self.model.eval()
        with torch.no_grad(), autocast(workload.precision, workload.device):
            output = self.model(self.inputs[:1])
        logits = getattr(output, "logits", output)
        if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or not logits.is_floating_point():
            return None
        generator = torch.Generator().manual_seed(0)
        targets = torch.randint(logits.shape[1], (len(self.inputs),), generator=generator)
        return Batch(self.inputs, targets.to(workload.device))

    def forward(self) -> Any:
        """The model's output for the batch."""
        with autocast(self.workload.precision, self.workload.device):
            return call_model(self.model, self.inputs)

    def eager_step(self) -> None:
        """One step, not replayed; the host does not wait for the device."""
        workload = self.workload
        if self._parts is None:
            with torch.inference_mode():
                self.forward()
        elif self._batch is not None:
            train_step(self._parts, [self._batch])
        else:
            with autocast(workload.precision, workload.device):
                output = self.forward()
                loss = workload.loss(output) if workload.loss else mean_square(output_tensors(output, workload.output))
            self._parts.scaler.scale(loss).backward()
            update_weights(self._parts)

    def block_times_s(self, steps: int) -> list[float]:
        """Seconds of each of `steps` steps. Waits for the device at the end."""
        return step_times_s(self.step, steps, self.workload.device)

    def warm_up(self) -> float:
        """Select kernels, compile, create the optimizer's state, record the graph; returns seconds per step."""
        self.block_times_s(2 + (WARM_UP_STEPS if self.workload.cuda_graph else 0))
        return self.block_times_s(1)[0]

    def peak_memory_gib(self, timed: list["TimedModel"]) -> float:
        """Memory of a process with only this layout in an eager step: the peak less what the others of `timed` hold."""
        other_bytes = sum(other.held_bytes() for other in timed if other is not self)
        return peak_memory_of_step_gib(self.eager_step, self.held_bytes(), other_bytes, self.workload.device)

    def held_bytes(self) -> int:
        """Weights, buffers, optimizer state and batch, each storage once."""
        optimizer = self._parts.optimizer if self._parts else None
        state = [optimizer.param_groups, list(optimizer.state.values())] if optimizer else []
        leaves = tree_leaves([list(self.model.parameters()), list(self.model.buffers()), self.inputs, state])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
        return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def model_in_layout(model: nn.Module, layout: Layout, precision: Precision, device: torch.device) -> nn.Module:
    """A copy on `device`, in the dtypes of `precision`, first contiguous, then converted to `layout`."""
    copied = cast_model(copy_model(model, device), precision)
    convert(copied, memory_format=torch.contiguous_format)
    if layout.memory_format != torch.contiguous_format:
        convert(copied, layout.conversion, layout.select, layout.memory_format)
    return copied


def noise(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Normal noise of `shape`, float32 on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def place_batch(batch: Any, device: torch.device, dtype: torch.dtype | None, memory_format: torch.memory_format) -> Any:
    """A copy of `batch` on `device`: floating tensors in `dtype`, those with 4 or 5 dimensions in `memory_format`."""

    def place(value: torch.Tensor) -> torch.Tensor:
        return value.detach().to(device, dtype if value.is_floating_point() else None, copy=True)

    return images_in(memory_format, tree_map_only(torch.Tensor, place, batch))


# --- the benchmark ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutSpeed:
    """The speed of one layout, a geometric mean over blocks; `ratio` is to the first layout of the comparison."""

    layout: str
    images_per_s: float
    step_ms: float
    peak_memory_gib: float
    ratio: Interval
    verdict: str  # faster, slower, no_difference, inconclusive or not_comparable; no_difference for the first layout


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare_layouts`; layouts in the order given, the first is the baseline."""

    speeds: tuple[LayoutSpeed, ...]
    precision: str
    batch_size: int  # smaller than requested where memory ran out; the same for all layouts
    batch_size_requested: int
    rounds: int
    seconds: float
    stopped_by: str  # "target_ci" or "time_limit"
    others_pct: float | None = None  # share of the cores that other processes used meanwhile; None = unknown
    utilisation: dict[str, Any] | None = None  # of the fastest layout, see `step.utilisation`; None if compiled

    @property
    def verdict(self) -> str:
        """Verdict on the last layout against the first."""
        return self.speeds[-1].verdict

    @property
    def ratio(self) -> Interval:
        """Speed of the last layout / speed of the first."""
        return self.speeds[-1].ratio

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `pairs` has the keys of a sweep's comparison."""
        baseline, speeds, pairs = self.speeds[0].layout, [dict(vars(speed)) for speed in self.speeds], []
        for speed in speeds:
            verdict = {**speed.pop("ratio").to_dict(), "verdict": speed.pop("verdict")}
            pairs.append({"baseline": baseline, "candidate": speed["layout"], **verdict})
        return {**vars(self), "speeds": speeds, "pairs": pairs[1:]}

    def __str__(self) -> str:
        lines = []
        for index, speed in enumerate(self.speeds):
            line = f"{speed.layout:<18} {speed.images_per_s:10.1f} images/s {speed.step_ms:10.2f} ms "
            untrusted = "untrusted " if speed.verdict == "not_comparable" else ""
            against = f"  {untrusted}{speed.ratio} {speed.verdict.replace('_', ' ')}" if index else ""
            lines.append(f"  {line}{speed.peak_memory_gib:8.2f} GiB{against}")
        if self.utilisation:
            lines.append(f"  {describe(self.utilisation)}")
        if self.batch_size != self.batch_size_requested:
            lines.append(f"  out of memory at batch {self.batch_size_requested}: all layouts used {self.batch_size}")
        if (self.others_pct or 0.0) >= BUSY_PCT:
            lines.append(f"  other processes used {self.others_pct:.0f} % of the cores: measure on a quiet machine")
        return "\n".join(lines)


def compare_layouts(
    model: nn.Module,
    batch_size: int = 32,
    *,
    image_size: int | tuple[int, ...] = 224,
    batch: Any = None,
    loss: LossFunction | None = None,
    output: str | None = None,
    mode: str = "train",
    precision: str = "auto",
    device: torch.device | str | None = None,
    compile: bool = False,
    cuda_graph: bool = False,
    target_ci: float = 0.02,
    time_limit_s: float = 60.0,
) -> Comparison:
    """Measure copies of `model`, contiguous and in channels_last, in alternating blocks, with training's own step.

    If other processes use more than 25 % of the cores, the verdict is "not_comparable".

    Args:
        batch_size: images per step; halved for both layouts when memory runs out.
        image_size: side of RGB images in pixels, or the shape of one input: (C, H, W), or (C, T, H, W) for video.
        batch: input to use instead of noise: a tensor, a tuple of inputs or a dict of keyword arguments.
        loss: scalar of the model's output; default cross-entropy with random labels for logits [N, classes], else the
            mean square of the output.
        output: the part of the output that the default loss uses, such as "out" or "0".
        mode: "train" (forward, backward, optimizer) or "infer".
        precision: one of `PRECISIONS` in cl_train/config/schema.py, such as auto or bf16.
        device: default: where the model is.
        compile: measure `torch.compile`d copies.
        cuda_graph: replay the step as a CUDA graph.
        target_ci: stop when the 95 % interval of the ratio is at most this wide (high - low).
        time_limit_s: stop after this long; warm-up and compilation are not counted.

    Raises:
        ConfigError: the model does not run on this batch, or one image does not fit into memory.
    """
    sizes = [len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    workload = workload_of(
        model, sizes[0] if sizes else batch_size, image_size, precision, device, batch=batch, loss=loss, output=output,
        mode=mode, compile=compile, cuda_graph=cuda_graph,
    )  # fmt: skip
    return benchmark_layouts(model, workload, target_ci=target_ci, time_limit_s=time_limit_s)


def workload_of(
    model: nn.Module, batch_size: int, image_size: Any, precision: str, device: Any, *, mode: str = "train",
    modes: Iterable[str] = ("train", "infer"), **more: Any,
) -> Workload:  # fmt: skip
    """A `Workload` from the arguments of the functions for users; `more` are its other fields."""
    refuse_lazy(model)
    if batch_size < 1 or mode not in modes:
        raise ConfigError(f"batch_size={batch_size} mode={mode}: at least 1, and one of {', '.join(modes)}")
    of_model = (tensor.device for tensor in [*model.parameters(), *model.buffers()])
    device = torch.device(device) if device is not None else next(of_model, torch.device("cpu"))
    shape = (3, image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    return Workload(batch_size, shape, resolve_precision(precision, device), device, mode, **more)


def benchmark_layouts(
    model: nn.Module,
    workload: Workload,
    layouts: Sequence[Layout] = (CONTIGUOUS, CHANNELS_LAST),
    *,
    target_ci: float = 0.02,
    time_limit_s: float = 60.0,
) -> Comparison:
    """As `compare_layouts`, for a given workload and any layouts; the first is the baseline of all ratios."""
    try:
        return _benchmark(model, workload, layouts, target_ci, time_limit_s)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release_memory()  # outside the except block, where the exception no longer refers to tensors
    if workload.batch_size == 1 or workload.batch is not None:
        raise ConfigError(f"a batch of {workload.batch_size} does not fit into the memory of {workload.device}")
    smaller = replace(workload, batch_size=workload.batch_size // 2)
    done = benchmark_layouts(model, smaller, layouts, target_ci=target_ci, time_limit_s=time_limit_s)
    return replace(done, batch_size_requested=workload.batch_size)


@crash_safe
def _benchmark(
    model: nn.Module, workload: Workload, layouts: Sequence[Layout], target_ci: float, time_limit_s: float
) -> Comparison:
    """Raises ConfigError: the model fails or crashes, but for a lack of memory."""
    remedy = "if it takes another input, give batch or image_size"
    explained = failure_explained("the model cannot be measured", remedy, memory_too=False)
    with explained, measurement_state(workload):
        timed = [TimedModel(model, layout, workload) for layout in layouts]
        steps = max(1, min(100, round(BLOCK_S / max(model.warm_up() for model in timed))))
        load = MachineLoad()
        # The median step of a block: interruptions on a shared machine are not caused by the layout.
        blocks = [lambda model=model: median(model.block_times_s(steps)) for model in timed]
        done = alternate(blocks, target_ci=target_ci, time_limit_s=time_limit_s)
        others_pct = load.others_pct()
        is_too_busy = workload.device.type == "cpu" and (others_pct or 0.0) >= TOO_BUSY_PCT
        speeds: list[LayoutSpeed] = []
        for one, ratio, times_s in zip(timed, done.speed_ratios(), done.blocks, strict=True):
            verdict = "not_comparable" if speeds and is_too_busy else verdict_of(ratio)
            step_s = geometric_mean(times_s)  # so that the ratios are quotients of it
            rate, peak_gib = workload.batch_size / step_s, one.peak_memory_gib(timed)
            speeds.append(LayoutSpeed(one.layout.name, rate, 1000 * step_s, peak_gib, ratio, verdict))
        used = None
        if not workload.compile:
            best = max(one.images_per_s for one in speeds)
            gflop = flops_of(timed[0].forward) / workload.batch_size / 1e9
            used = utilisation(gflop, best, workload.precision, workload.device, training=workload.mode == "train")
        return Comparison(
            tuple(speeds), workload.precision.name, workload.batch_size, workload.batch_size, done.rounds, done.seconds,
            done.stopped_by, others_pct, used,
        )  # fmt: skip


@contextmanager
def measurement_state(workload: Workload) -> Iterator[None]:
    """Kernel selection and memory as in training; switches and random generators are restored at the end."""
    if workload.compile:
        torch._dynamo.reset()  # else the model runs eagerly once the recompile limit is reached
    keep_freed_memory(workload.device)
    autotune = not torch.are_deterministic_algorithms_enabled()
    with random_state_restored(workload.device), kernel_selection(tf32=workload.precision.tf32, autotune=autotune):
        yield


# --- channels_last=auto -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The layout that `choose_memory_format` chose, and why; `conversion` and `select` as in `convert`."""

    memory_format: torch.memory_format
    conversion: str
    reason: str
    seconds: float
    select: tuple[str, ...] = ()
    cached: bool = False
    conclusive: bool = True  # False: the measurement was too noisy, and the next run measures again

    @property
    def channels_last(self) -> bool:
        return self.memory_format != torch.contiguous_format

    def __str__(self) -> str:
        return self.reason

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "memory_format": MEMORY_FORMAT_NAMES[self.memory_format]}


def choose_memory_format(
    model: nn.Module,
    *,
    batch_size: int = 32,
    image_size: int | tuple[int, ...] = 224,
    precision: str = "auto",
    device: torch.device | str | None = None,
    compile: bool = False,
    compile_mode: str = "default",
    cuda_graph: bool = False,
    optimizer: str = "sgd",
    time_limit_s: float = AUTO_TIME_LIMIT_S,
) -> Choice:
    """Measure copies of `model`; choose channels_last if it is faster beyond noise, else contiguous.

    Convolutions that are slower in channels_last than copies at their borders are then left contiguous, if that is
    faster still (not for compiled models and CUDA graphs, nor where a step takes more than 1 % of the time limit).
    Call it with the model built, loaded and on its device, before it is converted, wrapped or compiled. For a model
    that cannot be measured (no memory for copies, a crash of torch) the choice is contiguous, with the reason.

    Args:
        batch_size: images per device and step; eager on a CPU at most 8 are measured.
        image_size, precision, device, compile, cuda_graph: as in `compare_layouts`.
        optimizer: one of `OPTIMIZERS` in cl_train/config/schema.py.
        time_limit_s: for warm-up and measurement of an eager model.

    Raises:
        ConfigError: an impossible argument.
    """
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer={optimizer}; use {', '.join(OPTIMIZERS)}{suggest(optimizer, OPTIMIZERS)}")
    workload = workload_of(
        model, batch_size, image_size, precision, device, compile=compile, compile_mode=compile_mode,
        cuda_graph=cuda_graph, optim=OptimConfig(name=optimizer),
    )  # fmt: skip
    if not any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        return Choice(torch.contiguous_format, "full", "contiguous: the model has no convolutions", 0.0)
    path, known = _known_choice(model, workload)
    if known:
        return known
    log.info("channels_last=auto: measuring the layouts, about %.0f s, once per machine and setting", time_limit_s)
    try:
        choice = _fastest_layout(model, workload, time_limit_s)
    except ConfigError as error:
        return Choice(torch.contiguous_format, "full", f"contiguous: the layouts cannot be measured: {error}", 0.0)
    finally:
        release_memory()
        if workload.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(workload.device)  # the run's peak must not include this measurement's
    if choice.conclusive:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, choice.to_dict())
        except OSError as error:
            log.warning("channels_last=auto: the choice cannot be cached (%s), so the next run measures again", error)
    return choice


def _known_choice(model: nn.Module, workload: Workload) -> tuple[Path, Choice | None]:
    """A file, named by everything that could change which layout is faster, and the choice of an earlier run in it."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in model.named_parameters()]  # detect changed model code
    versions = describe_environment(workload.device)
    machine = [device_name(workload.device), *(versions[name] for name in ("torch", "cuda", "cudnn", "driver"))]
    digest = hashlib.sha256(repr((4, type(model), model, shapes, workload, machine)).encode()).hexdigest()
    path = cache_folder() / f"layout-{digest[:20]}.json"
    try:
        known = Choice(**json.loads(path.read_text(encoding="utf-8")))
        memory_format = MEMORY_FORMATS[str(known.memory_format)]
        reason = f"{known.reason} (measured before: {path})"
        return path, replace(known, memory_format=memory_format, reason=reason, select=tuple(known.select), cached=True)
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or one that cannot be read
        return path, None


def _fastest_layout(model: nn.Module, workload: Workload, time_limit_s: float) -> Choice:
    started_at = time.perf_counter()
    measured = workload
    if workload.device.type == "cpu" and not workload.compile:
        measured = replace(workload, batch_size=min(workload.batch_size, AUTO_CPU_BATCH))
    done = benchmark_layouts(model, measured, time_limit_s=0.5 * time_limit_s)  # warm-up takes about a quarter
    baseline, candidate = done.speeds
    layout, best = (CHANNELS_LAST, candidate) if done.verdict == "faster" else (CONTIGUOUS, baseline)
    smaller = "" if done.batch_size == workload.batch_size else f" at batch {done.batch_size}"
    reason = f"channels_last is {done.ratio} as fast as contiguous ({baseline.images_per_s:.1f} images/s{smaller})"
    is_wide = done.verdict == "inconclusive" and done.ratio.width > NOISY_WIDTH
    is_noisy = is_wide or done.verdict == "not_comparable"
    if is_noisy:
        reason += "; too noisy to decide, so the next run measures again"
    if best.step_ms < 10 * time_limit_s and not (workload.compile or workload.cuda_graph):
        measured = replace(measured, batch_size=done.batch_size)
        with suppress(ConfigError, RuntimeError, MemoryError):  # pure layouts could be measured, so the run goes on
            if mixed := _mixed_layout(model, measured, time_limit_s):
                gain = benchmark_layouts(model, measured, [layout, mixed], time_limit_s=0.25 * time_limit_s)
                reason += f"; channels_last but for {', '.join(mixed.select)} is {gain.ratio} as fast as {layout.name}"
                layout = mixed if gain.verdict == "faster" else layout
    reason, seconds = f"{layout.name}: {reason}", round(time.perf_counter() - started_at, 2)
    return Choice(layout.memory_format, layout.conversion, reason, seconds, layout.select, conclusive=not is_noisy)


def _mixed_layout(model: nn.Module, workload: Workload, time_limit_s: float) -> Layout | None:
    """channels_last but for the convolutions that lose by it; None if none does. Raises as `audit`."""
    copied = model_in_layout(model, CHANNELS_LAST, workload.precision, workload.device).train()
    images = noise((workload.batch_size, *workload.input_shape))
    images = place_batch(images, workload.device, workload.precision.input_dtype, torch.channels_last)
    times = audit(copied, images, precision=workload.precision, time=True, time_limit_s=0.25 * time_limit_s).times
    assert times is not None
    modules = dict(copied.named_modules())
    names = tuple(name for name in times.better_contiguous() if isinstance(modules.get(name), CONVOLUTIONS))
    return Layout("mixed", torch.channels_last, "mixed", names) if names else None
