"""What is due when."""

import pytest

from cl_train.config.schema import Config, ConfigError
from cl_train.training.progress import Epoch, Progress
from cl_train.training.setup import make_plan


def test_a_plan_counts_optimizer_steps() -> None:
    cfg = Config(batch_size=8, accumulate_steps=3, epochs=4, max_steps=10)
    cfg.schedule.name, cfg.optim.lr = "constant", 0.1
    plan = make_plan(cfg, 500, 2)
    assert plan.epochs == (Epoch(224, 8, 48, 10),) * 4 and plan.last_step == 10
    assert plan.lr_at(Progress()) == pytest.approx(0.1 * 48 / 256)


@pytest.mark.parametrize("reference_batch_size", [256, 0])
def test_growing_images_with_batches_of_equal_area(reference_batch_size: int) -> None:
    """The schedule follows the share of the epochs that are done; the peak rate follows the batch."""
    cfg = Config(batch_size=32, epochs=4)
    cfg.optim.reference_batch_size, cfg.optim.lr, cfg.schedule.name = reference_batch_size, 1.0, "linear"
    cfg.data.size_schedule, cfg.data.scale_batch = [[0, 64], [2, 128]], True
    plan = make_plan(cfg, 1280, 1)
    assert plan.epochs == (Epoch(64, 128, 128, 10), Epoch(96, 56, 56, 22), *[Epoch(128, 32, 32, 40)] * 2)
    assert plan.last_step == 112 and plan.largest.batch_size == 32
    peaks = [128 / 256, 56 / 256, 32 / 256, 32 / 256] if reference_batch_size else [1.0] * 4
    rates = [plan.lr_at(Progress(epoch=epoch, step_in_epoch=plan.epochs[epoch].steps // 2)) for epoch in range(4)]
    assert rates == pytest.approx([peak * (1 - (e + 0.5) / 4) for e, peak in enumerate(peaks)])


def test_too_few_images_for_one_step() -> None:
    with pytest.raises(ConfigError, match="one step takes 64 images"):
        make_plan(Config(batch_size=16, accumulate_steps=4), 50, 1)


def test_evaluations_and_checkpoints_come_at_their_epochs_and_at_the_end() -> None:
    cfg = Config(batch_size=10, epochs=5, evaluate_every=2)
    cfg.checkpoint.every_epochs = 3
    plan = make_plan(cfg, 40, 1)
    progress, evaluated, saved = Progress(), [], []
    for _ in range(plan.last_step):
        progress.advance(plan.epoch_of(progress).global_batch_size)
        if plan.is_epoch_end(progress):
            if plan.is_evaluation_due(progress):
                evaluated.append(progress.epoch + 1)
            if plan.is_epoch_save_due(progress):
                saved.append(progress.epoch + 1)
            plan.close_epoch(progress)
    assert (evaluated, saved, progress.images_seen) == ([2, 4, 5], [3, 5], 200)


@pytest.mark.parametrize(("every", "expected"), [(0, True), (1, True), (-1, False)])
def test_the_last_step_is_evaluated_unless_never(every: int, expected: bool) -> None:
    cfg = Config(batch_size=10, epochs=1, max_steps=2, evaluate_every=every)
    plan = make_plan(cfg, 40, 1)
    progress = Progress(step=2, step_in_epoch=2)
    assert plan.is_epoch_end(progress) and plan.is_evaluation_due(progress) == expected
    assert not plan.is_done(progress)
    plan.close_epoch(progress)
    assert plan.is_done(progress)
