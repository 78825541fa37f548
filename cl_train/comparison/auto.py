"""`channels_last=auto`: measure the layouts on the run's own model, batch and precision, take the fastest, remember it.

The choice is kept in ${XDG_CACHE_HOME:-~/.cache}/cl_train/, one small JSON file per combination of everything that
could change the answer, so the next run of the same kind starts at once.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cl_train.comparison.paired import (
    CHANNELS_LAST,
    CHANNELS_LAST_CONV,
    CONTIGUOUS,
    MIN_ROUNDS,
    Effort,
    Layout,
    LayoutBenchmark,
    Workload,
    benchmark_layouts,
    is_out_of_memory,
    release_memory,
)
from cl_train.config.schema import ConfigError, OptimConfig
from cl_train.memory_format import convert as memory_format
from cl_train.step.precision import Precision
from cl_train.system.distributed import Dist, broadcast_object
from cl_train.system.environment import cache_folder, describe_environment, device_name

log = logging.getLogger(__name__)

TIME_LIMIT_S = 20.0  # with warm-up under 5 % of a run of ten minutes, for slow models too
NOISY_WIDTH = 0.2  # of the ratio's interval: a tie this wide may be anything
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Choice:
    """What `channels_last=auto` came to, and why in one sentence; `conversion` as in `memory_format.convert`."""

    channels_last: bool
    conversion: str
    reason: str
    seconds: float
    cached: bool = False
    conclusive: bool = True  # False: the machine was too busy to tell, and the next run measures again


def choose_memory_format(
    model: nn.Module,
    *,
    model_name: str,
    image_size: int,
    batch_size: int,
    precision: Precision,
    compile: bool,
    optim: OptimConfig,
    dist: Dist,
    compile_mode: str = "default",
    input_channels: int = 3,
    time_limit_s: float = TIME_LIMIT_S,
) -> Choice:
    """Measure contiguous, channels_last, and channels_last for convolution weights only; choose the fastest.

    Contiguous unless another is faster beyond noise. Call it with the model built, loaded and on its device, before it
    is converted, wrapped or compiled. `model`, its BatchNorm statistics and all random generators stay as they are:
    copies are measured. Rank 0 measures while the others wait, and all ranks get its answer.

    Args:
        model_name: for the cache's key, beside the shapes of the model's parameters.
        batch_size: images per device and micro-step. Where a step is so slow that the time limit would not do, a part
            of the batch is measured (said in the reason).
        compile: the compiled model is measured; compiling each layout then costs more than the time limit.
        time_limit_s: for measuring and warm-up of an eager model.
    """
    choice = None
    if dist.is_main:
        workload = Workload(
            batch_size=batch_size,
            image_size=image_size,
            precision=precision,
            device=dist.device,
            compile=compile,
            compile_mode=compile_mode,
            input_channels=input_channels,
            optim=optim,
        )
        choice = _cached_or_measured(model, model_name, workload, time_limit_s)
    chosen = broadcast_object(choice, dist)
    assert isinstance(chosen, Choice)
    return chosen


def _cached_or_measured(model: nn.Module, model_name: str, workload: Workload, time_limit_s: float) -> Choice:
    key = _cache_key(model, model_name, workload)
    path = cache_folder() / f"layout-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]}.json"
    cached = _read(path, key)
    if cached is not None:
        return replace(cached, cached=True, reason=f"{cached.reason} (measured before: {path})")
    log.info("channels_last=auto: measuring the layouts, about %.0f s, once per machine and setting", time_limit_s)
    generators = random.getstate(), np.random.get_state()
    started_at = time.perf_counter()
    try:
        choice = _measure(model, workload, time_limit_s)
    except Exception as error:  # whatever a user's model raises when it is copied: the run itself needs no copies
        is_memory = isinstance(error, ConfigError) or is_out_of_memory(error)
        why = "no memory left" if is_memory else f"{type(error).__name__} ({str(error)[:200]}) stands in the way"
        return Choice(False, "full", f"contiguous: {why} to measure the layouts", 0.0)
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        _forget_memory(workload.device)
    choice = replace(choice, seconds=round(time.perf_counter() - started_at, 2))
    if choice.conclusive:
        _write(path, key, choice)
    return choice


def _forget_memory(device: torch.device) -> None:
    """The run's peak memory must not include what was measured here."""
    release_memory(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _measure(model: nn.Module, workload: Workload, time_limit_s: float) -> Choice:
    if not any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules()):
        return Choice(False, "full", "contiguous: the model has no 2-d convolutions", 0.0)
    layouts = _layouts(model, workload)
    batch_size = _affordable_batch(model, workload, len(layouts), time_limit_s)
    effort = Effort(time_limit_s=0.75 * time_limit_s)  # warm-up takes about the rest
    done = benchmark_layouts(model, replace(workload, batch_size=batch_size), layouts, effort)
    winner = CONTIGUOUS
    for layout in layouts[1:]:
        speed = done.of(layout)
        if speed.verdict == "faster" and speed.images_per_s > done.of(winner).images_per_s:
            winner = layout
    reason = _reason(winner, done, workload.batch_size)
    is_noisy = winner is CONTIGUOUS and any(speed.versus_first.width > NOISY_WIDTH for speed in done.speeds[1:])
    if is_noisy and all(speed.verdict == "no_difference" for speed in done.speeds[1:]):
        return Choice(False, "full", f"{reason}; too noisy to tell, so not remembered", 0.0, conclusive=False)
    return Choice(winner.channels_last, winner.conversion, reason, 0.0)


