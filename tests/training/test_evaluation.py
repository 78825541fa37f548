"""Evaluations: the preprocessing of published weights, exact numbers, the best one, the report."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from cl_train.config.schema import DataConfig
from cl_train.data.device import Batch, DeviceFormat
from cl_train.errors import ConfigError, TrainingFault
from cl_train.models import sources
from cl_train.models.sources import log_preprocessing, published_preprocessing
from cl_train.step.precision import BY_NAME
from cl_train.training.evaluation import outputs, rows_of
from tests import networks
from tests.conftest import Run
from tests.data.image_folders import write_folder

CPU = torch.device("cpu")
FORMAT = DeviceFormat(CPU, torch.float64, torch.channels_last)


def test_published_settings():
    imagenet, half = 0.485, 0.5  # the mean of the first channel
    for model, weights, expected in (
        ("resnet50", "DEFAULT", (224, 232, "bilinear", imagenet)),
        ("vit_l_16", "IMAGENET1K_SWAG_E2E_V1", (512, 512, "bicubic", imagenet)),
        ("timm/vit_tiny_patch16_224", "pretrained", (224, 248, "bicubic", half)),
        ("timm/convnext_atto", "pretrained", (288, 303, "bicubic", imagenet)),  # its test size
        ("resnet18", "weights.pt", None),
        ("timm/coat_lite_medium_384", "pretrained", None),  # squash
    ):
        published = published_preprocessing(model, weights)
        if published is not None:
            size = (published.crop, published.resize)
            published = (*size, published.interpolation, published.mean[0])
        assert published == expected, (model, weights)


def test_evaluation_follows_the_weights_but_not_against_the_user(caplog):
    data, model, weights = DataConfig(image_size=128), "resnet50", "IMAGENET1K_V2"
    follow = sources.follow_published_preprocessing
    followed = follow(data, model, weights, {"model", "weights", "data.root"})
    assert (followed.image_size, followed.val_size, followed.val_resize) == (224, None, 232)
    kept = follow(data, model, weights, {"data.image_size", "data.std"})
    assert (kept.image_size, kept.val_resize, kept.mean) == (128, None, data.mean)
    assert follow(data, model, "weights.pt", set()) == data
    log_preprocessing(followed, model, weights)
    assert not caplog.records
    log_preprocessing(kept, model, weights)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "data.val_resize=232" in caplog.text


def check_report(run, images):
    """The tables agree with the summary and the page; returns its figures."""
    folder = run.folder / "report"
    classes, confused = (
        list(csv.DictReader((folder / name).read_text().splitlines()))
        for name in ("per_class.csv", "confusions.csv")
    )
    correct = sum(int(row["correct"]) for row in classes)
    assert sum(int(row["images"]) for row in classes) == images
    assert sum(int(row["images"]) for row in confused) == images - correct
    assert 100 * correct / images == pytest.approx(run.summary["val"]["top1"], abs=1e-3)
    page = (folder / "index.html").read_text()
    assert "http" not in page, "it needs no network"
    content = json.loads(page.split('id="data">')[1].split("</script>")[0])
    figures, shown = content["figures"], content["shown"]
    assert (content["images"], content["wrong"]) == (len(figures), images - correct)
    for word in (run.summary["model"], run.folder.name, run.summary["started"][:10], "val of "):
        assert word in content["about"]
    assert [row["class"] for row in content["table"]] == [row["class"] for row in classes]
    order = [(figure["true"] == figure["predicted"], -figure["loss"]) for figure in figures]
    assert order == sorted(order), "wrong ones first, by their loss"
    pairs = Counter((figure["true"], figure["predicted"]) for figure in figures)
    assert content["counts"] == [[pairs[true, other] for other in shown] for true in shown]
    for figure in figures:
        path = Path(figure["name"])
        assert path.parent.name == content["classes"][figure["true"]]
        assert figure["url"] == path.as_uri() and figure["jpeg"]
    return figures


def more_outputs(num_classes):
    model = networks.small(num_classes + 2)
    with torch.no_grad():
        model.get_parameter("8.bias")[-1] = 100.0
    return model


def test_report_leaves_skipped_images_out_and_has_outputs_without_a_class(train, tmp_path):
    root = write_folder(tmp_path / "images", train=8, val=9)
    (root / "val" / "class_1" / "0007.jpg").write_bytes(b"\xff\xd8\xff")
    words = f"data.root={root} data.on_bad_image=skip batch_size=4 max_steps=1 epochs=1"
    done = train("report=true", *words.split(), f"model={__name__}:more_outputs")
    names = [figure["name"] for figure in check_report(done, 8)]
    assert not any(name.endswith("class_1/0007.jpg") for name in names)
    rows = (done.folder / "report" / "confusions.csv").read_text().splitlines()[1:]
    assert rows and all(row.split(",")[1].startswith("output ") for row in rows)


@pytest.mark.parametrize("flip", [False, True])
def test_evaluation_is_exact_and_changes_nothing(flip):
    torch.manual_seed(0)
    labels = torch.tensor([0, 2, 1, 2])
    model, images = networks.small(3), torch.randn(4, 3, 32, 32)
    statistics = model[1].running_mean.clone()
    batches = [Batch(images[:3], labels[:3]), Batch(images[3:], labels[3:])]
    evaluated = outputs(model, batches, BY_NAME["bf16"], flip=flip)
    rows = torch.cat([rows_of(*logits_and_targets) for logits_and_targets in evaluated])
    assert model.training and torch.equal(model[1].running_mean, statistics)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        parts = (images[:3], images[3:])
        logits = torch.cat([model(x) for x in parts])
        if flip:
            logits = (logits + torch.cat([model(x.flip(3)) for x in parts])) / 2
    logits = logits.float()
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    shares, in_top5 = logits.softmax(1), torch.ones(4)  # of three classes
    of_label = shares[range(4), labels]
    columns = (labels, logits.argmax(1), shares.amax(1), of_label, losses, in_top5)
    for column, expected in enumerate(columns):
        torch.testing.assert_close(rows[:, column].float(), expected.float())


def test_best_and_patience_follow_the_chosen_number(train):
    words = ("ema_decay=0.5", "epochs=4", "patience=1", "best_by=average.loss", "optim.lr=0.1")
    run = train(*words)
    values = [record["loss"] for record in run.records("val_average")]
    best = min(range(len(values)), key=values.__getitem__)
    assert run.summary["best"]["average.loss"] == values[best]
    assert run.summary["best"]["epoch"] == best
    assert run.saved_step("best.pt") == 3 * (best + 1)
    for choice, problem in {"average.top1": "ema_decay", "macro_f2": "did you mean"}.items():
        with pytest.raises(ConfigError, match=problem):
            train(f"best_by={choice}", "metrics=tests.training.test_evaluation:macro_f1")
    with pytest.raises(ConfigError, match=r"metrics=.* must return .* 21 images"):
        train("metrics=tests.training.test_evaluation:no_numbers")


def no_numbers(logits, targets):
    return {"logits": logits}


def macro_f1(logits, targets):
    return {"macro_f1": 0.5}


@pytest.mark.slow
def test_weights_of_a_run_are_evaluated_alike_and_nan_ones_fail(train, tmp_path):
    resize, failed = ("data.val_resize=36", "data.val_interpolation=bicubic"), tmp_path / "failed"
    run = train("max_steps=4", *resize)
    done = train("evaluate_only=true", f"weights={run.folder}", *resize)
    assert done.summary["val"] == run.summary["val"]
    recorded = published_preprocessing("tests.networks:small", str(run.folder))
    assert (recorded.crop, recorded.resize, recorded.interpolation) == (32, 36, "bicubic")
    state = run.checkpoint()["model"]
    state["0.weight"].fill_(torch.nan)
    torch.save(state, tmp_path / "nan.pth")
    with pytest.raises(TrainingFault, match="NaN"):
        train("evaluate_only=true", f"weights={tmp_path / 'nan.pth'}", folder=failed)
    with pytest.raises(ConfigError, match=r"nan.pth holds NaN or Inf in 0\.weight"):
        train("max_steps=1", f"weights={tmp_path / 'nan.pth'}")
    assert Run(failed, 1).summary["status"] == "failed"
