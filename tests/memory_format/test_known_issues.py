"""Each reason to doubt channels_last is given where it holds, with its source, and nowhere else."""

from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from cl_train.memory_format.known_issues import MEASURE, known_issues

AMPERE = {"device": "cuda", "precision_name": "fp16"}


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


def weight_standardised() -> nn.Module:
    class StdConv2d(nn.Conv2d):
        pass

    return nn.Sequential(StdConv2d(3, 8, 3))


CASES: list[tuple[str, Any, dict[str, Any], str, str]] = [
    ("mlp", lambda: nn.Linear(2, 2), {}, "no convolutions", "convert_conv2d_weight_memory_format"),
    (
        "vit",
        lambda: nn.Sequential(nn.Conv2d(3, 8, 16, 16)),
        {},
        "patch embeddings (0)",
        "convert_conv2d_weight_memory_format",
    ),
    ("fp32", lambda: nn.Conv2d(3, 8, 3), {"precision_name": "fp32"}, "fp32 does not use", "pytorch/pytorch#44943"),
    (
        "gn",
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)),
        {},
        "GroupNorm (1)",
        "pytorch/pytorch#111824",
    ),
    ("in", lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8)), {}, "InstanceNorm (1)", "#111824"),
    ("ws", weight_standardised, {}, "weights of 0 ", "pytorch/pytorch#121158"),
    ("grouped", lambda: nn.Conv2d(8, 8, 3, groups=2), {}, "more than one channel per group", "pytorch/pytorch#34977"),
    ("grey", lambda: nn.Conv2d(1, 8, 3), {}, "one channel", "pytorch/pytorch#24090"),
    ("mps", lambda: nn.Conv2d(3, 8, 3), {"device": "mps"}, "MPS", "pytorch/pytorch#141009"),
]


@pytest.mark.parametrize(
    ("build", "given", "reason", "source"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_each_doubt(build: Any, given: dict[str, Any], reason: str, source: str) -> None:
    lines = known_issues(build(), **{**AMPERE, **given})
    assert len(lines) == 1
    assert reason in lines[0] and source in lines[0]
    assert lines[0].endswith(MEASURE)


def test_a_gpu_without_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    (line,) = known_issues(nn.Conv2d(3, 8, 3), **AMPERE)
    assert "capability 6.1" in line and "convert_conv2d_weight" in line


def test_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.0")
    (line,) = known_issues(nn.Conv2d(3, 8, 3), **AMPERE)
    assert "pytorch/pytorch#63617" in line


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "shufflenet_v2_x1_0"])
def test_models_that_gain_are_not_doubted(name: str) -> None:
    assert known_issues(torchvision.models.get_model(name), **AMPERE) == []
    assert known_issues(torchvision.models.get_model(name), device="cpu", precision_name="fp32") == []


@pytest.mark.slow
def test_real_models_are_named() -> None:
    assert "layer1.0.conv2" in known_issues(torchvision.models.resnext50_32x4d(), **AMPERE)[0]
    assert "conv_proj" in known_issues(torchvision.models.vit_b_32(), **AMPERE)[0]
