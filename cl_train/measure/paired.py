"""Compares the layouts of one model, or several models, in one process, in alternating blocks.

`benchmark` warms up the step of each (`timed_step.py`) and times blocks of them in turns
(`alternate.py`); `statistics.py` makes the verdict.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import nn

from cl_train.errors import ConfigError, RecordingError
from cl_train.measure.alternate import (
    MOST_SUBTRACTED,
    MOST_TAKEN,
    Block,
    Rounds,
    Stop,
    TakenTime,
    alternate,
)
from cl_train.measure.statistics import HOST_BOUND, Interval, are_host_bound, verdict_of
from cl_train.measure.time_limit import scaled_to_time, warmed_up
from cl_train.measure.timed_step import (
    LossFunction,
    TimedStep,
    Workload,
    device_of,
    image_shape,
    measurement_state,
)
from cl_train.memory_format.convert import CHANNELS_LAST, CONTIGUOUS, Layout
from cl_train.models.facts import ModelFacts, image_count
from cl_train.step.cuda_graph import CAN_GO_ON_AFTER_FAILURE
from cl_train.step.precision import resolve_precision
from cl_train.step.train_step import StepSettings
from cl_train.step.utilisation import describe
from cl_train.system.failures import failure_explained
from cl_train.system.machine import GpuWatch, is_out_of_memory, problem_of_gpu, release_memory
from cl_train.system.processes import BUSY_PCT, LOST_PCT
from cl_train.system.torch_state import own_torch_state

BLOCK_S = 0.25
MODES = ("train", "infer")
LEAST_BY_ITSELF_PCT = 50.0  # of its images; with fewer, `by_itself_text` is empty


@dataclass(frozen=True)
class Variant:
    name: str
    model: nn.Module
    layout: Layout


def variants_of(
    model: nn.Module, layouts: Sequence[Layout] = (CONTIGUOUS, CHANNELS_LAST)
) -> list[Variant]:
    """Returns one model in several layouts; the first is the baseline."""
    return [Variant(layout.name, model, layout) for layout in layouts]


@dataclass(frozen=True)
class LayoutSpeed:
    """The speed of one layout, a geometric mean over blocks; `ratio` is relative to the first."""

    layout: str
    images_per_s: float
    step_ms: float
    peak_memory_gib: float | None  # None: there was no time to measure it
    ratio: Interval
    verdict: str  # faster, slower, no_difference, inconclusive or not_comparable
    block_ms: tuple[float, ...] = ()  # of a step in each block that counts, two blocks per round
    host_pct: float | None = None  # share of a step in which the host launches it; None: a CPU


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare_layouts`; layouts in the order given, the first is the baseline."""

    speeds: tuple[LayoutSpeed, ...]
    precision: str
    batch_size: int  # smaller than requested where memory or time ran out; the same for all layouts
    batch_size_requested: int
    rounds: int
    seconds: float  # of all rounds
    stopped_by: str  # "target_ci" or "time_limit"
    others_pct: float | None = None  # share of the cores of other processes; None = unknown
    utilisation: dict[str, Any] | None = None  # of the fastest layout; None if compiled
    gpu: dict[str, Any] | None = None  # what `GpuWatch.worst` returns
    rounds_left_out: int = 0  # because other processes took time from them
    lost_pct: float | None = None  # share of the counted rounds' time that other processes took
    subtracted_pct: float = 0.0  # share of their time that one thread waited for a core
    # Percent of the images that convolutions of the contiguous side nevertheless compute in
    # channels_last; None: no side is contiguous, or the model is compiled.
    by_itself_pct: float | None = None
    image_shape: tuple[int, ...] | None = None  # None: the caller's own batch

    @property
    def verdict(self) -> str:
        """The verdict on the last layout against the first."""
        return self.speeds[-1].verdict

    @property
    def is_host_bound(self) -> bool:
        return are_host_bound(speed.host_pct for speed in self.speeds)

    @property
    def ratio(self) -> Interval:
        """The speed of the last layout / that of the first."""
        return self.speeds[-1].ratio

    @property
    def disturbance(self) -> str | None:
        """What took time from the rounds, so that no verdict can be trusted."""
        is_lost = (self.lost_pct or 0.0) >= LOST_PCT
        return problem_of_gpu(self.gpu) or ("other processes used the cores" if is_lost else None)

    def not_comparable(self, layouts: Collection[str]) -> "Comparison":
        """Returns the comparison with the verdict "not_comparable" on these layouts."""
        speeds = [
            replace(speed, verdict="not_comparable") if speed.layout in layouts else speed
            for speed in self.speeds
        ]
        return replace(self, speeds=tuple(speeds))

    @property
    def round_s(self) -> float:
        """The least time of a round: two steps of each variant."""
        return 2 * sum(speed.step_ms for speed in self.speeds) / 1000

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; `pairs` has the keys of a sweep's comparison."""
        speeds, pairs = [], []
        for speed in self.speeds:
            plain = dict(vars(speed))
            outcome = {**plain.pop("ratio").to_dict(), "verdict": plain.pop("verdict")}
            speeds.append(plain)
            pairs.append({"baseline": self.speeds[0].layout, "candidate": speed.layout, **outcome})
        return {**vars(self), "speeds": speeds, "pairs": pairs[1:]}

    def __str__(self) -> str:
        lines = [f"precision {self.precision}, batch_size {self.batch_size}"]
        if self.image_shape:
            lines[0] += f", images {'x'.join(map(str, self.image_shape))}"
        for speed in self.speeds:
            line = f"{speed.layout:<18} {speed.images_per_s:10.1f} images/s "
            memory = speed.peak_memory_gib
            line += f"{speed.step_ms:10.2f} ms" + (f" {memory:8.2f} GiB" if memory else "")
            if speed is not self.speeds[0]:
                untrusted = "untrusted " if speed.verdict == "not_comparable" else ""
                line += f"  {untrusted}{speed.ratio} {speed.verdict.replace('_', ' ')}"
            lines.append(line)
        if self.rounds == 0:
            lines.append(f"no round of {self.round_s:.0f} s fits into the time: single steps")
        elif self.rounds == 1:
            lines.append(f"only one round of {self.round_s:.0f} s fits into the time")
        if self.utilisation:
            lines.append(describe(self.utilisation))
        if by_itself := by_itself_text(self.by_itself_pct):
            lines.append(by_itself)
        if self.is_host_bound:
            lines.append(HOST_BOUND)
        if self.batch_size != self.batch_size_requested:
            problem = f"batch {self.batch_size_requested} does not fit into memory or time_limit_s"
            lines.append(f"{problem}: all layouts used {self.batch_size}")
        if (self.others_pct or 0.0) >= BUSY_PCT:
            left_out, lost_pct = self.rounds_left_out, self.lost_pct
            line = f"other processes used {self.others_pct:.0f} % of the cores"
            if lost_pct is None:
                line += "; what that took from the rounds is unknown here"
            elif lost_pct >= LOST_PCT:
                line += f" and took {lost_pct:.0f} % of the time of the rounds"
                line += ": measure on a quiet machine, or with OMP_NUM_THREADS=1"
            else:
                line += f"; {left_out} of {self.rounds + left_out} rounds are left out"
            lines.append(line)
        if self.subtracted_pct >= LOST_PCT:
            share = f"{self.subtracted_pct:.0f} % of the time"
            lines.append(f"waiting for a core ({share}) is subtracted (one thread)")
        if gpu_problem := problem_of_gpu(self.gpu):
            lines.append(gpu_problem)
        return "\n".join(f"  {line}" for line in lines)


