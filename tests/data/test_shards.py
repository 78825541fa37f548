"""Tar shards: order, labels, index, patterns, damage."""

import json
import os
import random
import time

import numpy as np
import pytest

from cl_train.config.schema import ConfigError
from cl_train.data import shards as shards_module
from cl_train.data.decode import BadImage
from cl_train.data.order import shard_permutation
from cl_train.data.shards import expand_braces, read_shards
from tests.data.tar_shards import DAMAGE, WNIDS, damage_one, silent_losses, sound_shards, write


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("manifest", [False, True])
def test_images_are_sorted_by_label_and_name_and_read_as_they_were(tmp_path, manifest):
    source = read_shards(write(tmp_path / "s", sound_shards(), manifest=manifest), workers=1)
    assert source.classes == WNIDS
    assert source.train.labels.tolist() == [0] * 6 + [1] * 6 + [2] * 6 and len(source.val) == 6
    contents = {name: content for members in sound_shards().values() for name, content in members}
    names = [source.train.name(index).partition(".tar/")[2] for index in range(18)]
    assert names == sorted(names) and len(set(names)) == 18
    assert [source.train.read(index) for index in range(18)] == [contents[name] for name in names]


@pytest.mark.parametrize("manifest", [False, True])
def test_an_evaluation_needs_no_train_shards(tmp_path, manifest):
    folder = write(tmp_path / "s", sound_shards(), manifest=manifest)
    for shard in folder.glob("*train*.tar"):
        shard.unlink()
    source = read_shards(folder, workers=1, training=False)
    assert source.classes == WNIDS and len(source.val) == 6
    with pytest.raises(ConfigError, match="no train shards"):
        read_shards(folder, workers=1)


def test_each_shards_images_are_listed_in_the_order_of_the_file(tmp_path):
    source = read_shards(write(tmp_path / "s", sound_shards()), workers=1)
    names = [[source.train.name(index).partition(".tar/")[2] for index in shard] for shard in source.train.by_shard()]
    assert names == [[name for name, _ in sound_shards()[f"im-train-{n:04d}.tar"][::2]] for n in range(3)]


def test_the_index_is_kept_until_a_shard_changes(tmp_path, monkeypatch):
    root = write(tmp_path / "s", sound_shards())
    first = read_shards(root, workers=1)
    monkeypatch.setattr(shards_module, "index_shard", lambda *_, **__: pytest.fail("indexed again"))
    again = read_shards(root, workers=1)
    assert again.fingerprint == first.fingerprint and again.classes == first.classes
    assert again.train.read(5) == first.train.read(5) and again.val.name(3) == first.val.name(3)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    changed = sound_shards()
    changed["im-train-0001.tar"] = changed["im-train-0001.tar"][:-2]
    write(root, changed)
    assert len(read_shards(root, workers=1).train) == 17
    for cache in (tmp_path / "cache").rglob("*.npz"):
        cache.write_bytes(cache.read_bytes()[:-30])
    assert len(read_shards(root, workers=1).train) == 17


def test_labels_from_json_and_classes_without_wordnet_ids(tmp_path):
    shards = {
        name: [
            (
                member.replace("n0", "x").replace(".cls", ".json"),
                content if member.endswith("jpg") else b'{"label": %s}' % content,
            )
            for member, content in members
        ]
        for name, members in sound_shards().items()
    }
    source = read_shards(write(tmp_path / "s", shards, manifest=False), workers=1)
    assert source.classes == ("0", "1", "2") and np.bincount(source.train.labels).tolist() == [6, 6, 6]


def test_brace_patterns(tmp_path):
    assert list(expand_braces("a{00..02}b{x,y}")) == [f"a0{n}b{c}" for n in range(3) for c in "xy"]
    assert list(expand_braces("{a-{1..2},b}.tar")) == ["a-1.tar", "a-2.tar", "b.tar"]
    for literal in ("{a", "a}", "a,b", "{a{b}"):
        assert list(expand_braces(literal)) == [literal.replace("{b}", "b")]
    root = write(tmp_path / "s", sound_shards(), manifest=False)
    assert len(read_shards(f"{root}/im-{{train-{{0000..0001}},val-0000}}.tar", workers=1).train) == 12
    with pytest.raises(ConfigError, match=r"im-train-0003\.tar"):
        read_shards(f"{root}/im-{{train-{{0000..0003}},val-0000}}.tar", workers=1)
    with pytest.raises(ConfigError, match="do not exist"):
        read_shards(f"{root}/im-{{train-{{0000..0001}},val-0000.tar", workers=1)


@pytest.mark.parametrize("manifest", [False, True])
def test_a_missing_shard_is_an_error(tmp_path, manifest):
    root = write(tmp_path / "s", sound_shards(), manifest=manifest)
    (root / "im-train-0001.tar").unlink()
    with pytest.raises(ConfigError, match="missing"):
        read_shards(root, workers=1)


