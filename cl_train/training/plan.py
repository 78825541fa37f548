"""Where a run stands, how long it is, and what is due at a step."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from cl_train.config.schema import CheckpointConfig, ScheduleConfig
from cl_train.step.optim import lr_at
from cl_train.step.train_step import StepResult


@dataclass
class Progress:
    """What changes from step to step besides the `TrainState`. Saved in checkpoints."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    images_seen: int = 0
    skipped_steps: int = 0
    skipped_images: int = 0  # of all ranks, also those loaded ahead of the checkpoint
    best_score: float = -math.inf  # of `score_of`
    # Step, epoch and top-1 of `best_score`; None also if an older version saved it.
    best: dict[str, Any] | None = None
    evaluations_without_gain: int = 0  # since `best_score`
    evaluated_step: int = 0  # the last step whose evaluation is counted in these two
    closed_step: int = 0  # the last one at which an epoch was closed: no evaluation is missing
    bad_steps: int = 0  # with a loss or gradient that was not finite, up to the last log line
    resumed_with: list[str] = field(default_factory=list)  # settings that a resume has changed
    # The steps of this rank that are not yet submitted for a log line.
    pending_steps: list[StepResult] = field(default_factory=list)
    # The models' buffers at the last log line; only filled while `pending_steps` are saved.
    good_buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def count_evaluation(self, score: float, top1: float) -> bool:
        """Counts the evaluation of this step, once; returns whether it is the best so far."""
        if self.evaluated_step == self.step:  # before a resume
            return False
        self.evaluated_step, is_best = self.step, score > self.best_score
        if is_best:
            self.set_best(score, top1)
        self.evaluations_without_gain = 0 if is_best else self.evaluations_without_gain + 1
        return is_best

    def set_best(self, score: float, top1: float) -> None:
        self.best_score = score
        self.best = {"step": self.step, "epoch": self.epoch, "top1": top1}

    def advance(self, images: int) -> None:
        self.step += 1
        self.step_in_epoch += 1
        self.images_seen += images


@dataclass(frozen=True)
class Plan:
    """The length of a run in steps, and what its settings make due at a step."""

    image_sizes: tuple[int, ...]  # pixels, of each epoch
    global_batch_size: int
    accumulate_steps: int
    steps_per_epoch: int
    last_step: int  # the end of this run, which `max_steps` may set earlier
    lr: float  # at the global batch size
    schedule: ScheduleConfig
    checkpoint: CheckpointConfig
    log_every: int  # steps
    evaluate_every: int  # epochs
    patience: int | None  # evaluations without a gain
    warmup_steps: int  # that do not count for the speed
    max_bad_steps: int  # steps whose loss or gradient is not finite; more end the run

    @property
    def epochs(self) -> int:
        return len(self.image_sizes)

    @property
    def end(self) -> str:
        """The setting that ends the run."""
        is_whole = self.last_step == self.steps_per_epoch * self.epochs
        return f"epochs={self.epochs}" if is_whole else f"max_steps={self.last_step}"

    def lr_at(self, progress: Progress) -> float:
        return lr_at(
            progress.epoch * self.steps_per_epoch + progress.step_in_epoch,
            self.schedule,
            lr=self.lr,
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.steps_per_epoch * self.epochs,
        )

    def is_epoch_end(self, progress: Progress) -> bool:
        return progress.step_in_epoch == self.steps_per_epoch or progress.step >= self.last_step

    def is_done(self, progress: Progress) -> bool:
        """Whether nothing is left to do; the evaluation of the last step may still be missing."""
        is_over = progress.step >= self.last_step or self.is_out_of_patience(progress)
        return is_over and progress.closed_step == progress.step

    def is_out_of_patience(self, progress: Progress) -> bool:
        return self.patience is not None and progress.evaluations_without_gain >= self.patience

    def is_evaluation_due(self, progress: Progress) -> bool:
        """Call it at the end of an epoch, before `close_epoch`."""
        return self._is_epoch_due(self.evaluate_every, progress)

    def is_save_due(self, progress: Progress) -> bool:
        return self._is_epoch_due(self.checkpoint.every_epochs, progress)

    def _is_epoch_due(self, every_epochs: int, progress: Progress) -> bool:
        at_end = every_epochs >= 0 and progress.step >= self.last_step
        return at_end or (every_epochs > 0 and (progress.epoch + 1) % every_epochs == 0)

    def is_step_save_due(self, progress: Progress) -> bool:
        every_steps = self.checkpoint.every_steps
        return every_steps > 0 and progress.step % every_steps == 0

    def close_epoch(self, progress: Progress) -> None:
        """Begins the next epoch; a run that `max_steps` ends within an epoch stays in it."""
        progress.closed_step = progress.step
        if progress.step_in_epoch == self.steps_per_epoch:
            progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
