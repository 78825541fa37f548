"""The slowest rank of a window, from the times of all ranks."""

import pytest
import torch
from torch import nn

from cl_train.system.distributed import Dist
from cl_train.training.rank_times import own_times, slowest_rank


def test_the_slowest_rank_is_the_one_with_most_compute_and_wait_together() -> None:
    compute_and_wait = torch.tensor([[100.0, 90.0, 110.0], [0.0, 40.0, 5.0]], dtype=torch.float64)
    record = slowest_rank(compute_and_wait, step_ms=160.0)
    assert (record["slowest_rank"], record["slowest_rank_ms"], record["median_rank_ms"]) == (1, 130.0, 115.0)
    assert record["slowest_rank_data_wait_pct"] == pytest.approx(25.0)


def test_one_process_has_no_slowest_rank() -> None:
    times = own_times(nn.Linear(1, 1), 3.0, 1, Dist(0, 1, torch.device("cpu")))
    assert times.shape == (2, 1) and slowest_rank(times, 10.0) == {}
