"""The layout that a run trains in: the settings name it, or `channels_last=auto` measures it."""

import logging
from collections.abc import Mapping
from functools import partial

from torch import nn

from cl_train.errors import ConfigError
from cl_train.measure.auto import choose_layout
from cl_train.measure.parity_gate import parity_before_use
from cl_train.measure.timed_step import Workload
from cl_train.memory_format.convert import CONTIGUOUS, Layout
from cl_train.models.facts import ModelFacts
from cl_train.step.train_step import StepSettings
from cl_train.system.distributed import Dist, on_main
from cl_train.training.console import is_importable
from cl_train.training.parts import ModelSettings, audit_command

log = logging.getLogger(__name__)


def layout_for(
    wanted: ModelSettings,
    model: nn.Module,
    settings: StepSettings,
    facts: Mapping[int, ModelFacts],
    dist: Dist,
) -> tuple[Layout, str | None]:
    """Returns the layout in which `model` trains or is evaluated, and the parity as in summary.json
    (None: contiguous). facts: those of `model` at each image size of training.

    Raises ConfigError: with channels_last=true torch crashes on the model, or computes something
    else.
    """
    if wanted.channels_last == "false":
        return CONTIGUOUS, None
    crashes = [each.crash for each in facts.values() if each.crash]
    crash = crashes[0] if crashes and dist.device.type == "cpu" else None
    # It measures the run's own step on its largest images, or its evaluation.
    size = wanted.largest_size if wanted.is_trained else wanted.data.eval_size
    mode = "train" if wanted.is_trained else "infer"
    workload = Workload(wanted.batch_size, (3, size, size), settings, dist.device, mode)
    if wanted.channels_last == "true":
        if crash:
            raise ConfigError(crash)
        return wanted.channels_last_layout, checked_parity(wanted, model, workload, dist)
    if crash:
        log.info("channels_last=auto: contiguous: %s", crash)
        return CONTIGUOUS, None
    candidate, parity = wanted.channels_last_layout, wanted.parity
    choose = partial(choose_layout, model, workload, candidate=candidate, parity=parity)
    choice = on_main(choose, dist)
    log.info("channels_last=auto: %s", choice.reason)
    if choice.verdict == "slower":
        log.info("why channels_last is slower: %s", audit_command(wanted, settings.precision))
    return choice.layout, choice.parity


def checked_parity(wanted: ModelSettings, model: nn.Module, workload: Workload, dist: Dist) -> str:
    """Compares both layouts on rank 0 in the run's own step; returns the status for summary.json.

    Raises ConfigError: channels_last fails or computes something else.
    """
    layout = wanted.channels_last_layout
    parity = on_main(partial(parity_before_use, model, workload, layout, wanted.parity), dist)
    if parity.fails:
        raise ConfigError(f"{parity.difference}; channels_last=false trains")
    if parity.passed is False:
        check = "cl_train.check_parity(model)"
        if is_importable(wanted.name):
            size = f"data.image_size={workload.input_shape[-1]}"
            check = f"cl-train compare parity=true model={wanted.name} {size}"
            check += f" precision={workload.precision.name}"
        advice = "channels_last=false trains, parity=false trains all the same"
        raise ConfigError(f"{parity.difference}; more: {check}; {advice}")
    if parity.status.startswith("inconclusive"):
        log.warning("parity: %s", parity.status)
    return parity.status
