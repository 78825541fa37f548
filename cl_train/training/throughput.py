"""Images per second between two log lines.

`ActiveRun.log_pending` writes what `measured` returns to metrics.jsonl as a `Window` of
system/run_folder.py.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from cl_train.system.machine import MAX_STEPS_AHEAD, DeviceClock


@dataclass
class Timing:
    """The times of the steps between two log lines. Marks of `DeviceClock` are moments in the work
    of the device: CUDA events, or on a CPU the time.
    """

    image_size: int
    warmup: bool
    start: Any
    end: Any
    images: int = 0
    # For each step: the seconds that the host waited for its batch, a mark where the step before it
    # ends, and a mark behind the wait.
    waits: list[tuple[float, Any, Any]] = field(default_factory=list)
    pauses: list[tuple[Any, Any]] = field(default_factory=list)
    idle_steps: int = 0  # the device was idle already when the host asked for their batch


class ThroughputMeter:
    """Counts images between calls of `close`.

    A window is warm-up if it begins in the first `warmup_steps` steps on its image size (a new size
    selects kernels or compiles), or has a step up to the recording of a CUDA graph.
    """

    def __init__(
        self, warmup_steps: int, clock: DeviceClock, host_clock: Callable[[], float] = perf_counter
    ) -> None:
        self.clock, self._host_clock, self._warmup_steps = clock, host_clock, warmup_steps
        self._steps_before = self._image_size = 0
        self._ends: deque[Any] = deque()  # marks of the steps that the device may not have done
        self.start(0)

    def start(self, image_size: int, mark: Any = None) -> None:
        if image_size != self._image_size:
            self._image_size, self._steps_before = image_size, 0
        self._idle_from = mark = self.clock.mark() if mark is None else mark
        self._window = Timing(image_size, self._steps_before < self._warmup_steps, mark, mark)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Times the block, which waits for the batches of a step; before it, the host waits for a
        device that is MAX_STEPS_AHEAD behind.
        """
        while len(self._ends) >= MAX_STEPS_AHEAD:
            self.clock.wait(self._ends.popleft())
        self._window.idle_steps += self.clock.has_reached(self._idle_from)
        since = self._host_clock()
        yield
        self._window.waits.append((self._host_clock() - since, self._idle_from, self.clock.mark()))

    def tick(self, images: int, *, warmup: bool = False) -> None:
        """Counts one submitted step over `images` (of all ranks)."""
        self._window.warmup |= warmup
        self._idle_from = self._window.end = self.clock.mark()
        self._ends.append(self._idle_from)
        self._window.images += images

    def exclude_pause(self) -> None:
        """Excludes the time since the last step, in which a file was written."""
        self._idle_from = self.clock.mark()
        self._window.pauses.append((self._window.end, self._idle_from))

    def close(self) -> Timing:
        """Closes the window and begins the next. The host does not wait."""
        closed = self._window
        assert closed.waits, "an empty window"
        self._steps_before += len(closed.waits)
        self.start(closed.image_size, closed.end)
        return closed

    def measured(self, window: Timing) -> dict[str, Any]:
        """Returns a closed window as fields of `Window`; the host waits for its end. Its
        `data_wait_pct` is the share of the time in which an idle device had no batch.
        """
        self.clock.wait(window.end)
        paused_s = sum(self.clock.seconds(*pause) for pause in window.pauses)
        waited_s = sum(
            min(host_waited_s, self.clock.seconds(*marks)) for host_waited_s, *marks in window.waits
        )
        seconds = max(self.clock.seconds(window.start, window.end) - paused_s, 1e-9)
        return {
            "image_size": window.image_size,
            "images": window.images,
            "seconds": seconds,
            "images_per_s": window.images / seconds,
            "step_ms": 1000 * seconds / len(window.waits),
            "data_wait_pct": 100 * min(waited_s / seconds, 1.0),
            "host_bound_pct": 100 * window.idle_steps / len(window.waits),
            "warmup": window.warmup,
        }
