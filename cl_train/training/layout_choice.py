"""The layout that a run trains in: the settings name it, or `channels_last=auto` measures it."""

import logging
from collections.abc import Collection

import torch
from torch import nn

from cl_train.config.schema import Config
from cl_train.data.build import size_schedule
from cl_train.data.device import DeviceFormat
from cl_train.errors import ConfigError
from cl_train.measure.auto import choose_layout
from cl_train.measure.timed_step import Workload
from cl_train.memory_format.convert import CONTIGUOUS, Layout, convert
from cl_train.models.facts import ModelFacts
from cl_train.step.train_step import StepSettings
from cl_train.system.distributed import Dist, on_main

log = logging.getLogger(__name__)


def convert_layout(
    cfg: Config,
    model: nn.Module,
    settings: StepSettings,
    dist: Dist,
    facts: Collection[ModelFacts],
    mode: str = "train",
) -> DeviceFormat:
    """Convert `model` in place as the settings say; returns the format of its input. `facts`: at
    the sizes of training, as `auto` would notice a crash at its own size only. mode: what is run.

    Raises ConfigError: channels_last=true, and torch is known to crash on the model.
    """
    layout = layout_of(cfg)
    crashes = [each.crash for each in facts if each.crash] if dist.device.type == "cpu" else []
    if crashes and cfg.channels_last == "auto":
        log.info("channels_last=auto: contiguous: %s", crashes[0])
        layout = CONTIGUOUS
    elif cfg.channels_last == "auto":
        layout = measured_layout(cfg, model, settings, dist, mode)
    elif crashes and layout.is_channels_last:
        raise ConfigError(crashes[0])
    report = convert(model, layout)
    if layout.is_channels_last:
        log.info("%s", report)
    return DeviceFormat(dist.device, settings.precision.input_dtype, layout.memory_format)


def layout_of(cfg: Config) -> Layout:
    """The layout that the settings name; for `auto` the one that is measured against contiguous."""
    if cfg.channels_last == "false":
        return CONTIGUOUS
    return Layout(torch.channels_last, cfg.conversion, tuple(cfg.select))


def measured_layout(
    cfg: Config, model: nn.Module, settings: StepSettings, dist: Dist, mode: str
) -> Layout:
    """`channels_last=auto`: rank 0 measures the run's own step on its largest images, or its
    evaluation.
    """
    size = size_schedule(cfg.data).largest if mode == "train" else cfg.data.eval_size
    workload = Workload(cfg.batch_size, (3, size, size), settings, dist.device, mode)
    choice = on_main(lambda: choose_layout(model, workload, candidate=layout_of(cfg)), dist)
    log.info("channels_last=auto: %s", choice.reason)
    return choice.layout
