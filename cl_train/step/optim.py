"""Which parameters train, by which optimizer, with which learning rate."""

import fnmatch
import functools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from cl_train.config.schema import FUSED_OPTIMIZERS, OPTIMIZERS, OptimConfig, ScheduleConfig
from cl_train.config.validation import optional_module, suggest
from cl_train.errors import ConfigError
from cl_train.step.precision import BATCH_NORMS

# A checkpoint lacks part of kron's state, and adahessian needs gradients of gradients.
_NOT_SUPPORTED = {"kron", "kronc", "kronw", "adahessian"}


def check_optimizer(cfg: OptimConfig) -> None:
    if cfg.library == "torch":
        return
    names = set(optional_module("timm.optim", "optim=timm").list_optimizers()) - _NOT_SUPPORTED
    if cfg.name not in names:
        near = suggest(cfg.name, names)
        raise ConfigError(f"optim.name={cfg.name}: not a supported optimizer of timm{near}")
    if (cfg.beta1 is None) != (cfg.beta2 is None):
        raise ConfigError("optim=timm: set optim.beta1 and optim.beta2 together, or neither")
    layer = nn.Linear(2, 2, bias=False)
    try:
        build_optimizer(cfg, layer, dict(layer.named_parameters()), cfg.lr)
    except Exception as error:  # some need CUDA or other packages
        raise ConfigError(f"optim=timm optim.name={cfg.name}: {error}") from error


