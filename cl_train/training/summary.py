"""The results in `summary.json`, in the format that comparisons read; setup.py writes the part known in advance."""

import resource
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from cl_train.system.machine_load import BUSY_PCT
from cl_train.training.run_log import duration
from cl_train.training.throughput import without_warmup

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RunResult:
    """How a run ended, and where it left its records."""

    folder: Path
    summary: dict[str, Any]  # the content of summary.json, or of evaluation.json
    exit_code: int  # 0, or 128 + n if signal n stopped the run

    @property
    def top1(self) -> float | None:
        """Percent of the validation images; None without an evaluation."""
        return (self.summary["val"] or {}).get("top1")

    @property
    def images_per_s(self) -> float | None:
        """The median over the windows after warm-up, with loading; None if nothing was trained."""
        return (self.summary["images_per_s"]["end_to_end"] or {}).get("median")


def peak_memory_gib(device: torch.device) -> float:
    """The most memory used so far: allocated by torch on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB; bytes on macOS
    return peak / 2**20 if sys.platform != "darwin" else peak / 2**30


def speed(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Throughput and step time over the training records after warm-up, or all if there are no others.

    `compute` is set by runs on synthetic data only. `loader` is always null: `cl-train loader_benchmark` measures it.
    If the images grew, all values are of the last `image_size`, and `by_image_size` has the median of each.
    """
    records = without_warmup(records)
    if not records:
        return {}
    by_size: dict[int, list[float]] = {}
    for record in records:
        by_size.setdefault(record["image_size"], []).append(record["images_per_s"])
    image_size = records[-1]["image_size"]
    records = [record for record in records if record["image_size"] == image_size]
    seconds = sum(record["seconds"] for record in records)
    waited = sum(record["data_wait_pct"] * record["seconds"] for record in records) / seconds
    step_ms = spread([record["step_ms"] for record in records])
    end_to_end = {name: round(value, 2) for name, value in spread(by_size[image_size]).items()}
    speeds: dict[str, Any] = {"end_to_end": end_to_end, "compute": None, "loader": None}
    if len(by_size) > 1:
        speeds["by_image_size"] = {str(size): round(statistics.median(each), 2) for size, each in by_size.items()}
    return {
        "image_size": image_size,
        "images_per_s": speeds,
        "step_ms": {name: round(step_ms[name], 3) for name in ("median", "p95")},
        "data_wait_pct": round(waited, 2),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median and 5th and 95th percentile (linear interpolation) of at least one value, and their number."""
    percentiles = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else values
    return {"median": statistics.median(values), "p5": percentiles[0], "p95": percentiles[-1], "windows": len(values)}


def best_evaluation(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first of the best evaluations in the records of a run; None = not evaluated."""
    evaluations = [record for record in records if record["kind"] == "val" and record["top1"] is not None]
    best = max(evaluations, key=lambda record: record["top1"], default=None)
    return best and {name: best[name] for name in ("top1", "epoch")}


def end_time(started: str) -> dict[str, Any]:
    """`ended` and `seconds` of a run; one that was resumed counts from its last start."""
    now = datetime.now().astimezone()
    seconds = (now - datetime.fromisoformat(started)).total_seconds()
    return {"ended": now.isoformat(timespec="seconds"), "seconds": round(seconds, 1)}


def closing_lines(summary: dict[str, Any], folder: Path) -> Iterator[str]:
    """The last lines of a run: its results, and what can be done next."""
    parts = [f"{summary['status']} after {summary['steps']} steps in {duration(summary['seconds'])}"]
    end_to_end = summary["images_per_s"]["end_to_end"]
    if end_to_end is not None:
        parts.append(f"{end_to_end['median']:.1f} images/s ({summary['memory_format']}, {summary['precision']})")
    if summary["val"] is not None:
        parts.append(f"top-1 {summary['val']['top1']:.2f} %")
    if (summary["others_pct"] or 0) >= BUSY_PCT:
        parts.append(f"other processes used {summary['others_pct']:.0f} % of the CPU cores: do not trust the speed")
    if summary["skipped_images"]:
        parts.append(f"{summary['skipped_images']} bad images were skipped")
    yield f"{', '.join(parts)}. Records: {folder}"
    best, best_file = summary["best"], folder / "checkpoints" / "best.pt"
    if best is not None and best_file.is_file():
        yield f"best top-1 {best['top1']:.2f} % after epoch {best['epoch']}: {best_file}"
    if summary["status"] == "interrupted" and (newest := max((folder / "checkpoints").glob("step-*.pt"), default=None)):
        yield f"saved: {newest.name}; to continue, repeat the command with hydra.run.dir={folder} resume=auto"
    elif summary["status"] == "completed" and summary["steps"] and not (folder.parent / "sweep.json").is_file():
        yield "to compare the layouts, repeat the command with -m channels_last=true,false repeats=3"
