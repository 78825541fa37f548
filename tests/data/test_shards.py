"""Tar shards: order, labels, index, patterns, damage."""

import os
from errno import EIO
from unittest.mock import Mock

import pytest

from cl_train.config.schema import DataConfig
from cl_train.data import tar_shards
from cl_train.data.decode import BadImage
from cl_train.data.tar_shards import list_shards
from cl_train.errors import ConfigError
from tests.data.image_folders import jpeg
from tests.data.tar_shards import members_of, silent_losses, sound_shards, write
from tests.imagenet_archives import WNIDS


def member_names(split):
    return [split.name(index).partition(".tar/")[2] for index in range(len(split))]


@pytest.mark.parametrize("manifest", [False, True])
def test_images_are_sorted_by_label_and_name_and_read_as_they_were(tmp_path, manifest):
    root = write(tmp_path / "s", sound_shards(), manifest=manifest)
    source = list_shards(root, workers=1)
    assert source.classes == (WNIDS if manifest else ("0", "1", "2"))
    assert source.train.labels.tolist() == [0] * 6 + [1] * 6 + [2] * 6 and len(source.val) == 6
    contents = {name: content for members in sound_shards().values() for name, content in members}
    names = member_names(source.train)
    assert names == sorted(names)
    assert [source.train.read(index) for index in range(18)] == [contents[name] for name in names]
    os.truncate(root / "im-train-0001.tar", 600)  # after the start
    of_shard = [index for index in range(18) if "im-train-0001" in source.train.name(index)]
    with pytest.raises(BadImage):
        source.train.read(of_shard[0])
    (root / "im-train-0001.tar").unlink()
    if manifest:
        with pytest.raises(ConfigError, match="missing"):
            list_shards(root, workers=1)
    for shard in root.glob("*train*.tar"):
        shard.unlink()
    with pytest.raises(ConfigError, match="no train shards"):
        list_shards(root, workers=1)
    assert len(list_shards(root, workers=1, training=False).val) == 6


def test_the_index_is_kept_until_a_shard_changes(tmp_path, monkeypatch):
    root = write(tmp_path / "s", sound_shards())
    first = list_shards(root, workers=1)
    with monkeypatch.context() as patched:
        patched.setattr(tar_shards, "index_shard", None)
        again = list_shards(root, workers=1)
    assert again.fingerprint == first.fingerprint and again.classes == first.classes
    assert again.train.read(5) == first.train.read(5) and again.val.name(3) == first.val.name(3)
    changed = sound_shards()
    changed["im-train-0001.tar"] = changed["im-train-0001.tar"][:-2]
    write(root, changed)
    assert len(list_shards(root, workers=1).train) == 17
    monkeypatch.setattr(tar_shards, "read_member", Mock(side_effect=OSError(EIO, "I/O error")))
    with pytest.raises(OSError, match=r"im-train-0001\.tar"):
        tar_shards.index_shard(str(root / "im-train-0001.tar"))


def test_a_shell_pattern_takes_some_shards_and_none_is_an_error(tmp_path):
    root = write(tmp_path / "s[1]", sound_shards(), manifest=False)
    assert len(list_shards(root, workers=1).train) == 18
    assert len(list_shards(f"{tmp_path}/s*/im-*-000[02].tar", workers=1).train) == 12
    for pattern, words in (
        ("*/im-train*.tar", "no val shards"),
        ("s/im-{train,val}-0000.tar", "braces are not expanded"),
        ("nowhere", "no train and no val shards"),
    ):
        with pytest.raises(ConfigError, match=words):
            list_shards(tmp_path / pattern, workers=1)


def added(root, *members, extensions=(".jpg", ".jpeg", ".png")):
    """The index of sound shards with these members in the first one."""
    shards = sound_shards()
    more = [(name, b"2" if name.lower().endswith(".cls") else jpeg()) for name in members]
    shards["im-train-0000.tar"] = shards["im-train-0000.tar"] + more
    cfg = DataConfig(name="shards", extensions=list(extensions))
    return list_shards(write(root, shards, manifest=False), cfg, workers=1)


def test_names_with_dots_are_samples_if_they_pair_and_others_are_counted(tmp_path):
    dotted = ("img.00.jpg", "img.00.cls", "2024.05/x.1.JPG", "2024.05/x.1.CLS", "v1.0/b.jpg")
    rest = ("v1.0/b.cls", "f.seg.jpg", "f.jpg", "f.cls", "f.json", "._f.jpg", "g.1.cls")
    source = added(tmp_path / "s", *dotted, *rest)
    assert len(source.train) == 18 + 4
    assert {"img.00.jpg", "2024.05/x.1.JPG", "v1.0/b.jpg", "f.jpg"} <= {*member_names(source.train)}
    ignored, ends = source.notes
    assert "4 files" in ignored and "2 .jpg, 1 .json, 1 .cls" in ignored
    assert "2 keys have dots (img.00, 2024.05/x.1)" in ends
    again = list_shards(tmp_path / "s", DataConfig(name="shards"), workers=1)
    assert again.notes == source.notes, "also of the stored index"


def test_other_kinds_of_images_are_read_if_they_are_wanted(tmp_path):
    wider = (".jpg", ".webp")
    source = added(tmp_path / "s", "e.webp", "e.cls", "d.WEBP", "d.cls", extensions=wider)
    assert len(source.train) == 20
    with pytest.raises(ConfigError, match=r"'e' has no image.*1 \.webp.*\.png,\.webp\] reads them"):
        added(tmp_path / "s", "e.webp", "e.cls")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (("c.jpg", "c.png", "c.cls"), r"'c' has 2 images"),
        (("q.jpg", "q.cls", "q.jpg", "q.cls"), "the name 'q.jpg' occurs twice"),
        (("left.a.jpg", "left.cls"), r"'left' has no image.*left\.a\.jpg"),
        (("alone.jpg",), "'alone' has no label"),
    ],
)
def test_a_sample_has_one_image_and_one_label(tmp_path, members, words):
    with pytest.raises(ConfigError, match=words):
        added(tmp_path / "s", *members)


def test_wrong_labels_and_damaged_manifests_are_refused(tmp_path):
    root = write(tmp_path / "s", sound_shards())
    for text in ("{", "[]", '{"classes": [], "images": {"x-train.tar": 1}}'):
        (root / "shards.json").write_text(text)
        with pytest.raises(ConfigError, match=r"shards\.json"):
            list_shards(root, workers=1)
    (root / "shards.json").unlink()
    (image, (name, _)), rest = members_of(range(2, 4))[:2], members_of(range(2, 4))[2:]
    for label, words in ((b"1.0", "is not a label"), (b"-1", "is not a label"), (b"4", "needs an")):
        wrong = {"im-train-0001.tar": [image, (name, label), *rest]}
        with pytest.raises(ConfigError, match=words):
            list_shards(write(root, sound_shards() | wrong, manifest=False), workers=1)


def test_undamaged_shards_have_no_losses_and_a_changed_one_is_seen_as_lost(tmp_path):
    """As tests/faults/test_input_faults.py counts them for each kind of damage."""
    assert silent_losses(write(tmp_path / "sound", sound_shards())) == []
    less = sound_shards() | {"im-train-0002.tar": members_of(range(4, 5))}
    assert silent_losses(write(tmp_path / "less", less)) != []
