"""`channels_last=auto`: the faster layout for this model, this step and this machine.

`choose_layout` takes the choice that an earlier run has kept (`kept.py`), or has `paired.benchmark`
time both layouts in turns. If channels_last is faster, what it computes is compared
(`parity_gate.py`).
"""

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cl_train.config.schema import OPTIMIZERS, OptimConfig
from cl_train.config.validation import suggest
from cl_train.errors import ConfigError
from cl_train.measure.alternate import Stop
from cl_train.measure.kept import keep, kept_file, read_kept
from cl_train.measure.paired import benchmark, by_itself_text, variants_of
from cl_train.measure.parity_gate import parity_before_use
from cl_train.measure.statistics import HOST_BOUND, verdict_of
from cl_train.measure.time_limit import scaled_to_time
from cl_train.measure.timed_step import Workload, device_of, image_shape
from cl_train.memory_format.convert import CHANNELS_LAST, CONTIGUOUS, Layout
from cl_train.memory_format.layout import CONVOLUTIONS, MEMORY_FORMAT_NAMES
from cl_train.step.precision import resolve_precision
from cl_train.step.train_step import StepSettings
from cl_train.system.machine import release_memory
from cl_train.system.torch_state import own_torch_state

log = logging.getLogger(__name__)

TIME_LIMIT_S = 20.0  # with warm-up; under 5 % of a run of ten minutes, also for slow models
SHARE_OF_ROUNDS = 0.6  # of the time limit; the rest is for finding the batch size and warm-up
LEAST_STEPS = 32  # a step in each block of the eight rounds that an interval needs
NOISY_WIDTH = 0.2  # of a ratio's interval; a wider one is not cached unless it decides


@dataclass(frozen=True)
class Choice:
    """The layout that was chosen, and why."""

    layout: Layout
    reason: str
    seconds: float
    cached: bool = False
    conclusive: bool = True  # False: too noisy or disturbed; the next run measures again
    parity: str | None = None  # of channels_last: "passed", or "inconclusive: why"
    verdict: str | None = None  # on channels_last, if it was measured

    @property
    def memory_format(self) -> torch.memory_format:
        return self.layout.memory_format

    @property
    def conversion(self) -> str:
        return self.layout.conversion

    @property
    def channels_last(self) -> bool:
        return self.layout.is_channels_last

    def __str__(self) -> str:
        return self.reason

    def to_dict(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name != "layout"}
        memory_format = MEMORY_FORMAT_NAMES[self.memory_format]
        return {"memory_format": memory_format, "conversion": self.conversion, **plain}


@own_torch_state
def choose_memory_format(
    model: nn.Module,
    *,
    batch_size: int = 32,
    image_size: int | tuple[int, ...] = 224,
    precision: str = "auto",
    device: torch.device | str | None = None,
    compile: bool = False,
    cuda_graph: bool = False,
    optimizer: str = "sgd",
    time_limit_s: float = TIME_LIMIT_S,
) -> Choice:
    """Measure copies of `model`; choose channels_last if it is faster beyond noise.

    Call it with the model built, loaded and on its device, before it is converted, wrapped or
    compiled. For a model that cannot be measured the choice is contiguous; its `reason` says why.

    Args:
        batch_size: images per device and step; on a CPU, as many of them as memory and time allow.
        image_size, precision, device, compile, cuda_graph: as in `compare_layouts`.
        optimizer: one of `OPTIMIZERS` in cl_train/config/schema.py.
        time_limit_s: the time for warm-up and measurement of an eager model.

    Raises:
        ConfigError: an argument is impossible.
    """
    if optimizer not in OPTIMIZERS:
        choices = f"{', '.join(OPTIMIZERS)}{suggest(optimizer, OPTIMIZERS)}"
        raise ConfigError(f"optimizer={optimizer}; use {choices}")
    device = device_of(model, device)
    settings = StepSettings(
        resolve_precision(precision, device),
        OptimConfig(name=optimizer),
        compile=compile,
        cuda_graph=cuda_graph,
    )
    workload = Workload(batch_size, image_shape(image_size), settings, device)
    return choose_layout(model, workload, time_limit_s)


