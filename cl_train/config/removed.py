"""Settings that were removed, which files of older runs may still hold."""

from typing import Any

# Their values that are always used now.
ALWAYS: dict[str, Any] = {
    "optim.alpha": 0.9,
    "optim.head_lr_ratio": 1.0,
    "layer_scale": None,
    "drop_path_constant": False,
    "augment.timm_policy": "rand-m7-mstd0.5-inc1",
    "augment.randaugment_ops": 2,
    "augment.randaugment_magnitude": 9,
    "augment.crop_scale_max": 1.0,
    "augment.crop_ratio_min": 3 / 4,
    "augment.crop_ratio_max": 4 / 3,
    "data.download": False,
    "data.shuffle": "full",
    "checkpoint.every_minutes": 0.0,
    "checkpoint.save_best": True,
    "checkpoint.background": True,
    "max_nonfinite": 10,
    "amp.init_scale": 65536.0,
    "amp.growth_interval": 2000,
    "amp.min_scale": 1.0,
    "compile_mode": "default",
    "ddp_static_graph": False,
    "rank_timeout_s": 600.0,
    "rerun": "missing",
    "max_reruns": 2,
    "wait_for_quiet_s": None,
}
# What most of their users do instead; CHANGELOG.md has the others.
_INSTEAD = {
    "against": "train -m environment=PYTHON,here compare_by=environment",
    "augment.timm_policy": "augment.policy=NAME",
    "checkpoint.every_minutes": "checkpoint.every_steps",
    "optim.head_lr_ratio": "optim.layer_decay",
    "rerun": "repeats=auto",
}


def removal_of(key: str) -> str | None:
    """Returns the message about a setting that was removed; None for others."""
    if key not in ALWAYS | _INSTEAD:
        return None
    instead = _INSTEAD.get(key, "see `Removed` of 0.3.0 in CHANGELOG.md")
    return f"{key} was removed in 0.3: {instead}"


def was_default(key: str, value: Any) -> bool:
    """Whether an older file gives a removed setting the value that is always used now."""
    return key in ALWAYS and ALWAYS[key] == value
