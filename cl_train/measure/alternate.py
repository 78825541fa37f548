"""Runs variants of the same work in turns, A B B A, in one process: the one driver of measurements.

Linear drift of the machine (heat, other users) cancels within a round. Rounds that other processes
disturbed are left out. No torch here.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from cl_train.measure.statistics import Interval, interval_of_rounds
from cl_train.system.processes import LOST_PCT, MachineLoad, thread_times

log = logging.getLogger(__name__)

MOST_TAKEN = 0.02  # of a block's time
MOST_SUBTRACTED = 0.9  # of a step's time: what is left of it would be mostly error
LEAST_ROUNDS = 4  # that count, even if other processes took more


@dataclass(frozen=True)
class Block:
    """Some steps of one variant."""

    seconds: float  # of a step
    taken_share: float | None = 0.0  # of its time, which other processes took; None: unknown
    host_share: float | None = None  # of its time, in which the host launches it; None: a CPU
    subtracted_share: float = 0.0  # of the time that it took; `seconds` is without it


@dataclass(frozen=True)
class Rounds:
    """The blocks of each round, in the order A B B A (A B C C B A for three variants)."""

    blocks: list[list[Block]]
    seconds: float
    others_pct: float | None = None  # share of the cores of other processes; None: unknown
    stopped_by: str = ""  # "target_ci" or "time_limit"

    def __len__(self) -> int:
        return len(self.blocks)

    def times_s(self, variant: int) -> list[float]:
        """Returns the seconds per step of each block of a variant, two blocks per round."""
        return [blocks[place].seconds for blocks in self.blocks for place in (variant, ~variant)]

    def host_pct(self, variant: int) -> float | None:
        """Returns the median percentage of a step in which the host launches it; None: on a CPU."""
        shares = [
            blocks[place].host_share for blocks in self.blocks for place in (variant, ~variant)
        ]
        return 100 * median(known) if (known := [s for s in shares if s is not None]) else None

    def ratios(self, variant: int) -> list[float]:
        """Returns speed of a variant / that of the first, by round; a median ignores outliers."""
        pairs = zip(self.times_s(0), self.times_s(variant), strict=True)
        ratios = [first / other for first, other in pairs]
        return [math.sqrt(one * two) for one, two in zip(ratios[::2], ratios[1::2], strict=True)]

    def intervals(self) -> list[Interval]:
        """Returns the speed of each variant / that of the first, with the interval over rounds."""
        variants = range(len(self.blocks[0]) // 2)
        return [interval_of_rounds(self.ratios(variant)) for variant in variants]

    def undisturbed(self) -> "Rounds":
        numbers = rounds_that_count(self._lost_shares())
        return replace(self, blocks=[self.blocks[number] for number in numbers])

    @property
    def lost_pct(self) -> float | None:
        """The median percentage of a round's time that other processes took; None: unknown."""
        is_known = all(block.taken_share is not None for blocks in self.blocks for block in blocks)
        return 100 * median(self._lost_shares()) if is_known else None

    @property
    def subtracted_pct(self) -> float:
        """Percent of the time of a block that is not in its `seconds`, in the median."""
        return 100 * median(block.subtracted_share for blocks in self.blocks for block in blocks)

    def _lost_shares(self) -> list[float]:
        return [max(block.taken_share or 0.0 for block in blocks) for blocks in self.blocks]


def rounds_that_count(taken_shares: Sequence[float]) -> list[int]:
    """Returns the rounds that lost at most 2 % to other processes. If these are fewer than half of
    all, or fewer than four, the least disturbed of the others are added.

    Small losses are noise, which the interval includes; too few rounds would widen it more.
    """
    count = len(taken_shares)
    quiet = sum(share <= MOST_TAKEN for share in taken_shares)
    counted = max(quiet, min(count, LEAST_ROUNDS), (count + 1) // 2)
    return sorted(sorted(range(count), key=taken_shares.__getitem__)[:counted])


@dataclass(frozen=True)
class Stop:
    """When to stop: every interval is at most `target_ci` wide (high - low), or time is over."""

    target_ci: float = 0.02
    time_limit_s: float = 60.0
    min_rounds: int = 8  # with fewer, an interval that is narrow by chance would end it too soon
    least_rounds: int = 1  # that are run even beyond the time limit
    tell: Callable[[str], object] = log.info  # gets a line on how long a slow measurement takes

    @classmethod
    def after(cls, rounds: int) -> "Stop":
        return cls(math.inf, math.inf, rounds)

    def reason(self, done: Rounds) -> str:
        """Returns why `done` is enough; empty: it is not."""
        counted = done.undisturbed()
        if len(counted) >= self.min_rounds and (counted.lost_pct or 0.0) < LOST_PCT:
            widest = max(interval.width for interval in counted.intervals())
            if widest <= self.target_ci:
                return "target_ci"
        with_another_s = done.seconds * (len(done) + 1) / len(done)
        is_over = len(done) >= self.least_rounds and with_another_s > self.time_limit_s
        return "time_limit" if is_over else ""


def alternate(variants: Sequence[Callable[[], Block]], stop: Stop) -> Rounds:
    blocks: list[list[Block]] = []
    load, started_at = MachineLoad(), time.perf_counter()
    while True:
        blocks.append([variant() for variant in (*variants, *reversed(variants))])
        seconds = time.perf_counter() - started_at
        done = Rounds(blocks, seconds, load.others_pct())
        if reason := stop.reason(done):
            return replace(done, stopped_by=reason)


class TakenTime:
    """The time in which threads of this process were ready to run, but others had the cores."""

    def __init__(self) -> None:
        self._waited_s: dict[int, float] = {}  # of threads that have ended, too
        self.is_known = bool(thread_times())

    def seconds(self) -> float:
        """Returns the time taken so far from all threads."""
        self._waited_s |= {thread: waited_s for thread, (_, waited_s) in thread_times().items()}
        return sum(self._waited_s.values())
