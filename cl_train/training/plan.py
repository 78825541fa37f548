"""Where a run is, where it goes, and what is due at each step: plain numbers."""

from __future__ import annotations

import dataclasses
import time

from cl_train.config.schema import Config, ConfigError
from cl_train.step.optim import lr_at, scaled_lr


@dataclasses.dataclass
class Progress:
    """Where the run is: everything that changes from step to step but the weights."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    images_seen: int = 0
    skipped_steps: int = 0
    best_top1: float = -1.0
    closed_step: int = 0  # the last step after which an epoch's end (evaluation, saving) was seen to

    def advance(self, images: int) -> None:
        self.step += 1
        self.step_in_epoch += 1
        self.images_seen += images

    def finish_epoch(self, steps_per_epoch: int) -> None:
        """The next epoch begins; a run that `max_steps` ends in mid-epoch stays where it is, so that it can go on."""
        self.closed_step = self.step
        if self.step_in_epoch == steps_per_epoch:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What follows from the settings, the data and the number of ranks."""

    global_batch_size: int
    steps_per_epoch: int
    total_steps: int  # of all epochs: the schedule's length
    last_step: int  # where this run ends: `max_steps` may be earlier
    lr: float


def make_plan(cfg: Config, train_images: int, batches_per_epoch: int, world_size: int) -> Plan:
    """
    Raises:
        ConfigError: the data has fewer images than one optimizer step takes.
    """
    global_batch_size = cfg.batch_size * cfg.accumulate_steps * world_size
    steps_per_epoch = batches_per_epoch // cfg.accumulate_steps
    if steps_per_epoch == 0:
        raise ConfigError(
            f"one step takes {global_batch_size} images (batch_size x accumulate_steps x processes) "
            f"but there are {train_images} training images; lower batch_size or accumulate_steps"
        )
    total_steps = steps_per_epoch * cfg.epochs
    lr = scaled_lr(cfg.optim, global_batch_size)
    return Plan(global_batch_size, steps_per_epoch, total_steps, min(cfg.max_steps or total_steps, total_steps), lr)


def plan_lr(cfg: Config, plan: Plan, step: int) -> float:
    return lr_at(step, cfg.schedule, lr=plan.lr, steps_per_epoch=plan.steps_per_epoch, total_steps=plan.total_steps)


def is_epoch_end(progress: Progress, plan: Plan) -> bool:
    return progress.step_in_epoch == plan.steps_per_epoch or progress.step >= plan.last_step


def is_save_due_in_epoch(cfg: Config, progress: Progress, last_saved_at: float) -> bool:
    every = cfg.checkpoint
    minutes = (time.monotonic() - last_saved_at) / 60
    by_step = every.every_steps > 0 and progress.step % every.every_steps == 0
    return by_step or (every.every_minutes > 0 and minutes >= every.every_minutes)


def is_done(progress: Progress, plan: Plan) -> bool:
    """Nothing is left to do: a run that a signal stopped at its last step has yet to evaluate."""
    return progress.step >= plan.last_step and progress.closed_step == progress.step


def is_last(progress: Progress, plan: Plan) -> bool:
    return progress.step >= plan.last_step


def is_evaluation_due(cfg: Config, progress: Progress, plan: Plan) -> bool:
    if cfg.evaluate_every < 0:
        return False
    return is_last(progress, plan) or (cfg.evaluate_every > 0 and progress.epoch % cfg.evaluate_every == 0)


def is_save_due(cfg: Config, progress: Progress, plan: Plan) -> bool:
    every = cfg.checkpoint.every_epochs
    return is_last(progress, plan) or (every > 0 and progress.epoch % every == 0)