def test_other_tar_files_are_noted(tmp_path):
    root = write(tmp_path / "s", sound_shards() | {"im-test-0000.tar": []})
    (root / "shards.json").unlink()
    assert "im-test-0000.tar" in read_shards(root, workers=1).notes[0]


def test_no_shards_and_no_such_folder_are_errors(tmp_path):
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="no train shards") as caught:
            read_shards(root)
        assert len(caught.value.problems) == 2


def test_without_a_manifest_labels_must_agree_with_wordnet_ids_and_start_at_0(tmp_path):
    shards = sound_shards()
    shards["im-train-0002.tar"][1] = (shards["im-train-0002.tar"][1][0], b"2")
    with pytest.raises(ConfigError, match="label 2"):
        read_shards(write(tmp_path / "wrong", shards, manifest=False), workers=1)
    from_1 = {
        name: [
            (member, b"%d" % (int(content) + 1) if member.endswith("cls") else content) for member, content in members
        ]
        for name, members in sound_shards().items()
    }
    with pytest.raises(ConfigError, match="start at 0"):
        read_shards(write(tmp_path / "from_1", from_1, manifest=False), workers=1)


def test_a_copied_shard_is_refused_also_with_its_members_in_another_order(tmp_path):
    shards = sound_shards()
    members = shards["im-train-0001.tar"]
    shards["im-train-0003.tar"] = [*members[2:], *members[:2]]
    with pytest.raises(ConfigError, match=r"0003\.tar has the samples of .*0001\.tar"):
        read_shards(write(tmp_path / "s", shards, manifest=False), workers=1)


@pytest.mark.parametrize("label", ["true", "1.0", '"1"', "null", "[1]", "-1", "1e3", "10000000"])
@pytest.mark.parametrize("extension", ["cls", "json"])
def test_labels_that_are_no_integers_are_refused(tmp_path, extension, label):
    shards = sound_shards()
    name, _ = shards["im-train-0000.tar"][1]
    content = label if extension == "cls" else f'{{"label": {label}}}'
    shards["im-train-0000.tar"][1] = (name.replace("cls", extension), content.encode())
    with pytest.raises(ConfigError, match="is not a label"):
        read_shards(write(tmp_path / "s", shards, manifest=False), workers=1)


@pytest.mark.parametrize("pattern", ["{0..3000000}", "{0..99999}{0..99999}", "{" * 3 + "0..999999999" + "}" * 3])
def test_a_pattern_of_millions_is_refused_at_once(tmp_path, pattern):
    started = time.monotonic()
    with pytest.raises(ConfigError, match="more than 100,000 shards"):
        read_shards(f"{tmp_path}/x-train-{pattern}.tar")
    assert time.monotonic() - started < 5


def test_a_shard_cut_after_the_start_gives_named_bad_images(tmp_path):
    root = write(tmp_path / "s", sound_shards())
    split = read_shards(root, workers=1).train
    os.truncate(root / "im-train-0000.tar", 600)
    index = next(index for index in range(len(split)) if "im-train-0000" in split.name(index))
    with pytest.raises(BadImage):
        split.read(index)


@pytest.mark.parametrize("kind", list(DAMAGE))
def test_damage_is_never_silent(tmp_path, kind):
    rng = random.Random(kind)
    for trial in range(4):
        damage_one(tmp_path / str(trial), kind, rng)
        assert silent_losses(tmp_path / str(trial)) == []


def test_undamaged_shards_have_no_losses_and_a_changed_one_is_seen_as_lost(tmp_path):
    assert silent_losses(write(tmp_path / "sound", sound_shards())) == []
    shards = sound_shards()
    del shards["im-train-0002.tar"][:2]
    assert silent_losses(write(tmp_path / "less", shards)) != []


def test_damaged_manifests_are_named(tmp_path):
    root = write(tmp_path / "s", sound_shards())
    for text in (
        "{",
        "[]",
        json.dumps({"classes": 3, "images": {}}),
        json.dumps({"classes": [], "images": {"x.tar": 1}}),
    ):
        (root / "shards.json").write_text(text)
        with pytest.raises(ConfigError, match=r"shards\.json"):
            read_shards(root, workers=1)


def test_the_order_by_shards_is_a_permutation_that_stays_near_the_shards():
    shards = tuple(np.array_split(np.random.default_rng(0).permutation(1000), 10))
    order = shard_permutation(0, 3, shards, window=50)
    assert sorted(order) == list(range(1000))
    assert np.array_equal(order, shard_permutation(0, 3, shards, window=50))
    assert not np.array_equal(order, shard_permutation(0, 4, shards, window=50))
    shard_of = np.empty(1000, int)
    for number, shard in enumerate(shards):
        shard_of[shard] = number
    assert max(len(set(shard_of[order[start : start + 50]])) for start in range(0, 1000, 50)) <= 3
