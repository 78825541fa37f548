"""Tar shards: order, labels, index, patterns, damage."""

import os
from contextlib import nullcontext
from errno import EIO
from unittest.mock import Mock

import numpy as np
import pytest

from cl_train.config.schema import DataConfig
from cl_train.data import tar_shards
from cl_train.data.decode import BadImage
from cl_train.data.tar_shards import list_shards
from cl_train.errors import ConfigError
from tests.data.image_folders import jpeg
from tests.data.tar_shards import members_of, silent_losses, sound_shards, write
from tests.imagenet_archives import WNIDS


@pytest.mark.parametrize("manifest", [False, True])
def test_images_are_sorted_by_label_and_name_and_read_as_they_were(tmp_path, manifest):
    root = write(tmp_path / "s", sound_shards(), manifest=manifest)
    source = list_shards(root, workers=1)
    assert source.classes == (WNIDS if manifest else ("0", "1", "2"))
    assert source.train.labels.tolist() == [0] * 6 + [1] * 6 + [2] * 6 and len(source.val) == 6
    contents = {name: content for members in sound_shards().values() for name, content in members}
    names = [source.train.name(index).partition(".tar/")[2] for index in range(18)]
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


def test_the_index_is_that_of_these_shards_not_of_others_of_the_same_size_and_time(tmp_path):
    root = write(tmp_path / "s", sound_shards())
    list_shards(root, workers=1)
    labels = list_shards(root, workers=1).train.labels.tolist()
    times = {path: os.stat(path) for path in root.glob("*.tar")}
    write(root, relabelled(str, lambda label: {b"0": b"2", b"2": b"0"}.get(label, label)))
    for path, before in times.items():
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (
            before.st_size,
            before.st_mtime_ns,
        )
    changed = list_shards(root, workers=1).train
    assert changed.labels.tolist() == labels
    names = [changed.name(index) for index in range(18)]
    assert "/".join(names) != "/".join(sorted(names)), "by the new label"


def relabelled(name_of, label_of):
    """Other names, and other contents of the labels."""
    return {
        shard: [
            (name_of(name), content if name.endswith("jpg") else label_of(content))
            for name, content in members
        ]
        for shard, members in sound_shards().items()
    }


def test_labels_from_json_and_other_tar_files(tmp_path):
    shards = relabelled(lambda name: name.replace(".cls", ".json"), lambda n: b'{"label": %s}' % n)
    shards["im-test-0000.tar"] = []
    source = list_shards(write(tmp_path / "s", shards, manifest=False), workers=1)
    assert np.bincount(source.train.labels).tolist() == [6, 6, 6]


def test_a_shell_pattern_takes_some_shards_and_none_is_an_error(tmp_path):
    root = write(tmp_path / "s", sound_shards(), manifest=False)
    assert len(list_shards(f"{root}/im-*-000[02].tar", workers=1).train) == 12
    for pattern, words in (
        ("*/im-train*.tar", "no val shards"),
        ("s/im-{train,val}-0000.tar", "braces are not expanded"),
    ):
        with pytest.raises(ConfigError, match=words):
            list_shards(tmp_path / pattern, workers=1)
    for name in ("[1]", "a*{b,c}?.tar"):  # of a folder
        assert len(list_shards(root.rename(tmp_path / name), workers=1).train) == 18
        root = tmp_path / name
    for empty in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="no train and no val shards"):
            list_shards(empty)


def added(*members, extensions=(".jpg", ".jpeg", ".png"), root):
    """The index of sound shards with these members in the first one."""
    shards = sound_shards()
    more = [(name, b"2" if name.lower().endswith(".cls") else jpeg()) for name in members]
    shards["im-train-0000.tar"] = shards["im-train-0000.tar"] + more
    cfg = DataConfig(name="shards", extensions=list(extensions))
    return list_shards(write(root, shards, manifest=False), cfg, workers=1)


