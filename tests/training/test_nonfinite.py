"""When a run stops or skips, and the batch size that it suggests."""

import math

import pytest

from cl_train.training.nonfinite import (
    NonFinitePolicy,
    NonFiniteStep,
    TrainingFault,
    check_loss_scale,
    check_skipped_share,
    find_nonfinite_steps,
)

NAN = NonFiniteStep(7, 1, "the loss is nan")


def test_trouble_is_found_at_its_step() -> None:
    losses, skipped = [1.0, math.nan, 2.0, math.inf, 1.0], [0.0, 1.0, 1.0, 0.0, 0.0]
    assert find_nonfinite_steps(losses, skipped, first_step=10, rank=3, scales_loss=False) == [
        NonFiniteStep(11, 3, "the loss is nan"),
        NonFiniteStep(12, 3, "a gradient is not finite"),
        NonFiniteStep(13, 3, "the loss is inf"),
    ]
    # With loss scaling an overflowing gradient is business as usual.
    found = find_nonfinite_steps(losses, skipped, first_step=10, rank=3, scales_loss=True)
    assert [trouble.step for trouble in found] == [11, 13]


def test_stop_names_step_and_rank_and_the_first_cause() -> None:
    others = [NonFiniteStep(7, 0, "a gradient is not finite"), NonFiniteStep(8, 0, "the loss is nan"), NAN]
    with pytest.raises(TrainingFault, match=r"the loss is nan at step 7 on rank 1.*optim\.lr"):
        NonFinitePolicy("stop", 10).check(others)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_nothing_wrong_goes_on(policy: str) -> None:
    NonFinitePolicy(policy, 0).check([])


def test_skip_counts_steps_not_ranks_and_stops_past_the_limit() -> None:
    policy = NonFinitePolicy("skip", 2)
    policy.check([NonFiniteStep(1, 0, "the loss is nan"), NonFiniteStep(1, 1, "the loss is nan")])
    policy.check([NonFiniteStep(5, 0, "the loss is inf")])
    with pytest.raises(TrainingFault, match=r"3 .*max_nonfinite=2"):
        policy.check([NonFiniteStep(9, 0, "the loss is nan")])


def test_loss_scale_floor() -> None:
    check_loss_scale(1.0, 1.0, 5)
    with pytest.raises(TrainingFault, match=r"fell to 0\.5 at step 5.*precision=bf16"):
        check_loss_scale(0.5, 1.0, 5)


def test_a_run_that_skipped_most_steps_did_not_train() -> None:
    check_skipped_share(10, 20)
    check_skipped_share(5, 5)  # the scale is still being found
    with pytest.raises(TrainingFault, match="11 of 20"):
        check_skipped_share(11, 20)
