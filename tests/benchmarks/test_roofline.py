"""The traffic model against a derivation by hand, for ResNet-50 at 224 px in fp16 on an H200."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from benchmarks.roofline import H200, PATTERNS, Machine, roofline, training_kernels


def build(name: str) -> nn.Module:
    with torch.device("meta"):
        return torchvision.models.get_model(name)


@pytest.mark.parametrize(("pattern", "megabytes", "images_per_s"), [("eager", 471, 9370), ("fused", 356, 12070)])
def test_resnet50_as_derived_layer_by_layer(pattern: str, megabytes: float, images_per_s: float) -> None:
    found = roofline(build("resnet50"), H200, pattern=pattern)
    assert found.megabytes == pytest.approx(megabytes, rel=0.01)
    assert found.images_per_s == pytest.approx(images_per_s, rel=0.01)
    assert found.gigaflops == pytest.approx(24.3, rel=0.005)


def test_three_quarters_of_eager_traffic_is_batchnorm_relu_and_addition() -> None:
    kinds = roofline(build("resnet50"), H200).megabytes_by_kind
    expected = {"conv forward": 41.6, "batchnorm forward": 66.7, "relu forward": 38.4, "add forward": 33.1}
    expected |= {"relu backward": 57.7, "batchnorm backward": 111.1, "conv input gradient": 41.8, "pool": 4.8}
    for kind, megabytes in expected.items():
        assert kinds[kind] == pytest.approx(megabytes, rel=0.1 if kind == "pool" else 0.01), kind
    convolutions = sum(value for kind, value in kinds.items() if kind.startswith("conv"))
    assert convolutions / sum(kinds.values()) == pytest.approx(0.26, abs=0.02)


def test_a_small_network_by_hand() -> None:
    """conv 3->8 on 4 x 4, BatchNorm, ReLU: 48 numbers in, 128 out, of 2 bytes each."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    moved = {kernel.name: kernel.bytes / 2 for kernel in training_kernels(model, "eager", image_size=4)}
    assert moved == {
        "0 conv forward": 48 + 128,
        "0 conv weight gradient": 128 + 48,  # and no gradient of the images
        "1 batchnorm forward": 3 * 128,
        "1 batchnorm backward": 5 * 128,
        "2 relu forward": 2 * 128,
        "2 relu backward": 3 * 128,
    }
    flops = sum(kernel.flops for kernel in training_kernels(model, "eager", image_size=4))
    assert flops == 2 * (2 * 128 * 3 * 9)


def test_bytes_limit_a_slow_memory_and_operations_a_slow_processor() -> None:
    model = build("resnet18")
    slow_memory, slow_processor = Machine(1e18, 1e9), Machine(1e9, 1e18)
    cost = roofline(model, slow_memory)
    assert cost.images_per_s == pytest.approx(1e9 / (cost.megabytes * 1e6))
    assert roofline(model, slow_processor).images_per_s == pytest.approx(1e9 / (cost.gigaflops * 1e9))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "squeezenet1_1", "shufflenet_v2_x0_5"])
def test_fusing_never_moves_more(name: str) -> None:
    model = build(name)
    megabytes = [roofline(model, H200, pattern=pattern).megabytes for pattern in PATTERNS]
    assert megabytes == sorted(megabytes, reverse=True) and megabytes[-1] > 0


def test_a_model_that_cannot_be_traced_is_named() -> None:
    class Branching(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images if images.sum() > 0 else -images

    with pytest.raises(ValueError, match="Branching"):
        roofline(Branching(), H200)
