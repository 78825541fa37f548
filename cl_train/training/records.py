"""The records of a run: `metrics.jsonl`, `config.yaml` and `summary.json`, and the trackers that receive them too.

Rank 0 writes; the methods of the other ranks do nothing. A full disk does not end a run: records stay in memory until
they can be written (see `AppendFile`).
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cl_train.models.sources import copy_model
from cl_train.step.precision import Precision
from cl_train.step.utilisation import flops_of, utilisation
from cl_train.system.files import AppendFile, retry, write_json, write_text
from cl_train.system.machine_load import BUSY_PCT
from cl_train.training.progress import score_of
from cl_train.training.run_log import duration
from cl_train.training.throughput import without_warmup
from cl_train.training.trackers import Trackers


class RecordWriter:
    """Writes the records of one run.

    Args:
        folder: the run folder; None = do nothing.
        trackers: receive every record too.
        resumed_step: the step at which the run starts, 0 for a new run. Later records belong to lost work of an earlier
            process and are dropped, so that no chart has duplicate steps.
        is_evaluated: the evaluation after `resumed_step` is part of the resumed state.
    """

    def __init__(
        self, folder: Path | None, trackers: Trackers, *, resumed_step: int = 0, is_evaluated: bool = True
    ) -> None:
        self._folder, self._trackers, self._resumed_step = folder, trackers, resumed_step
        if folder is None:
            return
        self._metrics = AppendFile(folder / "metrics.jsonl")
        self._drop_lost_work(resumed_step, is_evaluated)

    def start(self, yaml: str, config: Mapping[str, Any]) -> None:
        """`config.yaml`, and the flat `config` for the trackers."""
        if self._folder is None:
            return
        write_text(self._folder / "config.yaml", yaml)
        in_sweep = (self._folder.parent / "sweep.json").is_file()
        group = self._folder.parent.name if in_sweep else None
        start = {"kind": "start", "step": self._resumed_step, "folder": str(self._folder), "group": group}
        self._trackers.send({**start, "config": dict(config)})

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one record."""
        if self._folder is None:
            return
        record = finite_or_null({"kind": kind, "step": step, **values, "time": time.time()})
        self._metrics.append((json.dumps(record) + "\n").encode())
        self._trackers.send(record)

    def _drop_lost_work(self, step: int, is_evaluated: bool) -> None:
        def is_kept(line: bytes) -> bool:
            record = read_record(line)
            if record is None or not 0 < record["step"] <= step:
                return False
            return record["step"] < step or is_evaluated or record["kind"] == "train"

        path = self._metrics.path
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        write_text(path, b"".join(line for line in lines if is_kept(line)).decode())

    def finish(self, summary: Mapping[str, Any], *, retries: bool = True) -> None:
        """`summary.json`, after all records; the end for the trackers.

        Raises OSError: the disk is full or failing, with `retries` still after a minute (see `retry`).
        """
        if self._folder is None:
            return
        finite = finite_or_null(summary)
        self._trackers.send({"kind": "end", "step": summary["steps"], "summary": finite})
        path = self._folder / "summary.json"

        def write() -> None:
            self._metrics.flush()
            write_json(path, finite, indent=2)

        retry(write) if retries else write()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, without a last line that a killed process left incomplete."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [record for record in map(read_record, lines) if record is not None]


def read_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int) and "kind" in record
    return record if is_record else None


def finite_or_null(value: Any) -> Any:
    """JSON has no NaN or Infinity: they become null."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


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


def utilisation_of(
    model: nn.Module, summary: dict[str, Any], precision: Precision, device: torch.device
) -> dict[str, Any] | None:
    """FLOPs and shares of the device's peak (`step.utilisation`); None for a model that cannot run on shapes alone."""
    size = summary["image_size"]
    try:
        shapes = copy_model(model, "meta").train()
        images = torch.empty(2, 3, size, size, device="meta", dtype=next(shapes.parameters()).dtype)
        flops = flops_of(lambda: shapes(images))
    except Exception:  # a user's model may raise any exception
        return None
    images_per_s = summary["images_per_s"]["end_to_end"]["median"] / summary["world_size"]
    return utilisation(flops / len(images) / 1e9, images_per_s, precision, device, training=True)


def spread(values: list[float]) -> dict[str, float]:
    """Median and 5th and 95th percentile (linear interpolation) of at least one value, and their number."""
    percentiles = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else values
    return {"median": statistics.median(values), "p5": percentiles[0], "p95": percentiles[-1], "windows": len(values)}


def best_evaluation(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first of the best evaluations in the records of a run; None = not evaluated."""
    evaluations = [record for record in records if record["kind"] == "val" and record["top1"] is not None]
    best = max(evaluations, key=score_of, default=None)
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
    elif (
        summary["status"] == "completed"
        and summary["train"]["loss"] is not None
        and not (folder.parent / "sweep.json").is_file()
    ):
        yield "to compare the layouts, repeat the command with -m channels_last=true,false repeats=3"
