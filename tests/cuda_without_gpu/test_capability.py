"""Each GPU with each build of torch: the device and precision that a run takes, or the one line that it ends with."""

from pathlib import Path

import pytest
import torch

from cl_train.config.schema import ConfigError
from cl_train.step.precision import resolve_precision
from cl_train.system import distributed
from cl_train.system.distributed import choose_device

CUDA = torch.device("cuda", 0)
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
CUDA_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
REFUSED = "install a newer torch"


@pytest.mark.parametrize(
    ("capability", "built", "expected"),
    [
        ((7, 0), CUDA_12_6, "fp16"),  # V100
        ((7, 5), CUDA_13, "fp16"),  # T4
        ((8, 0), CUDA_13, "fp16"),  # A100
        ((8, 9), CUDA_13, "fp16"),  # L4: the kernels for 8.6
        ((9, 0), CUDA_13, "fp16"),  # H100, H200
        ((12, 0), CUDA_13, "fp16"),
        ((12, 0), [*CUDA_12_6, "compute_90"], "fp16"),  # compiled when they are needed
        ((6, 1), CUDA_12_6, "fp32"),  # GTX 1080
        ((9, 4), ["gfx90a", "gfx942"], "fp16"),  # a build for AMD decides itself
        ((7, 0), [], "fp16"),
        ((7, 0), CUDA_13, REFUSED),
        ((6, 1), CUDA_13, REFUSED),
        ((7, 2), ["sm_75", "sm_80"], REFUSED),
        ((10, 0), CUDA_12_6, REFUSED),
        ((13, 0), CUDA_13, REFUSED),
    ],
)
def test_a_gpu_with_kernels_is_used_and_another_refused_with_the_build_to_install(
    capability: tuple[int, int], built: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"is_available": True, "device_count": 1, "get_arch_list": built}
    found |= {"get_device_capability": capability, "get_device_name": "Tesla V100-SXM2-16GB"}
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    for name in ("auto", "cuda"):
        if expected != REFUSED:
            assert choose_device(name) == CUDA
            assert resolve_precision("auto", CUDA).name == expected
            assert ("slow on" in resolve_precision("bf16", CUDA).reason) == (capability < (8, 0))
            continue
        with pytest.raises(ConfigError) as caught:
            choose_device(name)
        message = str(caught.value)
        assert "Tesla V100-SXM2-16GB" in message and f"{capability[0]}.{capability[1]}" in message
        assert built[0] in message and expected in message and len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("is_there", "cuda", "reason"),
    [(True, "13.2", "too old for CUDA 13.2"), (True, None, "build without CUDA"), (False, "13.2", "no usable CUDA")],
)
def test_a_gpu_that_torch_cannot_use_is_not_passed_over_in_silence(
    is_there: bool, cuda: str, reason: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(distributed, "GPU_FILE", tmp_path if is_there else tmp_path / "missing")
    assert choose_device("auto").type == choose_device("cpu").type == "cpu"
    assert choose_device("auto", warn=False).type == "cpu"
    assert [reason in message for message in caplog.messages] == [True] * is_there
    with pytest.raises(ConfigError, match=reason):
        choose_device("cuda")