def test_names_with_dots_are_samples_if_they_pair_and_others_are_counted(tmp_path):
    dotted = ("img.00.jpg", "img.00.cls", "2024.05/x.1.JPG", "2024.05/x.1.CLS", "v1.0/b.jpg")
    rest = ("v1.0/b.cls", "f.seg.jpg", "f.jpg", "f.cls", "readme.txt", "._f.jpg", "g.1.cls")
    source = added(*dotted, *rest, root=tmp_path / "s")
    assert len(source.train) == 18 + 4
    names = [source.train.name(index).partition(".tar/")[2] for index in range(22)]
    assert {"img.00.jpg", "2024.05/x.1.JPG", "v1.0/b.jpg", "f.jpg"} <= set(names)
    ignored, ends = source.notes
    assert "4 files" in ignored and "2 .jpg, 1 .txt, 1 .cls" in ignored
    assert "data.extensions" not in ignored
    assert "2 keys have dots (img.00, 2024.05/x.1)" in ends
    again = list_shards(tmp_path / "s", DataConfig(name="shards"), workers=1)
    assert again.notes == source.notes, "also of the stored index"


def test_other_kinds_of_images_are_read_if_they_are_wanted(tmp_path):
    wider = (".jpg", ".webp")
    source = added("e.webp", "e.cls", "d.WEBP", "d.cls", extensions=wider, root=tmp_path / "s")
    assert len(source.train) == 20
    with pytest.raises(ConfigError, match=r"'e' has no image.*1 \.webp.*\.png,\.webp\] reads them"):
        added("e.webp", "e.cls", root=tmp_path / "s")
    with pytest.raises(ConfigError, match=r"no samples\. .* 2 files \(1 \.txt, 1 \.gif\)"):
        wrong = sound_shards() | {"im-train-0001.tar": [("a.txt", b"1"), ("b.gif", b"1")]}
        list_shards(write(tmp_path / "t", wrong, manifest=False), workers=1)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        (("c.jpg", "c.png", "c.cls"), r"'c' has 2 images: c\.jpg, c\.png"),
        (("i.0.jpg", "i.0.JPG", "i.0.cls"), "'i.0' has 2 images"),
        (("q.jpg", "q.cls", "q.jpg", "q.cls"), "the name 'q.jpg' occurs twice"),
        (("q.jpg", "q.cls", "notes.txt", "notes.txt"), "the name 'notes.txt' occurs twice"),
        (("left.a.jpg", "left.cls"), r"'left' has no image.*left\.a\.jpg"),
    ],
)
def test_two_members_of_a_kind_are_refused(tmp_path, members, words):
    with pytest.raises(ConfigError, match=words):
        added(*members, root=tmp_path / "s")


@pytest.mark.parametrize(
    ("json", "words"),
    [(b'{"label": 0}', None), (b'{"width": 5}', None), (b'{"label": 1}', "are different labels")],
)
def test_metadata_beside_a_label(tmp_path, json, words):
    shards = sound_shards()
    (image, _), *_ = members = shards["im-train-0000.tar"]
    shards["im-train-0000.tar"] = [*members, (image.replace("jpg", "json"), json)]
    root = write(tmp_path / "s", shards)
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        assert len(list_shards(root, workers=1).train) == 18


def wrong_shards():
    """Shards without a manifest, and the words of their error."""
    members = sound_shards()["im-train-0001.tar"]
    (image, (name, _)), rest = members[:2], members[2:]
    yield relabelled(str, lambda label: b"%d" % (int(label) + 1)), "each class needs an image"
    for label in (b"1.0", b'"1"', b"[1]", b"-1", b"4000000000"):
        for wrong in ((name, label), (name.replace("cls", "json"), b'{"label": %s}' % label)):
            yield sound_shards() | {"im-train-0001.tar": [image, wrong, *rest]}, "is not a label"


def test_wrong_labels_and_damaged_manifests_are_refused(tmp_path):
    for number, (shards, words) in enumerate(wrong_shards()):
        with pytest.raises(ConfigError, match=words):
            list_shards(write(tmp_path / str(number), shards, manifest=False), workers=1)
    root = write(tmp_path / "s", sound_shards())
    for text in ("{", "[]", '{"classes": [], "images": {"x-train.tar": 1}}'):
        (root / "shards.json").write_text(text)
        with pytest.raises(ConfigError, match=r"shards\.json"):
            list_shards(root, workers=1)


def test_undamaged_shards_have_no_losses_and_a_changed_one_is_seen_as_lost(tmp_path):
    """As tests/faults/test_input_faults.py counts them for each kind of damage."""
    assert silent_losses(write(tmp_path / "sound", sound_shards())) == []
    less = sound_shards() | {"im-train-0002.tar": members_of(range(4, 5))}
    assert silent_losses(write(tmp_path / "less", less)) != []
