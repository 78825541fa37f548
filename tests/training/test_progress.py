"""What is due when."""

from __future__ import annotations

import pytest

from cl_train.config.schema import Config, ConfigError
from cl_train.training.progress import Progress
from cl_train.training.setup import make_plan


def test_a_plan_counts_optimizer_steps() -> None:
    plan = make_plan(Config(batch_size=8, accumulate_steps=3, epochs=4, max_steps=10), 1000, 31, world_size=2)
    assert (plan.global_batch_size, plan.steps_per_epoch, plan.total_steps, plan.last_step) == (48, 10, 40, 10)
    assert plan.lr == pytest.approx(0.1 * 48 / 256)


def test_too_few_images_for_one_step() -> None:
    with pytest.raises(ConfigError, match="one step takes 64 images"):
        make_plan(Config(batch_size=16, accumulate_steps=4), 50, 3, world_size=1)


def test_evaluations_and_checkpoints_come_at_their_epochs_and_at_the_end() -> None:
    cfg = Config(batch_size=10, epochs=5, evaluate_every=2)
    cfg.checkpoint.every_epochs = 3
    plan = make_plan(cfg, 40, 4, world_size=1)
    progress, evaluated, saved = Progress(), [], []
    for _ in range(plan.last_step):
        progress.advance(plan.global_batch_size)
        if plan.is_epoch_end(progress):
            if plan.is_evaluation_due(progress):
                evaluated.append(progress.epoch + 1)
            if plan.is_epoch_save_due(progress):
                saved.append(progress.epoch + 1)
            progress.close_epoch(plan.steps_per_epoch)
    assert (evaluated, saved, progress.images_seen) == ([2, 4, 5], [3, 5], 200)


@pytest.mark.parametrize(("every", "expected"), [(0, True), (1, True), (-1, False)])
def test_the_last_step_is_evaluated_unless_never(every: int, expected: bool) -> None:
    cfg = Config(batch_size=10, epochs=1, max_steps=2, evaluate_every=every)
    plan = make_plan(cfg, 40, 4, world_size=1)
    progress = Progress(step=2, step_in_epoch=2)
    assert plan.is_epoch_end(progress) and plan.is_evaluation_due(progress) == expected
    assert not plan.is_done(progress)
    progress.close_epoch(plan.steps_per_epoch)
    assert plan.is_done(progress)
