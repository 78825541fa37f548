"""Evaluation of pretrained-like weights against the pipelines that their accuracy was published with; the report."""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

from cl_train.config.schema import ConfigError, DataConfig
from cl_train.data.device import Batch, DeviceFormat
from cl_train.models import sources
from cl_train.models.sources import (
    build_model,
    follow_published_preprocessing,
    log_preprocessing,
    published_preprocessing,
)
from cl_train.step.precision import resolve_precision
from cl_train.training.evaluation import predictions
from cl_train.training.progress import TrainingFault
from tests import networks
from tests.conftest import Run
from tests.data.image_folders import folder_data, write_folder

CPU = torch.device("cpu")
FORMAT = DeviceFormat(CPU, torch.float64, torch.channels_last)


def reference_transform(model: str, weights: str) -> Callable[[Image.Image], torch.Tensor]:
    """What torchvision's reference script and timm's validate.py apply to an image."""
    if not model.startswith("timm/"):
        return torchvision.models.get_model_weights(model)[weights].transforms()
    timm = pytest.importorskip("timm")
    cfg = timm.get_pretrained_cfg(model.removeprefix("timm/")).to_dict()
    return timm.data.create_transform(**timm.data.resolve_data_config(pretrained_cfg=cfg, use_test_size=True))


@dataclass
class Agreement:
    """Our pipeline against the reference: pixels in grey levels, logits in standard deviations of the logits."""

    max_levels: float
    pixels_pct: float  # that differ
    max_logit: float
    max_logit_same_pixels: float  # with the reference's pixels in our normalisation: its float32 arithmetic only
    same_top1: int
    images: int


def agreement(model_name: str, weights: str, root: Path, file: Path, classes: int) -> Agreement:
    """Random weights with BatchNorm statistics of the images, saved, loaded, and run in float64 by both pipelines."""
    published = published_preprocessing(model_name, weights).settings()
    data = folder_data(root, batch_size=8, **published)
    ours = torch.cat([batch.images.clone() for batch in data.validation(FORMAT)])
    data.close()
    files = sorted((root / "val").glob("*/*"))
    transform = reference_transform(model_name, weights)
    images = []
    for path in files:
        with Image.open(path) as image:
            images.append(transform(image.convert("RGB")))
    reference = torch.stack(images).double()

    options = {"num_classes": classes, "image_size": published["image_size"]}
    if not file.exists():
        torch.manual_seed(0)
        model = build_model(model_name, **options)
        with torch.no_grad():
            for _ in range(20):
                model(reference[:16].float())
        torch.save(model.state_dict(), file)
    model = build_model(model_name, **options, weights=str(file), keep_classifier=True).double().eval()
    mean, std = (torch.tensor(published[name]).view(3, 1, 1) for name in ("mean", "std"))
    levels = [255 * (images * std + mean) for images in (ours, reference)]
    same_pixels = (levels[1].round() / 255 - mean).float().double() / std
    with torch.no_grad():
        logits, expected, rounded = model(ours), model(reference), model(same_pixels)
    spread = expected.std().item()
    difference = (levels[0] - levels[1]).abs()
    return Agreement(
        max_levels=round(difference.max().item(), 3),
        pixels_pct=100 * (difference > 0.5).double().mean().item(),
        max_logit=(logits - expected).abs().max().item() / spread,
        max_logit_same_pixels=(rounded - expected).abs().max().item() / spread,
        same_top1=int((logits.argmax(1) == expected.argmax(1)).sum()),
        images=len(files),
    )


@pytest.mark.parametrize(
    ("model", "weights", "levels"),
    [
        pytest.param("squeezenet1_1", "IMAGENET1K_V1", 1, marks=pytest.mark.slow),
        ("mobilenet_v3_small", "IMAGENET1K_V1", 1),  # bilinear, 256 -> 224
        pytest.param("efficientnet_b0", "IMAGENET1K_V1", 2, marks=pytest.mark.slow),  # bicubic
        ("timm/mobilenetv3_small_050.lamb_in1k", "pretrained", 2),  # bicubic
        pytest.param("timm/vit_tiny_patch16_224", "pretrained", 2, marks=pytest.mark.slow),  # mean and std 0.5
    ],
)
def test_logits_equal_those_of_the_published_pipeline(tmp_path: Path, model: str, weights: str, levels: int) -> None:
    """Decoded pixels are the same; both resizes work on uint8 and round differently in a few pixels."""
    root = write_folder(tmp_path / "images", train=8, val=6)
    found = agreement(model, weights, root, tmp_path / "weights.pt", classes=10)
    assert found.max_levels <= levels + 0.01 and found.pixels_pct < 3
    assert found.max_logit < 0.05 and found.max_logit_same_pixels < 1e-4
    assert found.same_top1 == found.images == 6


