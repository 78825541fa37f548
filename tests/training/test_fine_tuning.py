"""Settings of fine-tuning in the real loop: frozen parts, a custom loss, custom metrics, patience."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.training.nonfinite import TrainingFault
from tests.conftest import Run

HERE = "tests.training.test_fine_tuning"


def half_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, targets) / 2


def per_image(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, targets, reduction="none")


def counts(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    assert logits.shape == (21, 3) and logits.dtype == torch.float32 and targets.dtype == torch.int64
    return {"own_top1": 100 * (logits.argmax(1) == targets).double().mean(), "reds": int((targets == 2).sum())}


def colliding(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    return {"loss": 1.0}


def test_frozen_parts_do_not_change(train: Callable[..., Run]) -> None:
    first = train("max_steps=1")
    run = train("max_steps=2", "freeze=[backbone]", f"weights={first.folder}", "ema_decay=0.9")
    before, after = first.checkpoint()["model"], run.checkpoint()["model"]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"8.weight", "8.bias"}, "running statistics of BatchNorm included"


def test_the_classifier_learns_faster(train: Callable[..., Run]) -> None:
    settings = ("max_steps=1", "optim.momentum=0", "optim.weight_decay=0", "schedule=constant")
    steps = {}
    for ratio in (1, 3):
        before = train("max_steps=1", "optim.lr=1e-9").checkpoint()["model"]
        after = train(*settings, f"optim.head_lr_ratio={ratio}").checkpoint()["model"]
        steps[ratio] = {name: after[name] - before[name] for name in ("0.weight", "8.weight")}
    assert torch.allclose(steps[3]["8.weight"], 3 * steps[1]["8.weight"], rtol=1e-3, atol=1e-6)
    assert torch.allclose(steps[3]["0.weight"], steps[1]["0.weight"], rtol=1e-3, atol=1e-6)


def test_a_loss_and_metrics_of_ones_own(train: Callable[..., Run]) -> None:
    usual = train("max_steps=1")
    run = train("max_steps=1", f"loss={HERE}:half_cross_entropy", f"metrics={HERE}:counts")
    assert run.losses == pytest.approx([loss / 2 for loss in usual.losses])
    (record,) = run.records("val")
    assert record["own_top1"] == pytest.approx(record["top1"]) and record["reds"] == 7
    assert run.summary["val"]["reds"] == 7


def test_functions_that_cannot_be_used(train: Callable[..., Run], tiny: Callable[..., object]) -> None:
    with pytest.raises(ConfigError, match="a tensor of one number"):
        train("max_steps=1", f"loss={HERE}:per_image")
    with pytest.raises(TrainingFault, match=r"\['loss'\] are taken"):
        train("max_steps=1", f"metrics={HERE}:colliding")
    for words, problem in (
        (["loss=hinge"], "use cross_entropy, bce"),
        ([f"loss={HERE}:per_image", "label_smoothing=0.1"], "label_smoothing=0.1 has no effect"),
        (["patience=2", "evaluate_every=0"], "patience=2 has no effect"),
    ):
        with pytest.raises(ConfigError, match=problem):
            tiny(*words)


@pytest.mark.parametrize("saved", ["checkpoint.every_epochs=1", "checkpoint.every_epochs=0"])
def test_patience_ends_a_run_and_its_continuation(saved: str, train: Callable[..., Run], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ("epochs=9", "optim.lr=1e-9", "patience=2", saved)  # nothing is learnt: the first evaluation is the best
    run = train(*settings, folder=folder)
    epochs = [record["epoch"] for record in run.records("val")]
    assert epochs == [0, 1, 2] and run.summary["status"] == "completed" and run.checkpoint()["progress"]["step"] == 9
    again = train(*settings, "resume=auto", folder=folder)
    assert len(again.records("train")) == 9, "it was complete"
    longer = train(*settings[:2], "patience=4", saved, "resume=auto", folder=folder)
    assert [record["epoch"] for record in longer.records("val")] == [0, 1, 2, 3, 4]
