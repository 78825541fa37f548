"""Classes are matched by name: in evaluation and in fine-tuning on other classes than those of the
weights.
"""

import csv
from types import SimpleNamespace

import pytest
import torch

from cl_train.data.build import class_counts
from cl_train.data.class_names import matched
from cl_train.errors import ConfigError


def links(root, images, names):
    """Classes `names` of links to those of `images`, in both splits."""
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        for name, target in names.items():
            (root / split / name).symlink_to(images / split / target)
    return root


def per_class(run):
    with (run.folder / "report/per_class.csv").open(newline="") as file:
        return {
            row["class"]: (int(row["correct"]), int(row["images"])) for row in csv.DictReader(file)
        }


def test_an_evaluation_and_fine_tuning_on_other_classes_match_them_by_name(
    train, image_folder, tmp_path
):
    run = train("report=true")
    some = links(tmp_path / "some", image_folder, {"green": "green", "red": "red"})
    whole = per_class(run)
    del whole["blue"]
    correct, images = (sum(column) for column in zip(*whole.values(), strict=True))
    for source in ("resume", "weights"):
        words = ("evaluate_only=true", f"{source}={run.folder}", "report=true")
        done = train(*words, f"data.root={some}")
        checkpoint = f"{run.folder}/checkpoints/{'best' if source == 'weights' else 'step-'}"
        page = (done.folder / "report/index.html").read_text()
        assert checkpoint in page and f"(epoch 1, step {run.steps[-1]})" in page
        assert per_class(done) == whole and done.summary["val"]["images"] == images == 14
        assert correct > 0 and done.summary["val"]["top1"] == pytest.approx(100 * correct / images)
    other = links(tmp_path / "other", image_folder, {n: "red" for n in ("Red", "green", "x")})
    with pytest.raises(ConfigError, match=r"3 classes \(blue, green, red\).* of the data: Red, x;"):
        train(*words, f"data.root={other}")

    before = run.checkpoint("best.pt")["model"]
    for root, taken in ((image_folder, [0, 1, 2]), (some, [1, 2]), (other, [None, 1, None])):
        words = (f"weights={run.folder}", f"data.root={root}", "optim.lr=1e-12", "max_steps=1")
        tuned = train(*words, "optim.weight_decay=0")
        after = tuned.checkpoint()["model"]
        for name in ("8.weight", "8.bias"):
            for row, place in enumerate(taken):
                same = [torch.allclose(after[name][row], other) for other in before[name]]
                assert same == [number == place for number in range(3)]
        assert ("but for the rows of" in tuned.log) == (taken != [0, 1, 2])


def weighted(logits, targets):
    """12 images of blue, 1 of green and 3 of red: 16 / (3 x count)."""
    weights = torch.tensor([4 / 9, 16 / 3, 16 / 9])
    return torch.nn.functional.cross_entropy(logits, targets, weights, reduction="sum") / 16


def test_uneven_classes_are_said_weighted_and_scored(train, image_folder, tmp_path):
    root = tmp_path / "uneven"
    for name, train_images, val_images in (("blue", 12, 6), ("green", 1, 1), ("red", 3, 2)):
        for split, count in (("train", train_images), ("val", val_images)):
            (root / split / name).mkdir(parents=True)
            for path in sorted((image_folder / split / name).iterdir())[:count]:
                (root / split / name / path.name).symlink_to(path)
    words = (f"data.root={root}", "batch_size=16", "max_steps=3", "epochs=3")
    plain = train(*words, "report=true")
    assert "classes from 1 to 12 images: class_weight=balanced" in plain.log
    shares = [correct / images for correct, images in per_class(plain).values()]
    (*_, record) = plain.records("val")
    assert record["balanced_accuracy"] == pytest.approx(100 * sum(shares) / 3)
    assert record["balanced_accuracy"] != pytest.approx(record["top1"])
    assert plain.summary["best"].keys() == {"top1", "epoch"}
    balanced = train(*words, "class_weight=balanced")
    best = max(record["balanced_accuracy"] for record in balanced.records("val"))
    assert balanced.summary["best"]["balanced_accuracy"] == best
    by_hand = train(*words, f"loss={__name__}:weighted").losses
    assert balanced.losses == pytest.approx(by_hand) != pytest.approx(plain.losses)
    assert "classes from" not in balanced.log


def test_the_labels_of_a_dataset_are_its_targets(train):
    assert class_counts(SimpleNamespace(targets=torch.tensor([2, 0, 2])), 4) == [1, 0, 2, 0]
    assert class_counts(SimpleNamespace(targets=["cat"]), 1) is None
    own = ("data=dataset", "data.dataset=tests.data.user_datasets:uint8", "data.root=null")
    with pytest.raises(ConfigError, match="attribute `targets`"):
        train(*own, "class_weight=balanced", "batch_size=4", "data.image_size=16")


@pytest.mark.parametrize(
    ("own", "known", "places"),
    [
        ("bca", "abc", [1, 2, 0]),
        ("bx", "abc", [1, -1]),
        (["0", "1", "2"], "abc", [0, 1, 2]),
        (["class_0", "class_1"], ["0", "1"], [0, 1]),
        (["0", "1"], "abc", [-1, -1]),
        (["n01440764", "n01443537"], ["tench", "goldfish"], [0, 1]),
    ],
)
def test_names_that_are_only_numbers_or_of_another_kind_are_matched_by_place(own, known, places):
    assert matched(own, known) == places
