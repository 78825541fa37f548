"""Learning rates by formula, parameter groups by name, fused kernels where there are any."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import timm
import timm.optim
import torch
import torchvision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cl_train import convert
from cl_train.config.schema import FUSED_OPTIMIZERS, OPTIMIZERS, OptimConfig, ScheduleConfig
from cl_train.errors import ConfigError
from cl_train.step import train_step
from cl_train.step.optim import (
    build_optimizer,
    check_optimizer,
    freeze,
    in_memory_order,
    lr_at,
    set_lr,
)
from cl_train.step.train_step import update_weights
from cl_train.training.checkpointing import collect, restore
from tests.networks import small
from tests.step.test_train_step import make_parts, state_of

# Of ten epochs of ten steps: learning rates by step.
CURVES = [  # more: training/test_recipes.py
    ({"name": "linear", "final_lr_ratio": 0.5, "warmup_epochs": 0}, {0: 1.0, 50: 0.75}),
    ({"name": "constant", "warmup_epochs": 2, "warmup_start": 0.1}, {0: 0.1, 10: 0.55, 99: 1.0}),
]


@pytest.mark.parametrize(("schedule", "expected"), CURVES)
def test_learning_rates(schedule, expected):
    cfg = ScheduleConfig(**schedule)
    rate_at = partial(lr_at, cfg=cfg, lr=1.0, steps_per_epoch=10, total_steps=100)
    assert {step: rate_at(step) for step in expected} == pytest.approx(expected, abs=1e-5)


def optimizer_of(model, lr=0.1, **options):
    return build_optimizer(OptimConfig(**options), model, dict(model.named_parameters()), lr)


def by_name(model, groups, key):
    """The value of each parameter's group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: group[key] for group in groups for parameter in group["params"]}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
def test_layer_decay_equals_timms(name):
    model = timm.create_model(name, num_classes=3)
    optimizer = optimizer_of(model, layer_decay=0.75, decay_norm_and_bias=False, name="adamw")
    set_lr(optimizer, 1.0)
    reference = timm.optim.param_groups_layer_decay(model, layer_decay=0.75)
    theirs = by_name(model, reference, "lr_scale")
    assert by_name(model, optimizer.param_groups, "lr") == pytest.approx(theirs)


def test_layer_decay_of_other_models():
    model = torchvision.models.resnet18(num_classes=3)
    optimizer = optimizer_of(model, lr=1.0, layer_decay=0.5)
    rates = by_name(model, optimizer.param_groups, "lr")
    stages = [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]
    for depth, block in enumerate(reversed(["conv1", *stages, "fc"])):
        of_block = {rate for name, rate in rates.items() if name.startswith(f"{block}.")}
        assert of_block == {0.5**depth}, block
    assert rates["bn1.weight"] == rates["conv1.weight"]


ALL = [name for name, _ in small(3).named_parameters()]


def test_freeze():
    for patterns, trained in (
        (["[0-3]*"], ALL[5:]),
        (["*.bias", "backbone"], ["8.weight"]),
        ([], ALL),
    ):
        model = small(3)
        freeze(model, patterns, {"8.weight", "8.bias"})
        named = model.named_parameters()
        assert [name for name, parameter in named if parameter.requires_grad] == trained
        modes = [module.training for module in copy.deepcopy(model).train()]
        assert modes[1] == ("1.weight" in trained) and modes[4] == ("4.weight" in trained)
        assert modes[2]
    for pattern, said in (("layer1", "layer1: the model has no such part"), ("*", "nothing")):
        with pytest.raises(ConfigError, match=said):
            freeze(small(3), [pattern], set())


def test_parameters_without_decay_are_those_of_timm():
    model = nn.Sequential(small(3), nn.LayerNorm(3), nn.MultiheadAttention(4, 2))
    vit = timm.create_model("deit3_small_patch16_224", depth=1, img_size=32)
    reference = timm.optim.create_optimizer_v2(vit, "sgd", lr=0.1, weight_decay=0.1)
    theirs = by_name(vit, reference.param_groups, "weight_decay")
    weights = {"0.0.weight", "0.3.weight", "0.8.weight", "2.in_proj_weight", "2.out_proj.weight"}
    expected = {name: 0.1 if name in weights else 0.0 for name, _ in model.named_parameters()}
    for kind, decays in ((model, expected), (vit, theirs)):
        groups = optimizer_of(kind, weight_decay=0.1, decay_norm_and_bias=False).param_groups
        assert by_name(kind, groups, "weight_decay") == decays
        assert {group["lr"] for group in groups} == {0.1}


