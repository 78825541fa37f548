"""Each GPU with each build of torch: the device and precision that a run takes, or the one line that it ends with."""

import logging
from pathlib import Path

import pytest
import torch

from cl_train.config.schema import ConfigError
from cl_train.step.precision import precision_warnings, resolve_precision
from cl_train.system import distributed
from cl_train.system.distributed import choose_device

CUDA = torch.device("cuda", 0)
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
CUDA_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
WITH_PTX = [*CUDA_12_6, "compute_90"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    def plug_in(capability: tuple[int, int], built: list[str], name: str = "GPU") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)

    return plug_in


@pytest.mark.parametrize(
    ("capability", "built", "precision"),
    [
        ((7, 0), CUDA_12_6, "fp16"),  # V100
        ((7, 5), CUDA_13, "fp16"),  # T4
        ((8, 0), CUDA_13, "fp16"),  # A100
        ((8, 9), CUDA_13, "fp16"),  # L4: the kernels for 8.6
        ((9, 0), CUDA_13, "fp16"),  # H100, H200
        ((12, 0), CUDA_13, "fp16"),
        ((12, 0), WITH_PTX, "fp16"),  # compiled when they are needed
        ((6, 1), CUDA_12_6, "fp32"),  # GTX 1080
        ((9, 4), ["gfx90a", "gfx942"], "fp16"),  # a build for AMD decides itself
        ((7, 0), [], "fp16"),
    ],
)
def test_a_gpu_with_kernels_is_used(gpu, capability: tuple[int, int], built: list[str], precision: str) -> None:
    gpu(capability, built)
    for name in ("auto", "cuda"):
        assert choose_device(name) == CUDA
    assert resolve_precision("auto", CUDA).name == precision
    assert bool(precision_warnings(resolve_precision("bf16", CUDA), CUDA)) == (capability < (8, 0))


OLDER, NEWER = "install torch's build for CUDA 12.6", "install a newer torch"


@pytest.mark.parametrize(
    ("capability", "built", "advice"),
    [((7, 0), CUDA_13, OLDER), ((6, 1), CUDA_13, OLDER), ((7, 2), ["sm_75", "sm_80"], OLDER),
     ((10, 0), CUDA_12_6, NEWER), ((13, 0), CUDA_13, NEWER)],
)  # fmt: skip
def test_a_gpu_without_kernels_is_refused_with_the_build_to_install(
    gpu, capability: tuple[int, int], built: list[str], advice: str
) -> None:
    gpu(capability, built, "Tesla V100-SXM2-16GB")
    for name in ("auto", "cuda"):
        with pytest.raises(ConfigError) as caught:
            choose_device(name)
        message = str(caught.value)
        assert "Tesla V100-SXM2-16GB" in message and f"{capability[0]}.{capability[1]}" in message
        assert built[0] in message and advice in message and len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("there", "cuda", "reason"),
    [
        (True, "13.2", "too old for CUDA 13.2"),
        (True, None, "build without CUDA"),
        (False, "13.2", "no usable CUDA device"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    there: bool,
    cuda: str,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(distributed, "GPU_FILE", tmp_path if there else tmp_path / "missing")
    with caplog.at_level(logging.WARNING):
        assert choose_device("auto").type == choose_device("cpu").type == "cpu"
        assert choose_device("auto", warn=False).type == "cpu"
    assert [reason in message for message in caplog.messages] == [True] * there
    with pytest.raises(ConfigError, match=reason):
        choose_device("cuda")
