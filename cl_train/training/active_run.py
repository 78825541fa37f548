"""A run and its log lines: the steps between two of them are timed, added up on the device, read one line late, logged,
and searched for NaN. All ranks decide equally, on numbers that were gathered or summed over them."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from cl_train.data.build import Data
from cl_train.data.loader import bottleneck_advice
from cl_train.memory_format.model_call import BufferBackup
from cl_train.system.distributed import Dist, gather_objects, sum_over_ranks
from cl_train.system.machine import DeviceClock
from cl_train.system.processes import MachineLoad, StopRequest, cores_of_process
from cl_train.training.records import Records, duration, peak_memory_gib, without_warmup
from cl_train.training.state import Checkpoints, Plan, Progress, TrainingFault, TrainState

log = logging.getLogger(__name__)

ADVICE = "Lower optim.lr, add schedule.warmup_epochs or optim.clip_norm, or try precision=bf16 or on_nonfinite=skip"
READ_AT_ONCE = ("cpu",)  # devices; the host would wait for another one by reading a log line at once
LEAD_STEPS = 2  # that the device may be behind the host: enough to keep it busy; each holds a batch in memory


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


class ThroughputMeter:
    """Counts images between calls of `close`. The host runs ahead of a GPU: `host_clock` measures only its own waiting.
    Windows that begin within `warmup_steps` of an image size, which selects kernels or compiles, are warm-up."""

    def __init__(self, warmup_steps: int, clock: DeviceClock, host_clock: Callable[[], float] = perf_counter) -> None:
        self.clock, self._host_clock, self._warmup_steps = clock, host_clock, warmup_steps
        self._steps_before = self._image_size = 0
        self._ends: deque[Any] = deque()  # marks of the steps that the device may not have done
        self.start(0)

    def start(self, image_size: int, mark: Any = None) -> None:
        if image_size != self._image_size:
            self._image_size, self._steps_before = image_size, 0
        self._idle_from = mark = self.clock.mark() if mark is None else mark
        self._window = Window(image_size, self._steps_before < self._warmup_steps, mark, mark)

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

    def exclude_pause(self) -> None:
        """Exclude the time since the last step, in which for instance a checkpoint was saved."""
        self._idle_from = self.clock.mark()
        self._window.pauses.append((self._window.end, self._idle_from))

    def close(self) -> Window:
        """Close the window and begin the next. The host does not wait."""
        closed = self._window
        assert closed.waits, "an empty window"
        self._steps_before += len(closed.waits)
        self.start(closed.image_size, closed.end)
        return closed

    def measured(self, window: Window) -> dict[str, Any]:
        """A closed window as part of a training record, for all ranks, without pauses; the host waits for its end.
        `data_wait_pct`: 0-100, the share of the time in which this process had no batch for an idle device."""
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


@dataclass
class ActiveRun:
    """Everything that lives as long as a run, and its log lines."""

    dist: Dist
    folder: Path
    plan: Plan
    data: Data
    state: TrainState
    checkpoints: Checkpoints
    records: Records
    signals: StopRequest
    machine_load: MachineLoad
    progress: Progress
    stop_signal: int = 0  # ends the run
    epoch_records: list[dict[str, Any]] = field(default_factory=list)  # of the training in this epoch
    submitted: tuple[Any, ...] | None = None  # a window whose sums are on their way from the device to the host
    bad_steps: int = 0  # with a loss or gradient that was not finite
    is_loader_checked: bool = False  # once per run, after the first epoch

    def __post_init__(self) -> None:
        self.meter = ThroughputMeter(self.plan.cfg.warmup_steps, DeviceClock(self.dist.device))
        self._buffers = BufferBackup(self.state.model, *([self.state.average.module] if self.state.average else []))

    def log_steps(self, lr: float) -> None:
        """Submit the steps since the last log line, the last one with `lr`, for reading; log those submitted before.
        One reduction over the ranks; a GPU goes on meanwhile. At the end of an epoch and on a CPU the host waits."""
        steps, scaler = self.progress.window, self.state.parts.scaler
        rows = torch.stack([torch.stack([s.loss.double(), s.correct1, s.correct5, s.skipped]) for s in steps])
        bad_images = rows.new_full((1,), self.data.bad_images.skipped)
        totals = sum_over_ranks(torch.cat([rows.sum(0), bad_images]), self.dist)
        is_bad = ~totals[0].isfinite()  # as `check_bad_steps` decides, but without waiting for the device
        self._buffers.settle(is_bad if scaler.is_enabled() else is_bad | (totals[3] > 0))
        if scaler.is_enabled():  # private, but `get_scale` waits for the device
            scale = scaler._get_scale_async()
            assert scale is not None
            totals = torch.cat([totals, scale.double().view(1)])
        totals = totals.to("cpu", non_blocking=True)  # pinned memory if it comes from a GPU
        self.progress.window = []
        # Values that a resumed run may change; a comparison refuses runs in which they changed.
        names = ("memory_format", "precision", "world_size", "device_name")
        record = {name: self.records.description[name] for name in names}
        record |= {"step": self.progress.step, "epoch": self.progress.epoch, "lr": lr}
        submitted = (self.meter.close(), rows, totals, self.meter.clock.mark(), record)
        self.log_submitted()
        self.submitted = submitted
        if self.dist.device.type in READ_AT_ONCE or self.plan.is_epoch_end(self.progress):
            self.log_submitted()

    def log_submitted(self) -> None:
        """Log the submitted window, if there is one; the host waits for it. Raises TrainingFault: the run must end."""
        if self.submitted is None:
            return
        # rows: float64 [steps, 4] on the device; totals: the sums over steps and ranks, on the host after the mark.
        (window, rows, totals, copied, record), self.submitted = self.submitted, None
        self.meter.clock.wait(copied)
        loss, correct1, correct5, skipped, skipped_images, *scale = totals.tolist()
        self.progress.skipped_steps += round(skipped / self.dist.world_size)
        found: list[tuple[int, int, float]] = []  # step, rank, loss; if that is finite, a gradient is not
        if skipped or not math.isfinite(loss):  # equal on all ranks, because it is a sum over them
            for step, (its_loss, _, _, was_skipped) in enumerate(rows.tolist(), record["step"] - len(rows) + 1):
                # With loss scaling, overflowing gradients are expected, because they determine the scale.
                if not math.isfinite(its_loss) or (was_skipped and not scale):
                    found.append((step, self.dist.rank, its_loss))
            found = [step for of_rank in gather_objects(found, self.dist) for step in of_rank]
        images = len(rows) * self.plan.global_batch_size
        record |= {
            "loss": loss / (len(rows) * self.dist.world_size),
            "top1": 100 * correct1 / images,
            "top5": 100 * correct5 / images,
            **self.meter.measured(window),
            "loss_scale": scale[0] if scale else None,
            "skipped_steps": self.progress.skipped_steps,
            "skipped_images": int(skipped_images),
            "peak_memory_gib": peak_memory_gib(self.dist.device),
        }
        self.epoch_records.append(record)
        self.records.write("train", record)
        log.info("%s", self.console_line(record))
        cfg = self.plan.cfg
        if scale and scale[0] < cfg.amp.min_scale:  # GradScaler has no minimum (pytorch/pytorch#99640)
            fell = f"the loss scale fell to {scale[0]:g} at step {record['step']} (amp.min_scale={cfg.amp.min_scale:g})"
            raise TrainingFault(f"{fell}: gradients overflow fp16 at every scale. {ADVICE}")
        self.bad_steps += len({step for step, *_ in found})
        check_bad_steps(found, self.bad_steps, cfg.max_nonfinite if cfg.on_nonfinite == "skip" else 0)

    def console_line(self, record: dict[str, Any]) -> str:
        """A record of training in main_amp's format: each value, and in brackets its mean over the epoch. Time: seconds
        per step. Speed: images/s of all ranks with loading. Data: share of waiting. ETA: without evaluations."""
        records, measured = self.epoch_records, without_warmup(self.epoch_records)
        step_in_epoch = self.progress.step_in_epoch - (self.progress.step - record["step"])
        seconds_per_step = mean(measured, "step_ms") / 1000
        speed = sum(each["images"] for each in measured) / sum(each["seconds"] for each in measured)
        scale = f" Scale {record['loss_scale']:g} Skipped {record['skipped_steps']}" if record["loss_scale"] else ""
        bad_images = f" Bad images {record['skipped_images']}" if record["skipped_images"] else ""
        return (
            f"Epoch: [{record['epoch']}][{step_in_epoch}/{self.plan.steps_per_epoch}]"
            f" Time {record['step_ms'] / 1000:.3f} ({seconds_per_step:.3f})"
            f" Speed {record['images_per_s']:.1f} ({speed:.1f})"
            f" Loss {record['loss']:.4f} ({mean(records, 'loss'):.4f})"
            f" Prec@1 {record['top1']:.2f} ({mean(records, 'top1'):.2f})"
            f" Prec@5 {record['top5']:.2f} ({mean(records, 'top5'):.2f})"
            f" LR {record['lr']:.5f} Data {record['data_wait_pct']:.0f}%{scale}{bad_images}"
            f" ETA {duration((self.plan.last_step - record['step']) * seconds_per_step)}"
            f"{' (warm-up)' if record['warmup'] else ''}"
        )

    def warn_if_loader_bound(self) -> None:
        """If the first epoch waited for data, name the bottleneck and the setting to change."""
        images = sum(record["images"] for record in self.epoch_records if not record["warmup"])
        if self.is_loader_checked or images < 20 * self.plan.global_batch_size:  # mostly the loader's start
            return
        self.is_loader_checked = True
        wait_pct = mean(without_warmup(self.epoch_records), "data_wait_pct")
        seconds, cores = sum(record["seconds"] for record in self.epoch_records), cores_of_process(self.dist.world_size)
        times, workers = self.data.times, self.data.workers
        advice = bottleneck_advice(times, workers=workers, cores=cores, seconds=seconds, data_wait_pct=wait_pct)
        if advice is not None and self.dist.is_main:
            log.warning("%s (a slow loader can mask the gain of channels_last)", advice)


def check_bad_steps(found: list[tuple[int, int, float]], count: int, limit: int) -> None:
    """Raises TrainingFault: `count` bad steps so far, the last ones in `found`, are more than `limit`."""
    if found and count > limit:
        step, rank, loss = min(found, key=lambda bad: (bad[0], math.isfinite(bad[2]), bad[1]))
        what = "a gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
        which = f"; {count} such steps exceed max_nonfinite={limit}" if limit else ""
        raise TrainingFault(f"{what} at step {step} on rank {rank}; the update was skipped{which}. {ADVICE}")


def mean(records: list[dict[str, Any]], name: str) -> float:
    images = sum(record["images"] for record in records)  # not fmean: it raises an exception for losses like 1e308
    return sum(float(record[name]) * record["images"] for record in records) / images
