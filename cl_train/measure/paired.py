"""The memory formats of one model compared in one process, in alternating blocks.

The step is the one that training runs (`timed_step.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from torch import nn

from cl_train.errors import ConfigError
from cl_train.measure.statistics import (
    LAST_ERROR,
    Alternation,
    Interval,
    alternate,
    verdict_of,
)
from cl_train.measure.timed_step import (
    MOST_TAKEN,
    LossFunction,
    TakenTime,
    TimedStep,
    Workload,
    measurement_state,
    workload_of,
)
from cl_train.memory_format.convert import CHANNELS_LAST, CONTIGUOUS, Layout
from cl_train.step.utilisation import describe, flops_of, utilisation
from cl_train.system.failures import failure_explained
from cl_train.system.machine import gpu_state, is_out_of_memory, problem_of_gpu, release_memory
from cl_train.system.processes import BUSY_PCT, TOO_BUSY_PCT, MachineLoad

BLOCK_S = 0.25
LEAST_QUIET_ROUNDS = 4


@dataclass(frozen=True)
class LayoutSpeed:
    """The speed of one layout, a geometric mean over blocks.

    `ratio` is to the first layout of the comparison, for which `verdict` is no_difference.
    """

    layout: str
    images_per_s: float
    step_ms: float
    peak_memory_gib: float
    ratio: Interval
    verdict: str  # faster, slower, no_difference, inconclusive or not_comparable
    block_ms: tuple[float, ...] = ()  # of a step in each block that counts, two blocks per round


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare_layouts`; layouts in the order given, the first is the baseline."""

    speeds: tuple[LayoutSpeed, ...]
    precision: str
    batch_size: int  # smaller than requested where memory ran out; the same for all layouts
    batch_size_requested: int
    rounds: int
    seconds: float  # of all rounds
    stopped_by: str  # "target_ci", "verdict" or "time_limit"
    others_pct: float | None = None  # share of the cores of other processes; None = unknown
    utilisation: dict[str, Any] | None = None  # of the fastest layout; None if compiled
    gpu: dict[str, Any] | None = None  # as `machine.gpu_state`, at the end
    # Because other processes took time from them; None = unknown, or all were disturbed.
    rounds_left_out: int | None = None

    @property
    def gflop_per_image(self) -> tuple[float, float] | None:
        """Of a forward pass, and of a whole step."""
        used = self.utilisation
        return None if used is None else (used["gflop_per_image"], used["step_gflop_per_image"])

    @property
    def verdict(self) -> str:
        """Verdict on the last layout against the first."""
        return self.speeds[-1].verdict

    @property
    def ratio(self) -> Interval:
        """Speed of the last layout / speed of the first."""
        return self.speeds[-1].ratio

    def at_last_look(self) -> "Comparison":
        """Without more rounds to come: what no earlier look has decided, with `LAST_ERROR`."""
        blocks = [list(speed.block_ms) for speed in self.speeds]
        ratios = Alternation(blocks, self.seconds, self.stopped_by, LAST_ERROR).speed_ratios()
        speeds = tuple(
            replace(speed, ratio=ratio, verdict=verdict_of(ratio))
            if speed.verdict == "inconclusive"
            else speed
            for speed, ratio in zip(self.speeds, ratios, strict=True)
        )
        return replace(self, speeds=speeds)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `pairs` has the keys of a sweep's comparison."""
        speeds, pairs = [], []
        for speed in self.speeds:
            plain = dict(vars(speed))
            outcome = {**plain.pop("ratio").to_dict(), "verdict": plain.pop("verdict")}
            speeds.append(plain)
            pairs.append({"baseline": self.speeds[0].layout, "candidate": speed.layout, **outcome})
        return {**vars(self), "speeds": speeds, "pairs": pairs[1:]}

    def __str__(self) -> str:
        lines: list[str] = []
        for speed in self.speeds:
            line = f"{speed.layout:<18} {speed.images_per_s:10.1f} images/s "
            line += f"{speed.step_ms:10.2f} ms {speed.peak_memory_gib:8.2f} GiB"
            if lines:
                untrusted = "untrusted " if speed.verdict == "not_comparable" else ""
                line += f"  {untrusted}{speed.ratio} {speed.verdict.replace('_', ' ')}"
            lines.append(line)
        if self.utilisation:
            lines.append(describe(self.utilisation))
        if self.batch_size != self.batch_size_requested:
            problem = f"out of memory at batch {self.batch_size_requested}"
            lines.append(f"{problem}: all layouts used {self.batch_size}")
        if (self.others_pct or 0.0) >= BUSY_PCT:
            line = f"other processes used {self.others_pct:.0f} % of the cores: "
            left_out = self.rounds_left_out
            if left_out is None:
                line += "measure on a quiet machine, or with OMP_NUM_THREADS=1"
            else:
                line += f"{left_out} of {self.rounds + left_out} rounds are left out"
            lines.append(line)
        if gpu_problem := problem_of_gpu(self.gpu):
            lines.append(gpu_problem)
        return "\n".join(f"  {line}" for line in lines)


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

    The time that other processes take is left out (Linux): with one thread it is subtracted, with
    several the rounds that they disturbed are left out, at most half. If they use more than 25 % of
    the cores, all disturbed rounds are; if fewer than four remain, the verdict is "not_comparable".

    Args:
        batch_size: images per step; halved for both layouts when memory runs out.
        image_size: side of RGB images in pixels, or the shape of one input: (C, H, W), or
            (C, T, H, W) for video.
        batch: input to use instead of noise: a tensor, a tuple of inputs or a dict of keyword
            arguments.
        loss: scalar of the model's output; default cross-entropy with random labels for logits
            [N, classes], else the mean square of the output.
        output: the part of the output that the default loss uses: a dict's key, an attribute or an
            index, such as "out" or "0".
        mode: "train" (forward, backward, optimizer) or "infer".
        precision: auto, fp32, tf32, fp16, fp16_o2 or bf16.
        device: default: where the model is.
        compile: measure copies compiled by `torch.compile`.
        cuda_graph: replay the step as a CUDA graph.
        target_ci: stop when the 95 % interval of the ratio is at most this wide (high - low).
        time_limit_s: stop after this long; warm-up and compilation are not counted.

    Raises:
        ConfigError: the model does not run on this batch, or one image does not fit into memory;
            torch is known to crash on it in channels_last.
    """
    workload = workload_of(
        model,
        batch_size,
        image_size,
        precision,
        device,
        mode=mode,
        batch=batch,
        loss=loss,
        output=output,
        compile=compile,
        cuda_graph=cuda_graph,
    )
    return benchmark_layouts(model, workload, target_ci=target_ci, time_limit_s=time_limit_s)


def benchmark_layouts(
    model: nn.Module,
    workload: Workload,
    layouts: Sequence[Layout] = (CONTIGUOUS, CHANNELS_LAST),
    *,
    target_ci: float = 0.02,
    time_limit_s: float = 60.0,
    until_decided: bool = False,
    earlier: Comparison | None = None,
) -> Comparison:
    """As `compare_layouts`, for any workload and layouts; the first is the baseline.

    `until_decided`: as in `alternate`; `Comparison.at_last_look` is for what remains undecided.
    `earlier`: a comparison of the same that goes on.
    """
    ends: dict[str, Any] = {"target_ci": target_ci, "time_limit_s": time_limit_s}
    ends["until_decided"] = until_decided
    ends["earlier"] = []
    requested = workload.batch_size
    if earlier is not None:
        workload = replace(workload, batch_size=earlier.batch_size)
        ends["earlier"] = [[ms / 1000 for ms in speed.block_ms] for speed in earlier.speeds]
    while True:
        try:
            done = _benchmark(model, workload, layouts, ends, earlier)
            return replace(done, batch_size_requested=requested)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        release_memory()  # outside the except block: the exception no longer refers to tensors
        size = workload.batch_size
        if size == 1 or workload.batch is not None:
            what = f"a batch of {size} does not fit"
            raise ConfigError(f"{what} into the memory of {workload.device}")
        workload = replace(workload, batch_size=size // 2)


def _benchmark(
    model: nn.Module,
    workload: Workload,
    layouts: Sequence[Layout],
    ends: Mapping[str, Any],
    earlier: Comparison | None,
) -> Comparison:
    """`ends`: arguments of `alternate`. Raises ConfigError: the model fails for another
    reason than memory.
    """
    remedy = "if it takes another input, give batch or image_size"
    explained = failure_explained("the model cannot be measured", remedy, memory_too=False)
    with explained, measurement_state(workload):
        timed = [TimedStep(model, layout, workload) for layout in layouts]
        for step in timed:
            step.warm_up()
        # All eager work comes before the recordings, whose memory it could not use.
        if earlier is None:
            peaks_gib = [step.peak_memory_gib(timed) for step in timed]
            gflop_per_image = None if workload.settings.compile else _gflop_per_image(timed[0])
            earlier_s = 0.0
        else:
            peaks_gib = [speed.peak_memory_gib for speed in earlier.speeds]
            gflop_per_image = earlier.gflop_per_image
            earlier_s = earlier.seconds
        for step in timed:
            step.record()
        slowest_s = max(step.block_times_s(1)[0] for step in timed)
        steps = max(1, min(100, round(BLOCK_S / slowest_s)))

        load = MachineLoad()
        done, rounds_left_out = _quiet_rounds(timed, steps, ends, load)
        others_pct = load.others_pct()
        gpu = gpu_state(workload.device)

        is_busy = problem_of_gpu(gpu) is not None
        if workload.device.type == "cpu" and rounds_left_out is None:
            is_busy |= (others_pct or 0.0) >= TOO_BUSY_PCT
        speeds = _speeds(timed, done, peaks_gib, is_busy=is_busy)
        used = None
        if gflop_per_image is not None:
            fastest = max(speed.images_per_s for speed in speeds)
            used = utilisation(*gflop_per_image, fastest, workload.precision, workload.device)
        return Comparison(
            tuple(speeds),
            workload.precision.name,
            batch_size=workload.batch_size,
            batch_size_requested=workload.batch_size,
            rounds=done.rounds,
            seconds=earlier_s + done.seconds,
            stopped_by=done.stopped_by,
            others_pct=others_pct,
            utilisation=used,
            gpu=gpu,
            rounds_left_out=rounds_left_out,
        )


def _speeds(
    timed: Sequence[TimedStep], done: Alternation, peaks_gib: Sequence[float], *, is_busy: bool
) -> list[LayoutSpeed]:
    speeds: list[LayoutSpeed] = []
    measured = zip(timed, peaks_gib, done.speed_ratios(), done.blocks, strict=True)
    for step, peak_gib, ratio, times_s in measured:
        step_s = geometric_mean(times_s)  # so that the ratios are quotients of it
        rate = step.workload.images_per_step / step_s
        verdict = "not_comparable" if speeds and is_busy else verdict_of(ratio)
        block_ms = tuple(round(1000 * seconds, 4) for seconds in times_s)
        name = step.layout.name
        speed = LayoutSpeed(name, rate, 1000 * step_s, peak_gib, ratio, verdict, block_ms)
        speeds.append(speed)
    return speeds


def _quiet_rounds(
    timed: Sequence[TimedStep], steps: int, ends: Mapping[str, Any], load: MachineLoad
) -> tuple[Alternation, int | None]:
    """Blocks of `steps` steps in turns, and the number of rounds left out, because other processes
    took time from a block; None: all are disturbed, or it is not known, and all are kept.
    """
    others = TakenTime()
    is_told = timed[0].workload.device.type == "cpu" and others.is_known
    taken_shares = [0.0 for blocks in ends["earlier"] for _ in blocks]

    def block_s(step: TimedStep) -> float:
        block = step.block(steps, others if is_told else None)
        taken_shares.append(block.taken_share)
        return block.seconds

    def counting(rounds: int) -> list[int]:
        blocks = 2 * len(timed)
        worst = [max(taken_shares[n * blocks : (n + 1) * blocks]) for n in range(rounds)]
        return rounds_that_count(worst, is_busy=(load.others_pct() or 0.0) >= TOO_BUSY_PCT)

    blocks = [partial(block_s, step) for step in timed]
    done = alternate(blocks, **ends, counting=counting if is_told else None)
    rounds = counting(done.rounds) if is_told else []
    if not rounds:
        return done, None
    return done.of_rounds(rounds), done.rounds - len(rounds)


def rounds_that_count(taken_shares: Sequence[float], *, is_busy: bool) -> list[int]:
    """The rounds from which other processes took least; `taken_shares`: of each round's time.

    Those that lost at most 2 % count, and at least half of all: small losses are noise, which the
    interval contains, and few rounds make it wider than the noise would. On a busy machine, where
    large losses could differ between the layouts, only those that lost at most 2 % count; none if
    they are fewer than four.
    """
    count = len(taken_shares)
    quiet = sum(share <= MOST_TAKEN for share in taken_shares)
    least = min(count, LEAST_QUIET_ROUNDS)
    if is_busy and quiet < least:
        return []
    if not is_busy:
        quiet = max(quiet, least, (count + 1) // 2)
    return sorted(sorted(range(count), key=taken_shares.__getitem__)[:quiet])


def _gflop_per_image(step: TimedStep) -> tuple[float, float]:
    """Counts a forward pass, and all that a step computes."""
    forward = flops_of(step.forward) / step.workload.batch_size
    whole = flops_of(step.eager_step, gradients=True) / step.workload.images_per_step
    return forward / 1e9, whole / 1e9