def by_itself_text(by_itself_pct: float | None) -> str:
    if by_itself_pct is None or by_itself_pct < LEAST_BY_ITSELF_PCT:
        return ""
    share = f"the contiguous side computes {by_itself_pct:.0f} % of its images in channels_last"
    return f"{share}: this model does it by itself"


@own_torch_state
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
    """Measure copies of `model`, contiguous and in channels_last, in alternating blocks, with
    training's own step.

    On Linux, the time that other processes take is subtracted (one thread), or the rounds that they
    disturbed are left out, at most half; if the remaining rounds lost 5 % or more, the verdict is
    "not_comparable".

    Args:
        batch_size: images per step; halved for both layouts if memory runs out, and on a CPU,
            down to 8, if two rounds would not end within `time_limit_s`.
        image_size: side of RGB images in pixels, or the shape of one input: (C, H, W), or
            (C, T, H, W) for video.
        batch: the input instead of noise: a tensor, a tuple of inputs or a dict of keyword
            arguments.
        loss: maps the model's output to a scalar; default: cross-entropy with random labels for
            logits [N, classes], else the mean square of the output.
        output: the part that the default loss uses: a dict's key, an attribute or an index, "0".
        mode: "train" (forward, backward, optimizer) or "infer".
        precision: auto, fp32, tf32, fp16, fp16_o2 or bf16.
        device: default: the model's.
        compile: measure copies compiled by `torch.compile`.
        cuda_graph: replay the step as a CUDA graph.
        target_ci: stop when the 95 % interval of the ratio is at most this wide (high - low).
        time_limit_s: end after about this long, compilation aside. If no round fits, the steps of
            the warm-up are reported, and the verdict is inconclusive.

    Raises:
        ConfigError: the model does not run on this batch, one image does not fit into memory, or
            torch is known to crash on the model in channels_last.
    """
    if mode not in MODES:
        raise ConfigError(f"mode={mode}; use {' or '.join(MODES)}")
    device = device_of(model, device)
    precise = resolve_precision(precision, device)
    settings = StepSettings(precise, compile=compile, cuda_graph=cuda_graph)
    images = batch_size if batch is None else image_count(batch)
    shape = image_shape(image_size)
    workload = Workload(images, shape, settings, device, mode, batch, loss, output)
    return benchmark_in_time(variants_of(model), workload, stop=Stop(target_ci, time_limit_s))


