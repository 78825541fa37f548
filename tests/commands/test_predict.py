"""cl-train predict: the predictions of an evaluation, as a table."""

import csv
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from cl_train.commands import predict
from cl_train.errors import ConfigError
from cl_train.models.convert_file import convert_file
from cl_train.models.load import load_model

SMALL = "tests.networks:small"


@pytest.fixture
def run(train):
    words = "max_steps=2 optim.lr=0.05 channels_last=true data.val_resize=36"
    return train(*words.split(), "data.mean=[0.4,0.5,0.6]")


def predicted(weights, images, out, *words):
    words = (f"weights={weights}", f"data.root={images}", f"out={out}", f"model={SMALL}", *words)
    assert predict.main([*words, "data.workers=0", "device=cpu"]) == 0
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "name", ["run-0", pytest.param("weights.safetensors", marks=pytest.mark.slow)]
)
def test_predictions_equal_those_of_the_evaluation_and_of_torchvision_code(
    name, run, image_folder, tmp_path, capsys
):
    weights = tmp_path / name
    if weights != run.folder:
        assert convert_file(run.folder, weights, model=SMALL)[1]
    rows = predicted(
        weights, image_folder, tmp_path / "out.csv", "batch_size=5", "data.exif=ignore"
    )
    top1 = 100 * sum(row["label"] == row["class1"] for row in rows) / len(rows)
    evaluated = run.summary["val"]
    assert len(rows) == evaluated["images"] and top1 == pytest.approx(evaluated["top1"])
    assert 0 < top1 < 100, "a test of nothing"
    printed = capsys.readouterr().out
    assert f"{top1:.3f} % of 21 with a label are correct" in printed
    assert "the run had data.exif=apply" in printed
    assert [Path(row["file"]).parent.name for row in rows] == [row["label"] for row in rows]
    shares = [float(rows[0][f"probability{rank}"]) for rank in (1, 2, 3)]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1, abs=1e-5)
    model, preprocess, classes = load_model(weights, SMALL)
    interpolation = v2.InterpolationMode(preprocess.interpolation)
    steps = [v2.PILToTensor(), v2.Resize(preprocess.resize, interpolation, antialias=True)]
    steps += [v2.CenterCrop(preprocess.crop), v2.ToDtype(torch.float32, scale=True)]
    transform = v2.Compose([*steps, v2.Normalize(preprocess.mean, preprocess.std)])
    for row in rows:
        image = Image.open(image_folder / row["file"])
        ours, theirs = preprocess(image), transform(image)
        assert torch.allclose(ours, theirs, atol=1.01 / 255 / min(preprocess.std))
        with torch.no_grad():
            assert classes[int(model(ours[None]).argmax())] == row["class1"]


def test_a_flat_folder_has_no_labels(run, image_folder, tmp_path, capsys):
    (tmp_path / "flat").mkdir()
    for index, path in enumerate(sorted(image_folder.glob("val/*/*"))):
        shutil.copy(path, tmp_path / "flat" / f"{index:02d}.jpg")
    (tmp_path / "flat/03.jpg").write_bytes(b"damaged")
    labelled = predicted(run.folder, image_folder, tmp_path / "a.csv")
    rows = predicted(run.folder, tmp_path / "flat", tmp_path / "b.csv")
    printed = capsys.readouterr().out
    assert "20 images; 1 left out: " in printed and "03.jpg (" in printed
    assert f"weights: {run.folder}/checkpoints/best.pt (epoch 0, step 2)" in printed
    del labelled[3]
    *rows, damaged = rows
    assert damaged["file"] == "03.jpg" and damaged["error"] and not damaged["class1"]
    assert {row["label"] + row["error"] for row in rows} == {""}
    assert [row["file"] for row in rows[:4]] == ["00.jpg", "01.jpg", "02.jpg", "04.jpg"]
    assert [row["class1"] for row in rows] == [row["class1"] for row in labelled]


def test_the_extensions_of_the_run_and_the_entry_of_the_average(
    train, image_folder, tmp_path, capsys
):
    root = tmp_path / "webp"
    for path in image_folder.glob("*/*/*"):
        target = root / path.relative_to(image_folder).with_suffix(".webp")
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).save(target, lossless=True)
    shutil.copy(path, root / "val" / "one.jpg")
    run = train(f"data.root={root}", "data.extensions=[.webp]", "ema_decay=0.5")
    for entry, kind in (("model", "val"), ("average", "val_average")):
        predicted(run.folder, root, tmp_path / f"{entry}.csv", f"entry={entry}", "precision=fp32")
        printed = capsys.readouterr().out
        assert f"21 images, {run.summary[kind]['top1']:.3f} %" in printed
        assert "1 file (" in printed and "(1 .jpg)" in printed


def test_a_csv_file_is_predicted_in_its_order(train, image_folder, tmp_path):
    csv, unlabelled = tmp_path / "labels.csv", tmp_path / "test.csv"
    paths = sorted(path.relative_to(image_folder) for path in image_folder.glob("*/*/*"))
    rows = [f"{path},{path.parent.name},{path.parts[0]}" for path in paths]
    csv.write_text("\n".join(["path,label,split", *rows]))
    unlabelled.write_text("\n".join(["id", *(str(path.with_suffix("")) for path in paths[:-9:-3])]))
    run = train("data=csv", f"data.csv={csv}", "epochs=1")
    rows = predicted(run.folder, image_folder, tmp_path / "a.csv", f"data.csv={unlabelled}")
    assert [Path(row["file"]).stem for row in rows] == [path.stem for path in paths[:-9:-3]]
    assert {row["label"] for row in rows} == {""}


def test_images_that_the_run_was_trained_on_are_named(train, image_folder, tmp_path, capsys):
    root = image_folder / "train"
    run = train("max_steps=1", f"data.root={root}", "data.val_fraction=0.2")
    for images, is_named in ((root, True), (image_folder, False)):
        predicted(run.folder, images, tmp_path / f"{images.name}.csv")
        assert ("trained on images of this folder" in capsys.readouterr().out) is is_named


def test_what_cannot_be_predicted(run, image_folder, tmp_path, capsys):
    for name in ("empty", "bad"):
        (tmp_path / name).mkdir()
    state = run.checkpoint()["model"]
    torch.save(state, tmp_path / "plain.pth")
    torch.save(state | {"0.weight": state["0.weight"] * torch.nan}, tmp_path / "nan.pth")
    (tmp_path / "bad/image.jpg").write_bytes(b"damaged")
    known = {"weights": run.folder, "data.root": image_folder, "data.workers": 0}
    known |= {"out": tmp_path / "out.csv", "model": SMALL}

    def main(change):
        return predict.main([f"{name}={value}" for name, value in (known | change).items()])

    for change, problem in (
        ({"entry": "average"}, "no such entry"),
        ({"data.root": tmp_path / "empty"}, "no images"),
        ({"weights": tmp_path / "plain.pth"}, "data.image_size=224"),
        ({"out": tmp_path / "plain.pth"}, "overwrite=true"),
    ):
        with pytest.raises(ConfigError, match=problem):
            main(change)
    bad = {"data.root": tmp_path / "bad"}
    nan = {"weights": tmp_path / "nan.pth", "data.image_size": 32}
    for failing in (nan, bad, bad | {"data.on_bad_image": "error"}):
        assert main(failing) == 1 and "failed: " in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()
