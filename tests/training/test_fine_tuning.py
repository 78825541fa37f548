"""Settings of fine-tuning in the real loop: frozen parts, a custom loss, custom metrics, patience,
several labels.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from cl_train.errors import BadImageError, ConfigError, TrainingFault
from cl_train.training.evaluation import mean_average_precision

HERE = "tests.training.test_fine_tuning"


per_image = partial(nn.functional.cross_entropy, reduction="none")
smoothed = partial(nn.functional.cross_entropy, label_smoothing=0.2)
squared = nn.functional.mse_loss


def counts(logits, targets):
    assert logits.shape == (21, 3)
    assert logits.dtype == torch.float32 and targets.dtype == torch.int64
    own_top1 = 100 * (logits.argmax(1) == targets).double().mean()
    return {"own_top1": own_top1, "reds": int((targets == 2).sum())}


def own_precision(logits, targets):
    assert targets.shape == logits.shape == (40, 3) and targets.dtype == torch.float32
    return {"own": mean_average_precision(logits.numpy(), targets.numpy() == 1)}


def colliding(*_):
    return {"loss": 1.0}


def test_frozen_parts_do_not_change(train):
    first = train("max_steps=1")
    run = train("max_steps=2", "freeze=[backbone]", f"weights={first.folder}", "ema_decay=0.9")
    before, after = first.checkpoint()["model"], run.checkpoint()["model"]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"8.weight", "8.bias"}, "running statistics of BatchNorm included"
    assert ", of which 51 train" in run.log


@pytest.mark.slow
def test_the_classifier_learns_faster(train):
    words = ("max_steps=1", "optim.momentum=0", "optim.weight_decay=0", "schedule=constant")
    rates = ("optim.lr=1e-9", "optim.head_lr_ratio=1", "optim.head_lr_ratio=3")
    before, usual, fast = (train(*words, rate).checkpoint()["model"] for rate in rates)
    for name, ratio in (("8.weight", 3), ("0.weight", 1)):
        change = ratio * (usual[name] - before[name])
        torch.testing.assert_close(fast[name] - before[name], change, rtol=1e-3, atol=1e-6)


def test_a_loss_and_metrics_of_ones_own(train):
    run = train("max_steps=1", f"loss={HERE}:smoothed", f"metrics={HERE}:counts")
    assert run.losses == pytest.approx(train("max_steps=1", "label_smoothing=0.2").losses)
    (record,) = run.records("val")
    assert record["own_top1"] == pytest.approx(record["top1"])
    assert record["reds"] == run.summary["val"]["reds"] == 7


DATASET = f"data=dataset data.root=null data.dataset={HERE}"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (f"metrics={HERE}:colliding", r"\['loss'\] are taken"),
        (f"loss={HERE}:per_image", "a tensor of one number"),
        ("loss=hinge", "use cross_entropy, bce"),
        (f"loss={HERE}:per_image label_smoothing=0.1", "label_smoothing=0.1 has no effect"),
        ("patience=2 evaluate_every=0", "patience=2 has no effect"),
        (f"{DATASET}:stripes", "use loss=bce"),
        (f"{DATASET}:stripes_then_a_number loss=bce", "unlike that of the first sample"),
        (f"{DATASET}:stripes_beyond_one loss=bce", "not from 0 to 1"),
    ],
)
def test_losses_metrics_and_labels_that_cannot_be_used(train, words, problem):
    with pytest.raises((ConfigError, TrainingFault, BadImageError), match=problem):
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


class Stripes(list[tuple[np.ndarray, object]]):
    classes = ("red", "green", "blue")


def stripes(split, size, wrong=None):
    """Noise in which each of three labels, with probability 0.5, is a bright channel. `wrong`
    replaces later labels.
    """
    random, samples = np.random.default_rng(len(split)), Stripes()
    for index in range(192 if split == "train" else 40):
        labels = random.integers(0, 2, 3).astype(np.float32)
        pixels = random.integers(0, 100, (size, size, 3)) + 120 * labels.astype(int)
        is_wrong = wrong is not None and index > 0
        target = wrong if is_wrong else torch.from_numpy(labels)
        samples.append((pixels.astype(np.uint8), target))
    return samples


stripes_then_a_number = partial(stripes, wrong=1)
stripes_beyond_one = partial(stripes, wrong=torch.tensor([0.0, 2.0, 0.0]))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_multi_label_targets(workers, train):
    words = (*f"{DATASET}:stripes".split(), f"data.workers={workers}", "loss=bce")
    run = train(*words, "epochs=3", f"metrics={HERE}:own_precision")
    first, *_, last = run.records("val")
    assert last["own"] == pytest.approx(last["mean_average_precision"]) and last["own"] > 90
    assert last["loss"] < first["loss"]
    labelled_pct = 100 * np.mean([bool(labels.any()) for _, labels in stripes("val", 32)])
    # The most probable class is one of the image's; some images have none.
    assert 0.9 * labelled_pct < last["top1"] <= labelled_pct < 100
    mixed = train(*words, "max_steps=2", "augment.mixup=0.2", f"loss={HERE}:squared")
    assert mixed.summary["val"]["mean_average_precision"] > 0


@pytest.mark.slow
def test_mean_average_precision_with_ties_and_absent_classes():
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    scores = random.integers(0, 5, (50, 4)).astype(np.float32)
    positives = random.random((50, 4)) < [0.5, 0.1, 0.9, 0.0]
    expected = metrics.average_precision_score(positives[:, :3], scores[:, :3], average="macro")
    assert mean_average_precision(scores, positives) == pytest.approx(100 * expected)
    assert np.isnan(mean_average_precision(scores, np.zeros_like(positives)))
