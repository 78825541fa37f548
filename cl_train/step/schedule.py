"""The learning rate as a pure function of the step, so that a resumed run continues the same curve."""

import math

from cl_train.config.schema import OptimConfig, ScheduleConfig


def scaled_lr(cfg: OptimConfig, global_batch_size: int) -> float:
    """The peak learning rate: `optim.lr`, given for a reference batch, scaled linearly (Goyal et al. 2017)."""
    if cfg.reference_batch_size == 0:
        return cfg.lr
    return cfg.lr * global_batch_size / cfg.reference_batch_size


def lr_at(step: int, cfg: ScheduleConfig, *, lr: float, steps_per_epoch: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step` (0-based), with peak `lr`.

    A linear warm-up from `warmup_start * lr`, then the curve `cfg.name`. Cosine and linear end at `total_steps`. They
    begin after the warm-up, or at step 0 without `warmup_prefix`: then the warm-up replaces their beginning. The `step`
    curve counts its epochs from step 0.
    """
    if cfg.per_epoch:
        step -= step % steps_per_epoch
    warmup_steps = min(round(cfg.warmup_epochs * steps_per_epoch), total_steps)
    if step < warmup_steps:
        return lr * (cfg.warmup_start + (1 - cfg.warmup_start) * step / warmup_steps)
    first = warmup_steps if cfg.warmup_prefix else 0
    progress = (step - first) / max(1, total_steps - first)
    if cfg.name == "constant":
        return lr
    if cfg.name == "step":
        return lr * cfg.gamma ** (step / steps_per_epoch // cfg.step_epochs)
    if cfg.name == "linear":
        return lr * (1 - (1 - cfg.final_lr_ratio) * progress)
    assert cfg.name == "cosine", cfg.name
    return lr * (cfg.final_lr_ratio + (1 - cfg.final_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2)
