"""Throughput in windows between log lines, without pauses, on the device's clock.

The host runs ahead of a GPU: its clock says when work was submitted, not when it was done.

`images_per_s` in a summary keeps three speeds apart: `end_to_end` (real loader; what this meter measures), `compute`
(one fixed batch on the device: data=synthetic) and `loader` (no model: always null, see cl-train loader_benchmark).
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cl_train.system.timing import DeviceClock

LEAD_STEPS = 2  # that the device may be behind the host: enough to keep it busy; each holds a batch in memory


@dataclass
class Window:
    """Steps between two log lines. Marks are those of `DeviceClock`."""

    image_size: int
    warmup: bool
    start: Any
    end: Any
    steps: int = 0
    images: int = 0
    waited_s: float = 0.0  # without the steps that are still unsettled
    pauses: list[tuple[Any, Any]] = field(default_factory=list)


class _Step(NamedTuple):
    """A step that the device may not have done yet, and the marks around the wait for its batch and at its end."""

    window: Window
    host_waited_s: float
    idle_from: Any
    begin: Any
    end: Any


class ThroughputMeter:
    """Counts images between calls of `close`.

    Args:
        warmup_steps: windows that begin within this many first steps, or first steps with another image size (which
            select other kernels or compile), are marked as warm-up.
        clock: of the device.
        host_clock: seconds, monotonic.
    """

    def __init__(
        self, warmup_steps: int, clock: DeviceClock, host_clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.clock, self._host_clock, self._warmup_steps = clock, host_clock, warmup_steps
        self._steps_before = self._image_size = 0
        self._unsettled: deque[_Step] = deque()
        self.start(0)

    def start(self, image_size: int) -> None:
        """Begin a window where training starts or continues."""
        if image_size != self._image_size:
            self._image_size, self._steps_before = image_size, 0
        self._begin_window(self.clock.mark())

    def _begin_window(self, mark: Any) -> None:
        self._idle_from = mark
        self._window = Window(self._image_size, self._steps_before < self._warmup_steps, mark, mark)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for the batches of a step. Before it the host waits until the device is near enough."""
        while len(self._unsettled) >= LEAD_STEPS:
            self._settle(self._unsettled.popleft())
        since = self._host_clock()
        yield
        self._host_waited_s, self._begin = self._host_clock() - since, self.clock.mark()

    def tick(self, images: int) -> None:
        """Count one optimizer step over `images` (of all ranks), which has been submitted."""
        end = self.clock.mark()
        self._unsettled.append(_Step(self._window, self._host_waited_s, self._idle_from, self._begin, end))
        self._idle_from = self._window.end = end
        self._window.steps += 1
        self._window.images += images

    def _settle(self, step: _Step) -> None:
        """Count the wait for data of a step: the time in which the host waited and the device had nothing to do."""
        self.clock.wait(step.end)
        step.window.waited_s += min(step.host_waited_s, self.clock.seconds(step.idle_from, step.begin))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block, such as saving a checkpoint."""
        since = self.clock.mark()
        yield
        self._idle_from = self.clock.mark()
        self._window.pauses.append((since, self._idle_from))

    def close(self) -> Window:
        """Close the window and begin the next. The host does not wait."""
        assert self._window.steps > 0, "an empty window"
        closed = self._window
        self._steps_before += closed.steps
        self._begin_window(closed.end)
        return closed

    def measured(self, window: Window) -> dict[str, Any]:
        """The part of a training record about a closed window; the host waits for its last step.

        `image_size` in pixels, `images` and `images_per_s` of all ranks, `seconds` without pauses, `step_ms`,
        `data_wait_pct` (0-100, the share of the time in which this process had no batch for an idle device), `warmup`.
        """
        while self._unsettled and self._unsettled[0].window is window:
            self._settle(self._unsettled.popleft())
        paused_s = sum(self.clock.seconds(*pause) for pause in window.pauses)
        seconds = max(self.clock.seconds(window.start, window.end) - paused_s, 1e-9)
        return {
            "image_size": window.image_size,
            "images": window.images,
            "seconds": seconds,
            "images_per_s": window.images / seconds,
            "step_ms": 1000 * seconds / window.steps,
            "data_wait_pct": 100 * min(window.waited_s / seconds, 1.0),
            "warmup": window.warmup,
        }


def without_warmup(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The training records after warm-up, or all if there are no others."""
    return [record for record in records if not record["warmup"]] or records


log = logging.getLogger(__name__)

SKIPPED_STEPS = 5
WARMUP_STEPS = 2
TRACED_STEPS = 3


@contextmanager
def profile(folder: Path | None, device: torch.device) -> Iterator[Callable[[], object]]:
    """Trace three steps after the first seven; call the returned function once per optimizer step.

    Writes `trace.json.gz` and a table of the operators, `operators.txt`, into `folder`; None = no profile.
    """
    if folder is None:
        yield lambda: None
        return
    trace = folder / "trace.json.gz"

    def write(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(trace))
        key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=40)
        (folder / "operators.txt").write_text(table, encoding="utf-8")
        log.info("profile of %d steps: %s (open it at ui.perfetto.dev)", TRACED_STEPS, trace)

    schedule = torch.profiler.schedule(wait=SKIPPED_STEPS, warmup=WARMUP_STEPS, active=TRACED_STEPS, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write, record_shapes=True) as profiler:
        yield profiler.step
    if not trace.is_file():
        steps = SKIPPED_STEPS + WARMUP_STEPS + TRACED_STEPS
        log.warning("profile=true: no profile was taken; it needs a run of at least %d steps", steps)
