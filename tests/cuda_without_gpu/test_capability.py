"""Each GPU with each build of torch: the device and precision that a run takes, or the one line
that it ends with.
"""

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from cl_train.config.schema import ConfigError
from cl_train.config.validation import load
from cl_train.step.precision import resolve_precision
from cl_train.system import distributed
from cl_train.system.distributed import choose_device
from tests.cuda_without_gpu.fake_cuda import CUDA

CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
CUDA_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
REFUSED = "install a newer torch"


@pytest.mark.parametrize(
    ("built", "expected", "capabilities"),
    [
        (
            CUDA_13,
            "fp16",
            [(7, 5), (8, 0), (8, 9), (9, 0), (12, 0)],
        ),  # T4, A100, L4 with the kernels for 8.6, H100
        (CUDA_13, REFUSED, [(6, 1), (7, 0), (7, 2), (13, 0)]),
        (CUDA_12_6, "fp16", [(7, 0)]),  # V100
        (CUDA_12_6, "fp32", [(6, 1)]),  # GTX 1080
        (CUDA_12_6, REFUSED, [(10, 0), (12, 0)]),
        ([*CUDA_12_6, "compute_90"], "fp16", [(12, 0)]),  # compiled when they are needed
        (["gfx90a", "gfx942"], "fp16", [(9, 4)]),  # a build for AMD decides itself
        ([], "fp16", [(7, 0)]),
    ],
)
def test_a_gpu_with_kernels_is_used_and_another_refused_with_the_build_to_install(
    built: list[str],
    expected: str,
    capabilities: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {
        "is_available": True,
        "device_count": 1,
        "get_arch_list": built,
        "get_device_name": "Tesla V100-SXM2-16GB",
    }
    for capability in capabilities:
        for name, value in (found | {"get_device_capability": capability}).items():
            monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
        for name in ("auto", "cuda"):
            if expected != REFUSED:
                assert choose_device(name) == CUDA
                assert resolve_precision("auto", CUDA).name == expected
                for doubted, cost in (("bf16", "slow"), ("tf32", "the same as fp32")):
                    is_doubted = f"{cost} on" in resolve_precision(doubted, CUDA).reason
                    assert is_doubted == (capability < (8, 0))
                continue
            said = (
                r"^Tesla V100-SXM2-16GB"
                rf" .*{capability[0]}\.{capability[1]},.*{built[0]}.*{REFUSED}[^\n]*$"
            )
            with pytest.raises(ConfigError, match=said):
                choose_device(name)


def test_a_gpu_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the settings and in a run, where it is the current device."""
    current: list[object] = []
    for name, value in (("is_available", True), ("device_count", 2), ("get_arch_list", [])):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(current.append(device)))
    monkeypatch.setattr(distributed, "read_launch", lambda: None)
    assert choose_device("cuda:1") == torch.device("cuda", 1) and choose_device("cuda") == CUDA
    with distributed.processes(load({"device": "cuda:1"}).device, 1.0) as dist:
        assert [dist.device] == current == [torch.device("cuda", 1)]
    with pytest.raises(ConfigError, match="device=cuda:2: there are 2 GPUs"):
        choose_device("cuda:2")
    with pytest.raises(ConfigError, match=r"device=gpu: expected auto.cpu.cuda.cuda:N"):
        load({"device": "gpu"})
    monkeypatch.setattr(distributed, "read_launch", lambda: Mock(world_size=2))
    monkeypatch.setattr(distributed, "end_with_parent", lambda signum: None)
    with (
        pytest.raises(ConfigError, match="one GPU for 2 ranks"),
        distributed.processes("cuda:1", 1.0),
    ):
        pass


@pytest.mark.parametrize(
    ("is_there", "cuda", "reason"),
    [
        (True, "13.2", "too old for CUDA 13.2"),
        (True, None, "build without CUDA"),
        (False, "13.2", "no usable CUDA"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(
    is_there: bool, cuda: str, reason: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(distributed, "GPU_FILE", tmp_path if is_there else tmp_path / "missing")
    assert {
        choose_device("auto").type,
        choose_device("cpu").type,
        choose_device("auto", warn=False).type,
    } == {"cpu"}
    assert [reason in message for message in caplog.messages] == [True] * is_there
    with pytest.raises(ConfigError, match=reason):
        choose_device("cuda")
