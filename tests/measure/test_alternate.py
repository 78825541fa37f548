"""Variants in turns: the order of blocks, the rounds that count, the end, false verdicts."""

import itertools
import math
from collections import Counter
from unittest.mock import Mock

import numpy as np
import pytest

from cl_train.measure import alternate as driver
from cl_train.measure.alternate import Block, Rounds, Stop, alternate, rounds_that_count
from cl_train.measure.statistics import verdict_of


def test_blocks_alternate_until_the_interval_is_narrow_or_time_is_over():
    blocks = Mock(**{"a.return_value": Block(0.02), "b.return_value": Block(0.01)})
    done = alternate([blocks.a, blocks.b], Stop())
    assert [name for name, *_ in blocks.mock_calls] == ["a", "b", "b", "a"] * 8
    assert (len(done), done.stopped_by, done.times_s(1)) == (8, "target_ci", [0.01] * 16)
    assert [ratio.ratio for ratio in done.intervals()] == pytest.approx([1.0, 2.0])
    uneven = Mock(side_effect=map(Block, [1.0, 1.0]))
    done = alternate([uneven, lambda: Block(1.0)], Stop(time_limit_s=0.0))
    assert (len(done), done.stopped_by, done.times_s(0)) == (1, "time_limit", [1.0, 1.0])
    # Slower by 1 % from block to block: it cancels within a round.
    slower = (Block(0.01 * 1.01**n) for n in range(1000))
    done = alternate([lambda: next(slower)] * 3, Stop())
    assert [ratio.ratio for ratio in done.intervals()] == pytest.approx([1.0] * 3)
    assert done.ratios(2) == pytest.approx([1.0] * len(done))


@pytest.mark.parametrize(
    ("taken_shares", "kept"),
    [
        ([0.01, 0.5, 0.0, 0.02, 0.01, 0.3], [0, 2, 3, 4]),
        ([0.06, 0.03, 0.05, 0.01, 0.04, 0.07, 0.08, 0.02, 0.09, 0.1], [1, 2, 3, 4, 7]),
        ([0.06, 0.03, 0.9], [0, 1, 2]),
    ],
)
def test_disturbances_leave_half_of_the_rounds_at_least(taken_shares, kept):
    assert rounds_that_count(taken_shares) == kept


def test_rounds_that_lost_more_than_five_percent_do_not_end_a_measurement():
    cases = ((0.0, 0, "target_ci"), (0.06, 6, ""), (None, None, "target_ci"))
    for taken_share, lost_pct, reason in cases:
        rounds = Rounds([[Block(1.0, taken_share)] * 4] * 8, 1.0, others_pct=60.0)
        assert rounds.undisturbed().lost_pct == lost_pct
        assert Stop().reason(rounds) == reason


@pytest.mark.parametrize(
    ("spread", "ratio", "right", "at_most_wrong"),
    [
        (0.005, 1.0, "no_difference", 0),
        (0.02, 1.0, "no_difference", 5),
        (0.05, 1.0, "", 5),
        (0.02, 1.05, "faster", 0),
        (0.05, 0.8, "slower", 0),
    ],
)
def test_a_benchmark_errs_rarely(spread, ratio, right, at_most_wrong, monkeypatch):
    """Simulated: at most 32 rounds, each of one second."""
    rng, clock = np.random.default_rng(0), itertools.count()
    monkeypatch.setattr(driver.time, "perf_counter", lambda: float(next(clock)))
    found: Counter[str] = Counter()
    for _ in range(200):
        logs = rng.normal(math.log(ratio), spread, 32)
        blocks = (Block(math.exp(-log)) for log in np.repeat(logs, 2))
        done = alternate([lambda: Block(1.0), blocks.__next__], Stop(time_limit_s=32))
        found[verdict_of(done.intervals()[1])] += 1
    wrong = {"faster", "slower", "no_difference"} - {right or "no_difference"}
    assert 100 * sum(found[name] for name in wrong) / 200 <= at_most_wrong, found
    assert not right or found[right] >= 190, found
