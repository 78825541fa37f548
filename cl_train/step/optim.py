"""The optimizer and its parameter groups."""

from __future__ import annotations

import torch
from torch import nn

from cl_train.config.schema import OptimConfig


def build_optimizer(
    cfg: OptimConfig, model: nn.Module, parameters: dict[str, nn.Parameter], lr: float | torch.Tensor
) -> torch.optim.Optimizer:
    """SGD, AdamW or RMSprop over `parameters` (see `precision.trainable_parameters`).

    A fused kernel reads the loss scale and the overflow flag on the device. With any other optimizer GradScaler makes
    the host wait for the device in each step (pytorch/pytorch#80167). RMSprop has no fused kernel and uses foreach.
    """
    groups = parameter_groups(cfg, model, parameters)
    if cfg.name == "sgd":
        sgd = torch.optim.SGD(groups, lr=lr, momentum=cfg.momentum, nesterov=cfg.nesterov, fused=True)
        return _start_momentum_at_zero(sgd) if cfg.momentum > 0 else sgd
    if cfg.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)
    assert cfg.name == "rmsprop", cfg.name
    return torch.optim.RMSprop(groups, lr=lr, alpha=cfg.alpha, eps=cfg.eps, momentum=cfg.momentum, foreach=True)


def parameter_groups(
    cfg: OptimConfig, model: nn.Module, parameters: dict[str, nn.Parameter]
) -> list[dict[str, object]]:
    """One group with weight decay, and a second one without it if `decay_norm_and_bias` is false."""
    exempt = set() if cfg.decay_norm_and_bias else norm_and_bias_names(model)
    decayed = [parameter for name, parameter in parameters.items() if name not in exempt]
    not_decayed = [parameter for name, parameter in parameters.items() if name in exempt]
    groups: list[dict[str, object]] = [{"params": decayed, "weight_decay": cfg.weight_decay}]
    if not_decayed:
        groups.append({"params": not_decayed, "weight_decay": 0.0})
    return groups


def norm_and_bias_names(model: nn.Module) -> set[str]:
    """Names of the parameters of normalisation layers, and of all biases."""
    names = set()
    for module_name, module in model.named_modules():
        is_norm = "Norm" in type(module).__name__
        for name, _ in module.named_parameters(recurse=False):
            if is_norm or name == "bias" or name.endswith("_bias"):
                names.add(f"{module_name}.{name}" if module_name else name)
    return names


def _start_momentum_at_zero(sgd: torch.optim.SGD) -> torch.optim.SGD:
    """Momentum buffers of zeros, which give the same first update as none.

    Fused SGD leaves the momentum buffer uninitialised if the first step is skipped, as it is when the initial loss
    scale overflows; the second step would add that memory to the weights.
    """
    for group in sgd.param_groups:
        for parameter in group["params"]:
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group; in place if it is a tensor, as a CUDA graph requires."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
