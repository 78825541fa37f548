"""A run and its log lines. The steps between two lines are timed and added up on the device; the
sums are read one line later, logged, and searched for NaN. All ranks decide on the same numbers.
"""

import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cl_train.data.build import Data
from cl_train.data.loader_report import bottleneck_advice
from cl_train.errors import TrainingFault
from cl_train.measure.statistics import HOST_BOUND, HOST_BOUND_PCT
from cl_train.step.backup import BufferBackup
from cl_train.step.train_step import StepResult
from cl_train.system.distributed import Dist, gather_objects, sum_over_ranks
from cl_train.system.machine import DeviceClock, GpuWatch, peak_memory_gib
from cl_train.system.processes import MachineLoad, StopRequest, cores_of_process
from cl_train.system.run_folder import MAY_CHANGE, Window, after_warmup
from cl_train.training.build import TrainState
from cl_train.training.checkpointing import Checkpoints
from cl_train.training.console import console_line, mean
from cl_train.training.evaluation import EvaluationSettings
from cl_train.training.plan import Plan, Progress
from cl_train.training.records import Records
from cl_train.training.throughput import ThroughputMeter, Timing

log = logging.getLogger(__name__)

ADVICE = (
    "Lower optim.lr, add schedule.warmup_epochs or optim.clip_norm, or try precision=fp32 "
    "(instead of fp16 also precision=bf16) or on_nonfinite=skip"
)
READ_AT_ONCE = ("cpu",)  # devices whose log lines are read without waiting
BadStep = tuple[int, int, float]  # step, rank, loss (finite if only a gradient is not)


@dataclass(frozen=True)
class PendingWindow:
    timing: Timing
    rows: torch.Tensor  # of this rank, on the device: see `rows_of`
    totals: torch.Tensor  # sums over steps and ranks, on the host after the mark `copied`
    copied: Any
    step: int  # the last one of the window
    epoch: int
    lr: float


