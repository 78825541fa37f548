"""Growing images: sizes by epoch, the loader's batches in them, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cl_train.config.schema import AugmentConfig, ConfigError, DataConfig
from cl_train.config.validation import load
from cl_train.data.build import Data, build_data
from cl_train.data.device import DeviceFormat
from cl_train.data.order import SizeSchedule
from cl_train.system.distributed import Dist
from tests.data.tar_shards import sound_shards, write

CPU = torch.device("cpu")
FORM = DeviceFormat(CPU, torch.float32, torch.channels_last)
GROWING = [[0, 16], [2, 32]]


def data_of(batch_size: int = 8, **settings: Any) -> Data:
    cfg = DataConfig(**{"workers": 0, "size_schedule": GROWING, "val_size": 24, "image_size": 20, **settings})
    return build_data(cfg, AugmentConfig(), batch_size=batch_size, seed=0, dist=Dist(0, 1, CPU))


@pytest.mark.parametrize(
    ("points", "sizes"),
    [
        ([[0, 128], [6, 160], [12, 192]], [128] * 3 + [160] * 6 + [192] * 5),
        ([[0, 96], [8, 224]], [96, 128, 128, 160, 160, 192, 192, 224, 224, 224]),
        ([[0, 16], [4, 32]], [16, 16, 32, 32, 32, 32]),
        ([[0, 28], [2, 32]], [28, 32, 32]),
        ([[0, 192], [3, 128]], [192, 160, 160, 128]),
        ([[0, 100]], [100, 100]),
    ],
)
def test_sizes_by_epoch(points: list[list[int]], sizes: list[int]) -> None:
    schedule = SizeSchedule(tuple((epoch, size) for epoch, size in points))
    assert [schedule.image_size_at(epoch) for epoch in range(len(sizes))] == sizes
    assert all(schedule.image_size_at(epoch) == size for epoch, size in points), "given sizes are kept"


@pytest.mark.parametrize(
    "schedule",
    [
        [0, 128],
        [[1, 128]],
        [[0, 128], [0, 160]],
        [[0, 128], [4, 160], [3, 192]],
        [[0, 128, 3]],
        [[0, 4]],
        [[0, 30]],
        [[0, 5000]],
        [[0, 128], [5, 160]],
        [[0, "big"]],
        [[0, 128.5]],
        [[-1, 128]],
    ],
)
def test_a_bad_schedule_is_refused(schedule: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.size_schedule"):
        load({"epochs": 5, "data": {"size_schedule": schedule}})


def test_a_good_schedule_and_its_companions() -> None:
    cfg = load({"epochs": 6, "data": {"size_schedule": [[0, 128], [5, 160]], "val_size": 192}})
    assert cfg.data.size_schedule == [[0, 128], [5, 160]]
    with pytest.raises(ConfigError, match="one size"):
        load({"data": {"size_schedule": [[0, 128]], "name": "dataset", "dataset": "a:b"}})
    with pytest.raises(ConfigError, match="val_resize"):
        load({"data": {"val_size": 256, "val_resize": 240}})


@pytest.fixture(params=["folder", "shards"])
def source(
    request: pytest.FixtureRequest, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], int]:
    """Settings of a data source, and the number of its training images."""
    if request.param == "folder":
        return {"name": "folder", "root": str(image_folder)}, 96
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return {"name": "shards", "root": str(write(tmp_path / "shards", sound_shards())), "shuffle": "shards"}, 18


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_loader_changes_size_between_epochs(source: tuple[dict[str, Any], int], workers: int) -> None:
    settings, images = {**source[0], "workers": workers}, source[1]
    data = data_of(batch_size=4, **settings)
    try:
        pids = set()
        for epoch, size in enumerate([16, 32, 32]):
            batches = list(data.train(epoch, FORM))
            assert len(batches) == data.batch_count() == images // 4
            (last,) = data.train(epoch, FORM, first_batch=len(batches) - 1)
            assert torch.equal(last.images, batches[-1].images)
            assert {batch.images.shape for batch in batches} == {(4, 3, size, size)}
            assert all(batch.images.is_contiguous(memory_format=torch.channels_last) for batch in batches)
            assert {tuple(batch.images.shape[1:]) for batch in data.validation(FORM)} == {(3, 24, 24)}
            loader: Any = data.train_loader  # type: ignore[union-attr]
            pids.add(tuple(process.pid for process in loader._workers.processes))
            fresh = data_of(**{**settings, "size_schedule": [], "image_size": size}, batch_size=4)
            for one, other in zip(batches, fresh.train(epoch, FORM), strict=True):
                assert torch.equal(one.images, other.images) and torch.equal(one.targets, other.targets)
            fresh.close()
        assert len(pids) == 1, "the workers live through a change of size"
    finally:
        data.close()


def test_synthetic_data_grows() -> None:
    data = data_of(name="synthetic", synthetic_images=64)
    assert data.batch_count() == 8
    assert next(iter(data.train(0, FORM))).images.shape == (8, 3, 16, 16)
    assert next(iter(data.validation(FORM))).images.shape == (8, 3, 24, 24)
