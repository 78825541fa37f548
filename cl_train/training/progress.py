"""Progress of a run, its planned length, and the actions due at each step: plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Progress:
    """Everything besides tensors that changes from step to step. Saved in checkpoints."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    images_seen: int = 0
    skipped_steps: int = 0
    best_top1: float = -1.0
    closed_step: int = 0  # the last step at which `close_epoch` was called

    @property
    def is_evaluated(self) -> bool:
        """Nothing is left to do at this step: its epoch's end (saving, evaluation) is complete."""
        return self.closed_step == self.step

    def advance(self, images: int) -> None:
        self.step += 1
        self.step_in_epoch += 1
        self.images_seen += images

    def close_epoch(self, steps_per_epoch: int) -> None:
        """Begin the next epoch; a run that `max_steps` ends within an epoch stays in it, so that it can continue."""
        self.closed_step = self.step
        if self.step_in_epoch == steps_per_epoch:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0


@dataclass(frozen=True)
class Plan:
    """Numbers derived from the settings, the data and the ranks. Frequencies of 0 mean never, or at the end."""

    batch_size: int  # of a rank and micro-step
    global_batch_size: int
    steps_per_epoch: int
    total_steps: int  # of all epochs: the length of the schedule
    last_step: int  # the end of this run, which `max_steps` may set earlier
    lr: float
    log_every: int
    evaluate_every: int  # epochs; -1: never, 0: at the end
    save_every_epochs: int
    save_every_steps: int
    save_every_minutes: float
    save_best: bool

    def is_last_step(self, progress: Progress) -> bool:
        return progress.step >= self.last_step

    def is_epoch_end(self, progress: Progress) -> bool:
        return progress.step_in_epoch == self.steps_per_epoch or self.is_last_step(progress)

    def is_done(self, progress: Progress) -> bool:
        """Whether the run has ended: if a signal stopped it at its last step, the evaluation is still missing."""
        return self.is_last_step(progress) and progress.is_evaluated

    def is_log_due(self, progress: Progress) -> bool:
        return progress.step % self.log_every == 0 or self.is_epoch_end(progress)

    def is_save_due(self, progress: Progress, minutes_since_save: float) -> bool:
        """In an epoch."""
        by_step = self.save_every_steps > 0 and progress.step % self.save_every_steps == 0
        return by_step or 0 < self.save_every_minutes <= minutes_since_save

    def is_epoch_save_due(self, progress: Progress) -> bool:
        """At the end of an epoch, before `close_epoch`."""
        every = self.save_every_epochs
        return self.is_last_step(progress) or (every > 0 and (progress.epoch + 1) % every == 0)

    def is_evaluation_due(self, progress: Progress) -> bool:
        """At the end of an epoch, before `close_epoch`."""
        every = self.evaluate_every
        return every >= 0 and (self.is_last_step(progress) or (every > 0 and (progress.epoch + 1) % every == 0))
