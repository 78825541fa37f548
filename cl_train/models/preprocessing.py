"""The preprocessing of evaluations with given weights: published for weights by name, recorded in files of weights."""

import logging
import math
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any

from cl_train.config.schema import DataConfig
from cl_train.config.validation import show
from cl_train.models.card import Preprocessing
from cl_train.models.files import read_weights, weights_path
from cl_train.models.sources import import_timm, torchvision_weights

log = logging.getLogger(__name__)

_TOGETHER = (("image_size", "val_size", "val_resize"), ("val_interpolation",), ("mean", "std"))


@cache  # an evaluation follows it, and then logs it
def published_preprocessing(model: str, weights: str) -> dict[str, Any]:
    """`Preprocessing.settings` of torchvision's weights, of timm's at their test size, or of what a file records.

    Empty if unknown, or no centre crop after a resize of the short side (timm's crop modes "squash" and "border").
    Raises ConfigError: unknown weights, an unreadable file, or timm is not installed.
    """
    if path := weights_path(weights):
        recorded = read_weights(path).card.preprocessing if path.is_file() else None
        return recorded.settings() if recorded else {}
    if not model.startswith("timm/"):
        own = torchvision_weights(model, weights).transforms()
        sizes = own.resize_size[0], own.crop_size[0]
        return Preprocessing(*sizes, own.interpolation.value, tuple(own.mean), tuple(own.std)).settings()
    timm = import_timm(model)
    cfg = timm.get_pretrained_cfg(model.removeprefix("timm/"))
    found = timm.data.resolve_data_config(pretrained_cfg=cfg.to_dict() if cfg else {}, use_test_size=True)
    _, size, width = found["input_size"]
    if size != width or found["crop_mode"] != "center" or found["interpolation"] not in ("bilinear", "bicubic"):
        return {}
    resize = math.floor(size / found["crop_pct"])
    return Preprocessing(resize, size, found["interpolation"], tuple(found["mean"]), tuple(found["std"])).settings()


def follow_published_preprocessing(data: DataConfig, model: str, weights: str, given: Collection[str]) -> DataConfig:
    """`data` with the preprocessing of `weights`; unchanged if it is unknown.

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
    """Log the preprocessing of the weights, as a warning if the settings differ from it.

    When training, only the mean and the standard deviation are compared.
    """
    published = published_preprocessing(model, weights)
    if not published:
        if weights_path(weights) is None:
            log.warning("weights=%s: their published preprocessing is not a centre crop; it is not followed", weights)
        return
    own = {**vars(data), **Preprocessing.of(data).settings()}
    relevant = published if evaluate_only else {name: published[name] for name in ("mean", "std")}
    differing = {name: value for name, value in relevant.items() if own[name] != value}
    if differing:
        log.warning("weights=%s were published with other settings: %s", weights, _words(differing))
    elif evaluate_only:
        log.info("weights=%s: the published preprocessing, %s", weights, _words(published))


def _words(settings: dict[str, Any]) -> str:
    return " ".join(f"data.{name}={show(value)}" for name, value in settings.items())
