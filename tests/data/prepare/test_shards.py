"""Shards from a folder: the same images, order and losses."""

import numpy as np
import pytest

from cl_train.commands.prepare_imagenet import main
from cl_train.data.images import list_folder
from cl_train.data.prepare.shards import write_shards
from cl_train.data.tar_shards import list_shards
from cl_train.errors import ConfigError
from cl_train.system.processes import map_in_processes
from tests.data.image_folders import (
    encoded,
    folder_data,
    jpeg,
    noise,
    same,
    train_batches,
    write_folder,
)


@pytest.fixture
def folder(tmp_path):
    root = write_folder(tmp_path / "folder", train=22, val=7)
    (root / "train/class_0/0001.5-a.JPEG").write_bytes(jpeg(50, 40))
    (root / "train/class_0/0001.png").write_bytes(encoded(noise(30, 40), "PNG"))
    return root


def test_shards_hold_the_folders_images_in_the_folders_order(folder, tmp_path):
    (folder / "train/class_1/empty.jpg").write_bytes(b"")
    images, (bad,) = write_shards(folder, tmp_path / "shards", images_per_shard=7, workers=2)
    assert "empty.jpg" in bad and sorted(images.values()) == [6, 6, 6, 6, 7]
    (folder / "train/class_1/empty.jpg").unlink()
    source, shards = list_folder(folder), list_shards(tmp_path / "shards", workers=2)
    assert shards.classes == source.classes
    for ours, theirs in ((shards.train, source.train), (shards.val, source.val)):
        assert np.array_equal(ours.labels, theirs.labels)
        assert all(ours.read(index) == theirs.read(index) for index in range(len(theirs)))
    labels = [set(shards.train.labels[shards.train.shard == number]) for number in range(4)]
    assert all(len(classes) == 2 for classes in labels), "classes are mixed"


@pytest.mark.slow
def test_training_on_shards_has_the_batches_of_the_folder(folder, tmp_path):
    root = tmp_path / "shards"
    words = [f"data.root={folder}", f"out={root}", "images_per_shard=5", "data.workers=1"]
    assert main(["shards", *words]) == 0
    same(train_batches(folder_data(root, name="shards")), train_batches(folder_data(folder)))


def test_an_interrupted_writer_continues(folder, tmp_path, monkeypatch):
    write_shards(folder, tmp_path / "reference", images_per_shard=7, workers=1)
    out = tmp_path / "out"

    def two_shards(*arguments, **options):
        results = map_in_processes(*arguments, **options)
        yield next(results)
        yield next(results)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("cl_train.data.prepare.shards.map_in_processes", two_shards)
        write_shards(folder, out, images_per_shard=7, workers=1)
    assert len(list(out.glob("*.tar"))) == 2 and not (out / "shards.json").exists()
    (out / "folder-train-000001.tar").write_bytes(b"damaged")
    (out / ".folder-train-000002.tar.part").write_bytes(b"half")
    kept = (out / "folder-train-000000.tar").stat().st_mtime_ns
    write_shards(folder, out, images_per_shard=7, workers=1)
    for path in (tmp_path / "reference").glob("[!.]*"):
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert (out / "folder-train-000000.tar").stat().st_mtime_ns == kept
    with pytest.raises(ConfigError, match="images_per_shard=7"):
        write_shards(folder, out, images_per_shard=8, workers=1)