def freeze(model: nn.Module, patterns: Sequence[str], head: Collection[str]) -> None:
    """Stops the training of the parts whose names match the shell `patterns`; `backbone` means all
    but `head`. Their BatchNorm stays in eval mode. Raises ConfigError: nothing matches a pattern,
    or nothing is left to train.
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    parts = {*modules, *parameters} - {""}
    around_head = {module for name in head for module in _around(name)}
    frozen = set[str]()
    for pattern in patterns:
        matches = {*fnmatch.filter(parts, pattern)}
        if pattern == "backbone":
            matches = parts - around_head
        if not matches:
            near = suggest(pattern, {"backbone", *parts})
            raise ConfigError(f"freeze={pattern}: the model has no such part{near}")
        frozen |= matches
    still = {name for name in parts if frozen.intersection(_around(name))}
    for name in still & set(parameters):
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"freeze=[{','.join(patterns)}] leaves nothing to train")
    for name in still & set(modules):
        if isinstance(modules[name], BATCH_NORMS):
            modules[name].eval().train = MethodType(lambda self, mode=True: self, modules[name])


def _around(name: str) -> list[str]:
    """Returns the names of the modules around `a.b.c`, and its own: `a`, `a.b` and `a.b.c`."""
    words = name.split(".")
    return [".".join(words[:count]) for count in range(1, len(words) + 1)]


def build_optimizer(
    cfg: OptimConfig,
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    lr: float | torch.Tensor,
) -> torch.optim.Optimizer:
    """Builds the optimizer, if possible fused: its kernel reads loss scale and overflow flag on the
    device; with any other one GradScaler makes the host wait in each step (pytorch/pytorch#80167).
    """
    groups = _parameter_groups(cfg, model, parameters, lr)
    keys = OPTIMIZERS[cfg.name] if cfg.library == "torch" else ("momentum", "beta1", "beta2", "eps")
    values = {key: getattr(cfg, key) for key in keys}
    options: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    if "beta1" in options or "beta2" in options:
        options["betas"] = options.pop("beta1", 0.9), options.pop("beta2", 0.999)
    if cfg.library == "timm":
        create = optional_module("timm.optim", "optim=timm").create_optimizer_v2
        options |= {"lr": lr, "weight_decay": cfg.weight_decay}
        made: torch.optim.Optimizer = create(groups, cfg.name, **options)
        return made
    if cfg.name == "rmsprop":
        options["alpha"] = 0.9  # torch has 0.99; TensorFlow and every published recipe 0.9
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
    options["fused" if cfg.name in FUSED_OPTIMIZERS else "foreach"] = True
    optimizer = kinds[cfg.name](groups, lr=lr, **options)
    # Fused SGD leaves its buffer uninitialised if the first step is skipped, as when the initial
    # loss scale overflows. Zeros give the same first update as no buffer.
    for parameter in parameters.values() if cfg.name == "sgd" and cfg.momentum > 0 else ():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def make_dense(model: nn.Module) -> None:
    """Gives each tensor with gaps in memory, such as `big[:, :10]`, memory of its own: the fused
    kernels would update what lies between. Raises ConfigError: one that trains shares its memory.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    strided = {name: tensor for name, tensor in named.items() if tensor.layout == torch.strided}
    sharing = Counter(tensor.untyped_storage().data_ptr() for tensor in strided.values())
    for name, tensor in strided.items():
        if torch.empty_like(tensor, device="meta").stride() == tensor.stride():
            continue  # only what is dense keeps its strides in a copy
        memory = tensor.untyped_storage()
        is_shared = sharing[memory.data_ptr()] > 1 or memory.nbytes() < tensor.nbytes
        if tensor.requires_grad and is_shared:
            what = "elements that train share memory (an expanded tensor, a view of another one)"
            raise ConfigError(f"{name}: {what}; give the parameter memory of its own: .clone()")
        tensor.data = tensor.data.clone()


@contextmanager
def in_memory_order(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the block, weights, gradients and states of a fused optimizer on a CPU are contiguous
    views: the kernels copy each gradient that is not contiguous, which takes longer than the update
    (torch 2.15, docs/log.md). An update is element-wise: the order changes no value.
    """
    groups = optimizer.param_groups if optimizer.defaults.get("fused") else []
    before = []
    try:
        for weight in [p for group in groups for p in group["params"] if p.device.type == "cpu"]:
            gradient = weight.grad
            if gradient is None or gradient.layout != torch.strided:  # sparse: torch refuses it
                continue
            if weight.is_contiguous() and gradient.is_contiguous():
                continue
            order, inverse = _memory_order(weight.stride())
            data = weight.data
            before.append((weight, data, gradient, inverse))
            weight.data = data.permute(order)
            # The kernels read by address: other strides than the weight's give a wrong update.
            weight.grad = gradient.permute(order).contiguous()
            _permute(optimizer.state.get(weight, {}), order)
        yield
    finally:
        for weight, data, gradient, inverse in before:
            weight.data = data
            weight.grad = gradient
            _permute(optimizer.state.get(weight, {}), inverse)


@functools.cache
def _memory_order(strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return tuple(order), tuple(inverse)


def _permute(state: dict[str, Any], order: tuple[int, ...]) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim():  # not a step counter
            state[name] = value.permute(order)


def _parameter_groups(
    cfg: OptimConfig, model: nn.Module, parameters: dict[str, nn.Parameter], lr: Any
) -> list[dict[str, Any]]:
    """Returns groups of equal weight decay and `lr_scale`: `layer_decay` ** (later layers)."""
    exempt = set[str]()
    if not cfg.decay_norm_and_bias:
        # timm's rule: vectors, and the model's own list of tokens and position embedding.
        listed: Any = getattr(model, "no_weight_decay", tuple)()
        exempt = {name for name, p in parameters.items() if p.ndim <= 1 or name in listed}
    layers = layer_numbers(model) if cfg.layer_decay < 1 else dict.fromkeys(parameters, 0)
    last = max(layers.values(), default=0)
    # By exemption, not by decay: a decay of 0 must not change the order of a norm's sum.
    members: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        scale = cfg.layer_decay ** (last - layers[name])
        members.setdefault((scale, name in exempt), []).append(parameter)
    return [
        {
            "params": grouped,
            "lr": lr if scale == 1 else lr * scale,
            "lr_scale": scale,
            "weight_decay": 0.0 if is_exempt else cfg.weight_decay,
        }
        for (scale, is_exempt), grouped in members.items()
    ]


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Returns the layer of each parameter, from 0 at the input. timm's models number their layers;
    of other models each entry of a Sequential or ModuleList, and each module outside them, is one.
    A module without weights belongs to the layer before it.
    """
    group_matcher = getattr(model, "group_matcher", None)
    if group_matcher is not None:
        group = optional_module("timm.models", "optim.layer_decay").group_parameters
        of_timm: dict[str, int] = group(model, group_matcher(coarse=False), reverse=True)
        return of_timm
    modules, containers = dict(model.named_modules()), nn.Sequential | nn.ModuleList
    numbers: dict[str, int] = {}
    number, previous = 0, ""
    for name, parameter in model.named_parameters():
        block, *inner = _around(name)
        has_weights = parameter.ndim > 1
        for path in [block, *inner][:-1]:
            around = modules[path.rpartition(".")[0]]
            if isinstance(around, containers) and not isinstance(modules[path], containers):
                block, has_weights = path, any(p.ndim > 1 for p in modules[path].parameters())
                break
        if block != previous and (has_weights or not numbers):
            number, previous = number + bool(numbers), block
        numbers[name] = number
    return numbers


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets each group's share of the learning rate; in place if it is a tensor (CUDA graphs)."""
    for group in optimizer.param_groups:
        scaled = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


def lr_at(
    step: int, cfg: ScheduleConfig, *, lr: float, steps_per_epoch: int, total_steps: int
) -> float:
    """Returns the learning rate of `step`, from 0, with peak `lr`: a linear warm-up, then the curve
    `cfg.name`. Cosine and linear begin at step 0, or with `warmup_prefix` after the warm-up.
    """
    if cfg.per_epoch:
        step -= step % steps_per_epoch
    warmup_steps = min(round(cfg.warmup_epochs * steps_per_epoch), total_steps)
    if step < warmup_steps:
        return lr * (cfg.warmup_start + (1 - cfg.warmup_start) * step / warmup_steps)
    if cfg.name == "constant":
        return lr
    if cfg.name == "step":
        epoch = step / steps_per_epoch
        passed = sum(epoch >= milestone for milestone in cfg.milestones)
        return lr * cfg.gamma ** (passed if cfg.milestones else epoch // cfg.step_epochs)
    first = warmup_steps if cfg.warmup_prefix else 0
    progress = (step - first) / max(1, total_steps - first)
    if cfg.name == "linear":
        return lr * (1 - (1 - cfg.final_lr_ratio) * progress)
    assert cfg.name == "cosine", cfg.name
    share = (1 + math.cos(math.pi * progress)) / 2
    return lr * (cfg.final_lr_ratio + (1 - cfg.final_lr_ratio) * share)
