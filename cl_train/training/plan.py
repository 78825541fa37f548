"""Where a run stands, how long it is, and what is due at a step."""

import math
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from cl_train.config.schema import Config
from cl_train.data.build import size_schedule
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
    best_score: float = -math.inf  # of `score_of`
    # Step, epoch and top-1 of `best_score`; None also if an older version saved it.
    best: dict[str, Any] | None = None
    evaluations_without_gain: int = 0  # since `best_score`
    evaluated_step: int = 0  # the last step whose evaluation is counted in these two
    closed_step: int = 0  # the last one at which an epoch was closed: no evaluation is missing
    bad_steps: int = 0  # with a loss or gradient that was not finite, up to the last log line
    resumed_with: list[str] = field(default_factory=list)  # settings that a resume has changed
    # Of this rank, not yet submitted for a log line.
    pending_steps: list[StepResult] = field(default_factory=list)
    # The model's at the last log line; only filled while `pending_steps` are saved.
    good_buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def count_evaluation(self, score: float, top1: float) -> bool:
        """Count the evaluation of this step, once; whether it is the best so far."""
        if self.evaluated_step == self.step:  # before a resume
            return False
        self.evaluated_step, is_best = self.step, score > self.best_score
        if is_best:
            self.best_score = score
            self.best = {"step": self.step, "epoch": self.epoch, "top1": top1}
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
        global_batch_size = cfg.batch_size * cfg.accumulate_steps * world_size
        steps_per_epoch = train_images // (cfg.batch_size * world_size) // cfg.accumulate_steps
        sizes, total_steps = size_schedule(cfg.data), steps_per_epoch * cfg.epochs
        image_sizes = tuple(map(sizes.image_size_at, range(cfg.epochs)))
        last_step = min(cfg.max_steps or total_steps, total_steps)
        return cls(cfg, image_sizes, global_batch_size, max(1, steps_per_epoch), last_step)

    def lr_at(self, progress: Progress) -> float:
        """The learning rate of the next step, linear in the batch size (Goyal et al. 2017)."""
        steps_per_epoch, optim = self.steps_per_epoch, self.cfg.optim
        lr = optim.lr
        if optim.reference_batch_size:
            lr *= self.global_batch_size / optim.reference_batch_size
        return lr_at(
            progress.epoch * steps_per_epoch + progress.step_in_epoch,
            self.cfg.schedule,
            lr=lr,
            steps_per_epoch=steps_per_epoch,
            total_steps=steps_per_epoch * len(self.image_sizes),
        )

    def is_epoch_end(self, progress: Progress) -> bool:
        return progress.step_in_epoch == self.steps_per_epoch or progress.step >= self.last_step

    def is_done(self, progress: Progress) -> bool:
        """At the last step its evaluation may still be missing."""
        is_over = progress.step >= self.last_step or self.is_out_of_patience(progress)
        return is_over and progress.closed_step == progress.step

    def is_out_of_patience(self, progress: Progress) -> bool:
        patience = self.cfg.patience
        return patience is not None and progress.evaluations_without_gain >= patience

    def is_epoch_due(self, every_epochs: int, progress: Progress) -> bool:
        """At the end of an epoch, before `close_epoch`; 0: at the end of the run, -1: never."""
        at_end = every_epochs >= 0 and progress.step >= self.last_step
        return at_end or (every_epochs > 0 and (progress.epoch + 1) % every_epochs == 0)

    def is_save_due(self, progress: Progress) -> bool:
        """Between two steps of an epoch."""
        every_steps = self.cfg.checkpoint.every_steps
        return every_steps > 0 and progress.step % every_steps == 0

    def close_epoch(self, progress: Progress) -> None:
        """Begin the next epoch; a run that `max_steps` ends within an epoch stays in it."""
        progress.closed_step = progress.step
        if progress.step_in_epoch == self.steps_per_epoch:
            progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
