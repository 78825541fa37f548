"""Settings of fine-tuning in the real loop: frozen parts, own losses and metrics, patience."""

from functools import partial

import pytest
import torch
from torch import nn

from cl_train.errors import ConfigError, TrainingFault

HERE = "tests.training.test_fine_tuning"


per_image = partial(nn.functional.cross_entropy, reduction="none")
smoothed = partial(nn.functional.cross_entropy, label_smoothing=0.2)


def counts(logits, targets):
    assert logits.shape == (21, 3)
    assert logits.dtype == torch.float32 and targets.dtype == torch.int64
    own_top1 = 100 * (logits.argmax(1) == targets).double().mean()
    return {"own_top1": own_top1, "reds": int((targets == 2).sum())}


def colliding(*_):
    return {"loss": 1.0}


def test_frozen_parts_do_not_change(train):
    first = train("max_steps=1")
    run = train("max_steps=2", "freeze=[backbone]", f"weights={first.folder}", "ema_decay=0.9")
    before, after = first.checkpoint()["model"], run.checkpoint()["model"]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"8.weight", "8.bias"}, "running statistics of BatchNorm included"
    assert ", of which 51 train" in run.log


def test_a_loss_and_metrics_of_ones_own(train):
    run = train("max_steps=1", f"loss={HERE}:smoothed", f"metrics={HERE}:counts")
    assert run.losses == pytest.approx(train("max_steps=1", "label_smoothing=0.2").losses)
    (record,) = run.records("val")
    assert record["own_top1"] == pytest.approx(record["top1"])
    assert record["reds"] == run.summary["val"]["reds"] == 7


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (f"metrics={HERE}:colliding", r"\['loss'\] are taken"),
        (f"loss={HERE}:per_image", "a tensor of one number"),
        ("loss=hinge", "use cross_entropy, bce"),
        (f"loss={HERE}:per_image label_smoothing=0.1", "label_smoothing=0.1 has no effect"),
        ("patience=2 evaluate_every=0", "patience=2 has no effect"),
    ],
)
def test_losses_and_metrics_that_cannot_be_used(train, words, problem):
    with pytest.raises((ConfigError, TrainingFault), match=problem):
        train("max_steps=1", *words.split())


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["checkpoint.every_epochs=1", "checkpoint.every_epochs=0"])
def test_patience_ends_a_run_and_its_continuation(saved, train, tmp_path):
    folder = tmp_path / "run"
    words = ("epochs=9", "optim.lr=1e-9", saved)  # the first epoch is the best
    for patience, epochs in (("patience=2", 3), ("patience=2", 3), ("patience=4", 5)):
        run = train(*words, patience, *(["resume=auto"] if folder.exists() else []), folder=folder)
        assert [record["epoch"] for record in run.records("val")] == [*range(epochs)]
        assert run.summary["status"] == "completed"
        assert run.saved_step() == 3 * epochs
        assert len(run.records("train")) == 3 * epochs
