"""The transforms of validation images with which the accuracy of pretrained weights was published."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from cl_train.models.registry import import_timm, is_file, torchvision_weights


@cache  # an evaluation follows it, and then logs it
def published_preprocessing(model: str, weights: str) -> dict[str, Any]:
    """The settings of `data` for weights by name: `image_size`, `val_resize`, `val_interpolation`, `mean`, `std`.

    Sources: `transforms()` of torchvision's weights; the pretrained configuration of timm at its test size. Empty for a
    file of weights and for transforms other than a resize of the short side and a square centre crop (timm's crop modes
    "squash" and "border").

    Raises ConfigError: unknown weights, or timm is not installed.
    """
    if is_file(weights):
        return {}
    if model.startswith("timm/"):
        timm = import_timm(model)
        cfg = timm.get_pretrained_cfg(model.removeprefix("timm/"))
        found = timm.data.resolve_data_config(pretrained_cfg=cfg.to_dict() if cfg else {}, use_test_size=True)
        _, size, width = found["input_size"]
        if size != width or found["crop_mode"] != "center" or found["interpolation"] not in ("bilinear", "bicubic"):
            return {}
        resize, interpolation = math.floor(size / found["crop_pct"]), found["interpolation"]
        mean, std = found["mean"], found["std"]
    else:
        own = torchvision_weights(model, weights).transforms()
        size, resize, interpolation = own.crop_size[0], own.resize_size[0], own.interpolation.value
        mean, std = own.mean, own.std
    return {
        "image_size": size,
        "val_resize": resize,
        "val_interpolation": interpolation,
        "mean": list(mean),
        "std": list(std),
    }
