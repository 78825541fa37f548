"""The batch size that is suggested when a batch does not fit into memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cl_train.training.nonfinite import TrainingFault
from cl_train.training.preflight import check_batch_fits, largest_that_fits

CPU = torch.device("cpu")


def limited(fits: int, tried: list[int]) -> Callable[[int], None]:
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
    assert largest_that_fits(limited(fits, tried), 256, CPU) == found
    assert tried == sorted(set(tried), reverse=True) and (found in tried or found == 0)


def test_a_batch_that_does_not_fit_is_named_with_one_that_does() -> None:
    check_batch_fits(lambda size: None, 64, CPU)
    with pytest.raises(TrainingFault, match=r"batch_size=64.*batch_size=48"):
        check_batch_fits(limited(50, []), 64, CPU)
    with pytest.raises(TrainingFault, match="not even batch_size=1 fits"):
        check_batch_fits(limited(0, []), 64, CPU)
