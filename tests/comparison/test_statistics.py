"""Statistics with known answers."""

import math
import random

import pytest

from cl_train.comparison.statistics import Interval, interval_of_rounds, interval_of_runs, student_t, verdict_of


def correlated_windows(rng: random.Random, count: int, noise: float, phi: float = 0.7) -> list[float]:
    """Log speeds with first-order autocorrelation `phi` and standard deviation `noise`."""
    values = [rng.gauss(0, noise)]
    for _ in range(count - 1):
        values.append(phi * values[-1] + rng.gauss(0, noise * math.sqrt(1 - phi * phi)))
    return values


def simulated_runs(
    rng: random.Random, effect: float, repeats: int, noise: float, between: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Windows of A B B A ... runs under drift; `between` processes, `effect` on log speed of B."""
    sides: dict[str, list[list[float]]] = {"A": [], "B": []}
    drift = 0.0
    for repeat in range(repeats):
        for side in "AB" if repeat % 2 == 0 else "BA":
            offset = rng.gauss(0, between) + (effect if side == "B" else 0.0)
            run = []
            for value in correlated_windows(rng, 30, noise):
                drift += rng.gauss(0, 0.001)
                run.append(math.exp(6 + value + drift + offset))
            sides[side].append(run)
    return sides["A"], sides["B"]


def test_interval_of_rounds_is_the_t_interval() -> None:
    interval = interval_of_rounds([0.1, 0.2, 0.3, 0.4])
    half = 3.182 * math.sqrt(1 / 60) / 2  # stdev of the four is sqrt(1/60)
    assert interval.ratio == pytest.approx(math.exp(0.25))
    assert interval.low == pytest.approx(math.exp(0.25 - half))
    assert interval.high == pytest.approx(math.exp(0.25 + half))
    assert interval.n == 4


def test_one_round_gives_no_verdict() -> None:
    interval = interval_of_rounds([0.3])
    assert (interval.low, interval.high) == (0.0, math.inf)
    assert verdict_of(interval) == "no_difference"


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        (Interval(1.05, 1.02, 1.08, 3), "faster"),
        (Interval(0.95, 0.92, 0.98, 3), "slower"),
        (Interval(1.05, 0.99, 1.12, 3), "no_difference"),
        (Interval(1.005, 1.001, 1.009, 9), "no_difference"),  # beyond noise, but too small to matter
    ],
)
def test_verdicts(interval: Interval, verdict: str) -> None:
    assert verdict_of(interval) == verdict


def test_a_constant_ratio_is_found_exactly() -> None:
    baseline = [[100.0] * 8] * 3
    interval = interval_of_runs(baseline, [[120.0] * 8] * 3)
    assert interval.ratio == pytest.approx(1.2)
    assert interval.low > 1.15, "only the spread between processes, which is always included"


def test_one_repeat_is_wider_than_three() -> None:
    rng = random.Random(0)
    one = interval_of_runs(*simulated_runs(rng, 0.0, 1, 0.01, 0.01))
    three = interval_of_runs(*simulated_runs(rng, 0.0, 3, 0.01, 0.01))
    assert one.width > 1.3 * three.width
    assert one.width > 0.06, "two runs on a drifting machine cannot resolve less than a few percent"


def test_correlated_windows_widen_the_interval() -> None:
    steady = [[100.0, 101.0] * 20]
    correlated = [[100.0] * 10 + [101.0] * 10 + [102.0] * 10 + [103.0] * 10]
    assert interval_of_runs(correlated, correlated).width > 1.3 * interval_of_runs(steady, steady).width


def test_equal_sides_have_no_difference_and_planted_differences_are_found() -> None:
    """Rates over simulated sweeps of five repeats, with drift, autocorrelated windows and 1 % between processes."""
    rng = random.Random(1)

    def verdicts(effect: float, trials: int) -> list[str]:
        return [verdict_of(interval_of_runs(*simulated_runs(rng, effect, 5, 0.01, 0.01))) for _ in range(trials)]

    assert sum(verdict != "no_difference" for verdict in verdicts(0.0, 200)) <= 20
    assert verdicts(math.log(0.97), 100).count("slower") >= 80
    assert verdicts(math.log(0.90), 100).count("slower") == 100


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042)])
def test_student_t(degrees: int, quantile: float) -> None:
    assert student_t(degrees) == pytest.approx(quantile, rel=0.003)


def test_runs_that_are_too_short_or_have_no_partner_are_refused() -> None:
    with pytest.raises(ValueError, match="windows"):
        interval_of_runs([[1.0] * 3], [[1.0] * 3])
    with pytest.raises(ValueError, match="number"):
        interval_of_runs([[1.0] * 4], [])
