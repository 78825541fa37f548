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
from cl_train.memory_format import crashes
from tests.conftest import CPU_PRECISIONS


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork for each check takes longer than the check."""
    monkeypatch.setattr(crashes, "_is_child", True)


def as_if_contiguous(x: torch.Tensor) -> torch.Tensor:
    """The tensor's memory read in contiguous order: right in one layout, a permutation in the other."""
    return torch.as_strided(x, x.shape, torch.empty(x.shape).stride())


class RawView(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return as_if_contiguous(x)


class Backward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.register_hook(lambda gradient: as_if_contiguous(gradient).clone())
        return x


class Block(nn.Sequential):
    """The bug is in this module's own forward, between two of its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](as_if_contiguous(self[0](x)))


class Wrong(nn.Module):
    """`planted` of a channels_last input, of any draws its own random numbers."""

    def __init__(self, planted: Callable[[nn.Module, torch.Tensor], torch.Tensor], draw: Any = lambda x: x) -> None:
        super().__init__()
        self.planted, self.draw = planted, draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.draw(x)
        return x if x.is_contiguous() else self.planted(self, x)


def in_mode(training: bool) -> nn.Module:
    return Wrong(lambda module, x: x * 1.5 if module.training == training else x)


def conv() -> nn.Module:
    return nn.Conv2d(8, 8, 3, padding=1)


def network(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
    head = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(stem, middle, head, nn.Flatten(), nn.Linear(16, 10))


@pytest.mark.parametrize("precision", CPU_PRECISIONS)
def test_a_sound_model_agrees_and_stays_as_it_is(precision: str) -> None:
    model = network(nn.Identity())
    before = copy.deepcopy(model.state_dict())
    generators = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    report = check_parity(model, image_size=12, precision=precision)
    assert report.passed and report.first_divergence is None and report.worst is not None, str(report)
    assert json.loads(json.dumps(report.to_dict()))["passed"] is True
    assert random.getstate() == generators[0] and torch.equal(torch.get_rng_state(), generators[2])
    assert np.array_equal(np.random.get_state()[1], generators[1])
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


@pytest.mark.parametrize(
    ("middle", "precision", "where", "computed_in"),
    [
        (nn.Sequential(nn.ReLU(), RawView()), "fp32", "1.1 (RawView)", "torch.float64"),
        (nn.Sequential(nn.ReLU(), RawView()), "bf16", "1.1 (RawView)", "torch.float64"),
        (Block(conv(), conv()), "fp32", "1 (Block), in the forward code before submodule 1.1", "torch.float64"),
        (Backward(), "fp32", "0.1 (BatchNorm2d), in backward", "torch.float64"),
        (Wrong(lambda _, x: x * float("nan")), "fp32", "1 (Wrong)", "torch.float64"),
        (Wrong(lambda _, x: x if x.dtype == torch.float64 else x.flip(1)), "fp32", "1 (Wrong)", "fp32"),
        (in_mode(training=True), "fp32", "1 (Wrong)", "torch.float64"),
        (in_mode(training=False), "fp32", "1 (Wrong), in eval mode", "torch.float64 in eval mode"),
    ],
)
def test_a_planted_bug_is_named(middle: nn.Module, precision: str, where: str, computed_in: str) -> None:
    report = check_parity(network(middle), image_size=12, precision=precision)
    assert report.passed is False and report.first_divergence is not None
    assert report.first_divergence.startswith(where) and report.first_divergence in str(report)
    assert report.failed[0].computed_in == computed_in and report.failed[0].channels_last_error > 0.3
    error = json.loads(json.dumps(report.to_dict(), allow_nan=False))["failed"][0]["channels_last_error"]
    assert error is None or error > 0.3, "JSON has no infinity"


@pytest.mark.parametrize("training", [False, True])
def test_one_mode_alone_is_checked_if_asked_for(training: bool) -> None:
    model = network(in_mode(training))
    assert check_parity(model, image_size=12, mode="train" if training else "infer").passed is False
    assert check_parity(model, image_size=12, mode="infer" if training else "train").passed is True
    with pytest.raises(ConfigError, match="mode=eval"):
        check_parity(model, image_size=12, mode="eval")


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
    given: dict[str, Any] = {"image_size": 12, "precision": precision}
    sound = check_parity(network(Wrong(lambda _, x: x, DRAWS[draw])), **given)
    planted = check_parity(network(Wrong(lambda _, x: x * 1.2, DRAWS[draw])), **given)
    assert sound.passed, str(sound)
    assert planted.passed is False and planted.first_divergence == "1 (Wrong)"


def test_a_gradient_that_is_zero_in_theory_is_no_divergence() -> None:
    """A bias before BatchNorm: its gradient is a sum that cancels, so that nothing but rounding is left of it."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16))
    assert check_parity(model, image_size=24).passed


ONE_SIZE = nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.Flatten(), nn.Linear(4 * 32 * 32, 10))  # as a transformer


@pytest.mark.parametrize(
    ("model", "given", "batch"),
    [
        (ONE_SIZE, {"image_size": 128}, "[4, 3, 128, 128]"),
        (nn.Conv2d(3, 4, 3, 8), {}, "[4, 3, 96, 96]"),
        (nn.Conv2d(3, 4, 3), {"image_size": 32, "batch_size": 3}, "[3, 3, 32, 32]"),
    ],
)
def test_small_images_where_the_model_takes_them(model: nn.Module, given: dict[str, Any], batch: str) -> None:
    report = check_parity(model, **given)
    assert report.passed and report.batch == batch


OUTSIDE = random.SystemRandom()


@pytest.mark.parametrize(
    ("model", "given", "reason"),
    [
        (nn.Linear(4, 4), {"batch": torch.randn(2, 4)}, "no input and no weight"),
        (nn.Conv2d(1, 1, 1), {"image_size": (1, 8, 8)}, "no input and no weight"),
        (network(nn.Softplus(beta=float("nan"))), {"image_size": 12}, "nothing that is finite"),
        (network(Wrong(lambda _, x: x, lambda x: x * OUTSIDE.random())), {"image_size": 12}, "random numbers"),
    ],
)
def test_a_check_that_could_not_fail_has_not_passed(model: nn.Module, given: dict[str, Any], reason: str) -> None:
    report = check_parity(model, **given)
    assert report.passed is None and reason in str(report) and "cannot be checked" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_name", ["resnet18", "mobilenet_v2", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5", "googlenet"]
)
def test_models_of_the_zoo_agree(model_name: str) -> None:
    from cl_train.models.sources import build_model

    torch.manual_seed(0)
    report = check_parity(build_model(model_name, num_classes=100), image_size=64)
    assert report.passed, str(report)
