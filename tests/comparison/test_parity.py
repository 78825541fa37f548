"""Both layouts of sound models agree in every precision; planted layout bugs are found and named."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cl_train.comparison.parity import check_parity
from cl_train.config.schema import ConfigError
from tests.conftest import CPU_PRECISIONS


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


@pytest.mark.parametrize("precision", CPU_PRECISIONS)
def test_a_sound_model_agrees(precision: str) -> None:
    model = network(nn.Identity())
    before = copy.deepcopy(model.state_dict())
    generators = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    report = check_parity(model, image_size=12, precision=precision)
    assert report.passed, str(report)
    assert report.first_divergence is None and report.worst is not None
    assert json.loads(json.dumps(report.to_dict()))["passed"] is True
    assert random.getstate() == generators[0]
    assert np.array_equal(np.random.get_state()[1], generators[1])
    assert torch.equal(torch.get_rng_state(), generators[2])
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_view_of_raw_memory_is_named(precision: str) -> None:
    report = check_parity(network(nn.Sequential(nn.ReLU(), RawView())), image_size=12, precision=precision)
    assert report.passed is False
    assert report.first_divergence == "1.1 (RawView)"
    assert "1.1 (RawView)" in str(report)
    assert report.failed[0].channels_last_error > 0.3
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["failed"][0]["what"] == "output of 1.1"


def test_code_between_layers_is_attributed_to_the_module_that_holds_it() -> None:
    report = check_parity(network(Block()), image_size=12)
    assert report.first_divergence is not None and report.first_divergence.startswith("1 (Block)")
    assert "1.second" in report.first_divergence


def test_a_difference_in_backward_alone_is_attributed_to_the_layer_with_the_wrong_gradient() -> None:
    report = check_parity(network(Backward()), image_size=12)
    assert not report.passed
    assert report.first_divergence is not None and report.first_divergence.startswith("0.1 (BatchNorm2d)")


def test_nan_is_a_divergence() -> None:
    class NanInChannelsLast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.is_contiguous() else x * float("nan")

    report = check_parity(network(NanInChannelsLast()), image_size=12)
    assert report.first_divergence == "1 (NanInChannelsLast)"
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["failed"][0]["channels_last_error"] is None


# --- random models ----------------------------------------------------------------------------------------------------


class Random(nn.Module):
    """Draws its own numbers; with `factor`, channels_last input is multiplied: the planted error."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor], factor: float = 1.0) -> None:
        super().__init__()
        self.draw, self.factor = draw, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.draw(x)
        return x if x.is_contiguous() else x * self.factor


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.2, True),
    "dropout2d": lambda x: F.dropout2d(x, 0.2, True),
    "rand_like": lambda x: x + torch.rand_like(x),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.8),
    "randn": lambda x: x + torch.randn(x.shape).to(x.dtype),
    "python": lambda x: x * random.random(),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("draw", list(DRAWS))
def test_random_models_agree_and_planted_errors_in_them_are_found(draw: str, precision: str) -> None:
    sound = check_parity(network(Random(DRAWS[draw])), image_size=12, precision=precision)
    assert sound.passed, str(sound)
    planted = check_parity(network(Random(DRAWS[draw], 1.2)), image_size=12, precision=precision)
    assert planted.passed is False and planted.first_divergence == "1 (Random)"


def test_numbers_from_outside_torch_cannot_be_checked() -> None:
    source = random.SystemRandom()
    report = check_parity(network(Random(lambda x: x * source.random())), image_size=12)
    assert report.passed is None and "cannot be checked" in str(report)


# --- tolerance --------------------------------------------------------------------------------------------------------


def test_a_gradient_that_is_zero_in_theory_is_no_divergence() -> None:
    """A bias before BatchNorm: its gradient is a sum that cancels, so that nothing but rounding is left of it."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16))
    assert check_parity(model, image_size=24).passed


def test_an_error_of_a_kernel_that_float64_does_not_have_is_found() -> None:
    class WrongInFp32(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.is_contiguous() or x.dtype == torch.float64 else x.flip(1)

    report = check_parity(network(WrongInFp32()), image_size=12)
    assert report.passed is False and report.first_divergence == "1 (WrongInFp32)"
    assert report.failed[0].computed_in == "fp32"


# --- size and memory --------------------------------------------------------------------------------------------------


class OneSize(nn.Module):
    """As a transformer: built for images of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 126 * 126, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        torch._assert(images.shape[-1] == 128, "wrong size")
        return self.head(self.conv(images).flatten(1))


@pytest.mark.parametrize(
    ("model", "given", "batch"),
    [
        (OneSize(), {"image_size": 128}, "[4, 3, 128, 128]"),
        (network(nn.Identity()), {}, "[4, 3, 96, 96]"),
        (network(nn.Identity()), {"image_size": 32, "batch_size": 3}, "[3, 3, 32, 32]"),
    ],
)
def test_small_images_where_the_model_takes_them(model: nn.Module, given: dict[str, Any], batch: str) -> None:
    report = check_parity(model, **given)
    assert report.passed and report.batch == batch


# --- modes, and checks that could not fail ----------------------------------------------------------------------------


class WrongInMode(nn.Module):
    def __init__(self, training: bool) -> None:
        super().__init__()
        self.wrong_in_training = training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if x.stride(1) == 1 and self.training == self.wrong_in_training else x


@pytest.mark.parametrize("training", [False, True])
def test_both_modes_are_checked_unless_one_is_asked_for(training: bool) -> None:
    model = network(WrongInMode(training))
    report = check_parity(model, image_size=12)
    assert report.passed is False
    assert report.first_divergence == "1 (WrongInMode)" + ("" if training else ", in eval mode")
    assert check_parity(model, image_size=12, mode="train" if training else "infer").passed is False
    assert check_parity(model, image_size=12, mode="infer" if training else "train").passed is True
    with pytest.raises(ConfigError, match="mode=eval"):
        check_parity(model, image_size=12, mode="eval")


@pytest.mark.parametrize(
    ("model", "given", "reason"),
    [
        (nn.Linear(4, 4), {"batch": torch.randn(2, 4)}, "no input and no weight"),
        (nn.Conv2d(1, 1, 1), {"image_size": (1, 8, 8)}, "no input and no weight"),
        (network(nn.Softplus(beta=float("nan"))), {"image_size": 12}, "nothing that is finite"),
    ],
)
def test_a_check_that_could_not_fail_has_not_passed(model: nn.Module, given: dict[str, Any], reason: str) -> None:
    report = check_parity(model, **given)
    assert report.passed is None and reason in str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_name", ["resnet18", "mobilenet_v2", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5", "googlenet"]
)
def test_models_of_the_zoo_agree(model_name: str) -> None:
    from cl_train.models.sources import build_model

    torch.manual_seed(0)
    report = check_parity(build_model(model_name, num_classes=100), image_size=64)
    assert report.passed, str(report)