@pytest.mark.parametrize(
    ("model", "weights", "expected"),
    [
        ("resnet50", "IMAGENET1K_V1", (224, 256, "bilinear", 0.485)),
        ("resnet50", "DEFAULT", (224, 232, "bilinear", 0.485)),
        ("vit_l_16", "IMAGENET1K_SWAG_E2E_V1", (512, 512, "bicubic", 0.485)),
        ("timm/vit_tiny_patch16_224", "pretrained", (224, math.floor(224 / 0.9), "bicubic", 0.5)),
        ("timm/convnext_atto", "pretrained", (288, math.floor(288 / 0.95), "bicubic", 0.485)),  # its test size
    ],
)
def test_published_settings(model: str, weights: str, expected: tuple[int, int, str, float]) -> None:
    if model.startswith("timm/"):
        pytest.importorskip("timm")
    found = published_preprocessing(model, weights)
    assert (found.crop, found.resize, found.interpolation, found.mean[0]) == expected


def test_settings_that_cannot_be_followed() -> None:
    pytest.importorskip("timm")
    assert published_preprocessing("resnet18", "weights.pt") is None
    assert published_preprocessing("timm/coat_lite_medium_384", "pretrained") is None  # squash


def test_evaluation_follows_the_weights_but_not_against_the_user(caplog: pytest.LogCaptureFixture) -> None:
    data, model, weights = DataConfig(image_size=128), "resnet50", "IMAGENET1K_V2"
    followed = follow_published_preprocessing(data, model, weights, {"model", "weights", "data.root"})
    assert (followed.image_size, followed.val_size, followed.val_resize) == (224, None, 232)
    kept = follow_published_preprocessing(data, model, weights, {"data.image_size", "data.std"})
    assert (kept.image_size, kept.val_resize, kept.mean) == (128, None, data.mean)
    assert follow_published_preprocessing(data, model, "weights.pt", set()) == data
    for own, level in ((followed, "INFO"), (kept, "WARNING")):
        caplog.clear()
        with caplog.at_level("INFO", "cl_train"):
            log_preprocessing(own, model, weights, evaluate_only=True)
        assert [record.levelname for record in caplog.records] == [level]
        assert "data.val_resize=232" in caplog.text


def test_an_evaluation_reads_the_published_preprocessing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    original = sources.torchvision_weights
    monkeypatch.setattr(sources, "torchvision_weights", lambda *names: reads.append(names) or original(*names))
    published_preprocessing.cache_clear()
    followed = follow_published_preprocessing(DataConfig(), "resnet18", "DEFAULT", set())
    log_preprocessing(followed, "resnet18", "DEFAULT", evaluate_only=True)
    assert reads == [("resnet18", "DEFAULT")]


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def check_report(folder: Path, top1: float, images: int) -> None:
    classes, confused = read_csv(folder / "per_class.csv"), read_csv(folder / "confusions.csv")
    assert sum(int(row["images"]) for row in classes) == images
    correct = sum(int(row["correct"]) for row in classes)
    assert 100 * correct / images == pytest.approx(top1, abs=1e-3)
    assert sum(int(row["images"]) for row in confused) == images - correct
    assert [float(row["top1"]) for row in classes] == sorted(float(row["top1"]) for row in classes)
    page = (folder / "worst.html").read_text()
    assert page.count("<figure") == page.count("data:image/jpeg;base64,") == min(50, images)
    assert "http" not in page


def test_report_of_a_run(train: Callable[..., Run]) -> None:
    done = train("report=true", "max_steps=1", "optim.lr=0.01")
    check_report(done.folder / "report", done.summary["val"]["top1"], 21)
    page = (done.folder / "report" / "worst.html").read_text()
    losses = [float(part.split("<")[0]) for part in page.split("loss ")[1:]]
    assert losses[-21:] == sorted(losses[-21:], reverse=True)
    assert not (train("max_steps=1").folder / "report").exists()


