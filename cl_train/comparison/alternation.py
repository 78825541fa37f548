"""Variants of the same work in one process, timed in alternating blocks.

Blocks run in the order A B B A (A B C C B A for three), which is one round: linear drift of the machine (heat, other
users) cancels within a round, so rounds are nearly independent.
"""

from __future__ import annotations

import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cl_train.comparison.statistics import Interval, interval_of_rounds

log = logging.getLogger(__name__)

MIN_ROUNDS = 8  # with fewer, an interval that is narrow by chance ends the measurement too soon


@dataclass(frozen=True)
class Alternation:
    """Timed blocks of the variants that were measured to the end; variants dropped for lack of memory are missing."""

    blocks: list[list[float]]  # per variant: seconds per step of each block, two blocks per round
    seconds: float
    stopped_by: str  # "target_ci" or "time_limit"

    @property
    def rounds(self) -> int:
        return len(self.blocks[0]) // 2

    def median_s(self, variant: int) -> float:
        """Seconds per step: the median over the variant's blocks."""
        return statistics.median(self.blocks[variant])

    def speed_ratios(self) -> list[Interval]:
        """Speed of each variant / speed of the first one, with a 95 % interval over the rounds."""
        return _speed_ratios(self.blocks)


def alternate(
    blocks: Sequence[Callable[[], float]],
    *,
    target_ci: float = 0.02,
    time_limit_s: float = 60.0,
    min_rounds: int = MIN_ROUNDS,
) -> Alternation:
    """Run rounds until the interval of every ratio is at most `target_ci` wide (high - low), or time runs out.

    When a block runs out of memory, the last of more than two variants is dropped and the others continue; with two
    variants the error is raised.

    Args:
        blocks: per variant, a function that runs a block of steps and returns the seconds per step.
        time_limit_s: counts from the first block; at least two rounds are run.
    """
    times: list[list[float]] = [[] for _ in blocks]
    started_at = time.perf_counter()
    while True:
        variants = range(len(times))
        try:
            measured = [(index, blocks[index]()) for index in (*variants, *reversed(variants))]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or len(times) <= 2:
                raise
            log.warning("out of memory while alternating: variant %d is dropped", len(times))
            times.pop()
            continue
        for index, seconds in measured:
            times[index].append(seconds)
        rounds, seconds = len(times[0]) // 2, time.perf_counter() - started_at
        is_narrow = all(ratio.width <= target_ci for ratio in _speed_ratios(times)[1:])
        if rounds >= min_rounds and is_narrow:
            return Alternation(times, seconds, "target_ci")
        if rounds >= 2 and seconds * (rounds + 1) / rounds > time_limit_s:
            return Alternation(times, seconds, "time_limit")


def _speed_ratios(times: Sequence[Sequence[float]]) -> list[Interval]:
    logs = [[math.log(seconds) for seconds in variant] for variant in times]
    per_round = [[(mine[i] + mine[i + 1]) / 2 for i in range(0, len(mine), 2)] for mine in logs]
    return [
        interval_of_rounds([first - mine for first, mine in zip(per_round[0], variant, strict=True)])
        for variant in per_round
    ]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: CUDA has its own exception, the CPU's allocator raises a RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def release_memory(device: torch.device) -> None:
    """Free unreferenced memory on the device. Waits for the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
