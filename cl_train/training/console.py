"""What a person sees while the run goes on: the lines of main_amp, and a progress bar on a terminal."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

log = logging.getLogger(__name__)


@dataclass
class EpochAverages:
    """Running averages over an epoch's windows, as main_amp shows them in brackets; times without warm-up."""

    _windows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, window: dict[str, Any]) -> None:
        self._windows.append(window)

    def mean(self, name: str) -> float:
        """Weighted by images; of the loss and accuracies, all windows count."""
        return _weighted(self._windows, name)

    def measured_mean(self, name: str) -> float:
        """As `mean`, over windows after warm-up where there are any."""
        return _weighted([window for window in self._windows if not window["warmup"]] or self._windows, name)

    def seconds(self) -> float:
        """Of all windows, warm-up included."""
        return sum(float(window["seconds"]) for window in self._windows)

    def images_per_s(self) -> float:
        measured = [window for window in self._windows if not window["warmup"]] or self._windows
        return sum(window["images"] for window in measured) / sum(window["seconds"] for window in measured)


def _weighted(windows: list[dict[str, Any]], name: str) -> float:
    images = sum(window["images"] for window in windows)
    return sum(float(window[name]) * window["images"] for window in windows) / images


def console_line(window: dict[str, Any], averages: EpochAverages, step_in_epoch: int, steps_per_epoch: int) -> str:
    """One window in main_amp's form: each value, and in brackets its average over the epoch.

    Time is seconds per step, Speed images per second over all processes with data loading included, Data the share of
    the time in which a step waited for its batch.
    """
    scale = f" Scale {window['loss_scale']:g} Skipped {window['skipped_steps']}" if window["loss_scale"] else ""
    return (
        f"Epoch: [{window['epoch']}][{step_in_epoch}/{steps_per_epoch}]"
        f" Time {window['step_ms'] / 1000:.3f} ({averages.measured_mean('step_ms') / 1000:.3f})"
        f" Speed {window['images_per_s']:.1f} ({averages.images_per_s():.1f})"
        f" Loss {window['loss']:.4f} ({averages.mean('loss'):.4f})"
        f" Prec@1 {window['top1']:.2f} ({averages.mean('top1'):.2f})"
        f" Prec@5 {window['top5']:.2f} ({averages.mean('top5'):.2f})"
        f" LR {window['lr']:.5f} Data {window['data_wait_pct']:.0f}%{scale}"
        + (" (warm-up)" if window["warmup"] else "")
    )


class ProgressBar:
    """A bar over the steps of one epoch on a terminal; elsewhere nothing but its lines."""

    def __init__(self, steps: int, done: int, epoch: int, *, shown: bool) -> None:
        self._shown = shown
        on_terminal = shown and sys.stdout.isatty()
        self._bar = tqdm(
            total=steps,
            initial=done,
            desc=f"epoch {epoch}",
            unit="step",
            leave=False,
            disable=not on_terminal,
            file=sys.stdout,
        )

    def update(self) -> None:
        self._bar.update()

    def write_line(self, line: str) -> None:
        """Log `line`, above the bar where there is one. Only rank 0 does."""
        if not self._shown:
            return
        self._bar.clear()
        log.info("%s", line)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()
