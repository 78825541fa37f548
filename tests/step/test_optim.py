"""Learning rates by formula, parameter groups by name, fused kernels where there are any."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import timm
import timm.optim
import torch
import torchvision
from torch import nn

from cl_train.config.schema import FUSED_OPTIMIZERS, OPTIMIZERS, ConfigError, OptimConfig, ScheduleConfig
from cl_train.step.optim import build_optimizer, check_optimizer, freeze, layer_numbers, lr_at, set_lr
from cl_train.training.state import collect, restore
from tests.networks import small
from tests.step.test_train_step import make_parts, state_of

CURVES: list[tuple[dict[str, object], dict[int, float]]] = [  # of ten epochs of ten steps; learning rates by step
    ({"name": "cosine", "warmup_epochs": 0}, {0: 1.0, 50: 0.5, 99: 0.00025}),
    ({"name": "step", "step_epochs": 3, "gamma": 0.1}, {29: 1.0, 30: 0.1, 59: 0.1, 89: 0.01}),
    ({"name": "linear", "final_lr_ratio": 0.5, "warmup_epochs": 0}, {0: 1.0, 50: 0.75}),
    ({"name": "constant", "warmup_epochs": 0}, {0: 1.0, 99: 1.0}),
    *(
        ({"name": name, "warmup_epochs": 2, "warmup_start": 0.1}, {0: 0.1, 10: 0.55, 20: 1.0})
        for name in ("cosine", "step", "linear", "constant")
    ),
]


@pytest.mark.parametrize(("schedule", "expected"), CURVES)
def test_learning_rates(schedule: dict[str, object], expected: dict[int, float]) -> None:
    cfg = ScheduleConfig(**schedule)  # type: ignore[arg-type]
    found = {step: lr_at(step, cfg, lr=1.0, steps_per_epoch=10, total_steps=100) for step in expected}
    assert found == pytest.approx(expected, abs=1e-5)


def optimizer_of(model: nn.Module, lr: float | torch.Tensor = 0.1, **options: Any) -> torch.optim.Optimizer:
    return build_optimizer(OptimConfig(**options), model, dict(model.named_parameters()), lr)


def by_name(model: nn.Module, groups: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """The value of each parameter's group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: group[key] for group in groups for parameter in group["params"]}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "resnet18"])
def test_layer_decay_equals_timms(name: str) -> None:
    model = timm.create_model(name, num_classes=3)
    optimizer = optimizer_of(model, layer_decay=0.75, decay_norm_and_bias=False, name="adamw")
    set_lr(optimizer, 1.0)
    theirs = by_name(model, timm.optim.param_groups_layer_decay(model, layer_decay=0.75), "lr_scale")
    assert by_name(model, optimizer.param_groups, "lr") == pytest.approx(theirs)


def test_layer_decay_and_the_heads_ratio_of_other_models() -> None:
    model = torchvision.models.resnet18(num_classes=3)
    cfg = OptimConfig(layer_decay=0.5, head_lr_ratio=10)
    groups = build_optimizer(cfg, model, dict(model.named_parameters()), 1.0, {"fc.weight", "fc.bias"}).param_groups
    found = by_name(model, groups, "lr")
    blocks = ["conv1", *(f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)), "fc"]
    for depth, block in enumerate(reversed(blocks)):
        of_block = {value for name, value in found.items() if name.startswith(f"{block}.")}
        assert of_block == {0.5**depth * (10 if block == "fc" else 1)}, block
    assert found["bn1.weight"] == found["conv1.weight"]
    layers = layer_numbers(torchvision.models.VisionTransformer(32, 16, 12, 2, 8, 8, num_classes=3))
    assert layers["encoder.ln.weight"] == layers["encoder.layers.encoder_layer_11.mlp.3.weight"]
    assert layers["heads.head.weight"] - layers["encoder.layers.encoder_layer_0.mlp.0.weight"] == 12


ALL = ["0.weight", "1.weight", "1.bias", "3.weight", "3.bias", "4.weight", "4.bias", "8.weight", "8.bias"]


def test_freeze() -> None:
    for patterns, trained in (
        (["0", "1"], ALL[3:]),
        (["[0-3]*"], ALL[5:]),
        (["*.bias", "backbone"], ["8.weight"]),
        (["backbone"], ["8.weight", "8.bias"]),
        ([], ALL),
    ):
        model = small(3)
        freeze(model, patterns, {"8.weight", "8.bias"})
        assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained
        modes = [module.training for module in copy.deepcopy(model).train()]
        assert (modes[1], modes[4], modes[2]) == ("1.weight" in trained, "4.weight" in trained, True)
    for pattern, said in (("layer1", "freeze=layer1: the model has no such part"), ("*", "nothing")):
        with pytest.raises(ConfigError, match=said):
            freeze(small(3), [pattern], set())


