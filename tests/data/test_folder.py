"""Folders of images: which layouts are read, which are refused and how."""

import os
from pathlib import Path

import pytest

from cl_train.config.schema import ConfigError, DataConfig
from cl_train.data.folder import read_folder
from tests.data.image_folders import folder_data, jpeg, write_folder


def refused(root, **layout):
    with pytest.raises(ConfigError) as caught:
        read_folder(root, DataConfig(**layout))
    return str(caught.value)


def test_classes_labels_and_nested_images(tmp_path):
    root = write_folder(tmp_path, train=6, val=4, classes=3)
    (root / "train" / "class_1" / "deep" / "er").mkdir(parents=True)
    (root / "train" / "class_1" / "deep" / "er" / "x.PNG").write_bytes(b"1")
    (root / "train" / "class_1" / "notes.txt").write_text("not an image")
    folder = read_folder(root)
    assert folder.classes == ("class_0", "class_1", "class_2")
    assert folder.train.labels.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert [os.path.relpath(folder.train.name(i), root / "train") for i in (0, 4, 6)] == [
        "class_0/0000.jpg",
        "class_1/deep/er/x.PNG",
        "class_2/0005.jpg",
    ]


def test_names_that_are_no_utf8_and_names_with_spaces(tmp_path):
    root = write_folder(tmp_path / "my data=1", train=2, val=2)
    odd = os.fsencode(root / "train" / "class_0") + b"/caf\xe9 1.jpg"
    with open(odd, "wb") as file:
        file.write(jpeg())
    data = folder_data(root, batch_size=3)
    assert sum(len(host.targets) for host in data.train_loader.batches(0)) == 3
    assert len(data.fingerprint) == 16


def test_missing_root_and_missing_splits(tmp_path):
    assert "does not exist" in refused(tmp_path / "nowhere")
    (tmp_path / "train.tar").write_text("")
    message = refused(tmp_path)
    assert "train" in message and "val" in message and "data.val_fraction" in message
    assert "train.tar" in message and "prepare_imagenet" in message and "data=sample" in message
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refused(tmp_path / "file")


def test_no_classes_and_flat_val(tmp_path):
    root = write_folder(tmp_path, train=2, val=0)
    for label in (0, 1):
        (root / "val" / f"class_{label}").rmdir()
    assert "has no class folders" in refused(root)
    for number in range(3):
        (root / "val" / f"ILSVRC2012_val_{number:08d}.JPEG").write_bytes(b"1")
    message = refused(root)
    assert "ILSVRC2012_val_00000000.JPEG" in message and "prepare_imagenet" in message


def test_empty_class_folders_are_named_five_at_most(tmp_path):
    root = write_folder(tmp_path, train=1, val=9, classes=9)
    message = refused(root)
    assert "for 8 of 9 classes: class_1, class_2, class_3, class_4, class_5 and 3 more" in message


def test_different_classes_are_listed_from_both_sides(tmp_path):
    root = write_folder(tmp_path, train=4, val=4)
    (root / "train" / "cat").mkdir()
    (root / "val" / "dog").mkdir()
    message = refused(root)
    assert "only in train: cat" in message and "only in val: dog" in message


def test_fewer_images_than_one_global_batch(tmp_path):
    root = write_folder(tmp_path, train=7, val=2)
    assert folder_data(root, batch_size=7).batch_count() == 1
    with pytest.raises(ConfigError, match=r"7 training images are fewer than one global batch of 8 \(4 x 2\)"):
        folder_data(root, batch_size=4, world_size=2)


def test_too_little_memory_for_the_batches(tmp_path, monkeypatch):
    root = write_folder(tmp_path, train=8, val=2)
    monkeypatch.setattr("cl_train.data.loader.available_bytes", lambda device: 5_000)
    with pytest.raises(ConfigError, match=r"lower batch_size or data\.prefetch=3"):
        folder_data(root, batch_size=8)
    monkeypatch.setattr("cl_train.data.loader.available_bytes", lambda device: None)
    assert folder_data(root, batch_size=8).batch_count() == 1


def test_fingerprint_follows_names_and_classes(tmp_path):
    root = write_folder(tmp_path, train=4, val=4)
    first = read_folder(root).fingerprint
    assert read_folder(root).fingerprint == first
    (root / "train" / "class_0" / "new.jpg").write_bytes(b"1")
    assert read_folder(root).fingerprint != first


