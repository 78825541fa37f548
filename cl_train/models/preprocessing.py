"""The transforms of validation images with which the accuracy of pretrained weights was published."""

from __future__ import annotations

import math
from typing import Any

from cl_train.models.registry import import_timm, is_file, torchvision_weights


def published_preprocessing(model: str, weights: str) -> dict[str, Any]:
    """The settings of `data` for weights by name: `image_size`, `val_resize`, `val_interpolation`, `mean`, `std`.

    Sources: `transforms()` of torchvision's weights; the pretrained configuration of timm at its test size.

    Returns:
        An empty dictionary for a file of weights and for transforms other than a resize of the short side and a square
        centre crop (timm's crop modes "squash" and "border").

    Raises:
        ConfigError: unknown weights, or timm is not installed.
    """
    if is_file(weights):
        return {}
    if not model.startswith("timm/"):
        own = torchvision_weights(model, weights).transforms()
        return _settings(own.crop_size[0], own.resize_size[0], own.interpolation.value, own.mean, own.std)
    timm = import_timm(model)
    cfg = timm.get_pretrained_cfg(model.removeprefix("timm/"))
    found = timm.data.resolve_data_config(pretrained_cfg=cfg.to_dict() if cfg else {}, use_test_size=True)
    _, height, width = found["input_size"]
    if height != width or found["crop_mode"] != "center" or found["interpolation"] not in ("bilinear", "bicubic"):
        return {}
    resize = math.floor(height / found["crop_pct"])
    return _settings(height, resize, found["interpolation"], found["mean"], found["std"])


def _settings(size: int, resize: int, interpolation: str, mean: Any, std: Any) -> dict[str, Any]:
    return {
        "image_size": size,
        "val_resize": resize,
        "val_interpolation": interpolation,
        "mean": list(mean),
        "std": list(std),
    }
