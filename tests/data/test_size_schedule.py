"""Growing images: the loader's batches in their sizes, and what is refused."""

from contextlib import closing

import pytest
import torch

from cl_train.config.schema import ConfigError
from cl_train.config.validation import load
from tests.data.image_folders import FLOAT_CHANNELS_LAST, data_of
from tests.data.tar_shards import sound_shards, write

GROWING = {"size_schedule": [[0, 16], [2, 32]], "val_size": 24, "image_size": 20}


@pytest.mark.parametrize(
    "schedule",
    [
        *([0, 128], [[1, 128]], [[0, 128], [0, 160]], [[0, 128], [4, 160], [3, 192]], [[0, 128, 3]], [[0, 4]]),
        *([[0, 30]], [[0, 5000]], [[0, 128], [5, 160]], [[0, "big"]], [[0, 128.5]], [[-1, 128]]),
    ],
)
def test_a_bad_schedule_is_refused(schedule):
    with pytest.raises(ConfigError, match=r"data\.size_schedule"):
        load({"epochs": 5, "data": {"size_schedule": schedule}})


def test_a_good_schedule_and_its_companions():
    assert load({"epochs": 6, "data": {"size_schedule": [[0, 128], [5, 160]]}}).data.size_schedule[1] == [5, 160]
    with pytest.raises(ConfigError, match="one size"):
        load({"data": {"size_schedule": [[0, 128]], "name": "dataset", "dataset": "a:b"}})
    with pytest.raises(ConfigError, match="val_resize"):
        load({"data": {"val_size": 256, "val_resize": 240}})


@pytest.mark.parametrize(
    ("name", "workers"), [("folder", 0), ("shards", 0), pytest.param("shards", 2, marks=pytest.mark.slow)]
)
def test_the_loader_changes_size_between_epochs(image_folder, tmp_path, monkeypatch, name, workers):
    settings, images = {"name": "folder", "root": str(image_folder)}, 96
    if name == "shards":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        root = write(tmp_path / "shards", sound_shards())
        settings, images = {"name": "shards", "root": str(root), "shuffle": "shards"}, 18
    pids = set()
    with closing(data_of(**GROWING, **settings, workers=workers)) as data:
        for epoch, size in enumerate([16, 32, 32]):
            batches = list(data.train(epoch, FLOAT_CHANNELS_LAST))
            assert len(batches) == data.batch_count() == images // 4
            (last,) = data.train(epoch, FLOAT_CHANNELS_LAST, first_batch=len(batches) - 1)
            assert torch.equal(last.images, batches[-1].images)
            assert {batch.images.shape for batch in batches} == {(4, 3, size, size)}
            assert all(batch.images.is_contiguous(memory_format=torch.channels_last) for batch in batches)
            assert {b.images.shape[2] for b in data.validation(FLOAT_CHANNELS_LAST)} == {24}
            pids.add(tuple(process.pid for process in data.train_loader._pool.processes))
            fresh = data_of(**{**GROWING, **settings, "size_schedule": [], "image_size": size})
            for one, other in zip(batches, fresh.train(epoch, FLOAT_CHANNELS_LAST), strict=True):
                assert torch.equal(one.images, other.images) and torch.equal(one.targets, other.targets)
    assert len(pids) == 1, "the workers live through a change of size"


def test_synthetic_data_grows():
    data = data_of(name="synthetic", synthetic_images=64, batch_size=8, **GROWING)
    assert data.batch_count() == 8
    assert next(data.train(0, FLOAT_CHANNELS_LAST)).images.shape == (8, 3, 16, 16)
    assert next(data.validation(FLOAT_CHANNELS_LAST)).images.shape == (8, 3, 24, 24)
