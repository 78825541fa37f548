"""Confidence intervals of speed ratios, without torch. docs/comparison.md has their error rates.

Of rounds of alternating blocks A B B A in one process (`paired.py`), and of repeated runs, each in its own process,
with windows inside each run (a sweep). Both use the log of the speed, which treats a ratio and its inverse alike.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

# The speeds of two equal models in one process differ because of memory placement, so a ratio this close to 1 counts as
# no difference, however narrow its interval is.
SMALLEST_DIFFERENCE = 0.01

# Prior of `interval_of_runs`: the standard deviation of log speed between processes that run the same command on a
# quiet machine, and its weight in degrees of freedom. With many repeats the measured spread dominates.
PROCESS_SPREAD = 0.01
PRIOR_DEGREES = 4
SEGMENTS = 4
MIN_WINDOWS = SEGMENTS

_EXACT_T = {1: 12.706, 2: 4.303, 3: 3.182}


@dataclass(frozen=True)
class Interval:
    """The speed ratio candidate / baseline with its 95 % confidence interval, from `n` pairs."""

    ratio: float
    low: float
    high: float
    n: int

    @property
    def width(self) -> float:
        return self.high - self.low

    def __str__(self) -> str:
        return f"{self.ratio:.3f}x [{self.low:.3f}, {self.high:.3f}]"

    def to_dict(self) -> dict[str, Any]:
        """The keys of records; an unbounded interval, of one round, is null."""
        ci95 = [round(self.low, 4), round(self.high, 4)] if math.isfinite(self.high) else None
        return {"ratio": round(self.ratio, 4), "ci95": ci95, "n": self.n}


def student_t(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution, within 0.3 % (Abramowitz and Stegun 1964, 26.7.5)."""
    assert degrees >= 1
    if degrees in _EXACT_T:
        return _EXACT_T[degrees]
    z = 1.959964
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / degrees**power for power, term in enumerate(terms))


def interval_of_rounds(log_ratios: Sequence[float]) -> Interval:
    """The t interval over rounds, each log(candidate / baseline) of one round A B B A; unbounded for one round."""
    centre = statistics.fmean(log_ratios)
    count = len(log_ratios)
    if count < 2:
        return Interval(math.exp(centre), 0.0, math.inf, count)
    half = student_t(count - 1) * statistics.stdev(log_ratios) / math.sqrt(count)
    return _interval(centre, half, count)


def interval_of_runs(baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]]) -> Interval:
    """The interval over repeated runs; `baseline[k]` and `candidate[k]` are the windows (images/s) of pair k.

    Windows of one run are correlated: a run that starts in a slow period is slow throughout. The interval therefore
    depends on the number of runs. As in a moderated t test (Smyth 2004) two variances of a pair are pooled: within runs
    (of the log medians of four segments, *not* divided by four, plus `PROCESS_SPREAD` squared; `PRIOR_DEGREES` degrees
    of freedom) and between the pairs. One pair has the first only, hence a wide interval.

    Raises ValueError: unequal numbers of runs, or a run with fewer than `MIN_WINDOWS` windows.
    """
    if len(baseline) != len(candidate) or not baseline:
        raise ValueError("both sides need the same number of runs")
    if min(len(windows) for windows in [*baseline, *candidate]) < MIN_WINDOWS:
        raise ValueError(f"a run needs at least {MIN_WINDOWS} windows after warm-up")
    log_ratios = [_log_median(b) - _log_median(a) for a, b in zip(baseline, candidate, strict=True)]
    count = len(log_ratios)
    within = statistics.fmean([_segment_variance(run) for run in [*baseline, *candidate]])
    prior = 2 * PROCESS_SPREAD**2 + 2 * within
    between = statistics.variance(log_ratios) if count > 1 else 0.0
    degrees = PRIOR_DEGREES + count - 1
    pooled = (PRIOR_DEGREES * prior + (count - 1) * between) / degrees
    half = student_t(degrees) * math.sqrt(pooled / count)
    return _interval(statistics.fmean(log_ratios), half, count)


def _interval(centre: float, half: float, count: int) -> Interval:
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(centre + half), count)


def _log_median(windows: Sequence[float]) -> float:
    return math.log(statistics.median(windows))


def _segment_variance(windows: Sequence[float]) -> float:
    bounds = [len(windows) * index // SEGMENTS for index in range(SEGMENTS + 1)]
    return statistics.variance([_log_median(windows[a:b]) for a, b in pairwise(bounds)])


def verdict_of(interval: Interval) -> str:
    """`faster`, `slower` or `no_difference`, for the candidate."""
    if interval.low > 1 and interval.ratio >= 1 + SMALLEST_DIFFERENCE:
        return "faster"
    if interval.high < 1 and interval.ratio <= 1 - SMALLEST_DIFFERENCE:
        return "slower"
    return "no_difference"
