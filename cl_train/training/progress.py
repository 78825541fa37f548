"""Where a run stands, what is due at each step, and its throughput between log lines, on the device's clock."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from cl_train.config.schema import Config, ConfigError
from cl_train.data.build import size_schedule
from cl_train.step.optim import lr_at
from cl_train.system.machine import DeviceClock

MAP = "mean_average_precision"
LEAD_STEPS = 2  # that the device may be behind the host: enough to keep it busy; each holds a batch in memory


class TrainingFault(RuntimeError):
    """The run cannot continue; the message has the reason and what to try."""


def score_of(result: Mapping[str, float]) -> float:
    """What makes an evaluation the best: the mean average precision of a multi-label one, else top-1; percent."""
    return result["top1"] if result.get(MAP) is None else result[MAP]


@dataclass
class Progress:
    """Everything besides tensors that changes from step to step. Saved in checkpoints."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    images_seen: int = 0
    skipped_steps: int = 0
    best_top1: float = -1.0
    evaluations_without_gain: int = 0  # since `best_top1`
    evaluated_step: int = 0  # the last step whose evaluation is counted in these two
    closed_step: int = 0  # the last step at which an epoch was closed

    @property
    def is_epoch_closed(self) -> bool:
        """Nothing is left to do at this step: no evaluation is missing."""
        return self.closed_step == self.step

    def is_gain(self, top1: float) -> bool:
        """Count the evaluation of this step; whether it is the best so far."""
        if self.evaluated_step == self.step:  # the checkpoint of this step was saved after its evaluation
            return False
        self.evaluated_step, is_best = self.step, top1 > self.best_top1
        self.best_top1 = max(self.best_top1, top1)
        self.evaluations_without_gain = 0 if is_best else self.evaluations_without_gain + 1
        return is_best

    def advance(self, images: int) -> None:
        self.step += 1
        self.step_in_epoch += 1
        self.images_seen += images


@dataclass(frozen=True)
class Plan:
    """The length of a run in steps, and what its settings make due at a step."""

    cfg: Config
    image_sizes: tuple[int, ...]  # pixels, of each epoch
    global_batch_size: int
    steps_per_epoch: int
    last_step: int  # the end of this run, which `max_steps` may set earlier

    @classmethod
    def of(cls, cfg: Config, train_images: int, world_size: int) -> Self:
        """Raises ConfigError: one optimizer step takes more images than there are."""
        global_batch_size = cfg.batch_size * cfg.accumulate_steps * world_size
        steps_per_epoch = train_images // (cfg.batch_size * world_size) // cfg.accumulate_steps
        if steps_per_epoch == 0 and not cfg.evaluate_only:
            raise ConfigError(
                f"one step takes {global_batch_size} images (batch_size x accumulate_steps x processes), but there are "
                f"{train_images} training images; lower batch_size or accumulate_steps"
            )
        sizes, total_steps = size_schedule(cfg.data), steps_per_epoch * cfg.epochs
        image_sizes = tuple(map(sizes.image_size_at, range(cfg.epochs)))
        last_step = min(cfg.max_steps or total_steps, total_steps)
        return cls(cfg, image_sizes, global_batch_size, max(1, steps_per_epoch), last_step)

    def image_size_at(self, progress: Progress) -> int:
        return self.image_sizes[min(progress.epoch, len(self.image_sizes) - 1)]

    def lr_at(self, progress: Progress) -> float:
        """The learning rate of the next step; `optim.lr` is scaled linearly to the batch (Goyal et al. 2017)."""
        lr, reference = self.cfg.optim.lr, self.cfg.optim.reference_batch_size
        return lr_at(
            progress.epoch * self.steps_per_epoch + progress.step_in_epoch,
            self.cfg.schedule,
            lr=lr * (self.global_batch_size / reference) if reference else lr,
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.steps_per_epoch * len(self.image_sizes),
        )

    def is_epoch_end(self, progress: Progress) -> bool:
        return progress.step_in_epoch == self.steps_per_epoch or progress.step >= self.last_step

    def is_done(self, progress: Progress) -> bool:
        """Whether the run has ended: if a signal stopped it at its last step, the evaluation is still missing."""
        is_over = progress.step >= self.last_step or self.is_out_of_patience(progress)
        return is_over and progress.is_epoch_closed

    def is_out_of_patience(self, progress: Progress) -> bool:
        return self.cfg.patience is not None and progress.evaluations_without_gain >= self.cfg.patience

    def is_log_due(self, progress: Progress) -> bool:
        return progress.step % self.cfg.log_every == 0 or self.is_epoch_end(progress)

    def is_save_due(self, progress: Progress, minutes_since_save: float) -> bool:
        """Within an epoch."""
        checkpoint = self.cfg.checkpoint
        by_step = checkpoint.every_steps > 0 and progress.step % checkpoint.every_steps == 0
        return by_step or 0 < checkpoint.every_minutes <= minutes_since_save

    def is_due(self, every_epochs: int, progress: Progress) -> bool:
        """At the end of an epoch, before `close_epoch`; 0 is due at the end of the run, -1 never."""
        at_end = every_epochs >= 0 and progress.step >= self.last_step
        return at_end or (every_epochs > 0 and (progress.epoch + 1) % every_epochs == 0)

    def close_epoch(self, progress: Progress) -> None:
        """Begin the next epoch; a run that `max_steps` ends within an epoch stays in it, so that it can continue."""
        progress.closed_step = progress.step
        if progress.step_in_epoch == self.steps_per_epoch:
            progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0