REFERENCES = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "rmsprop": partial(torch.optim.RMSprop, alpha=0.9, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torchs_optimizers_are_the_plain_ones_with_a_fused_kernel_where_there_is_one(name):
    model, is_fused, rate = nn.Conv2d(3, 4, 3), name in FUSED_OPTIMIZERS, torch.tensor(0.1)
    reference = copy.deepcopy(model)
    optimizer = optimizer_of(model, rate, name=name, weight_decay=0.1)
    assert bool(optimizer.defaults.get("fused")) == is_fused
    assert getattr(optimizer, "_step_supports_amp_scaling", False) == is_fused
    set_lr(optimizer, 0.01)
    assert optimizer.param_groups[0]["lr"].data_ptr() == rate.data_ptr(), "set in place"
    train(model, optimizer, 0, 3)
    plain = REFERENCES[name](reference.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    train(reference, plain, 0, 3)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_an_overflow_in_the_first_step_leaves_no_trace_in_the_momentum():
    """Fused SGD would start from unwritten memory. Two steps follow a skipped one."""
    weight, cfg = nn.Parameter(torch.ones(5000)), OptimConfig(weight_decay=0.0)
    optimizer = build_optimizer(cfg, nn.Module(), {"weight": weight}, lr=0.5)
    weight.grad = torch.full_like(weight, 0.25)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    del optimizer.found_inf
    optimizer.step()
    optimizer.step()
    expected = torch.full_like(weight, 1 - 0.5 * 0.25 * (1 + 1.9))
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=0)


def train(model, optimizer, first, count):
    for step in range(first, first + count):
        images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(step))
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["lamb", "muon", "rmsproptf"])
def test_timms_optimizers_are_timms_and_continue_exactly(name):
    """Three steps equal those of `create_optimizer_v2`; the second begins from a checkpoint."""
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

    def state(model, optimizer):
        parts = make_parts("fp32", model=model, layout=torch.contiguous_format)
        return state_of(replace(parts, optimizer=optimizer))

    restore(copy.deepcopy(collect(state(resumed, ours), {}, {})), state(fresh, again))
    train(fresh, again, 1, 2)
    torch.testing.assert_close(fresh.state_dict(), reference.state_dict(), rtol=0, atol=0)


def test_betas_and_eps_reach_the_optimizer_only_if_they_are_set():
    model = small(3)
    assert optimizer_of(model, library="timm", name="lion").defaults["betas"] == (0.9, 0.99)
    lamb = optimizer_of(model, library="timm", name="lamb", beta2=0.95, eps=1e-5).defaults
    assert (lamb["betas"], lamb["eps"]) == ((0.9, 0.95), 1e-5)


def test_unknown_and_unusable_optimizers_of_timm_are_refused():
    check_optimizer(OptimConfig(library="timm", name="lion", beta1=0.95, beta2=0.98))
    unusable = {"lam": "lamb", "kron": "not a supported", "bnbadam": "bnb"}
    for name, beta1, said in (
        *((name, None, said) for name, said in unusable.items()),
        ("lion", 0.95, "beta2"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_optimizer(OptimConfig(library="timm", name=name, beta1=beta1))


class FusedKernels(TorchDispatchMode):
    """Notes whether every tensor that a fused kernel gets is contiguous."""

    def __init__(self):
        super().__init__()
        self.contiguous = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_fused_" in str(func):
            tensors = [tensor for tensors in args for tensor in tensors]
            self.contiguous.append(all(tensor.is_contiguous() for tensor in tensors))
        return func(*args, **(kwargs or {}))


def odd_layers():
    """Odd sizes, so that kernels have remainders; depthwise and 1x1 weights; 3-D."""
    torch.manual_seed(0)
    flat = [nn.Conv2d(3, 37, 7), nn.Conv2d(37, 37, 3, groups=37), nn.Conv2d(37, 13, 1)]
    more = [nn.ConvTranspose2d(13, 5, (3, 5)), nn.Conv3d(5, 7, (3, 3, 1)), nn.Conv2d(64, 96, 3)]
    layers = [*flat, *more, nn.Linear(19, 3)]
    for layer in layers:
        convert(layer)
    return nn.Sequential(*layers)


def updated(precision, options, kernels):
    """Weights and optimizer state after twelve updates with an overflow and a checkpoint."""
    parts = parts_of(precision, options)
    for step in range(12):
        if step == 6:
            saved = copy.deepcopy(collect(state_of(parts), {}, {}))
            parts = parts_of(precision, options)
            restore(saved, state_of(parts))
        generator = torch.Generator().manual_seed(step)
        for name, parameter in parts.wrapped_model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter).copy_(values)
            if name == "0.bias":
                parameter.grad = None
        parts.scaler.scale(torch.zeros(()))  # a scaler begins with the first loss
        if step == 3:
            parts.wrapped_model[0].weight.grad[0, 0, 0, 0] = torch.inf
        with kernels:
            assert update_weights(parts).item() == (step == 3)
    state = collect(state_of(parts), {}, {})
    return state["model"], state["optimizer"]["state"]


def parts_of(precision, options):
    kind, clip_norm, more = options["kind"], options.get("clip_norm"), options.get("more", {})
    layout = torch.preserve_format
    parts = make_parts(precision, model=odd_layers(), layout=layout, clip_norm=clip_norm)
    parameters = list(parts.weights.trainable().values())
    return replace(parts, optimizer=kind(parameters, lr=0.01, fused=True, **more))


FUSED = {
    "sgd": {"kind": torch.optim.SGD, "more": {"momentum": 0.9, "weight_decay": 0.1}},
    "sgd without momentum": {"kind": torch.optim.SGD, "clip_norm": 0.5},
    "adamw": {"kind": torch.optim.AdamW},
}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16_o2"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_get_contiguous_views_and_update_the_same_bits(name, precision, monkeypatch):
    torch.set_num_threads(2)  # a kernel's parts begin elsewhere than with one thread
    ours, theirs = FusedKernels(), FusedKernels()
    results = [updated(precision, FUSED[name], ours)]
    monkeypatch.setattr(train_step, "in_memory_order", nullcontext)
    results.append(updated(precision, FUSED[name], theirs))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert len(ours.contiguous) == len(theirs.contiguous) == 12
    assert all(ours.contiguous) and not any(theirs.contiguous)


def test_a_gradient_with_other_strides_than_its_weight_is_used_as_it_is():
    weight = torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last)
    gradient = torch.randn(4, 3, 5, 5)
    parameter = nn.Parameter(weight)
    parameter.grad = gradient
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    with in_memory_order(optimizer):
        optimizer.step()
    assert torch.equal(parameter.detach(), -gradient)
    assert parameter.is_contiguous(memory_format=torch.channels_last)
