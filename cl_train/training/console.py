"""Console output of a run: lines in main_amp's format, and a progress bar on a terminal."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from cl_train.training.throughput import without_warmup

Record = dict[str, Any]


def mean(records: list[Record], name: str) -> float:
    """The mean over windows, weighted by their images."""
    images = sum(record["images"] for record in records)
    return sum(float(record[name]) * record["images"] for record in records) / images


def console_line(records: list[Record], step_in_epoch: int, steps_per_epoch: int) -> str:
    """The last of the records of an epoch in main_amp's format: each value, and in brackets its mean over the epoch.

    Time is seconds per step, Speed is images per second of all ranks including data loading, Data is the share of the
    time in which a step waited for its batch. The means of Time and Speed are without warm-up if possible.
    """
    window, measured = records[-1], without_warmup(records)
    speed = sum(record["images"] for record in measured) / sum(record["seconds"] for record in measured)
    scale = f" Scale {window['loss_scale']:g} Skipped {window['skipped_steps']}" if window["loss_scale"] else ""
    bad_images = f" Bad images {window['skipped_images']}" if window["skipped_images"] else ""
    return (
        f"Epoch: [{window['epoch']}][{step_in_epoch}/{steps_per_epoch}]"
        f" Time {window['step_ms'] / 1000:.3f} ({mean(measured, 'step_ms') / 1000:.3f})"
        f" Speed {window['images_per_s']:.1f} ({speed:.1f})"
        f" Loss {window['loss']:.4f} ({mean(records, 'loss'):.4f})"
        f" Prec@1 {window['top1']:.2f} ({mean(records, 'top1'):.2f})"
        f" Prec@5 {window['top5']:.2f} ({mean(records, 'top5'):.2f})"
        f" LR {window['lr']:.5f} Data {window['data_wait_pct']:.0f}%{scale}{bad_images}{slowest_rank(window)}"
        + (" (warm-up)" if window["warmup"] else "")
    )


def slowest_rank(window: Record) -> str:
    """The slowest rank, its time per step without the wait for other ranks, and its wait for data in percent."""
    if "slowest_rank" not in window:
        return ""
    return (
        f" Slowest rank {window['slowest_rank']}: {window['slowest_rank_ms']:.0f} ms"
        f" (median {window['median_rank_ms']:.0f} ms), Data {window['slowest_rank_data_wait_pct']:.0f}%"
    )


def progress_bar(description: str, total: int, done: int = 0, *, unit: str = "step", shown: bool) -> tqdm[Any]:
    """A progress bar with the remaining time; it appears on a terminal only."""
    return tqdm(
        desc=description,
        total=total,
        initial=done,
        unit=unit,
        smoothing=0,  # the remaining time uses the average speed, including evaluations and checkpoints
        leave=False,
        disable=not (shown and sys.stdout is not None and sys.stdout.isatty()),
        file=sys.stdout,
    )
