"""When a run stops, and what it says."""

import math

import pytest
import torch

from cl_train.training.nonfinite import (
    NonFinitePolicy,
    TrainingFault,
    Trouble,
    check_loss_scale,
    check_skipped_share,
    dry_run,
    find_trouble,
    largest_that_fits,
)

CPU = torch.device("cpu")
NAN = Trouble(7, 1, "the loss is nan")


def test_trouble_is_found_at_its_step() -> None:
    losses, skipped = [1.0, math.nan, 2.0, math.inf, 1.0], [0.0, 1.0, 1.0, 0.0, 0.0]
    assert find_trouble(losses, skipped, first_step=10, rank=3, scales_loss=False) == [
        Trouble(11, 3, "the loss is nan"),
        Trouble(12, 3, "a gradient is not finite"),
        Trouble(13, 3, "the loss is inf"),
    ]
    # With loss scaling an overflowing gradient is business as usual.
    found = find_trouble(losses, skipped, first_step=10, rank=3, scales_loss=True)
    assert [trouble.step for trouble in found] == [11, 13]


def test_stop_names_step_and_rank_and_the_first_cause() -> None:
    others = [Trouble(7, 0, "a gradient is not finite"), Trouble(8, 0, "the loss is nan"), NAN]
    with pytest.raises(TrainingFault, match=r"the loss is nan at step 7 on rank 1.*optim\.lr"):
        NonFinitePolicy("stop", 10).decide(others)


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_nothing_wrong_goes_on(policy: str) -> None:
    assert NonFinitePolicy(policy, 0).decide([]) == "go on"


def test_skip_counts_steps_not_ranks_and_stops_past_the_limit() -> None:
    policy = NonFinitePolicy("skip", 2)
    assert policy.decide([Trouble(1, 0, "the loss is nan"), Trouble(1, 1, "the loss is nan")]) == "go on"
    assert policy.decide([Trouble(5, 0, "the loss is inf")]) == "go on"
    with pytest.raises(TrainingFault, match="3 such steps, max_nonfinite=2"):
        policy.decide([Trouble(9, 0, "the loss is nan")])


def test_rollback_once_per_step_then_skips_it() -> None:
    policy = NonFinitePolicy("rollback", 10)
    assert policy.decide([NAN]) == "roll back"
    assert policy.decide([NAN]) == "go on"
    assert policy.decide([Trouble(20, 0, "the loss is nan")]) == "roll back"


def test_loss_scale_floor() -> None:
    check_loss_scale(1.0, 1.0, 5)
    with pytest.raises(TrainingFault, match=r"fell to 0\.5 at step 5.*precision=bf16"):
        check_loss_scale(0.5, 1.0, 5)


def test_a_run_that_skipped_most_steps_did_not_train() -> None:
    check_skipped_share(10, 20)
    check_skipped_share(5, 5)  # the scale is still being found
    with pytest.raises(TrainingFault, match="11 of 20"):
        check_skipped_share(11, 20)


def limited(fits: int, tried: list[int]) -> object:
    def try_step(size: int) -> None:
        tried.append(size)
        if size > fits:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB. GPU 0 has ...")

    return try_step


@pytest.mark.parametrize(
    ("fits", "found"), [(255, 192), (200, 192), (130, 128), (100, 96), (9, 8), (3, 3), (1, 1), (0, 0)]
)
def test_the_suggested_batch_was_tried(fits: int, found: int) -> None:
    tried: list[int] = []
    assert largest_that_fits(limited(fits, tried), 256, CPU) == found  # type: ignore[arg-type]
    assert tried == sorted(set(tried), reverse=True) and (found in tried or found == 0)


def test_dry_run_says_batch_and_what_fits_and_is_silent_where_all_is_well() -> None:
    dry_run(lambda size: None, 64, CPU)
    with pytest.raises(TrainingFault, match=r"batch_size=64 does not fit.*batch_size=48 was tried and fits"):
        dry_run(limited(50, []), 64, CPU)  # type: ignore[arg-type]
    with pytest.raises(TrainingFault, match="not even batch_size=1 fits"):
        dry_run(limited(0, []), 64, CPU)  # type: ignore[arg-type]
