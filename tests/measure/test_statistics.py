"""Statistics with known answers, and simulated sweeps of equal and of different sides."""

import math
from collections import Counter

import numpy as np
import pytest

from cl_train.measure.statistics import (
    SMALLEST_SPREAD,
    Interval,
    error_of_look,
    interval_of_rounds,
    interval_of_runs,
    repeats_to_decide,
    seconds_to_decide,
    student_t,
    verdict_of,
)
from cl_train.sweeps.plan import FIRST_LOOK

VERDICTS = ("faster", "slower", "no_difference", "inconclusive")
REPEATS = (1, 2, 3, 5)
SPREADS = (0.005, 0.03, 0.05)  # between processes, of log speed


def verdicts(repeats, spread, ratio, trials, noise=0.01, windows=30, drift=0.0):
    """The percentage of each verdict in simulated sweeps A B B A ... of `repeats` runs per side, B
    at `ratio`.

    Windows have first-order autocorrelation 0.9 and standard deviation `noise` (log speed), and the
    machine a random walk of `drift` per window through the whole sweep.
    """
    rng = np.random.default_rng(0)
    shape, phi = (trials, repeats, 2, windows), 0.9
    log_speed = rng.normal(0, noise, shape)
    for index in range(1, windows):
        log_speed[..., index] *= math.sqrt(1 - phi**2)
        log_speed[..., index] += phi * log_speed[..., index - 1]
    log_speed += rng.normal(0, drift, (trials, 2 * repeats * windows)).cumsum(1).reshape(shape)
    log_speed[:, 1::2] = log_speed[:, 1::2, ::-1]  # the second repeat ran B A
    log_speed += rng.normal(0, spread, (trials, repeats, 2, 1)) + np.log([1.0, ratio])[:, None]
    runs = np.exp(log_speed).tolist()
    found = Counter(
        verdict_of(interval_of_runs(*([pair[i] for pair in sweep] for i in (0, 1))))
        for sweep in runs
    )
    return {name: 100 * found[name] / trials for name in VERDICTS}


def test_a_difference_of_five_percent_is_found_with_three_repeats():
    assert verdicts(3, 0.01, 0.95, 300)["slower"] >= 80


@pytest.mark.slow
@pytest.mark.parametrize("conditions", [{}, {"noise": 0.05, "windows": 10}, {"drift": 0.001}])
def test_the_error_rates_in_docs_comparison(conditions):
    rates = {
        (n, spread): verdicts(n, spread, 1.0, 2000, **conditions)
        for spread in SPREADS
        for n in REPEATS
    }
    assert max(found["faster"] + found["slower"] for found in rates.values()) <= 6, rates


def test_the_interval_of_rounds_is_the_t_interval():
    ratios = [math.exp(log) for log in (0.1, 0.2, 0.3, 0.4)]
    interval = interval_of_rounds(ratios)
    half = 3.182446 * math.sqrt(1 / 60) / 2  # stdev of the four is sqrt(1/60)
    expected = (math.exp(0.25), math.exp(0.25 - half), math.exp(0.25 + half), 4)
    assert (interval.ratio, interval.low, interval.high, interval.n) == pytest.approx(expected)
    one = interval_of_rounds(ratios[:1])
    # One round gives no verdict, and two that have little in common no interval.
    assert (one.low, one.high, verdict_of(one)) == (0.0, math.inf, "inconclusive")
    for unknown in (one, interval_of_rounds([1e-3, 1.0])):
        assert unknown.to_dict()["ci95"] is None and str(unknown).endswith("x [interval unknown]")
    assert interval_of_rounds([14.0, 16.0]).to_dict()["ci95"] is not None


