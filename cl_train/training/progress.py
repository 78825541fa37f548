"""Progress of a run, its planned length, and the actions due at each step."""

from collections.abc import Mapping
from dataclasses import dataclass

from cl_train.config.schema import CheckpointConfig, OptimConfig, ScheduleConfig
from cl_train.step.schedule import lr_at, scaled_lr

MAP = "mean_average_precision"


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
        """Whether the end of the epoch (saving, evaluation) is complete: nothing is left to do at this step."""
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
    """The epochs, and the settings that say what is due at a step."""

    image_sizes: tuple[int, ...]  # pixels, of each epoch
    batch_size: int  # of a rank and micro-step
    global_batch_size: int
    steps_per_epoch: int
    last_step: int  # the end of this run, which `max_steps` may set earlier
    accumulate_steps: int
    log_every: int
    evaluate_every: int  # epochs; -1: never, 0: at the end
    evaluate_flip: bool
    patience: int | None  # evaluations in a row without a gain
    report: bool  # evaluations write `report/`
    checkpoint: CheckpointConfig
    optim: OptimConfig
    schedule: ScheduleConfig

    def image_size_at(self, progress: Progress) -> int:
        return self.image_sizes[min(progress.epoch, len(self.image_sizes) - 1)]

    def lr_at(self, progress: Progress) -> float:
        """The learning rate of the next step."""
        return lr_at(
            progress.epoch * self.steps_per_epoch + progress.step_in_epoch,
            self.schedule,
            lr=scaled_lr(self.optim, self.global_batch_size),
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.steps_per_epoch * len(self.image_sizes),
        )

    def is_last_step(self, progress: Progress) -> bool:
        return progress.step >= self.last_step

    def is_epoch_end(self, progress: Progress) -> bool:
        return progress.step_in_epoch == self.steps_per_epoch or self.is_last_step(progress)

    def is_done(self, progress: Progress) -> bool:
        """Whether the run has ended: if a signal stopped it at its last step, the evaluation is still missing."""
        return (self.is_last_step(progress) or self.is_out_of_patience(progress)) and progress.is_epoch_closed

    def is_out_of_patience(self, progress: Progress) -> bool:
        return self.patience is not None and progress.evaluations_without_gain >= self.patience

    def is_log_due(self, progress: Progress) -> bool:
        return progress.step % self.log_every == 0 or self.is_epoch_end(progress)

    def is_save_due(self, progress: Progress, minutes_since_save: float) -> bool:
        """In an epoch."""
        by_step = self.checkpoint.every_steps > 0 and progress.step % self.checkpoint.every_steps == 0
        return by_step or 0 < self.checkpoint.every_minutes <= minutes_since_save

    def is_epoch_save_due(self, progress: Progress) -> bool:
        """At the end of an epoch, before `close_epoch`."""
        return self._is_due(self.checkpoint.every_epochs, progress)

    def is_evaluation_due(self, progress: Progress) -> bool:
        """At the end of an epoch, before `close_epoch`."""
        return self.evaluate_every >= 0 and self._is_due(self.evaluate_every, progress)

    def _is_due(self, every: int, progress: Progress) -> bool:
        return self.is_last_step(progress) or (every > 0 and (progress.epoch + 1) % every == 0)

    def close_epoch(self, progress: Progress) -> None:
        """Begin the next epoch; a run that `max_steps` ends within an epoch stays in it, so that it can continue."""
        progress.closed_step = progress.step
        if progress.step_in_epoch == self.steps_per_epoch:
            progress.epoch, progress.step_in_epoch = progress.epoch + 1, 0
