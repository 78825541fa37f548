"""The optimizer, its parameter groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from cl_train.config.schema import OptimConfig, ScheduleConfig


def scaled_lr(cfg: OptimConfig, global_batch_size: int) -> float:
    """`optim.lr` is for a reference batch; the linear scaling rule makes it the run's (Goyal et al. 2017)."""
    if cfg.reference_batch_size == 0:
        return cfg.lr
    return cfg.lr * global_batch_size / cfg.reference_batch_size


def lr_at(step: int, cfg: ScheduleConfig, *, lr: float, steps_per_epoch: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step` (0-based).

    A linear warm-up from `warmup_start * lr`, then the curve over what remains of `total_steps`.
    """
    warmup_steps = min(round(cfg.warmup_epochs * steps_per_epoch), total_steps)
    if step < warmup_steps:
        return lr * (cfg.warmup_start + (1 - cfg.warmup_start) * step / warmup_steps)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if cfg.name == "constant":
        return lr
    if cfg.name == "step":
        return lr * cfg.gamma ** (step // (cfg.step_epochs * steps_per_epoch))
    if cfg.name == "linear":
        return lr * (1 - (1 - cfg.final_lr_ratio) * progress)
    assert cfg.name == "cosine", cfg.name
    return lr * (cfg.final_lr_ratio + (1 - cfg.final_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the learning rate `lr`; in place where it is a tensor, as a CUDA graph needs."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def norm_and_bias_names(model: nn.Module) -> set[str]:
    """Names of the parameters of normalisation layers, and of all biases."""
    names = set()
    for module_name, module in model.named_modules():
        is_norm = "Norm" in type(module).__name__
        for name, _ in module.named_parameters(recurse=False):
            if is_norm or name == "bias" or name.endswith("_bias"):
                names.add(f"{module_name}.{name}" if module_name else name)
    return names


def parameter_groups(
    cfg: OptimConfig, model: nn.Module, parameters: dict[str, nn.Parameter]
) -> list[dict[str, object]]:
    """One group with weight decay, and one without when `decay_norm_and_bias` is false."""
    exempt = set() if cfg.decay_norm_and_bias else norm_and_bias_names(model)
    decayed = [parameter for name, parameter in parameters.items() if name not in exempt]
    free = [parameter for name, parameter in parameters.items() if name in exempt]
    groups: list[dict[str, object]] = [{"params": decayed, "weight_decay": cfg.weight_decay}]
    if free:
        groups.append({"params": free, "weight_decay": 0.0})
    return groups


def build_optimizer(
    cfg: OptimConfig, model: nn.Module, parameters: dict[str, nn.Parameter], lr: float | torch.Tensor
) -> torch.optim.Optimizer:
    """SGD, AdamW or RMSprop over `parameters` (see `precision.trainable_parameters`).

    Fused where torch has a fused kernel: it reads the loss scale and the overflow flag on the device, where every other
    optimizer makes GradScaler wait for the device each step (pytorch/pytorch#80167). RMSprop has none: foreach.
    """
    groups = parameter_groups(cfg, model, parameters)
    if cfg.name == "sgd":
        sgd = torch.optim.SGD(groups, lr=lr, momentum=cfg.momentum, nesterov=cfg.nesterov, fused=True)
        return start_momentum(sgd) if cfg.momentum > 0 else sgd
    if cfg.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)
    assert cfg.name == "rmsprop", cfg.name
    return torch.optim.RMSprop(groups, lr=lr, alpha=cfg.alpha, eps=cfg.eps, momentum=cfg.momentum, foreach=True)


def start_momentum(sgd: torch.optim.SGD) -> torch.optim.SGD:
    """Start every momentum at zero, which gives the same first update as no momentum.

    Fused SGD takes unwritten memory for it when the first step is left out, and an overflow in the first step is how
    the loss scale is found: the next step would add that memory to the weights.
    """
    for group in sgd.param_groups:
        for parameter in group["params"]:
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd
