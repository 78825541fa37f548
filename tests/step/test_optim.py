"""Learning rates by formula, parameter groups by name, fused kernels where there are any."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from cl_train.config.schema import OptimConfig, ScheduleConfig
from cl_train.step.optim import build_optimizer, norm_and_bias_names, set_lr
from cl_train.step.schedule import lr_at, scaled_lr
from tests.networks import small


def lrs(schedule: ScheduleConfig, epochs: int = 10, steps_per_epoch: int = 10) -> list[float]:
    total = epochs * steps_per_epoch
    return [lr_at(step, schedule, lr=1.0, steps_per_epoch=steps_per_epoch, total_steps=total) for step in range(total)]


def test_cosine_is_half_way_at_the_middle() -> None:
    values = lrs(ScheduleConfig(name="cosine"))
    assert values[0] == 1.0 and values[50] == pytest.approx(0.5) and values[-1] < 0.001
    assert values == sorted(values, reverse=True)


def test_step_divides_by_ten() -> None:
    values = lrs(ScheduleConfig(name="step", step_epochs=3, gamma=0.1))
    assert [values[30 * k + 29] for k in range(3)] == pytest.approx([1.0, 0.1, 0.01])
    assert values[30] == pytest.approx(0.1)


def test_linear_and_constant() -> None:
    assert lrs(ScheduleConfig(name="linear", final_lr_ratio=0.5))[50] == pytest.approx(0.75)
    assert set(lrs(ScheduleConfig(name="constant"))) == {1.0}


@pytest.mark.parametrize("name", ["cosine", "step", "linear", "constant"])
def test_warmup_is_linear_before_any_curve(name: str) -> None:
    values = lrs(ScheduleConfig(name=name, warmup_epochs=2, warmup_start=0.1))
    assert values[0] == pytest.approx(0.1) and values[10] == pytest.approx(0.55) and values[20] == pytest.approx(1.0)


def test_lr_is_for_a_reference_batch() -> None:
    assert scaled_lr(OptimConfig(lr=0.1), 1024) == pytest.approx(0.4)
    assert scaled_lr(OptimConfig(lr=0.1, reference_batch_size=0), 1024) == 0.1


def test_norm_and_bias_are_told_by_their_module() -> None:
    model = nn.Sequential(small(3), nn.LayerNorm(3), nn.MultiheadAttention(4, 2))
    assert norm_and_bias_names(model) == {
        *("0.1.weight", "0.1.bias", "0.3.bias", "0.4.weight", "0.4.bias", "0.8.bias"),
        *("1.weight", "1.bias", "2.in_proj_bias", "2.out_proj.bias"),
    }


def test_no_decay_on_norm_and_bias() -> None:
    model = small(3)
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(OptimConfig(weight_decay=0.1, decay_norm_and_bias=False), model, parameters, 1.0)
    decay = {
        name: group["weight_decay"]
        for group in optimizer.param_groups
        for name, parameter in parameters.items()
        if any(parameter is member for member in group["params"])
    }
    assert {name for name, value in decay.items() if value} == {"0.weight", "3.weight", "8.weight"}
    assert len(decay) == len(parameters)


@pytest.mark.parametrize(("name", "fused"), [("sgd", True), ("adamw", True), ("rmsprop", False)])
def test_fused_where_there_is_a_fused_kernel(name: str, fused: bool) -> None:
    model = small(3)
    optimizer = build_optimizer(OptimConfig(name=name), model, dict(model.named_parameters()), 0.1)
    assert bool(optimizer.defaults.get("fused")) == fused
    assert getattr(optimizer, "_step_supports_amp_scaling", False) == fused


def test_a_tensor_learning_rate_is_set_in_place() -> None:
    model = small(3)
    rate = torch.tensor(0.1)
    optimizer = build_optimizer(OptimConfig(), model, dict(model.named_parameters()), rate)
    set_lr(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"].data_ptr() == rate.data_ptr() and math.isclose(rate.item(), 0.25)


def test_an_overflow_in_the_first_step_leaves_no_trace_in_the_momentum() -> None:
    """Fused SGD would start from unwritten memory: two steps after a skipped one equal two steps without it."""
    weights = []
    for skip_first in (False, True):
        parameter = nn.Parameter(torch.ones(5000))
        optimizer = build_optimizer(OptimConfig(weight_decay=0.0), nn.Module(), {"weight": parameter}, lr=0.5)
        parameter.grad = torch.full_like(parameter, 0.25)
        if skip_first:
            optimizer.found_inf = torch.ones(())
            optimizer.step()
            del optimizer.found_inf
        optimizer.step()
        optimizer.step()
        weights.append(parameter.detach().clone())
    assert torch.equal(weights[0], weights[1])
    assert weights[0][0].item() == pytest.approx(1 - 0.5 * 0.25 * (1 + 1.9), rel=1e-6)
