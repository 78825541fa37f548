"""Settings that were removed, with what to do instead: answered by their names for one version."""

from fnmatch import fnmatchcase
from typing import Any

REMOVED_IN = "0.3"

# The value that is always used now, which an older file may still hold.
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
# What a user does instead, where that value does not say it; of a key, or a pattern of key=value.
_INSTEAD = {
    "experiment=resnet*_ffcv_*ep": "experiment=resnet50_ffcv epochs=16",
    "experiment=vit_small_deit3": "facebookresearch/deit trains it",
    "layer_scale": "set it in a model=module:function",
    "drop_path_constant": "set it in a model=module:function",
    "optim.head_lr_ratio": "use optim.layer_decay",
    "augment.policy=three_augment": "timm's augment.policy=3a comes nearest",
    "augment.policy=timm": "augment.policy=rand-m7-mstd0.5-inc1",
    "augment.timm_policy": "augment.policy=NAME",
    "augment.crop_ratio_m*": "crops are 3:4 to 4:3; crop_scale_min=1 takes the whole image",
    "amp.init_scale": "the scale finds its value in a few steps",
    "data.download": "unpack imagenette2-320.tgz of github.com/fastai/imagenette",
    "data.shuffle": "images are read at random; copy the shards to a fast disk",
    "log_to=mlflow": "log_to=my.module:function, see docs/training.md",
    "parquet": "a Dataset reads it, see docs/data.md",
    "checkpoint.every_minutes": "use checkpoint.every_steps",
    "batch_size=auto": "give the number",
    "ddp_static_graph": "cuda_graph=true sets it",
    "rank_timeout_s": "NCCL and gloo have timeouts",
    "rerun": "use repeats=auto",
    "max_reruns": "use repeats=auto",
    "wait_for_quiet_s": "use repeats=auto",
    "max_differences": "max_wrong=N",
    "measure": "time=true measures",
    "against=[cdf]*": "audit operators=true compares values",
    "against=*[/=]*": "use train -m environment=PYTHON,here compare_by=environment",
}


def removal_of(key: str, value: Any) -> str | None:
    """The answer to `key=value` if the setting, or this value of it, was removed; else None."""
    for name in (key, f"{key}={value}"):
        for pattern in (*_INSTEAD, *ALWAYS):
            if fnmatchcase(name, pattern):
                instead = _INSTEAD.get(pattern) or f"it is {str(ALWAYS[pattern]).lower()}"
                return f"{name} was removed in {REMOVED_IN}: {instead}"
    return None


def was_default(key: str, value: Any) -> bool:
    """Whether an older file says by a removed setting only what now always holds."""
    is_whole = (key, value) in (("augment.crop_ratio_min", 0.01), ("augment.crop_ratio_max", 100.0))
    return is_whole or (key in ALWAYS and ALWAYS[key] == value)  # whole: augment=none had them
