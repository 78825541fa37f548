"""When a run stops for non-finite steps, and what it says. That they are found: test_loop.py, tests/faults."""

import math

import pytest

from cl_train.training.log_lines import check_bad_steps, check_skipped_share
from cl_train.training.progress import TrainingFault

NAN = (7, False, 1, math.nan)


def test_the_first_cause_is_named_and_a_limit_counts() -> None:
    others = [(7, True, 0, 1.0), (8, False, 0, math.nan), NAN]
    with pytest.raises(TrainingFault, match=r"the loss is nan at step 7 on rank 1.*optim\.lr"):
        check_bad_steps(others, 2, 0)
    with pytest.raises(TrainingFault, match="a gradient is not finite at step 7 on rank 0"):
        check_bad_steps(others[:2], 2, 0)
    check_bad_steps([], 0, 0)
    check_bad_steps([NAN], 2, 2)
    with pytest.raises(TrainingFault, match=r"3 .*max_nonfinite=2"):
        check_bad_steps([NAN], 3, 2)


def test_a_run_that_skipped_most_steps_did_not_train() -> None:
    check_skipped_share(10, 20)
    check_skipped_share(5, 5)  # the scale is still being found
    with pytest.raises(TrainingFault, match="11 of 20"):
        check_skipped_share(11, 20)
