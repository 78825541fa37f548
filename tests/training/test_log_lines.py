"""When a run stops for non-finite steps, and what it says."""

import math

import pytest

from cl_train.training.log_lines import bad_steps, check_bad_steps, check_skipped_share
from cl_train.training.progress import TrainingFault

NAN = (7, False, 1, "the loss is nan")


def test_bad_steps_are_found_at_their_step() -> None:
    rows = [(loss, 0, 0, skipped) for loss, skipped in ((1, 0), (math.nan, 1), (2, 1), (math.inf, 0), (1, 0))]
    assert list(bad_steps(rows, first_step=10, rank=3, scales_loss=False)) == [
        (11, False, 3, "the loss is nan"),
        (12, True, 3, "a gradient is not finite"),
        (13, False, 3, "the loss is inf"),
    ]
    # With loss scaling an overflowing gradient is business as usual.
    assert [step for step, *_ in bad_steps(rows, first_step=10, rank=3, scales_loss=True)] == [11, 13]


def test_the_first_cause_is_named_and_a_limit_counts() -> None:
    others = [(7, True, 0, "a gradient is not finite"), (8, False, 0, "the loss is nan"), NAN]
    with pytest.raises(TrainingFault, match=r"the loss is nan at step 7 on rank 1.*optim\.lr"):
        check_bad_steps(others, 2, 0)
    check_bad_steps([], 0, 0)
    check_bad_steps([NAN], 2, 2)
    with pytest.raises(TrainingFault, match=r"3 .*max_nonfinite=2"):
        check_bad_steps([NAN], 3, 2)


def test_a_run_that_skipped_most_steps_did_not_train() -> None:
    check_skipped_share(10, 20)
    check_skipped_share(5, 5)  # the scale is still being found
    with pytest.raises(TrainingFault, match="11 of 20"):
        check_skipped_share(11, 20)
