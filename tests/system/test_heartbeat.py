"""Which rank a failed collective is blamed on. Real ranks are killed and stopped in tests/faults."""

import pytest
import torch

from cl_train.system import heartbeat
from cl_train.system.distributed import Dist
from cl_train.system.heartbeat import RankFault, find_silent_ranks, is_lost_connection, watch_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ([5, 5, 5], [9, 5, 9], "rank 1 is dead or hangs"),
        ([5, 5, 5], [9, 5, 5], "rank 1, rank 2 are dead or hang"),
        ([5, 5, 5], [9, 9, 9], "a rank hangs although its process is alive"),
    ],
)
def test_the_rank_whose_counter_stands_still_is_named(
    before: list[int], after: list[int], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "read_counters", lambda world_size, readings: readings.extend([before, after]))
    assert find_silent_ranks(Dist(0, 3, CPU)) == named


@pytest.mark.parametrize(("rank", "named"), [(1, "rank 0 is dead or hangs"), (0, "the ranks' store does not respond")])
def test_if_the_store_does_not_answer_rank_0_is_named(rank: int, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "read_counters", lambda world_size, readings: None)
    assert find_silent_ranks(Dist(rank, 2, CPU)) == named


def test_only_errors_of_collectives_count_as_lost_connections() -> None:
    assert is_lost_connection(
        RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:545] Connection reset by peer")
    )
    assert is_lost_connection(RuntimeError("Application timeout caused pair closure"))
    assert is_lost_connection(torch.distributed.DistNetworkError("x"))
    assert not is_lost_connection(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_single_process_is_not_watched() -> None:
    with pytest.raises(RuntimeError, match="gloo") as caught, watch_ranks(Dist(0, 1, CPU)):
        raise RuntimeError("gloo")
    assert not isinstance(caught.value, RankFault)
