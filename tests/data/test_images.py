"""Folders of images: which are read, which are refused and how; the stored list of a large folder.
Pixels of unusual files, and reasons against damaged ones; tests/faults/test_input_faults.py has
more, and fuzzed ones.
"""

import os
import shutil
import time
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from PIL import Image

from cl_train.config.schema import DataConfig
from cl_train.data import images
from cl_train.data.decode import BadImage, EncodedImage
from cl_train.data.images import list_folder
from cl_train.errors import ConfigError
from cl_train.system.files import cache_folder
from tests.data.image_folders import encoded, folder_data, jpeg, noise, write_folder


def refused(root, **layout):
    with pytest.raises(ConfigError) as caught:
        list_folder(root, DataConfig(**layout))
    return str(caught.value)


def names(split):
    return [split.name(index) for index in range(len(split))]


def test_classes_labels_and_nested_images(tmp_path):
    root = write_folder(tmp_path, train=6, val=4, classes=3)
    (root / "train/class_1/deep/er").mkdir(parents=True)
    (root / "train/class_1/deep/er/x.PNG").write_bytes(b"1")
    (root / "train/class_1/folder.jpg").mkdir()
    (root / "train/class_1/notes.txt").write_text("not an image")
    (root / "test").mkdir()  # val is preferred
    source = list_folder(root)
    assert source.classes == ("class_0", "class_1", "class_2") and len(source.val) == 4
    assert source.train.labels.tolist() == [0, 0, 1, 1, 1, 2, 2]
    found = [os.path.relpath(name, root / "train") for name in names(source.train)]
    assert found[0] == "class_0/0000.jpg" and found[4] == "class_1/deep/er/x.PNG"
    both = list_folder(root, DataConfig(val_split="train"))
    assert names(both.val) == names(both.train) == names(source.train)
    (root / "train/class_0/new.jpg").write_bytes(b"1")
    assert list_folder(root).fingerprint != source.fingerprint
    for before, name in pairwise(("val", "valid", "validation", "test")):
        (root / before).rename(root / name)
        assert len(list_folder(root).val) == 4
        assert len(list_folder(root, DataConfig(val_split=name)).val) == 4


def test_names_that_are_no_utf8_and_names_with_spaces(tmp_path):
    root = write_folder(tmp_path / "my data=1", train=2, val=2)
    with open(os.fsencode(root / "train/class_0") + b"/caf\xe9 1.jpg", "wb") as file:
        file.write(jpeg())
    data = folder_data(root, batch_size=3)
    assert sum(len(host.targets) for host in data.train_loader.batches(0)) == 3


def empty(root, name=""):
    shutil.rmtree(root / name)
    (root / name).mkdir()
    return root / name


def rename_all(folder, suffix):
    for path in list(folder.iterdir()):
        path.rename(path.with_suffix(suffix))


