"""The time that other processes took from a measurement, and what of it counts nevertheless."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from cl_train.measure.timed_step import TimedStep

MOST_TAKEN = 0.02  # of a step's time
LEAST_QUIET_ROUNDS = 4


class TakenTime:
    """The time in which threads of this process were ready to run and others had the cores; known
    on Linux only.
    """

    def __init__(self) -> None:
        # Nanoseconds running, nanoseconds waiting, slices.
        self._files = list(Path("/proc/self/task").glob("*/schedstat"))
        self.is_known = bool(self._files)

    def seconds(self) -> float:
        """So far, of all threads that existed at the start."""
        return 1e-9 * sum(int(file.read_text().split()[1]) for file in self._files)


class Block(NamedTuple):
    """The median step of a block, and the share of its time that other processes took."""

    seconds: float
    taken_share: float


def timed_block(step: TimedStep, steps: int, others: TakenTime) -> Block:
    """Time `steps` steps, on a CPU without those from which other processes took time.

    With one thread that time is subtracted instead; with several, what one of them waits for a
    core may or may not delay the others. A GPU does not wait for a core.
    """
    if step.workload.device.type != "cpu":
        return Block(median(step.block_times_s(steps)), 0.0)
    all_s, shares = [], []
    for _ in range(steps):
        taken_before_s = others.seconds()
        [step_s] = step.block_times_s(1)
        taken_s = others.seconds() - taken_before_s
        if torch.get_num_threads() == 1:
            step_s = max(step_s - taken_s, 0.1 * step_s)
            taken_s = 0.0
        all_s.append(step_s)
        shares.append(taken_s / step_s)
    quiet_s = [s for s, share in zip(all_s, shares, strict=True) if share <= MOST_TAKEN]
    return Block(median(quiet_s or all_s), 0.0 if quiet_s else median(shares))


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
