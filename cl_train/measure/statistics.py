"""Confidence intervals of speed ratios: of repeated runs (a sweep), and of blocks in one process.

They are computed from the log of the speed, which treats a ratio and its inverse alike.
docs/comparison.md has their error rates. No torch here.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

NO_DIFFERENCE = 0.03  # an interval within this distance of 1 has the verdict "no_difference"
# Equal models in one process differ by memory placement: a ratio this close to 1, or an interval
# that comes half as close, is neither faster nor slower.
SMALLEST_DIFFERENCE = 0.01

# Standard deviation of log speed between processes of the same command: the least that is assumed,
# however alike a few runs happen to be, and what is assumed for a single run per side.
SMALLEST_SPREAD = 0.01
SMALLEST_SPREAD_OF_TWO = 0.04  # both runs may be from fast, or both from slow, processes
UNKNOWN_SPREAD = 0.05
WIDEST = 10.0  # times the ratio; an interval with a higher bound is called unknown
LOOK_COST = 0.8  # exponent, see `error_of_look`
MAX_REPEATS = 100  # the most that are recommended
MIN_WINDOWS = 4  # of a run: one per segment, see `interval_of_runs`

HOST_BOUND_PCT = 90.0  # of a step's time, until the host has launched it
HOST_BOUND = "the host limits the speed, not the GPU: use cuda_graph=true or a larger batch_size"
ERROR = 0.05  # of an interval, and of all looks at a growing sweep together


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

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The interval; None: unknown, from one round, or from a few that had little in common."""
        return (self.low, self.high) if self.high <= WIDEST * self.ratio else None

    def __str__(self) -> str:
        bounds = "interval unknown" if self.bounds is None else f"{self.low:.3f}, {self.high:.3f}"
        return f"{self.ratio:.3f}x [{bounds}]"

    def to_dict(self) -> dict[str, Any]:
        ci95 = self.bounds and [round(bound, 4) for bound in self.bounds]
        return {"ratio": round(self.ratio, 4), "ci95": ci95, "n": self.n}


@functools.lru_cache(maxsize=4096)
def student_t(degrees: float, error: float = ERROR) -> float:
    """Returns the value that `|t|` of Student's distribution exceeds with probability `error`,
    within 0.1 %; `degrees` need not be whole.
    """
    # With t = sqrt(degrees) tan(angle) the density is cos(angle) ** (degrees - 1). Wanted is the
    # angle beyond which a share `error` of its integral lies. With many degrees nothing lies beyond
    # t = 8.
    count = 2000
    largest = min(math.pi / 2, 8 / math.sqrt(degrees))
    width = largest / count
    cells = [math.cos(largest - (index + 0.5) * width) ** (degrees - 1) for index in range(count)]
    left = error * sum(cells)
    for index, cell in enumerate(cells):  # from the largest angle downwards
        if cell >= left:
            return math.sqrt(degrees) * math.tan(largest - (index + left / cell) * width)
        left -= cell
    raise AssertionError("error must be below 1")


def interval_of_runs(
    baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]], looks: int = 1
) -> Interval:
    """Returns the interval over repeated runs; `baseline[k]` and `candidate[k]` are the windows
    (images/s) of repeat k.

    Windows of one run are correlated, so the sample is the log medians of the runs: Welch's
    interval for two means. `looks`: see `error_of_look`. With one run per side the variance is the
    square of `UNKNOWN_SPREAD` plus three times the variance of the log medians of the run's four
    segments, as neighbouring segments are alike.
    """
    assert len(baseline) == len(candidate) > 0
    centre, sides = _centre(baseline, candidate)
    count = len(baseline)
    if count > 1:
        half = _half_width(_variances(sides, count), count, error_of_look(looks))
        return _interval(centre, half, count)

    segments = []  # log medians of the four segments of each run
    for windows in (*baseline, *candidate):
        bounds = [len(windows) * index // MIN_WINDOWS for index in range(MIN_WINDOWS + 1)]
        segments.append(_log_medians([windows[a:b] for a, b in itertools.pairwise(bounds)]))
    within = 3 * statistics.fmean(map(statistics.variance, segments))
    variance = UNKNOWN_SPREAD**2 + within
    # Satterthwaite 1946
    degrees = min(1e6, 2 * (MIN_WINDOWS - 1) * (variance / max(within, 1e-12)) ** 2)
    return _interval(centre, student_t(degrees) * math.sqrt(2 * variance), count)


def interval_of_rounds(ratios: Sequence[float]) -> Interval:
    """Returns the t interval over the speed ratios of rounds; unbounded for one round."""
    logs, count, half = [math.log(ratio) for ratio in ratios], len(ratios), math.inf
    if count > 1:
        half = student_t(count - 1) * statistics.stdev(logs) / math.sqrt(count)
    return _interval(statistics.fmean(logs), half, count)


def error_of_look(looks: int) -> float:
    """Returns the error of each of `looks` intervals, which end with the first that decides, so
    that all together err in 5 %; a little under Pocock's constants (1977).
    """
    return ERROR / looks**LOOK_COST


def _centre(
    baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]]
) -> tuple[float, list[list[float]]]:
    """Returns the log of the ratio, and the log medians of the runs of each side."""
    sides = [_log_medians(baseline), _log_medians(candidate)]
    return statistics.fmean(sides[1]) - statistics.fmean(sides[0]), sides