@pytest.mark.parametrize(
    ("change", "layout", "words"),
    [
        (shutil.rmtree, {}, ["does not exist", "not a URL"]),
        (lambda root: root.rename(f"{root}s"), {}, ["did you mean datas?"]),
        (
            lambda root: (empty(root) / "train.tar").touch(),
            {},
            ["'val'", "data.val_fraction", "data=sample", "train.tar", "prepare_imagenet"],
        ),
        (
            lambda root: (empty(root, "val") / "1.JPEG").touch(),
            {},
            ["has no class folders", "1.JPEG", "prepare_imagenet"],
        ),
        (lambda root: None, {"val_split": "nothing"}, ["'nothing'"]),
        (
            lambda root: [(root / s).mkdir() for s in ("train/cat", "val/dog")],
            {},
            ["val' has 1 class that", "train' lacks: dog"],
        ),
        (
            lambda root: rename_all(root / "val/class_1", ".webp"),
            {},
            ["class_1", "2 .webp", "data.extensions"],
        ),
        (lambda root: None, {"val_fraction": 0.5}, ["/val"]),
        (
            lambda root: write_folder(root, train=1, val=9, classes=9),
            {},
            ["for 7 of 9", "class_6 and 2 more"],
        ),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, change, layout, words):
    root = write_folder(tmp_path / "data", train=2, val=4)
    change(root)
    message = refused(root, **layout)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("unreadable", ["train", "train/class_1/deep"])
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


def test_too_little_memory(tmp_path, monkeypatch):
    root = write_folder(tmp_path, train=7, val=2)
    monkeypatch.setattr("cl_train.data.loader.available_bytes", lambda device: 5_000)
    with pytest.raises(ConfigError, match=r"lower batch_size or data\.prefetch=3"):
        folder_data(root, batch_size=7)
    monkeypatch.setattr("cl_train.data.loader.available_bytes", lambda device: None)
    assert folder_data(root, batch_size=7).batch_count() == 1


@pytest.mark.parametrize("below", ["", "train"])
def test_a_fraction_of_each_class_is_the_validation_split(tmp_path, below):
    write_folder(tmp_path / "made", train=30, val=0, classes=3)
    root = tmp_path / "data"
    (tmp_path / "made/train").rename(root / below if below and not root.mkdir() else root)
    source = list_folder(root, DataConfig(val_fraction=0.2))
    train, val = set(names(source.train)), set(names(source.val))
    assert len(train) == 24 and len(val) == 6 and not train & val
    assert source.val.labels.tolist() == [0, 0, 1, 1, 2, 2]
    os.link(source.train.name(0), os.path.join(os.path.dirname(source.train.name(0)), "zzz.jpg"))
    again = list_folder(root, DataConfig(val_fraction=0.2))
    assert len(set(names(again.val)) ^ val) <= 2
    (root / below / "lone").mkdir()
    (root / below / "lone/1.jpg").write_bytes(jpeg())
    source = list_folder(root, DataConfig(val_fraction=0.9))
    assert source.train.labels.tolist() == [0, 1, 2, 3], "a class of one image is trained"


def test_validation_classes_are_matched_by_name(tmp_path):
    root = write_folder(tmp_path, train=6, val=6, classes=3)
    shutil.rmtree(root / "val/class_0")
    assert list_folder(root).val.labels.tolist() == [1, 1, 2, 2]
    (root / "val/class_0").mkdir()
    assert list_folder(root).val.labels.tolist() == [1, 1, 2, 2]
    assert list_folder(root, training=False).classes == ("class_0", "class_1", "class_2")


def test_links_are_followed_but_not_back_and_droppings_are_counted(tmp_path):
    """Ten images of cats, three behind each of two links, and what other programs left."""
    root = write_folder(tmp_path / "data", train=20, val=2)
    cats, elsewhere = root / "train/class_0", tmp_path / "elsewhere"
    droppings = ("._0000.jpg", ".ipynb_checkpoints/0-checkpoint.jpg", "@eaDir/0.jpg", "Thumbs.db")
    for path in (
        *(elsewhere / name for name in ("deep/0.jpg", "deep/1.JPG", "2.jpg")),
        *(cats / name for name in droppings),
        root / "train/__MACOSX/class_0/._0000.jpg",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg())
    for link, target in (
        (cats / "more", elsewhere),
        (cats / "again", elsewhere),
        (elsewhere / "deep/up", elsewhere),
        (cats / "all", ".."),
        (cats / "self", "self"),
    ):
        link.symlink_to(target)
    source = list_folder(root)
    assert source.classes == ("class_0", "class_1")
    found = [os.path.relpath(name, cats) for name in names(source.train)[:16]]
    linked = ("2.jpg", "deep/0.jpg", "deep/1.JPG")
    assert found == [
        *(f"{number:04d}.jpg" for number in range(0, 20, 2)),
        *(f"{link}/{name}" for link in ("again", "more") for name in linked),
    ]
    (note,) = source.notes
    assert "6 files (1 without extension, 5 hidden), such as 'class_0/self'" in note
    assert len(images.list_images(root / "train", ["class_0"], [".jpg"]).val) == 26


def test_ignored_files_are_counted_and_named_once(tmp_path):
    root = write_folder(tmp_path, train=4, val=4)
    for name in ("a.webp", "b.WEBP", "notes.txt", ".hidden"):
        (root / "train/class_0" / name).write_bytes(b"1")
    (note,) = list_folder(root).notes
    assert "4 files (2 .webp, 1 .txt, 1 hidden)" in note and "class_0" in note
    assert "data.extensions=[.jpg,.jpeg,.png,.webp]" in note
    wider = list_folder(root, DataConfig(extensions=[".jpg", ".webp"]))
    assert len(wider.train) == 6 and "data.extensions" not in wider.notes[0]


def stored():
    return list(cache_folder().glob("*.npz"))


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder whose times lie in the past; small folders are stored too."""
    monkeypatch.setattr(images, "CACHED_FROM", 1)
    root = write_folder(tmp_path / "data", train=6, val=4)
    (root / "train/class_0/notes.txt").write_text("")
    for path, _, _ in os.walk(root):
        os.utime(path, (time.time() - 100, time.time() - 100))
    return root


def test_a_list_is_stored_for_its_layout_and_replaced_if_it_is_broken(root, monkeypatch):
    listing = Mock(wraps=images._list)
    monkeypatch.setattr(images, "_list", listing)
    assert len(list_folder(root, DataConfig(extensions=[".jpg", ".txt"])).train) == 7
    (other,) = stored()
    first = list_folder(root)
    (path,) = {*stored()} - {other}
    for content in (path.read_bytes(), b"", path.read_bytes()[:300]):
        path.write_bytes(content)
        again = list_folder(root)
        for name in ("fingerprint", "classes", "notes"):
            assert getattr(again, name) == getattr(first, name)
        assert names(list_folder(root).val) == names(again.val) == names(first.val)
    assert listing.call_count == 2 * 4  # two folders of each of two layouts and of two broken lists


@pytest.mark.parametrize("name", ["train/class_0/new.jpg", "train/class_0/deep/new.jpg"])
def test_a_changed_folder_is_listed_again(root, tmp_path, name):
    """Class folders may be links."""
    folder = root / "train/class_0"
    folder.symlink_to(folder.rename(tmp_path / "elsewhere"))
    before = list_folder(root)
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_bytes(b"1")
    assert len(list_folder(root).train) == len(before.train) + 1


def test_a_folder_that_changes_while_it_is_listed_is_not_stored(root, monkeypatch):
    (root / "train/class_0/new.jpg").write_bytes(b"1")
    changed_ns = (root / "train/class_0").stat().st_mtime_ns
    for seconds, lists in ((-1, 0), (1, 1)):
        clock = SimpleNamespace(time_ns=lambda now=changed_ns + seconds * 10**9: now)
        monkeypatch.setattr(images, "time", clock)
        list_folder(root)
        assert len(stored()) == lists


PICTURE = noise(40, 60)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (jpeg()[:200], None),
        (encoded(PICTURE, "PNG")[:900], "truncated"),
        (encoded(PICTURE, "GIF"), "not a JPEG or PNG"),
        (encoded(Image.new("1", (20_000, 6_000)), "PNG"), "20000 x 6000 pixels, more than"),
    ],
)
def test_broken_images_are_refused_with_a_reason(content, reason):
    with pytest.raises(BadImage, match=reason):
        EncodedImage(content).decode()


def test_every_exception_of_a_decoder_is_a_bad_image(monkeypatch):
    """A wrong sampling factor is a KeyError in simplejpeg."""
    data = bytearray(jpeg())
    data[data.index(b"\xff\xc0") + 11] = 0x14
    assert EncodedImage(bytes(data)).needs_pillow
    monkeypatch.setattr("cl_train.data.decode.rgb", lambda image, **_: {}["missing"])
    with pytest.raises(BadImage, match="missing"):
        EncodedImage(encoded(PICTURE, "PNG")).decode()
