"""`summary.json`: what a run was and what came out, in the format that `compare` reads. See docs/architecture.md."""

from __future__ import annotations

import dataclasses
import json
import resource
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from cl_train.config.schema import Config
from cl_train.step.precision import Precision
from cl_train.system.environment import describe_environment, device_name, git_state
from cl_train.training.plan import Progress
from cl_train.training.setup import Assembly
from cl_train.training.throughput import Spread, ThroughputMeter, Window, spread

SCHEMA_VERSION = 1


def peak_memory_gib(device: torch.device) -> float:
    """Most memory used so far, GiB: allocated by torch on a GPU, resident of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / 2**20 if sys.platform != "darwin" else kib / 2**30


def describe_run(cfg: Config, precision: Precision, device: torch.device, world_size: int) -> dict[str, Any]:
    """What is known before the first step."""
    return {
        "schema_version": SCHEMA_VERSION,
        "status": "failed",
        "command": shlex.join(sys.argv),
        "seed": cfg.seed,
        "model": cfg.model,
        "memory_format": None,
        "channels_last_requested": cfg.channels_last,
        "conversion": cfg.conversion,
        "precision": precision.name,
        "compile": cfg.compile,
        "cuda_graph": cfg.cuda_graph,
        "device": device.type,
        "device_name": device_name(device),
        "world_size": world_size,
        "global_batch_size": cfg.batch_size * cfg.accumulate_steps * world_size,
        "image_size": cfg.data.image_size,
        "data": cfg.data.name,
        "workers": cfg.data.workers,
        "epochs": cfg.epochs,
        "steps": 0,
        "images_seen": 0,
        "images_per_s": {"end_to_end": None, "compute": None, "loader": None},
        "step_ms": None,
        "data_wait_pct": None,
        "peak_memory_gib": None,
        "train": {"loss": None},
        "val": None,
        "amp": {"scale": None, "skipped_steps": 0},
        "environment": describe_environment(device),
        "git": git_state(),
    }


def results(
    progress: Progress, meter: ThroughputMeter, assembly: Assembly, latest: dict[str, Any], cfg: Config
) -> dict[str, Any]:
    """What came out, for `json`."""
    scaler = assembly.parts.scaler
    return {
        "steps": progress.step,
        "images_seen": progress.images_seen,
        "peak_memory_gib": round(peak_memory_gib(assembly.parts.device), 4),
        "train": {"loss": latest.get("loss")},
        "amp": {"scale": scaler.get_scale() if scaler.is_enabled() else None, "skipped_steps": progress.skipped_steps},
        **throughput_facts(meter.measured(), cfg.data.name == "synthetic"),
    }


def results_of_records(metrics: Path, cfg: Config) -> dict[str, Any]:
    """What a finished run found, read back from its records: the same command again has nothing left to train."""
    records = (
        [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.is_file() else []
    )
    last = {record["kind"]: record for record in records}
    trained = [record for record in records if record["kind"] == "train"]
    names = [field.name for field in dataclasses.fields(Window)]
    windows = [Window(**{name: record.get(name, 0) for name in names}) for record in trained if not record["warmup"]]
    found: dict[str, Any] = throughput_facts(windows, cfg.data.name == "synthetic")
    for kind in ("val", "val_average"):
        if kind in last:
            found[kind] = {name: last[kind][name] for name in ("loss", "top1", "top5", "images")}
    if trained:
        found["train"] = {"loss": trained[-1]["loss"]}
        found["peak_memory_gib"] = round(max(record["peak_memory_gib"] for record in trained), 4)
    return found


def hparams_of(cfg: Config, facts: dict[str, Any]) -> dict[str, str | int | float | bool]:
    """The few settings that tell one run from another, for TensorBoard: None would turn a column into text."""
    return {
        "model": cfg.model,
        "channels_last": cfg.channels_last,
        "memory_format": str(facts["memory_format"]),
        "precision": facts["precision"],
        "batch_size": cfg.batch_size,
        "processes": facts["world_size"],
        "compile": cfg.compile,
        "workers": -1 if cfg.data.workers is None else cfg.data.workers,
        "image_size": cfg.data.image_size,
        "lr": cfg.optim.lr,
        "seed": cfg.seed,
        "device": facts["device_name"],
        "torch": str(facts["environment"]["torch"]),
    }


def closing_line(facts: dict[str, Any], folder: Path) -> str:
    parts = [f"{facts['status']} after {facts['steps']} steps"]
    speed = facts["images_per_s"]["end_to_end"]
    if speed is not None:
        parts.append(f"{speed['median']:.1f} images/s ({facts['memory_format']}, {facts['precision']})")
    if facts["val"] is not None:
        parts.append(f"top-1 {facts['val']['top1']:.2f} %")
    return f"{', '.join(parts)}. Records: {folder}"


def throughput_facts(windows: list[Window], is_synthetic: bool) -> dict[str, Any]:
    """Speeds and step times over the measured windows (warm-up left out)."""
    if not windows:
        return {}
    steps_ms = spread([window.step_ms for window in windows])
    end_to_end = dataclasses.asdict(_rounded(spread([window.images_per_s for window in windows])))
    seconds = sum(window.seconds for window in windows)
    waited = sum(window.data_wait_pct * window.seconds for window in windows) / seconds
    return {
        # Synthetic data has no loader: what is measured is the computation alone.
        "images_per_s": {"end_to_end": end_to_end, "compute": end_to_end if is_synthetic else None, "loader": None},
        "step_ms": {"median": round(steps_ms.median, 3), "p95": round(steps_ms.p95, 3)},
        "data_wait_pct": round(waited, 2),
    }


def _rounded(values: Spread) -> Spread:
    return Spread(round(values.median, 2), round(values.p5, 2), round(values.p95, 2), values.windows)