def choose_layout(
    model: nn.Module,
    workload: Workload,
    time_limit_s: float = TIME_LIMIT_S,
    candidate: Layout = CHANNELS_LAST,
    parity: str = "auto",
) -> Choice:
    """Chooses `candidate` if it is faster in the step of `workload` and computes the same, else
    contiguous.

    A choice is kept if it was measured undisturbed, and its interval decides or is narrow.
    `parity`: the setting of a run.
    """
    if not any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        return Choice(CONTIGUOUS, "contiguous: the model has no convolutions", 0.0)
    path = kept_file("layout", model, workload, candidate)
    cached = _read(path, candidate)
    if cached is not None:
        return _with_parity(cached, model, workload, parity)
    log.info(
        "channels_last=auto: measuring the layouts, about %.0f s; an undisturbed result is kept",
        time_limit_s,
    )
    try:
        choice = _measured_choice(model, workload, time_limit_s, candidate)
    except ConfigError as error:
        return Choice(CONTIGUOUS, f"contiguous: the layouts cannot be measured: {error}", 0.0)
    finally:
        release_memory()
    if choice.conclusive:
        keep(path, choice.to_dict(), "channels_last=auto")
    return _with_parity(choice, model, workload, parity)


def _with_parity(choice: Choice, model: nn.Module, workload: Workload, parity: str) -> Choice:
    """Returns the choice, or contiguous if channels_last fails or computes something else."""
    if not choice.channels_last:
        return choice
    found = parity_before_use(model, workload, choice.layout, parity)
    if found.passed is False:
        return replace(choice, layout=CONTIGUOUS, reason=f"contiguous: {found.difference}")
    return replace(choice, parity=found.status)


def _measured_choice(
    model: nn.Module, workload: Workload, time_limit_s: float, candidate: Layout
) -> Choice:
    started_at = time.perf_counter()
    measured = scaled_to_time(model, workload, SHARE_OF_ROUNDS * time_limit_s, LEAST_STEPS)
    stop = Stop(time_limit_s=time_limit_s - (time.perf_counter() - started_at))
    done = benchmark(variants_of(model, (CONTIGUOUS, candidate)), measured, stop=stop)

    # Not `done.verdict`: that is "not_comparable" after a disturbance, which slows both alike.
    verdict = verdict_of(done.ratio, is_host_bound=done.is_host_bound)
    layout = candidate if verdict == "faster" else CONTIGUOUS
    disturbed = done.disturbance
    is_wide = verdict == "inconclusive" and done.ratio.width > NOISY_WIDTH

    reason = f"{layout.name}, not decided" if is_wide else layout.name
    reason += f": channels_last is {done.ratio} as fast as contiguous, which reaches "
    reason += f"{done.speeds[0].images_per_s:.1f} images/s"
    reason += _smaller(done.batch_size, measured, workload)
    if by_itself := by_itself_text(done.by_itself_pct):
        reason += f"; {by_itself}"
        if verdict == "no_difference":
            reason += ", and either setting is as fast"
    if done.is_host_bound:
        reason += f"; {HOST_BOUND}"
    if disturbed or is_wide:
        reason += f"; {disturbed or 'the times vary too much'}, so the next run measures again"
    seconds = round(time.perf_counter() - started_at, 2)
    is_conclusive = not (disturbed or is_wide)
    return Choice(layout, reason, seconds, conclusive=is_conclusive, verdict=verdict)


def _smaller(batch_size: int, measured: Workload, workload: Workload) -> str:
    """Says what was smaller in the measured step than it is in the run."""
    micro_steps = measured.settings.accumulate_steps
    parts = [f"batch {batch_size}"] if batch_size != workload.batch_size else []
    if micro_steps != workload.settings.accumulate_steps:
        parts.append(f"accumulate_steps {micro_steps}")
    return " at " + " and ".join(parts) if parts else ""


def _read(path: Path, candidate: Layout) -> Choice | None:
    kept = read_kept(path)
    try:
        is_candidate = kept["memory_format"] == MEMORY_FORMAT_NAMES[candidate.memory_format]
        layout = candidate if is_candidate else CONTIGUOUS
        reason = f"{kept['reason']} (measured before: {path})"
        seconds, verdict = float(kept["seconds"]), kept.get("verdict")
        return Choice(layout, reason, seconds, cached=True, verdict=verdict)
    except (ValueError, KeyError, TypeError):
        return None
