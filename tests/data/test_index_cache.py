"""The stored index of a large folder: the same as a fresh one, and never an outdated one."""

import os
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from cl_train.config.schema import DataConfig
from cl_train.data import folder
from cl_train.data.folder import read_folder
from cl_train.data.source import load_index
from cl_train.system.files import cache_folder
from tests.data.image_folders import write_folder


def age(*roots):
    for root in roots:
        for path, _, _ in os.walk(root):
            os.utime(path, (time.time() - 100, time.time() - 100))


def stored():
    return list(cache_folder().glob("*.npz"))


def loaded(path):
    split = partial(folder.FolderSplit, folder=path)
    return load_index(path, split, split)


def fresh(root):
    """Without a stored index."""
    for path in stored():
        path.unlink()
    return read_folder(root)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder whose times lie in the past; small folders are stored too, in a cache of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(folder, "_CACHED_FROM", 1)
    root = write_folder(tmp_path / "data", train=6, val=4)
    (root / "train" / "class_0" / "notes.txt").write_text("")
    age(root)
    return root


def test_the_stored_list_is_the_list(root, monkeypatch):
    listed = read_folder(root)
    assert len(stored()) == 1 and loaded(stored()[0]) is not None
    monkeypatch.setattr(folder, "_list", lambda *arguments: pytest.fail("listed again"))
    again = read_folder(root)
    assert (again.fingerprint, again.classes, again.notes) == (listed.fingerprint, listed.classes, listed.notes)
    assert [again.val.name(i) for i in range(4)] == [listed.val.name(i) for i in range(4)]


def test_each_layout_has_a_list_of_its_own(root):
    assert len(read_folder(root).train) == 6
    assert len(read_folder(root, DataConfig(extensions=[".jpg", ".txt"])).train) == 7


@pytest.mark.parametrize("change", ["added", "removed", "class", "nested"])
def test_a_changed_folder_is_listed_again(root, change):
    read_folder(root)
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
    assert loaded(stored()[0]) is None
    assert read_folder(root).fingerprint == fresh(root).fingerprint


def test_a_broken_list_is_not_used(root):
    listed = read_folder(root)
    path = stored()[0]
    for content in (b"", b"PK broken", path.read_bytes()[:300]):
        path.write_bytes(content)
        assert loaded(path) is None
        assert read_folder(root).fingerprint == listed.fingerprint


@pytest.mark.parametrize(("seconds", "lists"), [(1, 0), (3, 1)])
def test_a_folder_that_changed_just_now_is_not_stored(root, monkeypatch, seconds, lists):
    (root / "train" / "class_0" / "new.jpg").write_bytes(b"1")
    now_ns = (root / "train" / "class_0").stat().st_mtime_ns + seconds * 10**9
    monkeypatch.setattr(folder, "time", SimpleNamespace(time_ns=lambda: now_ns))
    read_folder(root)
    assert len(stored()) == lists


def test_a_new_image_behind_a_link_is_seen(root, tmp_path):
    """Class folders may be links, which os.walk does not follow."""
    linked = tmp_path / "linked"
    for split in ("train", "val"):
        (linked / split).mkdir(parents=True)
        for name in ("class_0", "class_1"):
            (linked / split / name).symlink_to(root / split / name)
    age(linked)
    assert len(read_folder(linked).train) == 6 and len(stored()) == 1
    (root / "train" / "class_0" / "new.jpg").write_bytes(b"1")
    assert len(read_folder(linked).train) == 7


def test_a_stored_list_that_lacks_an_array_is_replaced(root):
    listed = read_folder(root)
    (path,) = stored()
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{key: array for key, array in arrays.items() if key != "val/labels"})
    assert read_folder(root).fingerprint == listed.fingerprint
    with np.load(path) as file:
        assert set(file) == set(arrays)
