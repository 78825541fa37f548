"""The results in `summary.json`, in the format that comparisons read; setup.py writes the part known in advance."""

from __future__ import annotations

import dataclasses
import resource
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from cl_train.system.machine_load import BUSY_PCT
from cl_train.training.records import read_records
from cl_train.training.throughput import Window, spread

SCHEMA_VERSION = 1


def peak_memory_gib(device: torch.device) -> float:
    """The most memory used so far: allocated by torch on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB; bytes on macOS
    return peak / 2**20 if sys.platform != "darwin" else peak / 2**30


def speed(windows: list[Window]) -> dict[str, Any]:
    """Throughput and step time over the windows after warm-up, or all if there are no others.

    `compute` is set by runs on synthetic data only. If the images grew, all values are of the last `image_size`, and
    `by_image_size` has the median of each.
    """
    windows = [window for window in windows if not window.warmup] or windows
    if not windows:
        return {}
    by_size: dict[int, list[float]] = {}
    for window in windows:
        by_size.setdefault(window.image_size, []).append(window.images_per_s)
    windows = [window for window in windows if window.image_size == windows[-1].image_size]
    seconds = sum(window.seconds for window in windows)
    waited = sum(window.data_wait_pct * window.seconds for window in windows) / seconds
    images_per_s = spread([window.images_per_s for window in windows])
    step_ms = spread([window.step_ms for window in windows])
    end_to_end = {name: round(value, 2) for name, value in images_per_s.items()}
    speeds: dict[str, Any] = {"end_to_end": end_to_end, "compute": None, "loader": None}
    if len(by_size) > 1:
        speeds["by_image_size"] = {str(size): round(statistics.median(each), 2) for size, each in by_size.items()}
    return {
        "image_size": windows[-1].image_size,
        "images_per_s": speeds,
        "step_ms": {name: round(step_ms[name], 3) for name in ("median", "p95")},
        "data_wait_pct": round(waited, 2),
    }


def results_of_records(metrics: Path) -> dict[str, Any]:
    """The results of a run that was already complete when the same command was run again."""
    records = read_records(metrics)
    trained = [record for record in records if record["kind"] == "train"]
    names = [field.name for field in dataclasses.fields(Window)]
    found = speed([Window(**{name: record.get(name, 0) for name in names}) for record in trained])
    for record in records:
        if record["kind"] in ("val", "val_average"):
            found[record["kind"]] = {name: record[name] for name in ("loss", "top1", "top5", "images")}
    if trained:
        found["train"] = {"loss": trained[-1]["loss"]}
        found["peak_memory_gib"] = round(max(record["peak_memory_gib"] for record in trained), 4)
    return found


def hparams_of(summary: dict[str, Any], batch_size: int, lr: float) -> dict[str, str | int | float | bool]:
    """The settings that distinguish runs in TensorBoard's HPARAMS table, where None would turn a column into text."""
    names = ("model", "precision", "compile", "image_size", "seed", "world_size")
    layout = {"channels_last": summary["channels_last_requested"], "memory_format": str(summary["memory_format"])}
    return {name: summary[name] for name in names} | layout | {"batch_size": batch_size, "lr": lr}


def closing_line(summary: dict[str, Any], folder: Path) -> str:
    """The last line of a run."""
    parts = [f"{summary['status']} after {summary['steps']} steps"]
    end_to_end = summary["images_per_s"]["end_to_end"]
    if end_to_end is not None:
        parts.append(f"{end_to_end['median']:.1f} images/s ({summary['memory_format']}, {summary['precision']})")
    if summary["val"] is not None:
        parts.append(f"top-1 {summary['val']['top1']:.2f} %")
    if (summary["others_pct"] or 0) >= BUSY_PCT:
        parts.append(f"other processes used {summary['others_pct']:.0f} % of the CPU cores: do not trust the speed")
    if summary["skipped_images"]:
        parts.append(f"{summary['skipped_images']} bad images were skipped")
    return f"{', '.join(parts)}. Records: {folder}"
