"""Makes the parts of a run from its settings."""

import logging
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from cl_train.config.schema import Config, DataConfig
from cl_train.config.validation import show
from cl_train.data.build import Data, ImageData, build_data, size_schedule
from cl_train.data.loader import DataSettings
from cl_train.errors import ConfigError
from cl_train.memory_format.convert import CHANNELS_LAST, Layout
from cl_train.models.sources import classes_of
from cl_train.step.precision import Precision
from cl_train.system.distributed import on_main
from cl_train.training.console import is_importable
from cl_train.training.plan import Plan

log = logging.getLogger(__name__)

MAX_BAD_STEPS = 10  # with on_nonfinite=skip
_UNEVEN = 10  # images of the largest class / those of the smallest one, from which a line says so


def open_data(settings: DataSettings, source: str | None, stack: ExitStack) -> Data:
    """Opens the images of the run. One that only evaluates takes the classes of the model `source`.
    Raises ConfigError: the images do not fit.
    """
    data = build_data(settings)
    stack.callback(data.close)
    known = () if settings.training else on_main(lambda: classes_of(source), settings.dist)
    if known and isinstance(data, ImageData):
        data.evaluate_as(known, f"the model of {source}")
    return data


def plan_of(cfg: Config, train_images: int, world_size: int) -> Plan:
    """Returns the plan; its learning rate is linear in the batch size (Goyal et al. 2017)."""
    global_batch_size = cfg.batch_size * cfg.accumulate_steps * world_size
    steps_per_epoch = train_images // (cfg.batch_size * world_size) // cfg.accumulate_steps
    total_steps, lr = steps_per_epoch * cfg.epochs, cfg.optim.lr
    if cfg.optim.reference_batch_size:
        lr *= global_batch_size / cfg.optim.reference_batch_size
    sizes = size_schedule(cfg.data)
    return Plan(
        tuple(map(sizes.image_size_at, range(cfg.epochs))),
        global_batch_size,
        cfg.accumulate_steps,
        max(1, steps_per_epoch),
        min(cfg.max_steps or total_steps, total_steps),
        lr,
        cfg.schedule,
        cfg.checkpoint,
        log_every=cfg.log_every,
        evaluate_every=cfg.evaluate_every,
        patience=cfg.patience,
        warmup_steps=cfg.warmup_steps,
        max_bad_steps=MAX_BAD_STEPS if cfg.on_nonfinite == "skip" else 0,
    )


@dataclass(frozen=True)
class ModelSettings:
    """Which model is built, in which layout, and for which images."""

    name: str
    weights: str | None = None
    entry: str | None = None  # of the file `weights`
    drop_path: float | None = None
    freeze: Sequence[str] = ()
    sync_batchnorm: bool = False
    channels_last: str = "false"  # true, false or auto
    channels_last_layout: Layout = CHANNELS_LAST  # what true and auto convert to
    parity: str = "auto"
    batch_size: int = 32  # per device and micro-step
    data: DataConfig = DataConfig()
    is_trained: bool = True  # False: its weights are evaluated as they are
    is_evaluated: bool = True
    graph_may_fail: bool = False  # the steps then run eagerly

    @property
    def trained_sizes(self) -> tuple[int, ...]:
        """The sizes of the images in training, pixels."""
        return size_schedule(self.data).image_sizes if self.is_trained else ()

    @property
    def largest_size(self) -> int:
        """The size of the largest images in training, pixels."""
        return size_schedule(self.data).largest


def audit_command(wanted: ModelSettings, precision: Precision) -> str:
    if not is_importable(wanted.name):
        return "cl_train.audit(model, images)"
    layout = wanted.channels_last_layout
    used: dict[str, Any] = {"model": wanted.name, "data.image_size": wanted.largest_size}
    used |= {"batch_size": wanted.batch_size, "precision": precision.name}
    if layout.conversion != "full":
        used["conversion"] = layout.conversion
    if layout.select:
        used["select"] = [*layout.select]
    return f"cl-train audit {shlex.join(f'{key}={show(value)}' for key, value in used.items())}"


def class_weights(wanted: str | None, data: Data) -> tuple[float, ...]:
    """Returns the class weights of the loss: none, or scikit-learn's `balanced`, whose mean over
    all images is 1. Without weights, a line tells that classes differ much. Raises ConfigError: the
    labels are unknown.
    """
    counts = data.class_counts
    if wanted is None:
        if counts and max(counts) >= _UNEVEN * max(1, min(counts)):
            images = f"classes from {min(counts)} to {max(counts)} images"
            equal = "class_weight=balanced counts them equally, as balanced_accuracy does"
            log.info("%s: %s", images, equal)
        return ()
    if counts is None:
        needs = "a Dataset with its labels as the attribute `targets`, or your own loss="
        raise ConfigError(f"class_weight={wanted} needs {needs}")
    return tuple(sum(counts) / (len(counts) * max(1, count)) for count in counts)
