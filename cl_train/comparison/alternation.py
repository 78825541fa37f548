"""Variants of the same work in one process, timed in alternating blocks.

Blocks run in the order A B B A (A B C C B A for three), which is one round: linear drift of the machine (heat, other
users) cancels within a round, so rounds are nearly independent.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cl_train.comparison.statistics import Interval, interval_of_rounds
from cl_train.system.memory import is_out_of_memory, release_memory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Alternation:
    """Timed blocks of the variants; those that ran out of memory are missing."""

    blocks: list[list[float]]  # per variant: seconds per step of each block, two blocks per round
    seconds: float
    stopped_by: str  # "target_ci" or "time_limit"

    @property
    def rounds(self) -> int:
        return len(self.blocks[0]) // 2

    def median_s(self, variant: int) -> float:
        """Seconds per step: the median over the variant's blocks."""
        return statistics.median(self.blocks[variant])

    def mean_s(self, variant: int) -> float:
        """Seconds per step: the geometric mean over the blocks, so that `speed_ratios` are quotients of it."""
        return statistics.geometric_mean(self.blocks[variant])

    def speed_ratios(self) -> list[Interval]:
        """Speed of each variant / speed of the first one, with a 95 % interval over the rounds."""
        return _speed_ratios(self.blocks)

    def round_ratios(self, variant: int) -> list[float]:
        """Speed of a variant / speed of the first one in each round; their median ignores outliers."""
        return [float(ratio) for ratio in np.exp(_log_ratios(self.blocks)[variant])]


def alternate(
    blocks: Iterable[Callable[[], float]],
    *,
    target_ci: float = 0.02,
    time_limit_s: float = 60.0,
    min_rounds: int = 8,
    release_last: Callable[[], object] = lambda: None,
) -> Alternation:
    """Run rounds until the interval of every ratio is at most `target_ci` wide (high - low), or time runs out.

    When a block runs out of memory, the last of more than two variants is dropped and the others continue; with two
    variants the error is raised.

    Args:
        blocks: per variant, a function that runs a block of steps and returns the seconds per step.
        time_limit_s: counts from the first block; at least two rounds are run.
        min_rounds: with fewer, an interval that is narrow by chance would end the measurement too soon.
        release_last: called when the last variant is dropped; the caller drops its references to it here.
    """
    blocks = list(blocks)
    times: list[list[float]] = [[] for _ in blocks]
    started_at = time.perf_counter()
    while True:
        variants = range(len(times))
        try:
            measured = [(index, blocks[index]()) for index in (*variants, *reversed(variants))]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or len(times) <= 2:
                raise
            measured = []
        if not measured:  # outside the except block, where the exception no longer refers to tensors
            log.warning("out of memory while alternating: variant %d is dropped", len(times))
            times.pop()
            blocks.pop()
            release_last()
            release_memory()
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
    return [interval_of_rounds(rounds.tolist()) for rounds in _log_ratios(times)]


def _log_ratios(times: Sequence[Sequence[float]]) -> np.ndarray[Any, Any]:
    """Log of the speed ratios to the first variant, [variants, rounds]; a round has two blocks of each variant."""
    log_s = np.log(times).reshape(len(times), -1, 2).mean(2)
    ratios: np.ndarray[Any, Any] = log_s[0] - log_s
    return ratios