@dataclass
class ActiveRun:
    """Everything that lives as long as a run, and its log lines."""

    dist: Dist
    folder: Path
    plan: Plan
    data: Data
    state: TrainState
    evaluation: EvaluationSettings
    checkpoints: Checkpoints
    records: Records
    signals: StopRequest
    machine_load: MachineLoad
    progress: Progress
    stop_signal: int = 0  # the number of the signal that ends the run
    epoch_windows: list[Window] = field(default_factory=list)
    pending: PendingWindow | None = None
    first_step_s: float | None = None  # since the process began its work
    is_loader_checked: bool = False  # once per run, after the first epoch

    def __post_init__(self) -> None:
        self.meter = ThroughputMeter(self.plan.warmup_steps, DeviceClock(self.dist.device))
        self.gpu = GpuWatch(self.dist.device)
        models = {"model": self.state.model}
        average = self.state.parts.average
        if average is not None:
            models["average"] = average.module
        self._buffers = BufferBackup(**models)
        self._buffers.set_good(self.progress.good_buffers)
        self.progress.good_buffers = {}

    def save(self) -> None:
        """Saves the state between two steps, once per step; the host waits for the device.

        Between two log lines, buffers that are not finite are mended first, and the checkpoint also
        holds the buffers of the last log line: a resumed run goes back to them if a step of the
        window turns out to be bad. Raises TrainingFault: a step of the window ends the run.
        """
        progress = self.progress
        if self.checkpoints.saved_step == progress.step:
            return
        self.log_pending()
        if progress.pending_steps:
            count = self._count_bad_steps(rows_of(progress.pending_steps), progress.step)
            if count > progress.bad_steps:
                self._buffers.restore()
            self._buffers.mend()
            progress.good_buffers = self._buffers.good
        progress.skipped_images = sum(gather_objects(self.data.bad_images.skipped, self.dist))
        self.checkpoints.save(progress)
        progress.good_buffers = {}

    def _count_bad_steps(self, rows: torch.Tensor, last_step: int) -> int:
        """Returns the bad steps of the run, including those in `rows` (of all ranks; the last row
        is `last_step`). With loss scaling, gradients may overflow: that determines the scale.
        """
        has_scale = self.state.parts.scaler.is_enabled()
        bad = [
            (step, self.dist.rank, loss)
            for step, (loss, _, _, skipped) in enumerate(rows.tolist(), last_step - len(rows) + 1)
            if not math.isfinite(loss) or (skipped and not has_scale)
        ]
        of_ranks = [step for of_rank in gather_objects(bad, self.dist) for step in of_rank]
        return count_bad_steps(of_ranks, self.progress.bad_steps, self.plan.max_bad_steps)

    def log_steps(self, lr: float) -> None:
        """Submits the steps since the last log line for reading, and logs those submitted before: a
        GPU goes on meanwhile. lr: the learning rate of the last step.
        """
        steps, scaler = self.progress.pending_steps, self.state.parts.scaler
        rows = rows_of(steps)
        bad_images = rows.new_full((1,), self.data.bad_images.skipped)
        totals = sum_over_ranks(torch.cat([rows.sum(0), bad_images]), self.dist)
        # As in `_count_bad_steps`, but without waiting for the device.
        loss, _, _, skipped, _ = totals
        is_bad = ~loss.isfinite()
        self._buffers.keep_or_restore(is_bad if scaler.is_enabled() else is_bad | (skipped > 0))
        if scaler.is_enabled():  # `get_scale` would wait for the device
            scale = scaler.scale(torch.ones((), device=totals.device))
            totals = torch.cat([totals, scale.double().view(1)])
        totals = totals.to("cpu", non_blocking=True)  # pinned memory if it comes from a GPU
        self.progress.pending_steps = []
        timing, copied = self.meter.close(), self.meter.clock.mark()
        if self.dist.is_main and not timing.warmup:
            self.gpu.look()
        step, epoch = self.progress.step, self.progress.epoch
        self.log_pending()
        self.pending = PendingWindow(timing, rows, totals, copied, step, epoch, lr)
        if self.dist.device.type in READ_AT_ONCE or self.plan.is_epoch_end(self.progress):
            self.log_pending()

    def note_first_step(self) -> None:
        """Notes when the first step is done, which selects kernels and compiles; the host waits."""
        if self.first_step_s is not None:
            return
        self.meter.clock.wait(self.meter.clock.mark())
        self.first_step_s = round(self.records.seconds(), 1)
        if self.dist.device.type == "cuda" or self.records.facts.compile:
            log.info("the first step is done after %.0f s", self.first_step_s)

    def log_pending(self) -> None:
        """Logs the pending window, if there is one. Raises TrainingFault: the run must end."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        self.meter.clock.wait(pending.copied)
        loss, correct1, correct5, skipped, skipped_images, *scale = pending.totals.tolist()
        self.progress.skipped_steps += round(skipped / self.dist.world_size)
        rows = pending.rows
        images = len(rows) * self.plan.global_batch_size
        window = Window(
            step=pending.step,
            epoch=pending.epoch,
            lr=pending.lr,
            time=time.time(),
            loss=loss / (len(rows) * self.dist.world_size),
            top1=100 * correct1 / images,
            top5=100 * correct5 / images,
            **self.meter.measured(pending.timing),
            loss_scale=scale[0] if scale else None,
            skipped_steps=self.progress.skipped_steps,
            skipped_images=int(skipped_images),
            peak_memory_gib=peak_memory_gib(self.dist.device),
            **{name: getattr(self.records.facts, name) for name in MAY_CHANGE},
        )
        self.epoch_windows.append(window)
        self.records.append(window.to_record())  # a line of metrics.jsonl, see `read_run`
        step_in_epoch = self.progress.step_in_epoch - (self.progress.step - window.step)
        log.info("%s", console_line(self.epoch_windows, step_in_epoch, self.plan))
        # GradScaler has no minimum (pytorch/pytorch#99640).
        if scale and scale[0] < 1:
            what = f"the loss scale fell to {scale[0]:g} at step {window.step}"
            raise TrainingFault(f"{what}: gradients overflow fp16 at every scale. {ADVICE}")
        if skipped or not math.isfinite(loss):  # equal on all ranks, because it is a sum over them
            self.progress.bad_steps = self._count_bad_steps(rows, window.step)

    def note_bad_images(self) -> tuple[dict[str, str], int]:
        """Writes bad_images.csv; returns the reasons of all ranks, and on rank 0 their number."""
        of_ranks = gather_objects(self.data.bad_images.reasons, self.dist)
        reasons = {name: reason for each in of_ranks for name, reason in each.items()}
        return reasons, self.records.write_bad_images(reasons)

    def warn_if_loader_bound(self) -> None:
        """Names the bottleneck and the setting to change if the first epoch waited for data."""
        images = sum(window.images for window in self.epoch_windows if not window.warmup)
        if self.is_loader_checked or images < 20 * self.plan.global_batch_size:
            return
        self.is_loader_checked = True
        advice = bottleneck_advice(
            self.data.times,
            workers=self.data.workers,
            cores=cores_of_process(self.dist.world_size),
            seconds=sum(window.seconds for window in self.epoch_windows),
            data_wait_pct=mean(after_warmup(self.epoch_windows), "data_wait_pct"),
        )
        if advice is None and mean(self.epoch_windows, "host_bound_pct") >= HOST_BOUND_PCT:
            log.warning(HOST_BOUND)
        if advice is not None and self.dist.is_main:
            log.warning("%s (a slow loader can mask the gain of channels_last)", advice)


def rows_of(steps: list[StepResult]) -> torch.Tensor:
    """Returns float64 [steps, 4]: loss, top-1 and top-5 hits, 1 if the update was skipped."""
    columns = [[s.loss.double(), s.correct1, s.correct5, s.skipped] for s in steps]
    return torch.stack([torch.stack(values) for values in columns])


def count_bad_steps(bad: list[BadStep], earlier: int, limit: int) -> int:
    """Returns `earlier` plus the steps in `bad`. Raises TrainingFault: more than `limit`."""
    count = earlier + len({step for step, *_ in bad})
    if bad and count > limit:
        step, rank, loss = min(bad, key=lambda each: (each[0], math.isfinite(each[2]), each[1]))
        what = "a gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
        what += f" at step {step} on rank {rank}; the update was skipped"
        which = f"; {count} such steps are more than {limit}" if limit else ""
        raise TrainingFault(f"{what}{which}. {ADVICE}")
    return count