@dataclass
class Window:
    """Steps between two log lines. Marks are those of `DeviceClock`."""

    image_size: int
    warmup: bool
    start: Any
    end: Any
    images: int = 0
    # Of each step: seconds that the host waited for its batch, marks at the end of the step before and after that wait
    waits: list[tuple[float, Any, Any]] = field(default_factory=list)
    pauses: list[tuple[Any, Any]] = field(default_factory=list)
    # For a log line, which is read later: float64 [steps, 4] on the device (loss, correct1, correct5, skipped); [5-6]
    # on the host from the mark `copied` on (sums over steps and ranks, bad images, loss scale); what the host knows.
    rows: Any = None
    totals: Any = None
    copied: Any = None
    record: dict[str, Any] = field(default_factory=dict)


class ThroughputMeter:
    """Counts images between calls of `close`.

    Windows that begin within the first `warmup_steps`, or within as many steps with another image size (which select
    other kernels or compile), are warm-up. The host runs ahead of a GPU: `host_clock` measures only its own waiting.
    """

    def __init__(
        self, warmup_steps: int, clock: DeviceClock, host_clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.clock, self._host_clock, self._warmup_steps = clock, host_clock, warmup_steps
        self._steps_before = self._image_size = 0
        self._ends: deque[Any] = deque()  # marks of the steps that the device may not have done
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
        while len(self._ends) >= LEAD_STEPS:
            self.clock.wait(self._ends.popleft())
        since = self._host_clock()
        yield
        self._window.waits.append((self._host_clock() - since, self._idle_from, self.clock.mark()))

    def tick(self, images: int) -> None:
        """Count one optimizer step over `images` (of all ranks), which has been submitted."""
        self._idle_from = self._window.end = self.clock.mark()
        self._ends.append(self._idle_from)
        self._window.images += images

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block, such as saving a checkpoint."""
        since = self.clock.mark()
        yield
        self._idle_from = self.clock.mark()
        self._window.pauses.append((since, self._idle_from))

    def close(self) -> Window:
        """Close the window and begin the next. The host does not wait."""
        closed = self._window
        assert closed.waits, "an empty window"
        self._steps_before += len(closed.waits)
        self._begin_window(closed.end)
        return closed

    def measured(self, window: Window) -> dict[str, Any]:
        """The part of a training record about a closed window; the host waits for its last step.

        `image_size` in pixels, `images` and `images_per_s` of all ranks, `seconds` without pauses, `step_ms`,
        `data_wait_pct` (0-100, the share of the time in which this process had no batch for an idle device), `warmup`.
        """
        self.clock.wait(window.end)
        paused_s = sum(self.clock.seconds(*pause) for pause in window.pauses)
        waited_s = sum(min(host_waited_s, self.clock.seconds(*marks)) for host_waited_s, *marks in window.waits)
        seconds = max(self.clock.seconds(window.start, window.end) - paused_s, 1e-9)
        return {
            "image_size": window.image_size,
            "images": window.images,
            "seconds": seconds,
            "images_per_s": window.images / seconds,
            "step_ms": 1000 * seconds / len(window.waits),
            "data_wait_pct": 100 * min(waited_s / seconds, 1.0),
            "warmup": window.warmup,
        }
