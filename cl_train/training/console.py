"""Console output of a run: lines in main_amp's format, and a progress bar on a terminal."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


class EpochAverages:
    """Averages over the windows of an epoch, weighted by images. Times and speeds are without warm-up if possible."""

    def __init__(self) -> None:
        self._windows: list[dict[str, Any]] = []

    def add(self, window: dict[str, Any]) -> None:
        self._windows.append(window)

    def mean(self, name: str, *, with_warmup: bool = False) -> float:
        windows = self._windows if with_warmup else self._measured()
        images = sum(window["images"] for window in windows)
        return sum(float(window[name]) * window["images"] for window in windows) / images

    def images_per_s(self) -> float:
        measured = self._measured()
        return sum(window["images"] for window in measured) / sum(window["seconds"] for window in measured)

    def seconds(self) -> float:
        """Mean over all windows, including warm-up."""
        return sum(float(window["seconds"]) for window in self._windows)

    def _measured(self) -> list[dict[str, Any]]:
        return [window for window in self._windows if not window["warmup"]] or self._windows


def console_line(window: dict[str, Any], averages: EpochAverages, step_in_epoch: int, steps_per_epoch: int) -> str:
    """One window in main_amp's format: each value, and in brackets its average over the epoch.

    Time is seconds per step, Speed is images per second of all ranks including data loading, Data is the share of the
    time in which a step waited for its batch.
    """
    scale = f" Scale {window['loss_scale']:g} Skipped {window['skipped_steps']}" if window["loss_scale"] else ""
    bad_images = f" Bad images {window['skipped_images']}" if window["skipped_images"] else ""
    loss, top1, top5 = (averages.mean(name, with_warmup=True) for name in ("loss", "top1", "top5"))
    return (
        f"Epoch: [{window['epoch']}][{step_in_epoch}/{steps_per_epoch}]"
        f" Time {window['step_ms'] / 1000:.3f} ({averages.mean('step_ms') / 1000:.3f})"
        f" Speed {window['images_per_s']:.1f} ({averages.images_per_s():.1f})"
        f" Loss {window['loss']:.4f} ({loss:.4f})"
        f" Prec@1 {window['top1']:.2f} ({top1:.2f})"
        f" Prec@5 {window['top5']:.2f} ({top5:.2f})"
        f" LR {window['lr']:.5f} Data {window['data_wait_pct']:.0f}%{scale}{bad_images}{slowest_rank(window)}"
        + (" (warm-up)" if window["warmup"] else "")
    )


def slowest_rank(window: dict[str, Any]) -> str:
    """The slowest rank, its time per step without the wait for other ranks, and its wait for data in percent."""
    if "slowest_rank" not in window:
        return ""
    return (
        f" Slowest rank {window['slowest_rank']}: {window['slowest_rank_ms']:.0f} ms"
        f" (median {window['median_rank_ms']:.0f} ms), Data {window['slowest_rank_data_wait_pct']:.0f}%"
    )


class ProgressBar:
    """A progress bar with the remaining time, on a terminal and on rank 0 only."""

    def __init__(self, description: str, total: int, done: int = 0, *, unit: str = "step", shown: bool) -> None:
        self._bar = tqdm(
            desc=description,
            total=total,
            initial=done,
            unit=unit,
            smoothing=0,  # the remaining time uses the average speed, including evaluations and checkpoints
            leave=False,
            disable=not (shown and sys.stdout is not None and sys.stdout.isatty()),
            file=sys.stdout,
        )

    def show(self, done: int) -> None:
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()
