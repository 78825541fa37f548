"""How a silent rank is named. Real ranks, killed and stopped, are in tests/faults."""

import pytest
import torch

from cl_train.system import heartbeat
from cl_train.system.distributed import Dist
from cl_train.system.heartbeat import RankFault, is_lost_connection, name_silent, watch_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ([5, 5, 5], [9, 5, 9], "rank 1 is dead or hangs"),
        ([5, 5, 5], [9, 5, 5], "rank 1, rank 2 are dead or hang"),
        ([5, 5, 5], [9, 9, 9], "a rank hangs at its own work, though its process is alive"),
    ],
)
def test_the_rank_that_does_not_count_up_is_named(
    before: list[int], after: list[int], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "listen", lambda world_size, heard: heard.extend([before, after]))
    assert name_silent(Dist(0, 0, 3, CPU)) == named


@pytest.mark.parametrize(("rank", "named"), [(1, "rank 0 is dead or hangs"), (0, "the ranks' store does not answer")])
def test_a_store_that_does_not_answer_is_rank_0_s(rank: int, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "listen", lambda world_size, heard: None)
    assert name_silent(Dist(rank, rank, 2, CPU)) == named


def test_errors_of_a_rank_s_own_work_are_left_alone() -> None:
    assert is_lost_connection(
        RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:545] Connection reset by peer")
    )
    assert is_lost_connection(torch.distributed.DistNetworkError("x"))
    assert not is_lost_connection(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_single_process_is_not_watched() -> None:
    with pytest.raises(RuntimeError, match="gloo") as caught, watch_ranks(Dist(0, 0, 1, CPU)):
        raise RuntimeError("gloo")
    assert not isinstance(caught.value, RankFault)