@pytest.mark.parametrize(
    ("low", "ratio", "high", "verdict"),
    [
        (1.02, 1.05, 1.08, "faster"),
        (0.92, 0.95, 0.98, "slower"),
        (1.0, 1.05, 1.11, "inconclusive"),
        (0.5, 1.0, 2.0, "inconclusive"),
        (0.98, 1.0, 1.04, "inconclusive"),
        (0.975, 1.0, 1.025, "no_difference"),
        (1.001, 1.005, 1.009, "no_difference"),  # beyond noise, but too small to matter
    ],
)
def test_verdicts(low, ratio, high, verdict):
    assert verdict_of(Interval(ratio, low, high, 3)) == verdict


@pytest.mark.parametrize(
    ("baseline", "candidate", "repeats"),
    [
        ([100, 101], [120, 121], 4),  # decided already: what the next look would need
        ([100, 104, 102], [106, 109, 104], 6),
        ([100, 160], [101, 159], None),
        ([100], [110], 4),  # the spread of one run per side is assumed
        ([100], [103], 14),
    ],
)
def test_the_repeats_that_decide_are_even(baseline, candidate, repeats):
    sides = [[[float(speed)] * 8 for speed in side] for side in (baseline, candidate)]
    assert repeats_to_decide(sides[0], sides[1]) == repeats


def test_quantiles_of_t_agree_with_tables():
    """Of 2.5, 0.5 and 0.05 % on a side; Fisher and Yates 1963."""
    tables = {1: (12.706, 63.657, 636.62), 2: (4.303, 9.925, 31.599), 4: (2.776, 4.604, 8.610)}
    tables |= {10: (2.228, 3.169, 4.587), 30: (2.042, 2.750, 3.646), 120: (1.980, 2.617, 3.373)}
    for degrees, quantiles in tables.items():
        found = [student_t(degrees, error) for error in (0.05, 0.01, 0.001)]
        assert found == pytest.approx(quantiles, rel=2e-3), degrees
    assert student_t(1) > student_t(1.5) > student_t(2), "degrees need not be whole"


def normal(rng, spread, shape):
    return rng.normal(0, spread, shape)


def with_a_tail(rng, spread, shape):
    """Now and then slow; the mean is that of the other side."""
    return spread - rng.exponential(spread, shape)


def sequential_verdicts(spreads, ratio, sweeps=2000, max_repeats=12, draws=(normal, normal)):
    """Percent of each verdict of sweeps with repeats=auto, and the mean number of repeats."""
    rng, shape = np.random.default_rng(0), (sweeps, max_repeats)
    logs = [draw(rng, spread, shape) for draw, spread in zip(draws, spreads, strict=True)]
    logs[1] += math.log(ratio)
    looks = range(FIRST_LOOK, max_repeats + 1, 2)
    verdicts, used = np.full(sweeps, "inconclusive", object), np.full(sweeps, max_repeats)
    for count in looks:
        means = [side[:, :count].mean(1) for side in logs]
        # As interval_of_runs, for all sweeps at once.
        variances = [np.maximum(SMALLEST_SPREAD**2, s[:, :count].var(1, ddof=1)) for s in logs]
        degrees = (count - 1) * sum(variances) ** 2 / sum(v**2 for v in variances)
        quantiles = [student_t(round(value, 1), error_of_look(len(looks))) for value in degrees]
        half, centre = quantiles * np.sqrt(sum(variances) / count), means[1] - means[0]
        for sweep in np.flatnonzero(verdicts == "inconclusive"):
            ends = (centre[sweep], centre[sweep] - half[sweep], centre[sweep] + half[sweep])
            verdict = verdict_of(Interval(*map(math.exp, ends), count))
            if verdict != "inconclusive":
                verdicts[sweep], used[sweep] = verdict, count
    return {name: 100 * float((verdicts == name).mean()) for name in VERDICTS}, float(used.mean())


EQUAL, UNEQUAL = (0.005, 0.01, 0.02, 0.03, 0.05, 0.08), ((0.01, 0.05), (0.005, 0.08), (0.02, 0.08))


