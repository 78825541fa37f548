"""The transforms of validation images with which the accuracy of pretrained weights was published, and their use."""

import logging
import math
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any

from cl_train.config.schema import DataConfig
from cl_train.config.validation import show
from cl_train.data.crops import default_val_resize
from cl_train.models.sources import import_timm, is_file, torchvision_weights

log = logging.getLogger(__name__)

_TOGETHER = (("image_size", "val_size", "val_resize"), ("val_interpolation",), ("mean", "std"))


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


def follow_published_preprocessing(data: DataConfig, model: str, weights: str, given: Collection[str]) -> DataConfig:
    """`data` with the published preprocessing of `weights`; unchanged for a file of weights.

    A setting in `given`, such as `data.image_size`, is kept, and so are those that belong to it: crop and resize have
    their sizes together, mean and standard deviation too.
    """
    published = dict(published_preprocessing(model, weights))
    for names in _TOGETHER:
        if any(f"data.{name}" in given for name in names):
            published = {name: value for name, value in published.items() if name not in names}
    if "image_size" in published:
        published["val_size"] = None
    return replace(data, **published)


def log_preprocessing(data: DataConfig, model: str, weights: str, *, evaluate_only: bool) -> None:
    """Log the published preprocessing of weights by name, as a warning if the settings differ from it.

    When training, only the mean and the standard deviation are compared.
    """
    if is_file(weights):
        return
    published = published_preprocessing(model, weights)
    if not published:
        log.warning("weights=%s: their published preprocessing is not a centre crop; it is not followed", weights)
        return
    size = data.val_size or data.image_size
    own = {**vars(data), "image_size": size, "val_resize": data.val_resize or default_val_resize(size)}
    relevant = published if evaluate_only else {name: published[name] for name in ("mean", "std")}
    differing = {name: value for name, value in relevant.items() if own[name] != value}
    if differing:
        log.warning("weights=%s were published with other settings: %s", weights, _words(differing))
    elif evaluate_only:
        log.info("weights=%s: the published preprocessing, %s", weights, _words(published))


def _words(settings: dict[str, Any]) -> str:
    return " ".join(f"data.{name}={show(value)}" for name, value in settings.items())
