"""The memory formats of one model compared in one process, in alternating blocks, with the step that training runs.

Each layout has its own copy of the same weights and the same images; see `alternation` for the order and the interval.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from cl_train.comparison.alternation import alternate
from cl_train.comparison.statistics import Interval, repeats_to_decide, verdict_of
from cl_train.comparison.timed_model import CHANNELS_LAST, CONTIGUOUS, Layout, LossFunction, TimedModel, Workload
from cl_train.config.schema import ConfigError
from cl_train.memory_format.crashes import OutOfMemory, crash_safe
from cl_train.memory_format.layout import refuse_lazy
from cl_train.memory_format.model_call import explain_failure, random_state_restored
from cl_train.models.sources import device_of
from cl_train.step.precision import kernel_selection, resolve_precision
from cl_train.step.utilisation import describe, flops_of, utilisation
from cl_train.system.machine_load import BUSY_PCT, TOO_BUSY_PCT, MachineLoad
from cl_train.system.memory import is_out_of_memory, release_memory

BLOCK_S = 0.25


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

    def _advice(self, ratio: Interval) -> str:
        """How long the layouts have to be measured for a verdict."""
        rounds = repeats_to_decide(ratio, degrees=1, most=20 * self.rounds) if self.rounds > 1 else None
        if rounds is None:
            return f"a verdict needs more than {20 * self.seconds:.0f} s, or a quieter machine"
        return f"about time_limit_s={math.ceil(self.seconds * rounds / self.rounds)} would decide"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `pairs` has the keys of a sweep's comparison."""
        kept = ("layout", "images_per_s", "step_ms", "peak_memory_gib")
        baseline, *candidates = self.speeds
        pairs = [
            {"baseline": baseline.layout, "candidate": one.layout, **one.ratio.to_dict(), "verdict": one.verdict}
            for one in candidates
        ]
        speeds = [{name: getattr(speed, name) for name in kept} for speed in self.speeds]
        return {**vars(self), "speeds": speeds, "pairs": pairs}

    def __str__(self) -> str:
        lines = []
        for index, speed in enumerate(self.speeds):
            untrusted = "untrusted " if speed.verdict == "not_comparable" else ""
            against = f"  {untrusted}{speed.ratio} {speed.verdict.replace('_', ' ')}" if index else ""
            lines.append(
                f"  {speed.layout:<18} {speed.images_per_s:10.1f} images/s {speed.step_ms:10.2f} ms "
                f"{speed.peak_memory_gib:8.2f} GiB{against}"
            )
        if self.utilisation:
            lines.append(f"  {describe(self.utilisation)}")
        if self.batch_size != self.batch_size_requested:
            lines.append(f"  out of memory at batch {self.batch_size_requested}: all layouts used {self.batch_size}")
        lines += [
            f"  {speed.layout}: {self._advice(speed.ratio)}" for speed in self.speeds if speed.verdict == "inconclusive"
        ]
        if self.others_pct is not None and self.others_pct >= BUSY_PCT:
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
    """Measure `model` contiguous and in channels_last, in alternating blocks, with training's own step.

    Copies are measured: `model`, its statistics and all random generators are unchanged. If other processes use more
    than 25 % of the cores, the verdict is "not_comparable".

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
    workload = workload_of(
        model, batch_size, image_size, precision, device, batch=batch, loss=loss, output=output, mode=mode,
        compile=compile, cuda_graph=cuda_graph,
    )  # fmt: skip
    return benchmark_layouts(model, workload, target_ci=target_ci, time_limit_s=time_limit_s)


def workload_of(
    model: nn.Module,
    batch_size: int,
    image_size: int | tuple[int, ...],
    precision: str,
    device: torch.device | str | None,
    **more: Any,
) -> Workload:
    """A `Workload` from plain values; `more` are its other fields."""
    refuse_lazy(model)
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}: must be at least 1")
    if more.get("mode", "train") not in ("train", "infer"):
        raise ConfigError(f"mode={more['mode']}: must be train or infer")
    on = torch.device(device) if device is not None else device_of(model)
    shape = (3, image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    sizes = [len(leaf) for leaf in tree_leaves(more.get("batch")) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return Workload(sizes[0] if sizes else batch_size, shape, resolve_precision(precision, on), on, **more)


def benchmark_layouts(
    model: nn.Module,
    workload: Workload,
    layouts: Sequence[Layout] = (CONTIGUOUS, CHANNELS_LAST),
    *,
    target_ci: float = 0.02,
    time_limit_s: float = 60.0,
) -> Comparison:
    """As `compare_layouts`, for a given workload and any layouts; the first is the baseline of all ratios."""
    batch_size = workload.batch_size
    while True:
        try:
            smaller = replace(workload, batch_size=batch_size)
            done = _benchmark(model, smaller, layouts, target_ci, time_limit_s)
            return replace(done, batch_size_requested=workload.batch_size)
        except OutOfMemory:
            pass
        except Exception as error:
            if isinstance(error, ConfigError) or not is_out_of_memory(error):
                raise
        release_memory()  # outside the except block, where the exception no longer refers to tensors
        if batch_size == 1 or workload.batch is not None:
            raise ConfigError(f"a batch of {batch_size} does not fit into the memory of {workload.device}")
        batch_size //= 2


@crash_safe
def _benchmark(
    model: nn.Module, workload: Workload, layouts: Sequence[Layout], target_ci: float, time_limit_s: float
) -> Comparison:
    """Raises ConfigError: the model fails or crashes, but for a lack of memory."""
    try:
        with measurement_state(workload):
            timed = [TimedModel(model, layout, workload) for layout in layouts]
            return _compare(timed, target_ci, time_limit_s)
    except ConfigError:
        raise
    except Exception as error:  # a user's model may raise any exception
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"the model cannot be measured: {explain_failure(error)}; if it takes another input, give batch or "
            "image_size"
        ) from error


@contextmanager
def measurement_state(workload: Workload) -> Iterator[None]:
    """Kernel selection as in training; the previous switches and all random generators are restored at the end."""
    if workload.compile:
        torch._dynamo.reset()  # else the model runs eagerly once the recompile limit is reached
    autotune = not torch.are_deterministic_algorithms_enabled()
    with random_state_restored(workload.device), kernel_selection(tf32=workload.precision.tf32, autotune=autotune):
        yield


def _compare(timed: list[TimedModel], target_ci: float, time_limit_s: float) -> Comparison:
    steps = max(1, min(100, round(BLOCK_S / max(model.warm_up() for model in timed))))
    load = MachineLoad()
    # The median step of a block: interruptions on a shared machine are not caused by the layout.
    blocks = (lambda model=model: median(model.block_times_s(steps)) for model in timed)
    done = alternate(blocks, target_ci=target_ci, time_limit_s=time_limit_s, release_last=timed.pop)
    workload, others_pct = timed[0].workload, load.others_pct()
    is_too_busy = workload.device.type == "cpu" and (others_pct or 0.0) >= TOO_BUSY_PCT
    speeds = []
    for index, ratio in enumerate(done.speed_ratios()):
        name, peak_gib, step_s = timed[index].layout.name, timed[index].peak_memory_gib(timed), done.mean_s(index)
        verdict = "not_comparable" if index and is_too_busy else verdict_of(ratio)
        speeds.append(LayoutSpeed(name, workload.batch_size / step_s, 1000 * step_s, peak_gib, ratio, verdict))
    used = None
    if not workload.compile:
        gflop = flops_of(timed[0].forward) / workload.batch_size / 1e9
        used = utilisation(
            gflop, max(speed.images_per_s for speed in speeds), workload.precision, workload.device,
            training=workload.mode == "train",
        )  # fmt: skip
    return Comparison(
        tuple(speeds), workload.precision.name, workload.batch_size, workload.batch_size, done.rounds, done.seconds,
        done.stopped_by, others_pct, used,
    )  # fmt: skip
