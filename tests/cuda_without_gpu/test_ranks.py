"""DDP and process groups as they are on GPUs, without one."""

from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from cl_train.system import distributed
from cl_train.system.distributed import Dist
from cl_train.training import build
from tests.cuda_without_gpu.fake_cuda import CUDA
from tests.networks import small


class Ddp:
    """torch's since 2.15, as far as its arguments matter here."""

    def __init__(
        self, model: nn.Module, *, forward_sync_buffers: bool = True, **words: Any
    ) -> None:
        self.forward_sync_buffers, self.words = forward_sync_buffers, words


class Counting(nn.Module):
    """Has a buffer that all ranks must share, unlike the statistics of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))


@pytest.mark.parametrize(("part", "broadcasts"), [(nn.ReLU, False), (Counting, True)])
def test_statistics_of_batchnorm_are_not_broadcast_in_each_step(
    part: type[nn.Module], broadcasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "check_ranks_agree", lambda *_: None)
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", Ddp)
    model = nn.Sequential(small(3), part())
    ddp: Any = build.wrap_in_ddp(model, Dist(0, 2, CUDA), static_graph=False)
    assert ddp.forward_sync_buffers is broadcasts
    assert ddp.words["gradient_as_bucket_view"] and ddp.words["device_ids"] == [CUDA]


def test_gloo_names_a_hung_rank_before_nccl_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Mock()
    monkeypatch.setattr(distributed, "adopt_srun", lambda: None)
    monkeypatch.setattr(distributed, "is_srun_task", lambda: False)
    monkeypatch.setattr(distributed, "read_launch", lambda: Mock(local_rank=0))
    monkeypatch.setattr(distributed, "end_with_parent", lambda signum: None)
    monkeypatch.setattr(distributed, "choose_device", lambda name, rank: CUDA)
    monkeypatch.setattr(distributed, "_store_prefix", str)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "distributed", Mock(group=Mock(WORLD=world)))
    torch.distributed.rendezvous.return_value = iter([(Mock(), 0, 2)])  # type: ignore[attr-defined]
    with distributed.processes("cuda", 30.0):
        timeout = torch.distributed.init_process_group.call_args.kwargs["timeout"]  # type: ignore[attr-defined]
        assert timeout == timedelta(seconds=30)
        world._get_backend.assert_called_once_with(CUDA)
        world._get_backend()._set_default_timeout.assert_called_once_with(timedelta(seconds=90))