@pytest.mark.parametrize(
    "spreads",
    [*((spread, spread) for spread in EQUAL), *UNEQUAL, *(pair[::-1] for pair in UNEQUAL)],
)
def test_sequential_looks_err_in_five_percent_at_most(spreads):
    """The table in docs/comparison.md."""
    equal, repeats = sequential_verdicts(spreads, 1.0)
    small, repeats_of_small = sequential_verdicts(spreads, 1.05)
    large, repeats_of_large = sequential_verdicts(spreads, 1.15)
    row = spreads, equal, repeats, small, repeats_of_small, large, repeats_of_large
    print(row)
    assert equal["faster"] + equal["slower"] <= 5, row
    assert small["slower"] + small["no_difference"] <= 1 and large["faster"] >= 85, row


@pytest.mark.parametrize(("share", "jump"), [(0.5, 0.1), (0.5, 0.15), (0.3, 0.15), (0.1, 0.2)])
def test_processes_of_two_speeds_do_not_make_more_errors(share, jump):
    """The next row of the table: memory placement and hyperthreads make modes."""

    def slower_sometimes(rng, spread, shape):
        return rng.normal(0, 0.01, shape) - jump * (rng.random(shape) < share)

    equal, repeats = sequential_verdicts((0.0, 0.0), 1.0, draws=(slower_sometimes,) * 2)
    print(share, jump, equal, repeats)
    assert equal["faster"] + equal["slower"] <= 5


def test_a_long_tail_on_one_side_makes_more_errors():
    """As docs/comparison.md says; on both sides it makes none."""
    for draws, least, most in (((with_a_tail,) * 2, 0, 5), ((with_a_tail, normal), 5, 15)):
        equal, _ = sequential_verdicts((0.08, 0.08 if least == 0 else 0.02), 1.0, draws=draws)
        print(equal)
        assert least <= equal["faster"] + equal["slower"] <= most


@pytest.mark.parametrize(
    ("baseline", "candidate", "ratio", "half"),
    [
        # The variances of two values each are log(1.4)^2 / 2 and log(1.5)^2 / 2.
        (
            [100.0, 140.0],
            [120.0, 180.0],
            math.sqrt(1.2 * 180 / 140),
            student_t(1.93) * math.hypot(0.336472, 0.405465) / 2,  # Welch's degrees
        ),
        ([100.0] * 2, [120.0] * 2, 1.2, student_t(2) * 0.04),  # perhaps of one mode each
        # runs that happen to be alike
        ([100.0] * 3, [120.0] * 3, 1.2, 2.776 * 0.01 * math.sqrt(2 / 3)),
        ([100.0], [120.0], 1.2, 1.96 * 0.05 * math.sqrt(2)),  # one run per side: processes differ
    ],
)
def test_the_interval_of_runs_is_the_t_interval(baseline, candidate, ratio, half):
    sides = ([[speed] * 8 for speed in side] for side in (baseline, candidate))
    interval = interval_of_runs(*sides)
    assert interval.ratio == pytest.approx(ratio)
    assert math.log(interval.high / interval.low) / 2 == pytest.approx(half, abs=1e-4)


def test_one_uneven_run_per_side_widens_the_interval():
    uneven = [[100.0] * 10 + [103.0] * 10 + [106.0] * 10 + [109.0] * 10]
    even = [[100.0] * 8]
    assert interval_of_runs(uneven, uneven).width > 1.3 * interval_of_runs(even, even).width


def test_the_time_that_decides_follows_from_the_interval():
    assert seconds_to_decide(Interval(1.06, 1.06 / 1.10, 1.06 * 1.10, 8), 10.0) == pytest.approx(
        10 * (math.log(1.10) / (math.log(1.06) - 0.01)) ** 2
    )
    assert seconds_to_decide(Interval(1.06, 1.05, 1.07, 8), 10.0) == 10.0
    assert seconds_to_decide(Interval(1.0, 0.0, math.inf, 1), 10.0) == math.inf