def test_parameters_without_decay_are_those_of_timm() -> None:
    model = nn.Sequential(small(3), nn.LayerNorm(3), nn.MultiheadAttention(4, 2))
    vit = timm.create_model("deit3_small_patch16_224", depth=1, img_size=32)
    reference = timm.optim.create_optimizer_v2(vit, "sgd", lr=0.1, weight_decay=0.1)
    theirs = by_name(vit, reference.param_groups, "weight_decay")
    weights = {"0.0.weight", "0.3.weight", "0.8.weight", "2.in_proj_weight", "2.out_proj.weight"}
    expected = {name: 0.1 if name in weights else 0.0 for name, _ in model.named_parameters()}
    for kind, decays in ((model, expected), (vit, theirs)):
        groups = optimizer_of(kind, weight_decay=0.1, decay_norm_and_bias=False).param_groups
        assert by_name(kind, groups, "weight_decay") == decays and {group["lr"] for group in groups} == {0.1}


REFERENCES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "rmsprop": partial(torch.optim.RMSprop, alpha=0.9, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_optimizers_are_the_plain_ones_with_a_fused_kernel_where_there_is_one(name: str) -> None:
    model, is_fused, rate = nn.Conv2d(3, 4, 3), name in FUSED_OPTIMIZERS, torch.tensor(0.1)
    reference = copy.deepcopy(model)
    optimizer = optimizer_of(model, rate, name=name, weight_decay=0.1)
    assert bool(optimizer.defaults.get("fused")) == is_fused
    assert getattr(optimizer, "_step_supports_amp_scaling", False) == is_fused
    set_lr(optimizer, 0.01)
    assert optimizer.param_groups[0]["lr"].data_ptr() == rate.data_ptr(), "set in place"
    train(model, optimizer, 0, 3)
    train(reference, REFERENCES[name](reference.parameters(), lr=0.01, weight_decay=0.1, foreach=False), 0, 3)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_an_overflow_in_the_first_step_leaves_no_trace_in_the_momentum() -> None:
    """Fused SGD would start from unwritten memory: two steps after a skipped one equal two steps without it."""
    weight = nn.Parameter(torch.ones(5000))
    optimizer = build_optimizer(OptimConfig(weight_decay=0.0), nn.Module(), {"weight": weight}, lr=0.5)
    weight.grad = torch.full_like(weight, 0.25)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    del optimizer.found_inf
    optimizer.step()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 1 - 0.5 * 0.25 * (1 + 1.9)), rtol=1e-6, atol=0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(step))
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["lamb", "lion", "muon", "adan", "rmsproptf", "nadamw"])
def test_timms_optimizers_are_timms_and_continue_exactly(name: str) -> None:
    """Three steps equal those of `create_optimizer_v2(model, ...)`, also if the second begins from a checkpoint."""
    cfg = OptimConfig(library="timm", name=name, weight_decay=0.1, decay_norm_and_bias=False)
    check_optimizer(cfg)
    torch.manual_seed(0)
    reference = small(3)
    resumed, fresh = copy.deepcopy(reference), copy.deepcopy(reference)
    theirs = timm.optim.create_optimizer_v2(reference, name, lr=0.01, weight_decay=0.1)
    train(reference, theirs, 0, 3)
    ours = build_optimizer(cfg, resumed, dict(resumed.named_parameters()), 0.01)
    train(resumed, ours, 0, 1)
    again = build_optimizer(cfg, fresh, dict(fresh.named_parameters()), 0.01)
    states = [
        state_of(replace(make_parts("fp32", model=model, layout=torch.contiguous_format), optimizer=optimizer))
        for model, optimizer in ((resumed, ours), (fresh, again))
    ]
    restore(copy.deepcopy(collect(states[0], {}, {})), states[1])
    train(fresh, again, 1, 2)
    torch.testing.assert_close(fresh.state_dict(), reference.state_dict(), rtol=0, atol=0)


def test_betas_and_eps_reach_the_optimizer_only_if_they_are_set() -> None:
    model = small(3)
    assert optimizer_of(model, library="timm", name="lion").defaults["betas"] == (0.9, 0.99)
    lamb = optimizer_of(model, library="timm", name="lamb", beta2=0.95, eps=1e-5).defaults
    assert (lamb["betas"], lamb["eps"]) == ((0.9, 0.95), 1e-5)
    adamw = optimizer_of(model, name="adamw").defaults
    assert (adamw["betas"], adamw["eps"]) == ((0.9, 0.999), 1e-8)


def test_unknown_and_unusable_optimizers_of_timm_are_refused() -> None:
    check_optimizer(OptimConfig(library="timm", name="lion", beta1=0.95, beta2=0.98))
    for name, said in (("lam", "lamb"), ("kron", "not a supported"), ("bnbadam", "bnb"), ("lion", "beta2")):
        with pytest.raises(ConfigError, match=said):
            check_optimizer(OptimConfig(library="timm", name=name, beta1=0.95 if name == "lion" else None))
