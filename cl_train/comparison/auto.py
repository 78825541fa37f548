"""`channels_last=auto`: measure the layouts on the run's own model, batch and precision, and use the fastest.

The choice is cached in ${XDG_CACHE_HOME:-~/.cache}/cl_train/, one JSON file per combination of what can change it.
"""

import hashlib
import json
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cl_train.comparison.paired import Comparison, benchmark_layouts, workload_of
from cl_train.comparison.timed_model import CHANNELS_LAST, CHANNELS_LAST_CONV, CONTIGUOUS, Layout, Workload
from cl_train.config.schema import OPTIMIZERS, ConfigError, OptimConfig
from cl_train.config.validation import suggest
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import CONVOLUTIONS, MEMORY_FORMAT_NAMES
from cl_train.models.sources import copy_model
from cl_train.system.environment import describe_environment, device_name
from cl_train.system.files import cache_folder, write_json
from cl_train.system.memory import release_memory

log = logging.getLogger(__name__)

TIME_LIMIT_S = 20.0  # with warm-up under 5 % of a run of ten minutes, for slow models too
CPU_BATCH = 8  # images at most in an eager step on a CPU, so that enough steps fit into the time limit
NOISY_WIDTH = 0.2  # of a ratio's interval: without a significant difference, a wider one is inconclusive


@dataclass(frozen=True)
class Choice:
    """The layout that `choose_memory_format` chose, and why; `conversion` as in `memory_format.convert`."""

    memory_format: torch.memory_format
    conversion: str
    reason: str
    seconds: float
    cached: bool = False
    conclusive: bool = True  # False: the measurement was too noisy, and the next run measures again

    @property
    def channels_last(self) -> bool:
        return self.memory_format != torch.contiguous_format

    def __str__(self) -> str:
        return self.reason

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "memory_format": MEMORY_FORMAT_NAMES[self.memory_format]}


def choose_memory_format(
    model: nn.Module,
    *,
    batch_size: int = 32,
    image_size: int | tuple[int, ...] = 224,
    precision: str = "auto",
    device: torch.device | str | None = None,
    compile: bool = False,
    compile_mode: str = "default",
    cuda_graph: bool = False,
    optimizer: str = "sgd",
    time_limit_s: float = TIME_LIMIT_S,
) -> Choice:
    """Measure contiguous, channels_last, and channels_last for convolution weights only; choose the fastest.

    Contiguous unless another layout is faster beyond noise. Call it with the model built, loaded and on its device,
    before it is converted, wrapped or compiled. Copies are measured: `model`, its BatchNorm statistics and all random
    generators are unchanged. For a model that cannot be measured (no memory for copies, a crash of torch in
    channels_last) the choice is contiguous, with the reason.

    Args:
        batch_size: images per device and step; eager on a CPU at most 8 are measured.
        image_size: side of RGB images in pixels, or the shape of one input: (C, H, W), or (C, T, H, W) for video.
        precision: one of `PRECISIONS` in cl_train/config/schema.py, such as auto or bf16.
        device: default: where the model is.
        compile: measure compiled copies; the time limit does not include compilation.
        cuda_graph: measure the step as a replayed CUDA graph.
        optimizer: one of `OPTIMIZERS` in cl_train/config/schema.py.
        time_limit_s: for warm-up and measurement of an eager model.

    Raises:
        ConfigError: an impossible argument.
    """
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer={optimizer}; use {', '.join(OPTIMIZERS)}{suggest(optimizer, OPTIMIZERS)}")
    workload = workload_of(
        model, batch_size, image_size, precision, device, compile=compile, compile_mode=compile_mode,
        cuda_graph=cuda_graph, optim=OptimConfig(name=optimizer),
    )  # fmt: skip
    key = _cache_key(model, workload)
    path = cache_folder() / f"layout-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]}.json"
    if cached := _read(path):
        return replace(cached, cached=True, reason=f"{cached.reason} (measured before: {path})")
    log.info("channels_last=auto: measuring the layouts, about %.0f s, once per machine and setting", time_limit_s)
    started_at = time.perf_counter()
    try:
        choice = _measure(model, workload, time_limit_s)
    except ConfigError as error:
        return _contiguous(f"the layouts cannot be measured: {error}")
    finally:
        release_memory()
        if workload.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(workload.device)  # the run's peak must not include this measurement's
    choice = replace(choice, seconds=round(time.perf_counter() - started_at, 2))
    if choice.conclusive:
        _write(path, key, choice)
    return choice


