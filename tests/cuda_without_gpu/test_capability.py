"""The device and precision that a run takes, or the line that it ends with; forks that use it."""

from contextlib import nullcontext
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from cl_train.config.validation import checked_config
from cl_train.errors import ConfigError
from cl_train.step.precision import resolve_precision
from cl_train.system import distributed
from cl_train.system.distributed import choose_device
from tests.cuda_without_gpu.fake_cuda import CUDA
from tests.faults.forkserver import Forked


def plant_gpus(patch, capability=(9, 0), count=1):
    for name, value in (("is_available", True), ("device_count", count)):
        patch.setattr(torch.cuda, name, lambda value=value: value)
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(
    ("capability", "expected"), [((6, 1), "fp32"), ((7, 5), "fp16"), ((8, 9), "fp16")]
)
def test_the_precision_of_each_gpu(capability, expected, monkeypatch):
    plant_gpus(monkeypatch, capability)
    assert choose_device("auto") == choose_device("cuda") == CUDA
    assert resolve_precision("auto", CUDA).name == expected
    for doubted, cost in (("bf16", "slow"), ("tf32", "the same as fp32")):
        assert (f"{cost} on" in resolve_precision(doubted, CUDA).reason) == (capability < (8, 0))


def test_a_gpu_has_a_number(monkeypatch):
    """Also in the settings and in a run, where it is the current device."""
    current = []
    second = torch.device("cuda", 1)
    plant_gpus(monkeypatch, count=2)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(current.append(device)))
    monkeypatch.setattr(distributed, "read_launch", lambda: None)
    assert choose_device("cuda") == CUDA
    with distributed.processes(checked_config({"device": "cuda:1"}).device) as dist:
        assert [dist.device] == current == [second]
    with pytest.raises(ConfigError, match="there are 2 GPUs"):
        choose_device("cuda:2")
    monkeypatch.setattr(distributed, "read_launch", lambda: Mock(world_size=2))
    of_two_ranks = distributed.processes("cuda:1")
    with pytest.raises(ConfigError, match="one GPU for 2 ranks"), of_two_ranks:
        pass


@pytest.mark.parametrize(
    ("is_there", "cuda", "reason"),
    [
        (True, "13.2", "too old for CUDA 13.2"),
        (True, None, "build without CUDA"),
        (False, "13.2", "can use no GPU"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(
    is_there, cuda, reason, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(distributed, "GPU_FILE", tmp_path if is_there else tmp_path / "missing")
    chosen = [choose_device("auto"), choose_device("cpu"), choose_device("auto", warn=False)]
    assert {device.type for device in chosen} == {"cpu"}
    assert [reason in message for message in caplog.messages] == [True] * is_there
    with pytest.raises(ConfigError, match=reason):
        choose_device("cuda")


FORK = """
import os, torch, cl_train, cl_train.measure.zoo, cl_train.training.loop
for name in cl_train.__all__:
    getattr(cl_train, name)
def is_bad_fork():
    return bool(os.fork() or os._exit(torch.cuda._is_in_bad_fork())) and os.wait()[1] > 0
print(is_bad_fork(), end=" ")
torch.cuda.is_available()  # asks for a device
print(is_bad_fork())
"""


@pytest.mark.slow
def test_forks_can_use_cuda_as_no_import_has_asked_for_it(tmp_path):
    """Such as those of the server of `zoo`, and of launchers in notebooks."""
    done = Forked(partial(exec, FORK, {}), tmp_path / "log")
    assert done.wait() == 0 and done.output() == "False True\n", done.output()
