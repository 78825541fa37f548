"""The layout that a run trains in: the settings name it, or `channels_last=auto` measures it."""

import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from cl_train.config.schema import Config
from cl_train.data.build import size_schedule
from cl_train.data.device import DeviceFormat
from cl_train.errors import ConfigError
from cl_train.measure.auto import Choice, choose_layout
from cl_train.measure.parity_gate import parity_before_use
from cl_train.measure.timed_step import Workload
from cl_train.memory_format.convert import CONTIGUOUS, Layout, convert
from cl_train.models.facts import ModelFacts
from cl_train.step.train_step import StepSettings
from cl_train.system.distributed import Dist, on_main
from cl_train.training.console import is_importable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChosenLayout:
    """The format of a batch, which is also the model's; `parity` as in summary.json."""

    batch_format: DeviceFormat
    parity: str | None  # None: the run trains contiguous


def convert_layout(
    cfg: Config,
    model: nn.Module,
    settings: StepSettings,
    dist: Dist,
    facts: Collection[ModelFacts],
    mode: str = "train",
) -> ChosenLayout:
    """Convert `model` in place as the settings say. `facts`: at the sizes of training, as `auto`
    would notice a crash at its own size only. mode: what is run.

    Raises ConfigError: channels_last=true, and torch is known to crash on the model, or to compute
    something else.
    """
    layout, parity = layout_of(cfg), None
    # The run's own step on its largest images, or its evaluation.
    size = size_schedule(cfg.data).largest if mode == "train" else cfg.data.eval_size
    workload = Workload(cfg.batch_size, (3, size, size), settings, dist.device, mode)
    crashes = [each.crash for each in facts if each.crash] if dist.device.type == "cpu" else []
    if crashes and cfg.channels_last == "auto":
        log.info("channels_last=auto: contiguous: %s", crashes[0])
        layout = CONTIGUOUS
    elif cfg.channels_last == "auto":
        layout, parity = measured_layout(cfg, model, workload, dist)
    elif crashes and layout.is_channels_last:
        raise ConfigError(crashes[0])
    elif layout.is_channels_last:
        parity = checked_parity(cfg, model, workload, dist)
    report = convert(model, layout)
    if layout.is_channels_last:
        log.info("%s", report)
    dtype = settings.precision.input_dtype
    return ChosenLayout(DeviceFormat(dist.device, dtype, layout.memory_format), parity)


def layout_of(cfg: Config) -> Layout:
    """The layout that the settings name; for `auto` the one that is measured against contiguous."""
    if cfg.channels_last == "false":
        return CONTIGUOUS
    return Layout(torch.channels_last, cfg.conversion, tuple(cfg.select))


def measured_layout(
    cfg: Config, model: nn.Module, workload: Workload, dist: Dist
) -> tuple[Layout, str | None]:
    """`channels_last=auto`: rank 0 measures the run's own step; with its parity."""

    def choose() -> Choice:
        return choose_layout(model, workload, candidate=layout_of(cfg), parity=cfg.parity)

    choice = on_main(choose, dist)
    log.info("channels_last=auto: %s", choice.reason)
    return choice.layout, choice.parity


def checked_parity(cfg: Config, model: nn.Module, workload: Workload, dist: Dist) -> str:
    """Rank 0 compares both layouts in the run's own step; the status in summary.json.

    Raises ConfigError: channels_last computes something else.
    """
    parity = on_main(lambda: parity_before_use(model, workload, layout_of(cfg), cfg.parity), dist)
    if parity.passed is False:
        check = "cl_train.check_parity(model)"
        if is_importable(cfg.model):
            size = f"data.image_size={workload.input_shape[-1]}"
            check = f"cl-train compare parity=true model={cfg.model} {size}"
            check += f" precision={workload.precision.name}"
        what = f"channels_last=true computes something else: {parity.text}"
        advice = "channels_last=false trains, parity=false trains all the same"
        raise ConfigError(f"{what}; more: {check}; {advice}")
    if parity.status.startswith("inconclusive"):
        log.warning("parity: %s", parity.status)
    return parity.status