def benchmark_in_time(variants: Sequence[Variant], workload: Workload, *, stop: Stop) -> Comparison:
    """Runs `benchmark`, with fewer images if two rounds would not end in time."""
    started_at = time.perf_counter()
    steps = 6 * len(variants)  # warm-up, memory, and two rounds
    scaled = scaled_to_time(variants[0].model, workload, stop.time_limit_s, steps)
    left_s = stop.time_limit_s - (time.perf_counter() - started_at)
    done = benchmark(variants, scaled, stop=replace(stop, time_limit_s=left_s))
    return replace(done, batch_size_requested=workload.batch_size)


def benchmark(variants: Sequence[Variant], workload: Workload, *, stop: Stop) -> Comparison:
    """Compares the variants with the first one; if memory runs out, tries half of the images.

    Raises ConfigError: not even one image fits, or a model fails.
    """
    requested = workload.batch_size
    while True:
        try:
            return replace(_compared(variants, workload, stop), batch_size_requested=requested)
        except Exception as error:
            # The memory of a recording that failed is lost, and no smaller batch would fit.
            can_go_on = CAN_GO_ON_AFTER_FAILURE or not isinstance(error, RecordingError)
            if not (can_go_on and is_out_of_memory(error)):
                raise
        release_memory()  # outside the except block: the exception no longer refers to tensors
        size = workload.batch_size
        if size == 1 or workload.batch is not None:
            what = f"a batch of {size} does not fit"
            raise ConfigError(f"{what} into the memory of {workload.device}")
        workload = replace(workload, batch_size=size // 2)


def _compared(variants: Sequence[Variant], workload: Workload, stop: Stop) -> Comparison:
    remedy = "if it takes another input, give batch or image_size"
    explained = failure_explained("the model cannot be measured", remedy, memory_too=False)
    with explained, measurement_state(workload.settings, workload.device):
        facts: dict[nn.Module, ModelFacts] = {}
        timed = []
        for one in variants:
            timed.append(TimedStep(one.model, one.layout, workload, facts.get(one.model)))
            facts[one.model] = timed[-1].facts
        step_s, left_s = warmed_up(timed, stop)
        watch = GpuWatch(workload.device)
        has_round = 2 * sum(step_s) <= left_s
        if has_round:
            done = _alternated(timed, step_s, watch, replace(stop, time_limit_s=left_s))
        else:
            watch.look()
            blocks = [Block(seconds, None) for seconds in step_s]
            done = Rounds([[*blocks, *reversed(blocks)]], sum(step_s), stopped_by="time_limit")
        counted = done.undisturbed()
        names = [one.name for one in variants]
        speeds = _speeds(names, timed, counted)
        pairs = zip(speeds, timed, strict=True)
        fastest, step = max(pairs, key=lambda pair: pair[0].images_per_s)
        compared = Comparison(
            tuple(speeds),
            workload.precision.name,
            batch_size=workload.batch_size,
            batch_size_requested=workload.batch_size,
            rounds=len(counted) if has_round else 0,
            seconds=done.seconds,
            stopped_by=done.stopped_by,
            others_pct=done.others_pct,
            utilisation=step.utilisation(fastest.images_per_s),
            gpu=watch.worst(),
            rounds_left_out=len(done) - len(counted),
            lost_pct=counted.lost_pct,
            subtracted_pct=counted.subtracted_pct,
            by_itself_pct=timed[0].by_itself_pct,
            image_shape=workload.input_shape if workload.batch is None else None,
        )
        return compared.not_comparable(names[1:]) if compared.disturbance else compared


def _alternated(
    timed: Sequence[TimedStep], step_s: Sequence[float], watch: GpuWatch, stop: Stop
) -> Rounds:
    """Times the steps in turns. `step_s`: seconds of the warm steps, before they are recorded."""
    # All eager work comes before the recordings, whose memory it could not use.
    for step in timed:
        step.record()
    if timed[0].workload.settings.cuda_graph:
        step_s = [step.block_times_s(1)[0] for step in timed]
    count, taken = max(1, min(100, round(BLOCK_S / max(step_s)))), TakenTime()

    def block(step: TimedStep) -> Block:
        watch.look()
        return timed_block(step, count, taken)

    return alternate([partial(block, step) for step in timed], stop)


def timed_block(step: TimedStep, steps: int, others: TakenTime) -> Block:
    """Times a block; on a CPU, leaves out the steps from which other processes took time.

    With one thread that time is subtracted instead, up to 90 % of a step. With several threads, the
    wait of one for a core may or may not delay the others.
    """
    if step.workload.device.type != "cpu":
        times_s, host_s = step.block_and_host_times_s(steps)
        # The minimum, as the host also waits while the device's queue is full.
        return Block(median(times_s), host_share=min(host_s) / median(times_s))
    all_s, shares, elapsed_s, subtracted_s = [], [], 0.0, 0.0
    for _ in range(steps):
        taken_before_s = others.seconds()
        [step_s] = step.block_times_s(1)
        taken_s = others.seconds() - taken_before_s
        elapsed_s += step_s
        if torch.get_num_threads() == 1 and taken_s <= MOST_SUBTRACTED * step_s:
            step_s -= taken_s
            subtracted_s += taken_s
            taken_s = 0.0
        all_s.append(step_s)
        shares.append(taken_s / step_s)
    quiet_s = [s for s, share in zip(all_s, shares, strict=True) if share <= MOST_TAKEN]
    taken_share = 0.0 if quiet_s else median(shares)
    known_share = taken_share if others.is_known else None
    return Block(median(quiet_s or all_s), known_share, subtracted_share=subtracted_s / elapsed_s)


def _speeds(names: Sequence[str], timed: Sequence[TimedStep], counted: Rounds) -> list[LayoutSpeed]:
    speeds: list[LayoutSpeed] = []
    is_host_bound = are_host_bound(map(counted.host_pct, range(len(timed))))
    measured = zip(names, timed, counted.intervals(), strict=True)
    for number, (name, step, ratio) in enumerate(measured):
        times_s = counted.times_s(number)
        step_s = geometric_mean(times_s)  # the ratios are then its quotients
        rate = step.workload.images_per_step / step_s
        verdict = verdict_of(ratio, is_host_bound=is_host_bound and bool(speeds))
        block_ms = tuple(round(1000 * seconds, 4) for seconds in times_s)
        host_pct = counted.host_pct(number)
        speeds.append(
            LayoutSpeed(
                name, rate, 1000 * step_s, step.peak_gib, ratio, verdict, block_ms, host_pct
            )
        )
    return speeds
