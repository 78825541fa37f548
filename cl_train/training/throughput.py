"""Throughput in windows between log lines, without pauses.

`images_per_s` in a summary keeps three speeds apart: `end_to_end` (real loader; what this meter measures), `compute`
(one fixed batch on the device: data=synthetic) and `loader` (no model: always null, see cl-train loader_benchmark).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
        self.start(0)

    def start(self, image_size: int) -> None:
        """Begin a window where training starts or continues."""
        if image_size != self._image_size:
            self._image_size, self._steps_before = image_size, 0
        self._started_at = self._clock()
        self._paused_s = self._wait_s = 0.0
        self._steps = self._images = 0

    def tick(self, images: int, wait_s: float) -> None:
        """Count one optimizer step over `images` (of all ranks) that waited `wait_s` seconds for its batches."""
        self._steps += 1
        self._images += images
        self._wait_s += wait_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block, such as saving a checkpoint."""
        since = self._clock()
        yield
        self._paused_s += self._clock() - since

    def window(self) -> dict[str, Any]:
        """Close the window and begin the next. Returns this part of a training record:

        `image_size` in pixels, `images` and `images_per_s` of all ranks, `seconds` without pauses, `step_ms`,
        `data_wait_pct` (0-100, the share of the time in which this process waited for a batch), `warmup`.
        """
        assert self._steps > 0, "an empty window"
        seconds = max(self._clock() - self._started_at - self._paused_s, 1e-9)
        window = {
            "image_size": self._image_size,
            "images": self._images,
            "seconds": seconds,
            "images_per_s": self._images / seconds,
            "step_ms": 1000 * seconds / self._steps,
            "data_wait_pct": 100 * min(self._wait_s / seconds, 1.0),
            "warmup": self._steps_before < self._warmup_steps,
        }
        self._steps_before += self._steps
        self.start(self._image_size)
        return window


def without_warmup(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The training records after warm-up, or all if there are no others."""
    return [record for record in records if not record["warmup"]] or records