def _contiguous(reason: str, *, conclusive: bool = True) -> Choice:
    return Choice(torch.contiguous_format, "full", f"contiguous: {reason}", 0.0, conclusive=conclusive)


def _measure(model: nn.Module, workload: Workload, time_limit_s: float) -> Choice:
    if not any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
        return _contiguous("the model has no convolutions")
    layouts = _layouts(model, workload)
    measured = workload
    if workload.device.type == "cpu" and not workload.compile:
        measured = replace(workload, batch_size=min(workload.batch_size, CPU_BATCH))
    done = benchmark_layouts(model, measured, layouts, time_limit_s=0.75 * time_limit_s)  # warm-up takes about the rest
    reason = _reason(done, workload.batch_size)
    faster = [speed for speed in done.speeds if speed.verdict == "faster"]
    if faster:
        best = max(faster, key=lambda speed: speed.images_per_s)
        winner = next(layout for layout in layouts if layout.name == best.layout)
        return Choice(winner.memory_format, winner.conversion, f"{winner.name}: {reason}", 0.0)
    if any(
        speed.verdict == "not_comparable" or (speed.verdict == "inconclusive" and speed.ratio.width > NOISY_WIDTH)
        for speed in done.speeds[1:]
    ):
        return _contiguous(f"{reason}; too noisy to decide, so the next run measures again", conclusive=False)
    return _contiguous(reason)


def _layouts(model: nn.Module, workload: Workload) -> list[Layout]:
    """Whether converting convolution weights only is a separate layout: other tensors have four dimensions too.

    Not for compiled models: each additional layout is another compilation, and the compiler moves tensors itself.
    """
    full, conv = (convert(copy_model(model, "meta"), mode) for mode in ("full", "conv"))
    is_same = set(full.changed) == set(conv.changed)
    return [CONTIGUOUS, CHANNELS_LAST] + ([] if is_same or workload.compile else [CHANNELS_LAST_CONV])


def _reason(done: Comparison, batch_size: int) -> str:
    ratios = [
        f"{speed.layout} is {speed.ratio.ratio:.2f}x [{speed.ratio.low:.2f}, {speed.ratio.high:.2f}]"
        if speed.ratio.width < 1
        else f"{speed.layout} is perhaps {speed.ratio.ratio:.1f}x"
        for speed in done.speeds[1:]
    ]
    smaller = "" if done.batch_size == batch_size else f" at batch {done.batch_size}"
    return f"{' and '.join(ratios)} as fast as contiguous ({done.speeds[0].images_per_s:.1f} images/s{smaller})"


# --- the cache --------------------------------------------------------------------------------------------------------


def _cache_key(model: nn.Module, workload: Workload) -> dict[str, Any]:
    """Everything that could change which layout is faster. Shapes detect changed model code."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in model.named_parameters()]
    versions = describe_environment(workload.device)
    return {
        "format_version": 2,
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "modules": hashlib.sha256(f"{model!r} {shapes}".encode()).hexdigest()[:16],
        "batch_size": workload.batch_size,
        "input_shape": list(workload.input_shape),
        "precision": workload.precision.name,
        "compile": workload.compile_mode if workload.compile else False,
        "cuda_graph": workload.cuda_graph,
        "optimizer": workload.optim.name,
        "device": device_name(workload.device),
        **{name: versions[name] for name in ("torch", "cuda", "cudnn", "driver")},
    }


def _read(path: Path) -> Choice | None:
    """The cached choice; None if the file is missing or cannot be read: the layouts are measured again."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        memory_format = CHANNELS_LAST.memory_format if stored["channels_last"] else torch.contiguous_format
        return Choice(memory_format, stored["conversion"], stored["reason"], stored["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, key: dict[str, Any], choice: Choice) -> None:
    """Store the choice; a cache that cannot be written must not fail the run."""
    kept = {name: getattr(choice, name) for name in ("channels_last", "conversion", "reason", "seconds")}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"key": key, **kept})
    except OSError as error:
        log.warning("channels_last=auto: the choice cannot be cached (%s), so the next run measures again", error)
