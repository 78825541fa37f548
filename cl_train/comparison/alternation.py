"""Variants of the same work in one process, timed in alternating blocks.

Blocks run in the order A B B A (A B C C B A for three), which is one round: linear drift of the machine (heat, other
users) cancels within a round, so rounds are nearly independent.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cl_train.comparison.statistics import Interval, interval_of_rounds


@dataclass(frozen=True)
class Alternation:
    """Timed blocks of the variants."""

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
        return [interval_of_rounds(list(map(math.log, self.round_ratios(index)))) for index in range(len(self.blocks))]

    def round_ratios(self, variant: int) -> list[float]:
        """Speed of a variant / speed of the first one in each round; their median ignores outliers."""
        blocks = zip(self.blocks[0], self.blocks[variant], strict=True)
        ratios = [first / other for first, other in blocks]
        return [math.sqrt(one * two) for one, two in zip(ratios[::2], ratios[1::2], strict=True)]


def alternate(
    blocks: Sequence[Callable[[], float]],
    *,
    target_ci: float = 0.02,
    time_limit_s: float = 60.0,
    min_rounds: int = 8,
) -> Alternation:
    """Run rounds until the interval of every ratio is at most `target_ci` wide (high - low), or time runs out.

    Args:
        blocks: per variant, a function that runs a block of steps and returns the seconds per step.
        time_limit_s: counts from the first block; at least two rounds are run.
        min_rounds: with fewer, an interval that is narrow by chance would end the measurement too soon.
    """
    times: list[list[float]] = [[] for _ in blocks]
    order = [*range(len(blocks)), *reversed(range(len(blocks)))]
    started_at = time.perf_counter()
    while True:
        for variant in order:
            times[variant].append(blocks[variant]())
        done = Alternation(times, time.perf_counter() - started_at, "target_ci")
        if done.rounds >= min_rounds and all(ratio.width <= target_ci for ratio in done.speed_ratios()[1:]):
            return done
        if done.rounds >= 2 and done.seconds * (done.rounds + 1) / done.rounds > time_limit_s:
            return Alternation(times, done.seconds, "time_limit")
