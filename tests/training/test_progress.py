"""What is due when."""

import pytest

from cl_train.config.schema import CheckpointConfig, Config, DataConfig, OptimConfig, ScheduleConfig
from cl_train.training.progress import Plan, Progress


def test_a_plan_counts_optimizer_steps() -> None:
    constant = {"schedule": ScheduleConfig(name="constant"), "optim": OptimConfig(lr=0.1)}
    cfg = Config(batch_size=8, accumulate_steps=3, epochs=4, max_steps=10, **constant)
    plan = Plan.of(cfg, 500, 2)
    assert (plan.image_sizes, plan.global_batch_size) == ((224,) * 4, 48)
    assert plan.steps_per_epoch == plan.last_step == 10
    assert plan.lr_at(Progress()) == pytest.approx(0.1 * 48 / 256)


@pytest.mark.parametrize("reference_batch_size", [256, 0])
def test_growing_images_leave_steps_and_learning_rate_alone(reference_batch_size: int) -> None:
    optim = OptimConfig(reference_batch_size=reference_batch_size, lr=1.0)
    data = DataConfig(size_schedule=[[0, 64], [2, 128]])
    cfg = Config(batch_size=32, epochs=4, optim=optim, schedule=ScheduleConfig(name="linear"), data=data)
    plan = Plan.of(cfg, 1280, 1)
    assert plan.image_sizes == (64, 96, 128, 128) and plan.last_step == 160
    peak = 32 / 256 if reference_batch_size else 1.0
    rates = [plan.lr_at(Progress(epoch=epoch, step_in_epoch=20)) for epoch in range(4)]
    assert rates == pytest.approx([peak * (1 - (epoch + 0.5) / 4) for epoch in range(4)])


def test_evaluations_and_checkpoints_come_at_their_epochs_and_at_the_end() -> None:
    cfg = Config(batch_size=10, epochs=5, evaluate_every=2, checkpoint=CheckpointConfig(every_epochs=3))
    plan = Plan.of(cfg, 40, 1)
    progress, evaluated, saved = Progress(), [], []
    for _ in range(plan.last_step):
        progress.advance(plan.global_batch_size)
        if plan.is_epoch_end(progress):
            if plan.is_due(cfg.evaluate_every, progress):
                evaluated.append(progress.epoch + 1)
            if plan.is_due(cfg.checkpoint.every_epochs, progress):
                saved.append(progress.epoch + 1)
            plan.close_epoch(progress)
    assert (evaluated, saved, progress.images_seen) == ([2, 4, 5], [3, 5], 200)


@pytest.mark.parametrize(("every", "expected"), [(0, True), (1, True), (-1, False)])
def test_the_last_step_is_evaluated_unless_never(every: int, expected: bool) -> None:
    plan = Plan.of(Config(batch_size=10, epochs=1, max_steps=2, evaluate_every=every), 40, 1)
    progress = Progress(step=2, step_in_epoch=2)
    assert plan.is_epoch_end(progress) and plan.is_due(every, progress) == expected
    assert not plan.is_done(progress)
    plan.close_epoch(progress)
    assert plan.is_done(progress)
