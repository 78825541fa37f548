"""Both layouts of sound models agree in every precision; planted layout bugs are found and named."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cl_train.comparison import parity
from cl_train.comparison.parity import Check, ParityReport, check_parity
from cl_train.step.precision import Precision, resolve_precision

CPU = torch.device("cpu")


class RawView(nn.Module):
    """Reads its input's memory as if it were contiguous: right in one layout, a permutation in the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        return torch.as_strided(x, (n, c, h, w), (c * h * w, h * w, w, 1))


class RawViewBackward(torch.autograd.Function):
    """Passes images on, and permutes the gradient where it is not contiguous."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(gradient, gradient.shape, torch.empty(gradient.shape).stride()).clone()


class Backward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RawViewBackward.apply(x)


class Block(nn.Module):
    """The bug is in this module's own forward, between two of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(torch.as_strided(x, x.shape, torch.empty(x.shape).stride()))


def network(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
    head = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(stem, middle, head, nn.Flatten(), nn.Linear(16, 10))


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp16_o2"])
def test_a_sound_model_agrees(name: str) -> None:
    model = network(nn.Identity())
    before = copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()
    report = check_parity(model, image_size=12, precision=resolve_precision(name, CPU), device=CPU)
    assert report.passed, str(report)
    assert report.first_divergence is None
    assert "both layouts agree" in str(report)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_a_view_of_raw_memory_is_named(name: str) -> None:
    report = check_parity(
        network(nn.Sequential(nn.ReLU(), RawView())), image_size=12, precision=resolve_precision(name, CPU), device=CPU
    )
    assert not report.passed
    assert report.first_divergence == "1.1 (RawView)"
    assert "channels_last computes something else, first in 1.1 (RawView)" in str(report)
    assert report.failed[0].channels_last_error > 0.3


def test_code_between_layers_is_put_on_the_module_that_holds_it() -> None:
    report = check_parity(network(Block()), image_size=12, precision=resolve_precision("fp32", CPU), device=CPU)
    assert report.first_divergence == "1 (Block), in its own forward, before it calls 1.second"


def test_a_bug_in_backward_alone_is_named_by_the_layer_that_gets_the_wrong_gradient() -> None:
    report = check_parity(network(Backward()), image_size=12, precision=resolve_precision("fp32", CPU), device=CPU)
    assert not report.passed
    assert report.first_divergence == "0.1 (BatchNorm2d), in backward (its forward agrees)"


def test_nan_is_a_divergence() -> None:
    class NanInChannelsLast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.is_contiguous() else x * float("nan")

    report = check_parity(
        network(NanInChannelsLast()), image_size=12, precision=resolve_precision("fp32", CPU), device=CPU
    )
    assert report.first_divergence == "1 (NanInChannelsLast)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_name", ["resnet18", "mobilenet_v2", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5"]
)
def test_models_of_the_zoo_agree(model_name: str) -> None:
    from cl_train.models.registry import build_model

    torch.manual_seed(0)
    model = build_model(model_name, num_classes=100)
    report = check_parity(model, image_size=64, precision=resolve_precision("fp32", CPU), device=CPU, steps=2)
    assert report.passed, str(report)


@pytest.mark.parametrize(("what", "tries"), [("gradient of 0.weight", 3), ("output of 0", 1)])
def test_other_images_are_tried_where_gradients_alone_differ(
    monkeypatch: pytest.MonkeyPatch, what: str, tries: int
) -> None:
    """An activation on a kink flips for few images; a wrong output is wrong whatever the images."""
    seen = []

    def compare_sides(model: nn.Module, images: torch.Tensor, *rest: object) -> ParityReport:
        seen.append(images)
        check = Check(what, 1, 1e-6, 1e-2, 1e-5)
        return ParityReport(False, "fp32", 1, "0", check, [check])

    monkeypatch.setattr(parity, "_compare_sides", compare_sides)
    report = check_parity(nn.Conv2d(3, 8, 3), image_size=8, precision=Precision("fp32"), device=torch.device("cpu"))
    assert not report.passed and len(seen) == tries
    assert all(not torch.equal(seen[0], other) for other in seen[1:])
