"""The optimizer and its parameter groups."""

from typing import Any

import torch
from torch import nn

from cl_train.config.schema import ConfigError, OptimConfig
from cl_train.config.user_function import optional_module
from cl_train.config.validation import suggest

# A checkpoint lacks part of kron's state, and adahessian needs gradients of gradients.
NOT_SUPPORTED = {"kron", "kronc", "kronw", "adahessian"}


def check_optimizer(cfg: OptimConfig) -> None:
    """Check an optimizer of timm by building it for one small parameter; torch's need no check.

    Raises ConfigError: timm is missing or has no such optimizer; only one of beta1 and beta2 is set; the optimizer
    cannot be built on this machine (some need CUDA or other packages).
    """
    if cfg.library == "torch":
        return
    names = set(optional_module("timm.optim", "optim=timm").list_optimizers()) - NOT_SUPPORTED
    if cfg.name not in names:
        raise ConfigError(f"optim.name={cfg.name}: not a supported optimizer of timm{suggest(cfg.name, names)}")
    if (cfg.beta1 is None) != (cfg.beta2 is None):
        raise ConfigError("optim=timm: set optim.beta1 and optim.beta2 together, or neither: their defaults differ")
    try:
        _timm_optimizer(cfg, [{"params": [nn.Parameter(torch.zeros(2, 2))]}], cfg.lr)
    except Exception as error:
        raise ConfigError(f"optim=timm optim.name={cfg.name}: {error}") from error


def build_optimizer(
    cfg: OptimConfig, model: nn.Module, parameters: dict[str, nn.Parameter], lr: float | torch.Tensor
) -> torch.optim.Optimizer:
    """The optimizer of `cfg` over `parameters` (see `precision.trainable_parameters`).

    A fused kernel reads the loss scale and the overflow flag on the device. With any other optimizer GradScaler makes
    the host wait for the device in each step (pytorch/pytorch#80167). RMSprop has no fused kernel and uses foreach.
    """
    groups = parameter_groups(cfg, model, parameters)
    if cfg.library == "timm":
        return _timm_optimizer(cfg, groups, lr)
    if cfg.name == "sgd":
        sgd = torch.optim.SGD(groups, lr=lr, momentum=cfg.momentum, nesterov=cfg.nesterov, fused=True)
        return _start_momentum_at_zero(sgd) if cfg.momentum > 0 else sgd
    options = _options(cfg)
    if cfg.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, fused=True, **options)
    assert cfg.name == "rmsprop", cfg.name
    options.pop("betas", None)
    return torch.optim.RMSprop(groups, lr=lr, alpha=cfg.alpha, momentum=cfg.momentum, foreach=True, **options)


def _timm_optimizer(cfg: OptimConfig, groups: list[dict[str, Any]], lr: float | torch.Tensor) -> torch.optim.Optimizer:
    create = optional_module("timm.optim", "optim=timm").create_optimizer_v2
    options = {"weight_decay": cfg.weight_decay, "momentum": cfg.momentum, **_options(cfg)}
    optimizer = create(groups, cfg.name, lr=lr, **options)
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def _options(cfg: OptimConfig) -> dict[str, Any]:
    """`betas` and `eps`, unless they have the optimizer's own default."""
    options: dict[str, Any] = {} if cfg.eps is None else {"eps": cfg.eps}
    if cfg.beta1 is not None or cfg.beta2 is not None:
        options["betas"] = (0.9 if cfg.beta1 is None else cfg.beta1, 0.999 if cfg.beta2 is None else cfg.beta2)
    return options


def parameter_groups(cfg: OptimConfig, model: nn.Module, parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """One group with weight decay, and a second one without it if `decay_norm_and_bias` is false."""
    exempt = set() if cfg.decay_norm_and_bias else not_decayed_names(model, parameters)
    decayed = [parameter for name, parameter in parameters.items() if name not in exempt]
    not_decayed = [parameter for name, parameter in parameters.items() if name in exempt]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": cfg.weight_decay}]
    if not_decayed:
        groups.append({"params": not_decayed, "weight_decay": 0.0})
    return groups


def not_decayed_names(model: nn.Module, parameters: dict[str, nn.Parameter]) -> set[str]:
    """timm's rule: one-dimensional parameters (normalisation, biases, layer scales) and the model's own list, which
    names a vision transformer's tokens and position embedding."""
    own_list: set[str] = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()  # type: ignore[operator]
    return {name for name, parameter in parameters.items() if parameter.ndim <= 1 or name in own_list}


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
