"""A stem for four channels is the same function with the same checkpoint; recomputed blocks train as plain ones do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from cl_train.comparison.model_cost import peak_memory_of_step_gib
from cl_train.config.schema import ConfigError
from cl_train.memory_format.convert import convert
from cl_train.models.activation_checkpointing import checkpoint_blocks
from cl_train.models.padded_stem import PaddedStem, pad_stem
from cl_train.models.registry import build_model
from cl_train.step.ema import WeightAverage
from tests.conftest import Run
from tests.networks import small

CPU = torch.device("cpu")


def padded(images: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    extra = torch.full_like(images[:, :1], fill)
    return torch.cat([images, extra], 1).to(memory_format=torch.channels_last)


# --- the stem ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_same_function_and_the_same_gradients(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    plain = small(3).to(memory_format=layout)
    wide = copy.deepcopy(plain)
    assert pad_stem(wide, "small") == "0" and isinstance(wide[0], PaddedStem)
    images = torch.randn(4, 3, 32, 32)
    expected, found = plain(images.to(memory_format=layout)), wide(padded(images))
    torch.testing.assert_close(found, expected)
    expected.sum().backward()
    found.sum().backward()
    for one, other in zip(plain.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5)
        assert other.grad.shape == one.grad.shape


def test_the_fourth_channel_does_not_count_and_three_are_taken_too() -> None:
    torch.manual_seed(0)
    model = small(3)
    pad_stem(model, "small")
    images = torch.randn(4, 3, 32, 32)
    zero, seven, three = model(padded(images)), model(padded(images, 7.0)), model(images)
    torch.testing.assert_close(zero, seven)
    torch.testing.assert_close(zero, three)


def test_checkpoints_are_those_of_the_plain_network() -> None:
    plain = small(3)
    wide = copy.deepcopy(plain)
    pad_stem(wide, "small")
    assert {name: value.shape for name, value in wide.state_dict().items()} == {
        name: value.shape for name, value in plain.state_dict().items()
    }
    wide.load_state_dict(plain.state_dict())
    average = WeightAverage(wide, 0.5)
    assert isinstance(average.module[0], PaddedStem)
    assert average.module(padded(torch.randn(2, 3, 32, 32))).shape == (2, 3)


def test_the_padded_weight_and_the_output_are_channels_last() -> None:
    """[8, 4, 3, 3] in channels_last: cuDNN would otherwise convert it in each step."""
    model = small(3)
    pad_stem(model, "small")
    convert(model)
    seen: list[tuple[int, ...]] = []
    original = model[0]._conv_forward
    model[0]._conv_forward = lambda x, weight, bias: seen.append(weight.stride()) or original(x, weight, bias)
    output = model[0](padded(torch.randn(2, 3, 32, 32)))
    assert seen == [(36, 1, 12, 4)]
    assert output.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "name", ["resnet18", "squeezenet1_1", "mobilenet_v2", "googlenet", "vit_b_16", "convnext_tiny"]
)
def test_the_stem_of_a_zoo_model_is_found(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name, num_classes=10).train()
    pad_stem(model, name)
    assert sum(isinstance(module, PaddedStem) for module in model.modules()) == 1
    with torch.no_grad():
        model.eval()(torch.empty(2, 4, 224, 224, device="meta"))


def test_models_without_one_plain_stem_are_refused() -> None:
    class Own(nn.Conv2d):
        pass

    for model, found in [
        (nn.Sequential(nn.Conv2d(1, 8, 3)), "none"),
        (nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 8, 3)), r"0 \(Conv2d\), 1 \(Conv2d\)"),
        (nn.Sequential(Own(3, 8, 3)), r"0 \(Own\)"),
    ]:
        with pytest.raises(ConfigError, match=f"pad_channels=true needs .* odd has {found}"):
            pad_stem(model, "odd")


@pytest.mark.parametrize("precision", ["fp32", "fp16_o2"])
def test_a_run_with_padded_channels_trains_as_one_without(train: Callable[..., Run], precision: str) -> None:
    shared = ["channels_last=true", f"precision={precision}", "ema_decay=0.5", "optim.lr=0.2"]
    plain, wide = train(*shared), train(*shared, "data.pad_channels=true")
    assert wide.losses == pytest.approx(plain.losses, rel=1e-4 if precision == "fp32" else 2e-2)
    assert wide.checkpoint()["model"]["0.weight"].shape == (8, 3, 3, 3)
    resumed = train(*shared, "data.pad_channels=false", "epochs=3", f"resume={wide.folder}")
    assert len(resumed.losses) == 3, "a checkpoint goes on without the fourth channel"


# --- recomputed blocks ------------------------------------------------------------------------------------------------


def train_once(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)  # dropout and stochastic depth
    loss = nn.functional.cross_entropy(model(images), torch.zeros(len(images), dtype=torch.int64))
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("resnet18", 8), ("mobilenet_v3_small", 13), ("shufflenet_v2_x0_5", 16), ("efficientnet_b0", 18)],
)
def test_losses_gradients_and_statistics_are_those_of_the_plain_model(name: str, blocks: int) -> None:
    torch.manual_seed(0)
    plain = build_model(name, num_classes=5).train()
    recomputed = copy.deepcopy(plain)
    assert len(checkpoint_blocks(recomputed, name)) == blocks
    assert list(recomputed.state_dict()) == list(plain.state_dict())
    images = torch.randn(4, 3, 64, 64)
    assert torch.equal(train_once(plain, images), train_once(recomputed, images))
    for (key, one), (_, other) in zip(plain.named_buffers(), recomputed.named_buffers(), strict=True):
        assert torch.equal(one, other), key
    for (key, one), (_, other) in zip(plain.named_parameters(), recomputed.named_parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5, msg=lambda said, at=key: f"{at} {said}")


def test_a_step_with_recomputed_blocks_holds_less() -> None:
    plain = build_model("mobilenet_v2", num_classes=5).train()
    recomputed = copy.deepcopy(plain)
    checkpoint_blocks(recomputed, "mobilenet_v2")
    images = torch.randn(8, 3, 96, 96)
    for model in (plain, recomputed):
        train_once(model, images)  # gradients exist from here on, so that activations are what is compared
    gib = [peak_memory_of_step_gib(lambda m=m: train_once(m, images), 0, 0, CPU) for m in (plain, recomputed)]
    assert gib[1] < 0.6 * gib[0], gib


def test_a_copy_recomputes_its_own_blocks() -> None:
    model = build_model("resnet18", num_classes=5).train()
    checkpoint_blocks(model, "resnet18")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert train_once(twin, torch.randn(2, 3, 64, 64)) > 0
    assert twin.layer1[0].conv1.weight.grad is not None and model.layer1[0].conv1.weight.grad is None


def test_models_without_blocks_are_refused() -> None:
    with torch.device("meta"):
        model = build_model("alexnet", num_classes=5)
    with pytest.raises(ConfigError, match="alexnet is not made of blocks"):
        checkpoint_blocks(model, "alexnet")


def test_a_run_with_recomputed_blocks_trains_as_one_without(train: Callable[..., Run]) -> None:
    shared = ["model=resnet18", "data.image_size=32", "batch_size=16", "max_steps=2", "evaluate_every=-1"]
    plain, recomputed = train(*shared), train(*shared, "activation_checkpointing=true")
    assert recomputed.losses == pytest.approx(plain.losses, rel=1e-5)
    assert recomputed.checkpoint()["model"].keys() == plain.checkpoint()["model"].keys()
