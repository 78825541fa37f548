"""Evaluation of pretrained weights by name, with the preprocessing for which their accuracy was published."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from cl_train.config.schema import Config
from cl_train.config.validation import show
from cl_train.data.crops import default_val_resize
from cl_train.models.preprocessing import published_preprocessing
from cl_train.models.registry import is_file

log = logging.getLogger(__name__)

_TOGETHER = (("image_size", "val_size", "val_resize"), ("val_interpolation",), ("mean", "std"))


def follow_published_preprocessing(cfg: Config, given: Collection[str]) -> Config:
    """`cfg` with the published preprocessing, for `evaluate_only=true` and weights by name.

    A setting in `given`, such as `data.image_size`, is kept, and so are those that belong to it: crop and resize have
    their sizes together, mean and standard deviation too.
    """
    if not cfg.evaluate_only or cfg.weights is None:
        return cfg
    published = published_preprocessing(cfg.model, cfg.weights)
    for names in _TOGETHER:
        if any(f"data.{name}" in given for name in names):
            published = {name: value for name, value in published.items() if name not in names}
    if "image_size" in published:
        published["val_size"] = None
    return replace(cfg, data=replace(cfg.data, **published))


def log_preprocessing(cfg: Config) -> None:
    """Log the published preprocessing of weights by name, as a warning if the settings differ from it.

    When training, only the mean and the standard deviation are compared.
    """
    if cfg.weights is None or is_file(cfg.weights):
        return
    published = published_preprocessing(cfg.model, cfg.weights)
    if not published:
        log.warning("weights=%s: their published preprocessing is not a centre crop; it is not followed", cfg.weights)
        return
    size = cfg.data.val_size or cfg.data.image_size
    own = {**vars(cfg.data), "image_size": size, "val_resize": cfg.data.val_resize or default_val_resize(size)}
    relevant = published if cfg.evaluate_only else {name: published[name] for name in ("mean", "std")}
    differing = {name: value for name, value in relevant.items() if own[name] != value}
    if differing:
        log.warning("weights=%s were published with other settings: %s", cfg.weights, _words(differing))
    elif cfg.evaluate_only:
        log.info("weights=%s: the published preprocessing, %s", cfg.weights, _words(published))


def _words(settings: dict[str, Any]) -> str:
    return " ".join(f"data.{name}={show(value)}" for name, value in settings.items())
