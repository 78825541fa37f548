"""Both layouts of sound models agree in every precision; planted layout bugs are found and named.

Unusual models: tests/training/test_odd_models.py.
"""

import json
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cl_train.errors import ConfigError
from cl_train.measure.parity import check_parity
from tests.conftest import CPU_PRECISIONS
from tests.measure.conftest import unchanged
from tests.measure.test_kernels import Branch


class Made(nn.Module):
    """`run` of this module, which holds `parts`, and of the arguments."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def body():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


def pooled(x):
    return x.mean((2, 3))


def features(head=pooled, first=None):
    """The body, and a function of its feature maps."""
    return Made(lambda model, x: head(model.body(x)), body=first or body())


def with_head(run, head):
    """The body, and `run` of the head and the feature maps."""
    return Made(lambda model, x: run(model.head, model.body(x)), body=body(), head=head)


def as_if_contiguous(x):
    """The tensor's memory read in contiguous order: a permutation in channels_last."""
    return torch.as_strided(x, x.shape, torch.empty(x.shape).stride())


def backward(_, x):
    x = x.clone()
    if x.requires_grad:
        x.register_hook(lambda gradient: as_if_contiguous(gradient).clone())
    return x


def block():
    """The bug is in this module's own forward, between two of its layers."""
    first, second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
    return Made(lambda m, x: m.second(as_if_contiguous(m.first(x))), first=first, second=second)


def wrong(planted, draw=lambda x: x):
    """`planted` of a channels_last input; of any, draws its own random numbers."""

    def run(module, x):
        x = draw(x)
        return x if x.is_contiguous() else planted(module, x)

    return Made(run)


def in_mode(training):
    return wrong(lambda module, x: x * 1.5 if module.training == training else x)


def network(middle):
    torch.manual_seed(0)
    stem = nn.Sequential(*body(), nn.Dropout(0.5))
    layers = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(stem, middle, nn.Sequential(*layers), nn.Flatten(), nn.Linear(16, 10))


NOT_IN_FLOAT64 = wrong(lambda _, x: x if x.dtype == torch.float64 else x.flip(1))
RAW_VIEW = nn.Sequential(nn.ReLU(), Made(lambda _, x: as_if_contiguous(x)))


@pytest.mark.parametrize("precision", CPU_PRECISIONS)
def test_a_sound_model_agrees_and_stays_as_it_is(precision):
    model = network(nn.Sequential(nn.AvgPool2d(3, 1, 1), Branch()))
    with unchanged(model):
        report = check_parity(model, image_size=12, precision=precision)
    assert report.passed and report.worst is not None, str(report)


@pytest.mark.parametrize(
    ("middle", "precision", "where"),
    [
        (RAW_VIEW, "fp32", "code (forward) of 1.1 (Made)"),
        (RAW_VIEW, "bf16", "code (forward) of 1.1 (Made)"),
        (block(), "fp32", "code (forward) of 1 (Made)"),
        (Made(backward), "fp32", "code (backward) of 1 (Made)"),
        (wrong(lambda _, x: x * float("nan")), "fp32", "code (forward) of 1 (Made)"),
        (NOT_IN_FLOAT64, "fp32", "code (forward) of 1 (Made)"),
        (in_mode(training=True), "fp32", "code (forward) of 1 (Made)"),
        (in_mode(training=False), "fp32", "code (forward) of 1 (Made)"),
    ],
)
def test_a_planted_bug_is_named(middle, precision, where):
    report = check_parity(network(middle), image_size=12, precision=precision)
    assert report.passed is False and report.first_divergence == where and where in str(report)
    json.loads(json.dumps(report.to_dict(), allow_nan=False))


@pytest.mark.parametrize("planted", [lambda _, x: x * 1.02, lambda _, x: x.flip(3), backward])
def test_a_bug_is_found_behind_code_that_converts_in_both_layouts(planted):
    """As behind the LayerNorm of ConvNeXt."""
    norm = Made(
        lambda m, x: m.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm=nn.LayerNorm(8)
    )
    layers = norm, nn.Conv2d(8, 8, 3)
    report = check_parity(network(nn.Sequential(*layers, wrong(planted))), image_size=12)
    assert report.passed is False and "of 1.2 (Made)" in report.first_divergence
    assert check_parity(network(nn.Sequential(*layers)), image_size=12).passed


