"""Settings that were removed, with what to do instead: answered by their names for one version."""

from fnmatch import fnmatchcase
from typing import Any

REMOVED_IN = "0.3"

_REPEATS = "a disturbed run does not count, and repeats=auto adds others"

# A key, or a pattern of key=value where only values went: the default that a setting had, which an
# older file may still hold, and what a user does instead.
_REMOVED: dict[str, tuple[Any, str]] = {
    "optim.alpha": (0.9, "it is 0.9, as in the published recipes"),
    "experiment=resnet*_ffcv_*ep": (None, "write experiment=resnet50_ffcv epochs=16"),
    "experiment=vit_small_deit3": (None, "facebookresearch/deit trains it"),
    "layer_scale": (None, "set it in a model=package.module:function"),
    "drop_path_constant": (False, "set it in a model=package.module:function"),
    "optim.head_lr_ratio": (1.0, "optim.layer_decay gives the classifier the largest rate"),
    "augment.policy=three_augment": (None, "timm's augment.policy=3a comes nearest"),
    "augment.policy=timm": (None, "write augment.policy=rand-m7-mstd0.5-inc1"),
    "augment.timm_policy": ("rand-m7-mstd0.5-inc1", "write augment.policy=NAME"),
    "augment.randaugment_ops": (2, "it is 2; augment.policy=rand-n3-m9 is timm's"),
    "augment.randaugment_magnitude": (9, "it is 9; augment.policy=rand-m15 is timm's"),
    "augment.crop_scale_max": (1.0, "it is 1"),
    "data.download": (False, "unpack imagenette2-320.tgz of github.com/fastai/imagenette"),
    "log_to=mlflow": (None, "log_to=my.module:function does it, see docs/training.md"),
    "parquet": (None, "a Dataset over Hugging Face `datasets` reads such files, see docs/data.md"),
    "checkpoint.every_minutes": (0.0, "use checkpoint.every_steps"),
    "checkpoint.save_best": (True, "best.pt is always kept"),
    "checkpoint.background": (True, "a thread always writes"),
    "max_nonfinite": (10, "it is 10"),
    "amp.growth_interval": (2000, "it is 2000"),
    "amp.min_scale": (1.0, "it is 1"),
    "rank_timeout_s": (600.0, "NCCL and gloo have their own timeouts"),
    "ddp_static_graph": (False, "cuda_graph=true sets it"),
    "compile_mode": ("default", "it is torch's default"),
    "batch_size=auto": (None, "give the number"),
    "rerun": ("missing", _REPEATS),
    "max_reruns": (2, _REPEATS),
    "wait_for_quiet_s": (None, _REPEATS),
    "against=*[/=]*": (None, "use train -m environment=PYTHON,here compare_by=environment"),
}


def removal_of(key: str, value: Any) -> str | None:
    """The answer to `key=value` if the setting, or this value of it, was removed; else None."""
    for name in (key, f"{key}={value}"):
        for pattern, (_, instead) in _REMOVED.items():
            if fnmatchcase(name, pattern):
                return f"{name} was removed in {REMOVED_IN}: {instead}"
    return None


def was_default(key: str, value: Any) -> bool:
    """Whether an older file says by a removed setting only what now always holds."""
    return key in _REMOVED and _REMOVED[key][0] == value
