"""Images that a CSV file names: columns, splits, bad rows, the stored list, the batches."""

import os
import time

import pytest

from cl_train.config.schema import DataConfig
from cl_train.config.validation import checked_config
from cl_train.data import csv_lists
from cl_train.data.csv_lists import list_csv
from cl_train.data.images import list_folder
from cl_train.errors import ConfigError
from tests.data.image_folders import folder_data, same, train_batches, write_folder


@pytest.fixture
def root(tmp_path):
    return write_folder(tmp_path / "images", train=10, val=4)


def table(root, text, name="labels.csv", **options):
    path = root / name
    path.write_text(text, **options)
    return str(path)


def rows_of(root, split, form="{path},{label}", header="path,label"):
    """A row for each image of a folder, the last one first."""
    files = sorted((root / split).glob("*/*"), reverse=True)
    lines = [
        form.format(
            path=path.relative_to(root), label=path.parent.name, stem=path.stem, split=split
        )
        for path in files
    ]
    return "\n".join([header, *lines]) + "\n"


def listed(root, *, training=True, **settings):
    return list_csv(root, DataConfig(name="csv", root=str(root), **settings), training=training)


def names(split):
    return [split.name(index) for index in range(len(split))]


FORMS = {
    "path,label": "{path},{label}",
    "label;image": "{label};{path}",
    '"","Label","File"': '"7","{label}","{path}"',
    "\ufefffilename\tlabel": "./{path}\t{label}",
    "id,label": "{split}/{label}/{stem},{label}",
}


@pytest.mark.parametrize("header", FORMS)
def test_the_images_their_order_and_their_batches_are_those_of_a_folder(root, header):
    csv, val_csv = (
        table(root, rows_of(root, split, FORMS[header], header), f"{split}.csv", encoding="utf-8")
        for split in ("train", "val")
    )
    source, folder = listed(root, csv=csv, val_csv=val_csv), list_folder(root)
    assert source.classes == folder.classes
    for ours, theirs in ((source.train, folder.train), (source.val, folder.val)):
        assert names(ours) == names(theirs) and ours.labels.tolist() == theirs.labels.tolist()
    data = folder_data(root, name="csv", csv=csv, val_csv=val_csv)
    same(train_batches(data), train_batches(folder_data(root)))


def test_a_split_column_or_a_fraction(root):
    both = rows_of(root, "train", "{path},{label},{split}", "path,label,split")
    both += rows_of(root, "val", "{path},{label},Valid", "").lstrip()
    csv = table(root, both + "train/class_0/0000.jpg,class_0,train\n")
    source = listed(root, csv=csv)
    assert (len(source.train), len(source.val)) == (10, 4)
    assert source.notes == (f"1 rows of '{csv}' repeat others",)
    assert len(listed(root, csv=csv, training=False).train) == 4
    csv = table(root, both.replace("class_1,Valid", "class_1,test"))
    source = listed(root, csv=csv)
    assert len(source.val) == 2 and "2 rows of other splits" in source.notes[0]
    assert source.val.labels.tolist() == [0, 0]
    assert names(listed(root, csv=csv, val_split="test").val)[0].endswith("class_1/0001.jpg")

    csv = table(root, rows_of(root, "train"))
    source = listed(root, csv=csv, val_fraction=0.3)
    assert len(source.train) == 6 and source.val.labels.tolist() == [0, 0, 1, 1]
    assert len(listed(root, csv=csv, training=False).val) == 10
    assert len(listed(root, csv=csv, training=False, val_fraction=0.3).val) == 4


@pytest.mark.parametrize("classes", [("-1.5", "9", "10"), ("1", "10", "nan")])
def test_labels_are_sorted_as_numbers_if_all_are(root, classes):
    rows = [f"train/class_0/{2 * n:04d}.jpg,{label}\n" for n, label in enumerate(classes[::-1])]
    csv = table(root, "path,label\n" + "".join(rows))
    assert listed(root, csv=csv, val_csv=csv).classes == classes


A, B = "train/class_0/0000.jpg", "train/class_1/0001.jpg"
BAD = {
    f"path,label\n{A},cat\nmissing.jpg,cat\n": ["line 3: no image 'missing.jpg'", ".png below '"],
    f'path,label\n"{A}",cat\n\n{B},""\n,cat\n': ["line 4: no label", "line 5: no name", "2 rows"],
    f"path,label\n{A},cat\n{B},dog\n./{A},dog\n": [
        f"line 4: './{A}' is train 'dog', and train 'cat' in line 2"
    ],
    f"path,label,split\n{A},cat,train\n{B},cat,\n": ["line 3: no split"],
    f"path,label,split\n{A},cat,train\n{B},dog,val\n": [
        "line 3: no training image has the label 'dog'"
    ],
    f"path,label\n{A},cat\n": ["data.val_csv", "a column split", "data.val_fraction"],
    f"{A},cat\n": ["the first line must name the columns", A],
    "path;label\n": ["no rows"],
}


@pytest.mark.parametrize("text", BAD)
def test_bad_rows_are_named_with_their_lines(root, text):
    with pytest.raises(ConfigError) as refused:
        listed(root, csv=table(root, text))
    (message,) = refused.value.problems
    assert all(word in message for word in [str(root / "labels.csv"), *BAD[text]]), message


def test_no_file_and_settings_that_need_another(root):
    with pytest.raises(ConfigError, match=r"none\.csv: No such file"):
        listed(root, csv=str(root / "none.csv"))
    csv = table(root, rows_of(root, "train"))
    assert len(listed(root, val_csv=csv).train) == 10, "labels.csv in data.root"
    with pytest.raises(ConfigError, match="root=FOLDER"):
        checked_config({"data": {"name": "csv", "csv": "x"}})


def test_a_large_list_is_stored_until_the_file_or_a_folder_changes(root, monkeypatch):
    monkeypatch.setattr(csv_lists, "CACHED_FROM", 10)
    csv = table(root, rows_of(root, "train"))
    for path in (csv, *root.rglob("*"), root):
        os.utime(path, (time.time() - 100, time.time() - 100))
    first = listed(root, csv=csv, val_fraction=0.5)
    with monkeypatch.context() as patched:
        patched.setattr(csv_lists, "_rows", None)
        again = listed(root, csv=csv, val_fraction=0.5)
    assert again.fingerprint == first.fingerprint and names(again.val) == names(first.val)
    (root / A).unlink()
    with pytest.raises(ConfigError, match=f"no image '{A}'"):
        listed(root, csv=csv, val_fraction=0.5)