def _layouts(model: nn.Module, workload: Workload) -> list[Layout]:
    """Convolution weights alone are a layout of their own only where other tensors have four dimensions too.

    Compiled, each layout more is another compilation, and the compiler moves tensors as it likes.
    """
    full, conv = (memory_format.convert(copy.deepcopy(model).to("meta"), mode) for mode in ("full", "conv"))
    names = [{change.name for change in report.changed} for report in (full, conv)]
    return [CONTIGUOUS, CHANNELS_LAST] + ([CHANNELS_LAST_CONV] if names[0] != names[1] and not workload.compile else [])


def _affordable_batch(model: nn.Module, workload: Workload, layouts: int, time_limit_s: float) -> int:
    """The run's batch, or on a slow CPU the largest halving of it for which the least number of rounds fits."""
    if workload.device.type == "cuda" or workload.compile:
        return workload.batch_size
    steps = layouts * (4 + 2 * MIN_ROUNDS)  # warm-up and memory, then A B B A
    probe = min(workload.batch_size, 4)
    effort = Effort(time_limit_s=0.0, block_s=0.0)
    probed = benchmark_layouts(model, replace(workload, batch_size=probe), [CONTIGUOUS], effort)
    image_s = probed.speeds[0].step_ms / 1000 / probe
    batch_size = workload.batch_size
    while batch_size > probe and image_s * batch_size * steps > time_limit_s:
        batch_size //= 2
    return batch_size


def _reason(winner: Layout, done: LayoutBenchmark, batch_size: int) -> str:
    ratios = [(speed.layout, speed.versus_first) for speed in done.speeds[1:]]
    listed = ", ".join(f"{name} {ratio.ratio:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]" for name, ratio in ratios)
    smaller = "" if done.batch_size == batch_size else f" at batch {done.batch_size}"
    return f"{winner.name}, as against contiguous ({done.speeds[0].images_per_s:.1f} images/s{smaller}): {listed}"


# --- the cache --------------------------------------------------------------------------------------------------------


def _cache_key(model: nn.Module, model_name: str, workload: Workload) -> dict[str, Any]:
    """Everything that could change which layout is faster. Shapes stand for code that changed under the same name."""
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    versions = describe_environment(workload.device)
    return {
        "format_version": _FORMAT_VERSION,
        "model": model_name,
        "parameters": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
        "batch_size": workload.batch_size,
        "image_size": workload.image_size,
        "input_channels": workload.input_channels,
        "precision": workload.precision.name,
        "compile": workload.compile_mode if workload.compile else False,
        "optimizer": workload.optim.name,
        "device": device_name(workload.device),
        **{name: versions[name] for name in ("torch", "cuda", "cudnn", "driver")},
    }


def _read(path: Path, key: dict[str, Any]) -> Choice | None:
    """None where there is no such file, or one that cannot be read: then it is measured again."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return Choice(**stored["choice"]) if stored["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, key: dict[str, Any], choice: Choice) -> None:
    """Atomically: another run may read it at the same time. A cache that cannot be written costs time, not the run."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"key": key, "choice": asdict(choice)}, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        log.warning("channels_last=auto: the choice cannot be cached (%s), so the next run measures again", error)
