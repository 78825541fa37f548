"""The traffic model against a derivation by hand, for ResNet-50 at 224 px in fp16 on an H200."""

import pytest
import torch
import torchvision
from torch import nn

from benchmarks.roofline import H200, Machine, roofline


def build(name: str) -> nn.Module:
    with torch.device("meta"):
        return torchvision.models.get_model(name)


@pytest.mark.parametrize(("fused", "megabytes", "images_per_s"), [(False, 471, 9370), (True, 356, 12070)])
def test_resnet50_as_derived_layer_by_layer(fused: bool, megabytes: float, images_per_s: float) -> None:
    found = roofline(build("resnet50"), H200, fused=fused)
    assert found.megabytes == pytest.approx(megabytes, rel=0.01)
    assert found.images_per_s == pytest.approx(images_per_s, rel=0.01)
    assert found.gigaflops == pytest.approx(24.3, rel=0.005)


def test_a_small_network_by_hand() -> None:
    """conv 3->8 on 4 x 4, BatchNorm, ReLU: 48 numbers in, 128 out, of 2 bytes each; no gradient of the images."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    eager, fused = (roofline(model, H200, fused=fused, image_size=4) for fused in (False, True))
    assert eager.megabytes == pytest.approx(2e-6 * (2 * (48 + 128) + (3 + 5) * 128 + (2 + 3) * 128))
    assert fused.megabytes == pytest.approx(2e-6 * (2 * (48 + 128) + (3 + 5) * 128))
    assert eager.gigaflops == pytest.approx(1e-9 * 2 * (2 * 128 * 3 * 9))


def test_bytes_limit_a_slow_memory_and_operations_a_slow_processor() -> None:
    model = build("resnet18")
    slow_memory, slow_processor = Machine(1e18, 1e9), Machine(1e9, 1e18)
    cost = roofline(model, slow_memory)
    assert cost.images_per_s == pytest.approx(1e9 / (cost.megabytes * 1e6))
    assert roofline(model, slow_processor).images_per_s == pytest.approx(1e9 / (cost.gigaflops * 1e9))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "squeezenet1_1", "shufflenet_v2_x0_5"])
def test_fusing_never_moves_more(name: str) -> None:
    eager, fused = (roofline(build(name), H200, fused=fused).megabytes for fused in (False, True))
    assert eager >= fused > 0


def test_a_model_that_cannot_be_traced_is_named() -> None:
    class Branching(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images if images.sum() > 0 else -images

    with pytest.raises(ValueError, match="Branching"):
        roofline(Branching(), H200)
