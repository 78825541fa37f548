"""Settings of one group that contradict each other: the data, the launcher, growing images. One line per problem."""

from __future__ import annotations

import itertools

from cl_train.config.schema import AugmentConfig, DataConfig, LauncherConfig


def data_problems(data: DataConfig, augment: AugmentConfig) -> list[str]:
    val_size = data.val_size or data.image_size
    rules = [
        (augment.crop_scale_min > augment.crop_scale_max, "augment.crop_scale_min is above augment.crop_scale_max"),
        (augment.crop_ratio_min > augment.crop_ratio_max, "augment.crop_ratio_min is above augment.crop_ratio_max"),
        (
            any(0 < alpha < 0.01 for alpha in (augment.mixup, augment.cutmix)),
            "augment.mixup and augment.cutmix must be 0 (off) or at least 0.01",
        ),
        (
            augment.policy != "timm" and augment.timm_policy != AugmentConfig.timm_policy,
            f"augment.timm_policy={augment.timm_policy} has no effect with augment.policy={augment.policy}: use "
            f"augment.policy=timm, or write augment.timm_policy={AugmentConfig.timm_policy} if a recipe sets it",
        ),
        (
            data.name in ("imagenet", "folder") and data.root is None,
            f"data={data.name} needs data.root=FOLDER with train/<class>/* and val/<class>/* (no data? data=sample)",
        ),
        (
            len(data.mean) != 3 or len(data.std) != 3 or min(data.std) <= 0,
            "data.mean and data.std need three numbers each, those of data.std above 0",
        ),
        (
            data.val_resize is not None and data.val_resize < val_size,
            f"data.val_resize={data.val_resize} is smaller than the validation crop of {val_size} px",
        ),
        (
            data.scale_batch and not data.size_schedule,
            "data.scale_batch=true has no effect without data.size_schedule=[[0,128],[6,160],...]",
        ),
    ]
    return [text for broken, text in rules if broken]


def launcher_problems(launcher: LauncherConfig) -> list[str]:
    if launcher.name == "slurm" and launcher.gpus:
        return ["launcher.gpus is for launcher=local; use launcher.gpus_per_node with launcher=slurm"]
    if launcher.name == "local" and launcher != LauncherConfig(gpus=launcher.gpus):
        return ["with launcher=local only launcher.gpus can be set; the other launcher settings need launcher=slurm"]
    return []


def size_schedule_problems(schedule: list[list[int]], epochs: int) -> list[str]:
    """One problem of `data.size_schedule`, with an example of what to write."""
    name = f"data.size_schedule={schedule}"
    if not schedule:
        return []
    if any(len(point) != 2 for point in schedule):
        return [f"{name}: write pairs of epoch and size, such as [[0,128],[6,160],[12,192]]"]
    starts, sizes = zip(*schedule, strict=True)
    if any(later <= earlier for earlier, later in itertools.pairwise(starts)):
        return [f"{name}: each epoch must be later than the one before it, as in [[0,128],[6,160],[12,192]]"]
    if starts[0] != 0:
        return [f"{name}: the first epoch is {starts[0]}; begin with [0,{sizes[0]}]"]
    for size in sizes:
        if not 8 <= size <= 4096 or size % 4:
            nearest = min(4096, max(8, 4 * round(size / 4)))
            return [f"{name}: size {size} is not a multiple of 4 from 8 to 4096; use {nearest}"]
    if starts[-1] >= epochs:
        return [f"{name}: its last epoch {starts[-1]} is not reached with epochs={epochs} (epochs 0 to {epochs - 1})"]
    return []
