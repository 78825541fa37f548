"""Listing a folder: what is refused, and the kept index."""

import os
import time

import pytest

from cl_train.config.schema import ConfigError
from cl_train.data import folder as folder_module
from cl_train.data.folder import read_folder, read_index, write_index
from tests.data.image_folders import folder_data, jpeg, write_folder


def refused(root):
    with pytest.raises(ConfigError) as caught:
        read_folder(root)
    return str(caught.value)


def test_classes_labels_and_nested_images(tmp_path):
    root = write_folder(tmp_path, train=6, val=4, classes=3)
    (root / "train" / "class_1" / "deep" / "er").mkdir(parents=True)
    (root / "train" / "class_1" / "deep" / "er" / "x.PNG").write_bytes(b"1")
    (root / "train" / "class_1" / "notes.txt").write_text("not an image")
    folder = read_folder(root)
    assert folder.classes == ("class_0", "class_1", "class_2")
    assert folder.train.labels.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert [os.path.relpath(folder.train.path(i).decode(), root / "train") for i in (0, 4, 6)] == [
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
    assert sum(len(host.targets) for host in data.train_host(0)) == 3
    assert len(data.fingerprint) == 16


def test_missing_root_and_missing_splits(tmp_path):
    assert "does not exist" in refused(tmp_path / "nowhere")
    (tmp_path / "train.tar").write_text("")
    message = refused(tmp_path)
    assert "no folder 'train'" in message and "no folder 'val'" in message
    assert "Found: train.tar" in message and "prepare_imagenet.py" in message and "data=sample" in message
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
    assert "holds 3 files such as ILSVRC2012_val_00000000.JPEG" in message and "prepare_imagenet.py" in message


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
    assert folder_data(root, batch_size=7).batches_per_epoch == 1
    with pytest.raises(ConfigError, match=r"7 training images are fewer than one global batch of 8 \(4 x 2\)"):
        folder_data(root, batch_size=4, world_size=2)


def test_too_little_memory_for_the_batches(tmp_path, monkeypatch):
    root = write_folder(tmp_path, train=8, val=2)
    monkeypatch.setattr("cl_train.data.build.available_bytes", lambda: 50_000)
    with pytest.raises(ConfigError, match=r"lower batch_size or data\.prefetch=3"):
        folder_data(root, batch_size=8)
    monkeypatch.setattr("cl_train.data.build.available_bytes", lambda: None)
    assert folder_data(root, batch_size=8).batches_per_epoch == 1


def test_fingerprint_follows_names_and_classes(tmp_path):
    root = write_folder(tmp_path, train=4, val=4)
    first = read_folder(root).fingerprint()
    assert read_folder(root).fingerprint() == first
    (root / "train" / "class_0" / "new.jpg").write_bytes(b"1")
    assert read_folder(root).fingerprint() != first


@pytest.fixture
def settled(tmp_path, monkeypatch):
    """A folder whose times lie in the past, and a cache that small folders use too."""
    root = write_folder(tmp_path / "data", train=6, val=4)
    for path, _, _ in os.walk(root):
        os.utime(path, (time.time() - 100, time.time() - 100))
    monkeypatch.setattr(folder_module, "_CACHED_FROM", 1)
    return root, tmp_path / "cache" / "index.npz"


def test_the_kept_index_is_the_list(settled, monkeypatch):
    root, cache = settled
    listed = read_folder(root, cache)
    assert cache.is_file()
    monkeypatch.setattr(folder_module, "_list_folder", lambda root: pytest.fail("listed again"))
    again = read_folder(root, cache)
    assert again.fingerprint() == listed.fingerprint() and again.classes == listed.classes
    assert [again.val.path(i) for i in range(4)] == [listed.val.path(i) for i in range(4)]


@pytest.mark.parametrize("change", ["added", "removed", "class", "nested"])
def test_a_changed_folder_is_listed_again(settled, change):
    root, cache = settled
    read_folder(root, cache)
    if change == "added":
        (root / "train" / "class_0" / "new.jpg").write_bytes(b"1")
    elif change == "removed":
        (root / "val" / "class_0" / "0000.jpg").unlink()
    elif change == "class":
        for split in ("train", "val"):
            (root / split / "class_9").mkdir()
            (root / split / "class_9" / "a.jpg").write_bytes(b"1")
    else:
        (root / "train" / "class_0" / "deep").mkdir()
    assert read_index(cache, root) is None
    fresh = read_folder(root)
    assert read_folder(root, cache).fingerprint() == fresh.fingerprint()


def test_a_broken_index_is_no_index(settled):
    root, cache = settled
    listed = read_folder(root, cache)
    for content in (b"", b"PK broken", cache.read_bytes()[:300]):
        cache.write_bytes(content)
        assert read_index(cache, root) is None
        assert read_folder(root, cache).fingerprint() == listed.fingerprint()


def test_a_folder_that_changed_just_now_is_not_kept(tmp_path):
    root = write_folder(tmp_path / "data", train=2, val=2)
    write_index(tmp_path / "index.npz", read_folder(root))
    assert not (tmp_path / "index.npz").exists()


def test_a_new_image_behind_a_link_is_seen(tmp_path, monkeypatch):
    """Class folders may be links, which os.walk does not follow."""
    stored, root = write_folder(tmp_path / "stored", train=6, val=4), tmp_path / "data"
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        for name in ("class_0", "class_1"):
            (root / split / name).symlink_to(stored / split / name)
    for folder in (stored, root):
        for path, _, _ in os.walk(folder):
            os.utime(path, (time.time() - 100, time.time() - 100))
    monkeypatch.setattr(folder_module, "_CACHED_FROM", 1)
    cache = tmp_path / "cache" / "index.npz"
    assert len(read_folder(root, cache).train) == 6 and cache.is_file()
    (stored / "train" / "class_0" / "new.jpg").write_bytes(b"1")
    assert len(read_folder(root, cache).train) == 7