@pytest.mark.parametrize("name", ["valid", "validation", "test"])
def test_other_names_of_the_validation_folder(tmp_path, name):
    root = write_folder(tmp_path, train=4, val=6)
    (root / "val").rename(root / name)
    assert len(read_folder(root).val) == 6
    (root / "mine").mkdir()
    assert "has no class folders" in refused(root, val_split="mine")
    assert len(read_folder(root, DataConfig(val_split=name)).val) == 6
    assert "nothing" in refused(root, val_split="nothing")


def test_val_is_preferred_to_test(tmp_path):
    root = write_folder(tmp_path, train=4, val=6)
    (root / "test").mkdir()
    assert len(read_folder(root).val) == 6


def test_the_training_images_can_be_the_validation_split_too(tmp_path):
    root = write_folder(tmp_path, train=4, val=2)
    source = read_folder(root, DataConfig(val_split="train"))
    assert [source.val.name(index) for index in range(4)] == [source.train.name(index) for index in range(4)]


@pytest.mark.parametrize("below", ["", "train"])
def test_a_fraction_of_each_class_is_the_validation_split(tmp_path, below):
    write_folder(tmp_path / "made", train=30, val=0, classes=3)
    root = tmp_path / "data"
    (tmp_path / "made" / "train").rename(root / below if below and not root.mkdir() else root)
    source = read_folder(root, DataConfig(val_fraction=0.2))
    train, val = ({split.name(index) for index in range(len(split))} for split in (source.train, source.val))
    assert len(train) == 24 and len(val) == 6 and not train & val
    assert source.val.labels.tolist() == [0, 0, 1, 1, 2, 2]
    new = os.path.join(os.path.dirname(source.train.name(0)), "zzz.jpg")
    os.link(source.train.name(0), new)
    again = read_folder(root, DataConfig(val_fraction=0.2))
    assert len({again.val.name(index) for index in range(len(again.val))} ^ val) <= 2


def test_a_fraction_beside_a_validation_folder_and_single_images_are_refused(tmp_path):
    root = write_folder(tmp_path / "both", train=4, val=4)
    assert "val" in refused(root, val_fraction=0.5)
    single = write_folder(tmp_path / "single", train=3, val=0)
    (single / "val" / "class_0").rmdir()
    (single / "val" / "class_1").rmdir()
    (single / "val").rmdir()
    assert "class_1" in refused(single, val_fraction=0.5)


def test_ignored_files_are_counted_and_named_once(tmp_path):
    root = write_folder(tmp_path, train=4, val=4)
    for name in ("a.webp", "b.WEBP", "notes.txt", ".hidden"):
        (root / "train" / "class_0" / name).write_bytes(b"1")
    source = read_folder(root)
    (note,) = source.notes
    assert "3 files" in note and "2 .webp" in note and "1 .txt" in note and "class_0" in note
    assert "data.extensions=[.jpg,.jpeg,.png,.webp]" in note
    wider = read_folder(root, DataConfig(extensions=[".jpg", ".webp"]))
    assert len(wider.train) == 6 and "1 .txt" in wider.notes[0] and "data.extensions" not in wider.notes[0]


def test_a_class_of_ignored_files_names_them(tmp_path):
    root = write_folder(tmp_path, train=4, val=4)
    for path in (root / "val" / "class_1").iterdir():
        path.rename(path.with_suffix(".webp"))
    message = refused(root)
    assert "class_1" in message and "2 .webp" in message and "data.extensions" in message


@pytest.mark.parametrize("url", ["s3://bucket/imagenet", "gs://bucket/x", "https://host/x"])
def test_a_url_is_answered(url):
    assert "file system" in refused(Path(url))


@pytest.mark.parametrize("unreadable", ["train", "train/class_1", "val/class_0", "train/class_1/deep"])
def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch, unreadable):
    root = write_folder(tmp_path, train=4, val=4)
    (root / "train/class_1/deep").mkdir()
    scan = os.scandir

    def refuse(path):
        if os.fsdecode(path) == str(root / unreadable):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert f"'{root / unreadable}' cannot be read: Permission denied" in refused(root)