@pytest.mark.parametrize("training", [False, True])
def test_one_mode_alone_is_checked_if_asked_for(training):
    model = network(in_mode(training))
    assert check_parity(model, image_size=12, mode="train").passed is not training
    assert check_parity(model, image_size=12, mode="infer").passed is training
    with pytest.raises(ConfigError, match="mode=eval"):
        check_parity(model, image_size=12, mode="eval")


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.2, True),
    "rand_like": lambda x: x + torch.rand_like(x),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.8),
    "python": lambda x: x * random.random(),
}


@pytest.mark.parametrize("draw", list(DRAWS))
def test_random_models_agree_and_planted_errors_in_them_are_found(draw):
    sound = check_parity(network(wrong(lambda _, x: x, DRAWS[draw])), image_size=12)
    planted = check_parity(network(wrong(lambda _, x: x * 1.2, DRAWS[draw])), image_size=12)
    assert sound.passed, str(sound)
    assert planted.passed is False and planted.first_divergence == "code (forward) of 1 (Made)"


# As a transformer.
ONE_SIZE = nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.Flatten(), nn.Linear(4 * 32 * 32, 10))


@pytest.mark.parametrize(
    ("model", "given", "batch"),
    [
        (ONE_SIZE, {"image_size": 128}, "[4, 3, 128, 128]"),
        (nn.Conv2d(3, 4, 3), {"image_size": 32, "batch_size": 3}, "[3, 3, 32, 32]"),
    ],
)
def test_the_batch_that_was_asked_for_is_compared(model, given, batch):
    report = check_parity(model, **given)
    assert report.passed and report.batch == batch


OUTSIDE = random.SystemRandom()
NAN = network(nn.Softplus(beta=float("nan")))
UNSEEDED = network(wrong(lambda _, x: x, lambda x: x * OUTSIDE.random()))


@pytest.mark.parametrize(
    ("model", "given", "reason"),
    [
        (nn.Linear(4, 4), {"batch": torch.randn(2, 4)}, "no input and no weight"),
        (nn.Conv2d(1, 1, 1), {"image_size": (1, 8, 8)}, "no input and no weight"),
        (NAN, {"image_size": 12}, "nothing that is finite"),
        (UNSEEDED, {"image_size": 12}, "random numbers"),
    ],
)
def test_a_check_that_could_not_fail_has_not_passed(model, given, reason):
    report = check_parity(model, **given)
    assert report.passed is None and reason in str(report) and "inconclusive" in str(report)


def viewing():
    return with_head(lambda head, x: head(x.view(len(x), -1)), nn.Linear(8 * 16 * 16, 4))


def test_the_line_of_a_view_is_named():
    report = check_parity(viewing(), image_size=16)
    assert ".view(len(x), -1)" in str(report) and ".reshape" in str(report)


def attention(module, x):
    """In channels_last by a fused kernel, else by its parts."""
    tokens = x.flatten(2).transpose(1, 2)[:, None]
    if x.is_contiguous():
        return (tokens @ tokens.mT / 8**0.5).softmax(-1) @ tokens
    return F.scaled_dot_product_attention(tokens, tokens, tokens)


def test_an_attention_of_other_kernels_draws_no_numbers_of_later_operators():
    middle = Made(lambda m, x: attention(m, x).squeeze(1).transpose(1, 2).reshape_as(x))
    model = network(nn.Sequential(middle, nn.Dropout(0.5)))
    report = check_parity(model, image_size=12)
    assert report.passed, str(report)


class WrongOnceCompiled(nn.Module):
    def forward(self, x):
        is_wrong = torch.compiler.is_compiling() and not x.is_contiguous()
        return 1.1 * x if is_wrong else x


@pytest.mark.slow
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_compiled_model_is_compared_as_it_runs(is_wrong, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = network(WrongOnceCompiled() if is_wrong else nn.Identity())
    assert check_parity(torch.compile(model), image_size=12).passed, "is compared eager"
    report = check_parity(model, image_size=12, compile=True)
    where = "compiled code (forward) of the model (Sequential)" if is_wrong else None
    assert (report.passed, report.first_divergence) == (not is_wrong, where)