def _log_medians(runs: Sequence[Sequence[float]]) -> list[float]:
    return [math.log(statistics.median(windows)) for windows in runs]


def _variances(sides: Sequence[Sequence[float]], count: int) -> list[float]:
    """Returns the variance of each side's `count` runs; two runs are little evidence of a small
    one.
    """
    smallest = SMALLEST_SPREAD_OF_TWO if count == 2 else SMALLEST_SPREAD
    return [max(smallest**2, statistics.variance(logs)) for logs in sides]


def _half_width(variances: Sequence[float], count: int, error: float) -> float:
    """Returns half of Welch's interval (Biometrika 1947) of two means of `count` values each."""
    total = sum(variances)
    degrees = (count - 1) * total**2 / sum(variance**2 for variance in variances)
    return student_t(round(degrees, 2), error) * math.sqrt(total / count)


def _interval(centre: float, half: float, count: int) -> Interval:
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(centre + half), count)


def are_host_bound(host_pct: Iterable[float | None]) -> bool:
    """Whether the host limits all sides, so that their ratio says nothing about the device."""
    return all((pct or 0.0) >= HOST_BOUND_PCT for pct in host_pct)


def verdict_of(interval: Interval, *, is_host_bound: bool = False) -> str:
    """Returns the verdict on the candidate: `faster`, `slower`, `no_difference` (an equivalence
    test: the whole interval is within 3 %; never of the host's speed) or `inconclusive`.
    """
    if interval.low > 1 + SMALLEST_DIFFERENCE / 2 and interval.ratio >= 1 + SMALLEST_DIFFERENCE:
        return "faster"
    if interval.high < 1 - SMALLEST_DIFFERENCE / 2 and interval.ratio <= 1 - SMALLEST_DIFFERENCE:
        return "slower"
    is_within = interval.low >= 1 - NO_DIFFERENCE and interval.high <= 1 + NO_DIFFERENCE
    return "no_difference" if is_within and not is_host_bound else "inconclusive"


def repeats_to_decide(
    baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]], looks: int = 1
) -> int | None:
    """Returns the even number of runs per side after which this ratio with this spread has a
    verdict; None: more than `MAX_REPEATS`.
    """
    centre, sides = _centre(baseline, candidate)
    variances = [((SMALLEST_SPREAD + UNKNOWN_SPREAD) / 2) ** 2] * 2  # assumed for one run per side
    if len(baseline) > 1:
        variances = _variances(sides, len(baseline) + 1)
    for count in range(len(baseline) + 1, MAX_REPEATS + 1):
        half = _half_width(variances, count, error_of_look(looks))
        if count % 2 == 0 and verdict_of(_interval(centre, half, count)) != "inconclusive":
            return count
    return None


def seconds_to_decide(interval: Interval, seconds: float) -> float:
    """Returns the seconds of rounds that probably lead to a verdict, after `seconds` of them led to
    `interval`, which has none; inf: no time is enough.
    """
    difference, half = abs(math.log(interval.ratio)), math.log(interval.high / interval.ratio)
    margin = max(difference - SMALLEST_DIFFERENCE, NO_DIFFERENCE - difference)
    return seconds * max(1.0, half / margin) ** 2 if margin > 0 else math.inf
