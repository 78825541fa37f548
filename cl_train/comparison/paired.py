"""Both memory formats of one model in one process, in alternating blocks, with the step that training runs.

Each layout has its own copy of the same weights and the same images. Blocks alternate A B B A, so that drift of the
machine (heat, other users) hits both sides alike; the ratio within a round is what counts (`interval_of_rounds`).
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import nn

from cl_train.comparison.model_cost import peak_memory_of_step_gib
from cl_train.comparison.statistics import Interval, interval_of_rounds, verdict_of
from cl_train.config.schema import ConfigError, OptimConfig
from cl_train.data.batch import Batch
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
from cl_train.step.train_step import StepParts, logits_of, train_step
from cl_train.system.machine_load import MachineLoad

MIN_ROUNDS = 8  # fewer, and an interval that looks narrow by luck ends the measurement too soon
LEARNING_RATE = 1e-4  # costs what any other does, and random labels leave the weights where they are


@dataclass(frozen=True)
class Layout:
    """One way to lay out a model and its input; `conversion` as in `memory_format.convert`."""

    name: str
    channels_last: bool
    conversion: str = "full"


CONTIGUOUS = Layout("contiguous", channels_last=False)
CHANNELS_LAST = Layout("channels_last", channels_last=True)
CHANNELS_LAST_CONV = Layout("channels_last_conv", channels_last=True, conversion="conv")


@dataclass(frozen=True)
class Workload:
    """What one step works on. `batch_size` images [batch_size, input_channels, image_size, image_size] of noise."""

    batch_size: int
    image_size: int
    precision: Precision
    device: torch.device
    mode: str = "train"  # or "infer"
    compile: bool = False
    compile_mode: str = "default"
    input_channels: int = 3
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(frozen=True)
class Effort:
    """When to stop: the interval of every ratio is at most `target_ci` wide (high - low), or the time is over.

    The time limit counts from the first measured block; warm-up, autotuning and compilation come before it.
    """

    target_ci: float = 0.02
    time_limit_s: float = 60.0
    min_rounds: int = MIN_ROUNDS
    block_s: float = 0.25


@dataclass(frozen=True)
class LayoutSpeed:
    """What one layout did. Speeds are medians over blocks; the ratio is to the first layout of the benchmark."""

    layout: str
    images_per_s: float
    step_ms: float
    peak_memory_gib: float | None
    versus_first: Interval
    verdict: str  # faster, slower, no_difference; of the first layout always no_difference


@dataclass(frozen=True)
class LayoutBenchmark:
    """The outcome of `benchmark_layouts`, layouts in the order given."""

    speeds: tuple[LayoutSpeed, ...]
    batch_size: int  # smaller than asked for when memory ran out; the same for all layouts
    batch_size_requested: int
    rounds: int
    seconds: float
    stopped_by: str  # "target_ci" or "time_limit"
    others_pct: float | None = None  # share of the cores that other processes took meanwhile

    def of(self, layout: Layout) -> LayoutSpeed:
        return next(speed for speed in self.speeds if speed.layout == layout.name)


def benchmark_layouts(
    model: nn.Module,
    workload: Workload,
    layouts: Sequence[Layout] = (CONTIGUOUS, CHANNELS_LAST),
    effort: Effort | None = None,
    slowdown: float = 0.0,
) -> LayoutBenchmark:
    """Measure `model` in each of `layouts`; `model` itself, random generators and torch's switches stay as they are.

    Args:
        model: in any layout, on any device; copied once per layout. Cast to fp16 already or not.
        layouts: the first is what the others are compared with.
        slowdown: the last layout idles for this share of each step: a planted difference, to test the method (CPU).

    When memory runs out, the batch is halved for all layouts alike.

    Raises:
        ConfigError: not even a batch of one image fits.
    """
    batch_size = workload.batch_size
    while True:
        try:
            with switches(workload):
                done = _benchmark(
                    model, replace(workload, batch_size=batch_size), layouts, effort or Effort(), slowdown
                )
            return replace(done, batch_size_requested=workload.batch_size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        release_memory(workload.device)  # here, where the error no longer holds on to tensors
        if batch_size == 1:
            raise ConfigError(
                f"not even one image of {workload.image_size} px fits into the memory of {workload.device}"
            )
        batch_size //= 2


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has an error class for it, the CPU's allocator only its words."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def release_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def switches(workload: Workload) -> Iterator[None]:
    """Autotuning and TF32 as in training, and nothing of it, nor of the random numbers, left behind."""
    cuda = [workload.device] if workload.device.type == "cuda" else []
    autotune = not torch.are_deterministic_algorithms_enabled()
    if workload.compile:
        torch._dynamo.reset()  # else the limit on recompilations ends in eager code
    with torch.random.fork_rng(devices=cuda), kernel_selection(tf32=workload.precision.tf32, autotune=autotune):
        yield


class Trial:
    """A copy of the model in one layout, its optimizer and its batch: `step` does what training does per step."""

    def __init__(self, model: nn.Module, layout: Layout, workload: Workload) -> None:
        self.layout = layout
        self.slowdown = 0.0
        self._workload = workload
        self.model = cast_model(copy.deepcopy(model).to(workload.device), workload.precision)
        memory_format.convert(self.model, memory_format=torch.contiguous_format)
        if layout.channels_last:
            memory_format.convert(self.model, layout.conversion)
        self.batch = _batch(self.model, layout, workload)
        self.model.train(workload.mode == "train")
        if workload.mode == "train":
            masters = MasterWeights(self.model) if workload.precision.master_weights else None
            parameters = trainable_parameters(self.model, masters)
            self._parts = StepParts(
                model=self.model,
                optimizer=build_optimizer(workload.optim, self.model, parameters, LEARNING_RATE),
                scaler=build_scaler(workload.precision, workload.device),
                precision=workload.precision,
                device=workload.device,
                masters=masters,
            )
        if workload.compile:
            self.model.compile(mode=workload.compile_mode)

    def step(self) -> None:
        """One training step, or one inference; the host does not wait for the device."""
        if self._workload.mode == "train":
            train_step(self._parts, [self.batch])
            return
        with torch.inference_mode(), autocast(self._workload.precision, self._workload.device):
            self.model(self.batch.images)

    def step_times(self, steps: int) -> list[float]:
        """Seconds of each of `steps` steps: by device events on a GPU (waits for the device once, at the end)."""
        if self._workload.device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
            events[0].record()
            for event in events[1:]:
                self.step()
                event.record()
            events[-1].synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in pairwise(events)]
        clock = [time.perf_counter()]
        for _ in range(steps):
            self.step()
            spent_s = time.perf_counter() - clock[-1]
            while time.perf_counter() < clock[-1] + spent_s * (1 + self.slowdown):
                pass
            clock.append(time.perf_counter())
        return [b - a for a, b in pairwise(clock)]


def _batch(model: nn.Module, layout: Layout, workload: Workload) -> Batch:
    """The same numbers for every layout; the classes are those that the model has outputs for."""
    generator = torch.Generator().manual_seed(0)
    shape = (workload.batch_size, workload.input_channels, workload.image_size, workload.image_size)
    images = torch.randn(shape, generator=generator).to(
        workload.device,
        workload.precision.input_dtype,
        memory_format=torch.channels_last if layout.channels_last else torch.contiguous_format,
    )
    model.eval()
    with torch.no_grad(), autocast(workload.precision, workload.device):
        classes = logits_of(model(images[:1])).shape[1]
    targets = torch.randint(classes, (workload.batch_size,), generator=generator)
    return Batch(images, targets.to(workload.device))


def _benchmark(
    model: nn.Module, workload: Workload, layouts: Sequence[Layout], effort: Effort, slowdown: float
) -> LayoutBenchmark:
    trials = [Trial(model, layout, workload) for layout in layouts]
    trials[-1].slowdown = slowdown
    steps = _warm_up(trials, effort)
    blocks: list[list[float]] = [[] for _ in trials]  # per layout: seconds per step, of each block
    log_ratios: list[list[float]] = [[] for _ in trials]
    order = [*range(len(trials)), *reversed(range(len(trials)))]  # A B B A, or A B C C B A
    started_at, load = time.perf_counter(), MachineLoad()
    while True:
        for index in order:
            # The median step of a block: a hiccup of a shared machine is not the layout's.
            blocks[index].append(statistics.median(trials[index].step_times(steps)))
        for index in range(len(trials)):
            mine, first = blocks[index][-2:], blocks[0][-2:]
            log_ratios[index].append((sum(map(math.log, first)) - sum(map(math.log, mine))) / 2)
        intervals = [interval_of_rounds(values) for values in log_ratios]
        rounds = len(log_ratios[0])
        seconds = time.perf_counter() - started_at
        is_narrow = rounds >= effort.min_rounds and all(item.width <= effort.target_ci for item in intervals[1:])
        if is_narrow or (rounds >= 2 and seconds * (rounds + 1) / rounds > effort.time_limit_s):
            break
    others_pct = load.others_pct()
    memory = [_peak_memory_gib(trial, trials, workload.device) for trial in trials]
    speeds = [
        _speed(trial.layout, workload, times, peak, interval)
        for trial, times, peak, interval in zip(trials, blocks, memory, intervals, strict=True)
    ]
    stopped_by = "target_ci" if is_narrow else "time_limit"
    size = workload.batch_size
    return LayoutBenchmark(tuple(speeds), size, size, rounds, seconds, stopped_by, others_pct)


def _warm_up(trials: Sequence[Trial], effort: Effort) -> int:
    """Two untimed steps each (kernel selection, compilation, optimizer state); returns the steps per block."""
    slowest = 0.0
    for trial in trials:
        trial.step_times(2)
        slowest = max(slowest, *trial.step_times(1))
    return max(1, min(100, round(effort.block_s / slowest)))


def _speed(
    layout: Layout, workload: Workload, times: Sequence[float], peak_memory_gib: float | None, interval: Interval
) -> LayoutSpeed:
    step_s = statistics.median(times)
    return LayoutSpeed(
        layout=layout.name,
        images_per_s=workload.batch_size / step_s,
        step_ms=1000 * step_s,
        peak_memory_gib=peak_memory_gib,
        versus_first=interval,
        verdict=verdict_of(interval),
    )


def _peak_memory_gib(trial: Trial, trials: Sequence[Trial], device: torch.device) -> float:
    """What a process with this layout alone would need: the peak of a step less what the other copies hold."""
    others = sum(_held_bytes(other) for other in trials if other is not trial)
    return peak_memory_of_step_gib(trial.step, _held_bytes(trial), others, device)


def _held_bytes(trial: Trial) -> int:
    """Weights, buffers, optimizer state and batch, each storage once."""
    tensors = [*trial.model.parameters(), *trial.model.buffers(), trial.batch.images, trial.batch.targets]
    if trial._workload.mode == "train":
        groups = trial._parts.optimizer.param_groups
        tensors += [parameter for group in groups for parameter in group["params"]]
        for state in trial._parts.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
