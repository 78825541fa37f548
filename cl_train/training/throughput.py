"""Throughput in windows between log lines, without warm-up and pauses. Imports no torch.

Three speeds are kept apart: `end_to_end` (real loader; what this meter measures), `compute` (one fixed batch on the
device) and `loader` (no model).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """The measurement between two log lines."""

    image_size: int  # pixels; a window lies within one epoch
    steps: int
    images: int  # of all ranks
    seconds: float  # without pauses
    images_per_s: float  # of all ranks
    step_ms: float
    data_wait_pct: float  # share of the time in which this process waited for a batch, 0-100
    warmup: bool  # excluded from averages


class ThroughputMeter:
    """Counts images between calls of `window`. Before each, the caller waits for the device.

    Args:
        warmup_steps: windows that begin within this many first steps, or first steps with another image size (which
            select other kernels or compile), are marked as warm-up.
        clock: seconds, monotonic.
    """

    def __init__(self, warmup_steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._warmup_steps = warmup_steps
        self._steps_before = self._image_size = 0
        self.windows: list[Window] = []
        self.start(0)

    def start(self, image_size: int) -> None:
        """Begin a window where training starts or continues."""
        if image_size != self._image_size:
            self._image_size, self._steps_before = image_size, 0
        self._started_at = self._clock()
        self._paused_s = 0.0
        self._wait_s = 0.0
        self._steps = 0
        self._images = 0

    def tick(self, images: int, wait_s: float) -> None:
        """Count one optimizer step over `images` (of all ranks) that waited `wait_s` seconds for its batches."""
        self._steps += 1
        self._images += images
        self._wait_s += wait_s

    def data_wait_ms(self) -> float:
        """Mean wait for data per step of the open window, in this process."""
        return 1000 * self._wait_s / self._steps

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block, such as saving a checkpoint."""
        since = self._clock()
        yield
        self._paused_s += self._clock() - since

    def window(self) -> Window:
        """Close the current window and begin the next."""
        assert self._steps > 0, "an empty window"
        seconds = max(self._clock() - self._started_at - self._paused_s, 1e-9)
        window = Window(
            image_size=self._image_size,
            steps=self._steps,
            images=self._images,
            seconds=seconds,
            images_per_s=self._images / seconds,
            step_ms=1000 * seconds / self._steps,
            data_wait_pct=100 * min(self._wait_s / seconds, 1.0),
            warmup=self._steps_before < self._warmup_steps,
        )
        self._steps_before += self._steps
        self.windows.append(window)
        self.start(self._image_size)
        return window


def spread(values: list[float]) -> dict[str, float]:
    """Median and 5th and 95th percentile (linear interpolation) of at least one value, and their number."""
    percentiles = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else values
    return {
        "median": statistics.median(values),
        "p5": percentiles[0],
        "p95": percentiles[-1],
        "windows": len(values),
    }