def test_report_of_a_model_with_more_outputs_than_classes(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def more_outputs(num_classes: int) -> nn.Module:
        model = networks.small(num_classes + 8)
        with torch.no_grad():
            model.get_parameter("8.bias")[-1] = 100.0
        return model

    monkeypatch.setattr(networks, "more_outputs", more_outputs, raising=False)
    done = train("report=true", "model=tests.networks:more_outputs", "max_steps=1")
    predicted = {row["predicted"] for row in read_csv(done.folder / "report" / "confusions.csv")}
    assert len(predicted) == 1 and predicted.pop().startswith("output ")
    assert (done.folder / "report" / "worst.html").is_file()


def test_report_leaves_skipped_images_out(train: Callable[..., Run], tmp_path: Path) -> None:
    root = write_folder(tmp_path / "images", train=8, val=9)
    (root / "val" / "class_0" / "0002.jpg").write_bytes(b"\xff\xd8\xff")
    done = train(
        "report=true", f"data.root={root}", "data.on_bad_image=skip", "batch_size=4", "max_steps=1", "epochs=1"
    )
    check_report(done.folder / "report", done.summary["val"]["top1"], 8)
    assert "class_0/0002.jpg" not in (done.folder / "report" / "worst.html").read_text()


def test_report_of_synthetic_data_has_no_pictures(train: Callable[..., Run]) -> None:
    done = train("data=synthetic", "data.root=null", "data.synthetic_images=64", "report=true", "max_steps=1")
    assert "base64" not in (done.folder / "report" / "worst.html").read_text()
    assert read_csv(done.folder / "report" / "per_class.csv")


def evaluation_batch(images: int, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(images, 3, 32, 32, generator=generator)
    return Batch(pixels, torch.randint(0, 3, (images,), generator=generator))


def test_evaluation_counts_exactly_and_changes_nothing() -> None:
    torch.manual_seed(0)
    model = networks.small(3)
    batches = [evaluation_batch(count, seed=count) for count in (8, 8, 3)]
    statistics = model[1].running_mean.clone()
    rows = predictions(model, batches, resolve_precision("bf16", CPU), CPU)
    assert model.training
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.eval()
        logits = torch.cat([model(batch.images) for batch in batches]).float()
    targets = torch.cat([batch.targets for batch in batches])
    assert rows.shape == (19, 5) and rows[:, 4].sum() == 19  # top-5 of three classes contains every image
    assert torch.equal(rows[:, 0].long(), targets) and torch.equal(rows[:, 1].long(), logits.argmax(1))
    torch.testing.assert_close(rows[:, 2].float(), logits.softmax(1).amax(1))
    losses = nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(rows[:, 3].float(), losses)
    assert torch.equal(model[1].running_mean, statistics)


def test_evaluation_with_soft_targets_and_without_labels() -> None:
    torch.manual_seed(0)
    model, images = networks.small(3), evaluation_batch(4).images
    soft = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    unlabelled = torch.tensor([0, -100, 1, 2])
    logits = model.eval()(images)
    for targets, labels in ((soft, soft.argmax(1)), (unlabelled, unlabelled)):
        rows = predictions(model, [Batch(images, targets)], resolve_precision("fp32", CPU), CPU)
        losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        torch.testing.assert_close(rows[:, 3].float(), losses)
        assert rows[:, 0].tolist() == labels.tolist() and rows[:, 4].tolist() == (labels >= 0).double().tolist()


def test_a_flipped_evaluation_averages_the_logits_of_both_mirror_images() -> None:
    torch.manual_seed(0)
    model, batch = networks.small(3), evaluation_batch(8)
    mirrored = Batch(batch.images.flip(3), batch.targets)
    rows = [predictions(model, [one], resolve_precision("fp32", CPU), CPU, flip=True) for one in (batch, mirrored)]
    torch.testing.assert_close(rows[0], rows[1])
    model.eval()
    logits = (model(batch.images) + model(mirrored.images)) / 2
    losses = nn.functional.cross_entropy(logits, batch.targets, reduction="none")
    torch.testing.assert_close(rows[0][:, 3].float(), losses)


def test_weights_of_a_run_are_evaluated_alike_and_nan_ones_fail(train: Callable[..., Run], tmp_path: Path) -> None:
    run = train("max_steps=4", "data.val_resize=36", "data.val_interpolation=bicubic")
    again = train("evaluate_only=true", f"weights={run.folder}", "data.val_resize=36", "data.val_interpolation=bicubic")
    assert again.summary["val"] == run.summary["val"]
    recorded = published_preprocessing("tests.networks:small", str(run.folder))
    assert (recorded.crop, recorded.resize, recorded.interpolation) == (32, 36, "bicubic")
    state = run.checkpoint()["model"]
    state["0.weight"].fill_(torch.nan)
    torch.save(state, tmp_path / "nan.pth")
    (tmp_path / "failed").mkdir()
    with pytest.raises(TrainingFault, match="NaN"):
        train("evaluate_only=true", f"weights={tmp_path / 'nan.pth'}", folder=tmp_path / "failed")
    with pytest.raises(ConfigError, match=r"nan.pth holds NaN in 0\.weight"):
        train("max_steps=1", f"weights={tmp_path / 'nan.pth'}")
    assert Run(tmp_path / "failed", 1).summary["status"] == "failed"
