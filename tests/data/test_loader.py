"""Batches depend on the seed, the epoch and the index alone: not on workers, ranks or where the
epoch began. Bad images are named, counted, replaced or left out. Images grow.
"""

import random
import time
from contextlib import closing

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from cl_train.config.schema import AugmentConfig
from cl_train.config.validation import checked_config
from cl_train.data.loader_report import bottleneck_advice
from cl_train.data.transforms import ImageReader, WorkerTimes
from cl_train.data.workers import shared
from cl_train.errors import ConfigError
from tests.data.image_folders import (
    CPU,
    FLOAT_CHANNELS_LAST,
    DeviceFormat,
    all_pixels,
    data_of,
    folder_data,
    jpeg,
    same,
    train_batches,
    val_count,
    write_folder,
)
from tests.data.tar_shards import sound_shards, write

TRUNCATED = jpeg()[:300]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("images"), train=53, val=17)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_do_not_depend_on_workers_abandoned_epochs_and_the_first_batch(root, workers):
    whole = train_batches(folder_data(root), epoch=3)
    assert whole[0][0].dtype == torch.uint8
    assert all(images.stride() == (32 * 32 * 3, 1, 32 * 3, 3) for images, _ in whole)
    with closing(folder_data(root, workers=workers)) as data:
        assert len(whole) == data.batch_count() == 13
        same(train_batches(data, epoch=3), whole)
        for taken in (1, 0, 3):
            batches = data.train_loader.batches(5)
            for _ in range(taken):
                next(batches)
            batches.close()
        for first_batch in (0, 1, 12):
            same(train_batches(data, epoch=3, first_batch=first_batch), whole[first_batch:])
        seen = []
        for number, host in enumerate(data.train_loader.batches(3)):
            seen.append((host.images.clone(), host.targets.clone()))
            assert number != 4 or val_count(data) == 17  # an evaluation within the epoch
        same(seen, whole)
        kept = [(batch, batch.images.clone()) for batch in data.train(0, FLOAT_CHANNELS_LAST)]
    assert all(torch.equal(batch.images, pixels) for batch, pixels in kept)


def test_a_slow_worker_gets_fewer_images_and_its_slots_are_not_overwritten(root, monkeypatch):
    expected = train_batches(folder_data(root))
    plain, times = ImageReader.read, shared((2,), torch.int64)

    def read(self, row, index, epoch, random_index):
        worker = get_worker_info().id
        times[worker] += 1
        if worker == 0 and times[0] == 1:  # until the other one has filled all slots that are free
            while times[1] < free_rows:
                time.sleep(0.001)
            time.sleep(0.1)  # for a worker that does not wait to overwrite
        return plain(self, row, index, epoch, random_index)

    monkeypatch.setattr(ImageReader, "read", read)
    with closing(folder_data(root, workers=2, worker_timeout_s=10)) as data:
        loader = data.train_loader  # 7 slots; batches 0, 2, 4 wait for the slow worker
        free_rows = (loader._slot_count - loader._parts_per_worker) * loader.batch_size
        same(train_batches(data), expected)


def test_an_abandoned_epoch_writes_nothing_into_the_next_one(root, monkeypatch):
    """Its requests lie in the same slots, and a slow worker still fills them."""
    plain = ImageReader.read

    def read(self, row, index, epoch, random_index):
        time.sleep(0.05 if epoch == 5 and get_worker_info().id == 0 else 0)
        return plain(self, row, index, epoch, random_index)

    monkeypatch.setattr(ImageReader, "read", read)
    with closing(folder_data(root, workers=2)) as data:
        next(data.train_loader.batches(5))
        found = train_batches(data, epoch=3, first_batch=2)
    same(found, train_batches(folder_data(root), epoch=3, first_batch=2))


def test_epochs_and_seeds_differ_and_a_second_iteration_ends_the_first_with_an_error(root):
    data = folder_data(root)
    first = all_pixels(train_batches(data, epoch=0))
    assert not torch.equal(first, all_pixels(train_batches(data, epoch=1)))
    assert not torch.equal(first, all_pixels(train_batches(folder_data(root, seed=1))))
    batches = data.train_loader.batches(0)
    next(batches)
    next(data.train_loader.batches(1))
    with pytest.raises(RuntimeError, match="another iteration"):
        next(batches)


def test_ranks_validate_every_image_once(root):
    datas = [folder_data(root, rank=rank, world_size=3) for rank in range(3)]
    hosts = (host for data in datas for host in data.val_loader.batches())
    seen = [image.numpy().tobytes() for host in hosts for image in host.images]
    assert len(seen) == len(set(seen)) == 17


@pytest.mark.parametrize(
    "policy",
    [
        "trivialaugment",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("randaugment", "v0", "augmix")),
    ],
)
def test_policies_are_seeded_per_image_and_leave_the_global_generator_alone(root, policy):
    augment = AugmentConfig(policy=policy, erase=0.5)
    torch.manual_seed(5)
    before, others = torch.get_rng_state(), (np.random.get_state()[2], random.getstate())
    reference = train_batches(folder_data(root, augment=augment))
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[2], random.getstate()) == others
    with closing(folder_data(root, augment=augment, workers=2)) as data:
        same(train_batches(data), reference)
    assert not torch.equal(all_pixels(train_batches(folder_data(root))), all_pixels(reference))


def test_erased_pixels_have_the_mean_colour_in_every_image(root):
    data = folder_data(root, augment=AugmentConfig(erase=1.0), batch_size=50)
    ((images, _),) = train_batches(data)
    is_erased = (images == torch.tensor([124, 116, 104]).view(1, 3, 1, 1)).all(dim=1)
    assert (is_erased.flatten(1).sum(dim=1) >= 0.02 * 32 * 32 * 0.8).all()


@pytest.mark.parametrize("mix", [{"mixup": 0.2}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}])
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_mixed_batches_are_seeded_and_keep_the_layout(root, mix, memory_format):
    form, augment = DeviceFormat(CPU, torch.float32, memory_format), AugmentConfig(**mix)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again = (list(folder_data(root, augment=augment).train(2, form)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    plain = list(folder_data(root).train(2, form))
    for batch, other in zip(first, again, strict=True):
        assert torch.equal(batch.images, other.images) and torch.equal(batch.targets, other.targets)
        assert batch.targets.shape == (4, 2)
        assert torch.allclose(batch.targets.sum(dim=1), torch.ones(4))
        assert batch.images.is_contiguous(memory_format=memory_format)
    pairs = zip(first, plain, strict=True)
    assert any(not torch.equal(batch.images, unmixed.images) for batch, unmixed in pairs)


def test_repeated_images_have_their_own_random_numbers_and_a_resumed_epoch_is_the_same(root):
    data = folder_data(root, augment=AugmentConfig(repeats=2), batch_size=8)
    whole = train_batches(data)
    assert len(whole) == 53 // 8
    for images, targets in whole:
        assert torch.equal(targets[:4], targets[4:])
        assert (images[:4] != images[4:]).flatten(1).any(dim=1).all()
    same(train_batches(data, first_batch=2), whole[2:])
    assert folder_data(root, augment=AugmentConfig(repeats=8), world_size=2).batch_count() == 6
    with pytest.raises(ConfigError, match=r"augment\.repeats=9.* 8 "):
        folder_data(root, augment=AugmentConfig(repeats=9), world_size=2)


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize(("ranks", "micro_steps"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_a_step_has_the_same_images_for_any_ranks_and_micro_steps(
    root, ranks, micro_steps, repeats
):
    """3 does not divide 16, nor 8, nor 4: 6 images, of which the last is shown once."""
    repeats = {"augment": AugmentConfig(repeats=repeats)}
    whole = train_batches(folder_data(root, batch_size=16, **repeats))
    sizes = {"batch_size": 16 // ranks // micro_steps, "accumulate_steps": micro_steps}
    of_ranks = [
        train_batches(folder_data(root, rank=rank, world_size=ranks, **sizes, **repeats))
        for rank in range(ranks)
    ]
    micro_batches = [batch for of_step in zip(*of_ranks, strict=True) for batch in of_step]
    parts = ranks * micro_steps
    steps = [micro_batches[first : first + parts] for first in range(0, len(micro_batches), parts)]
    same([tuple(map(torch.cat, zip(*step, strict=True))) for step in steps], whole)


@pytest.mark.parametrize(
    ("times", "workers", "expected", "setting"),
    [
        (WorkerTimes(12.0, 6.0, 1.0, 1000), 2, "12.0 ms", "smaller copy"),
        (WorkerTimes(0.5, 8.0, 1.0, 9000), 2, "52 %", "data.prefetch"),
        (WorkerTimes(0.5, 16.0, 3.0, 9000), 2, "2 of 8 cores", "data.workers=8"),
        (WorkerTimes(2.0, 68.0, 9.0, 9000), 8, "86 %", "resize"),
        (WorkerTimes(0.5, 9.0, 0.4, 9000), 0, "1 of 8 cores", "data.workers=8"),
        (WorkerTimes(resize_s=10.0, images=9000, dataset_s=65.0), 8, "your Dataset", "7.2 ms"),
        (WorkerTimes(), 2, "data.workers=2", "8 cores"),
    ],
)
def test_each_bottleneck_has_its_setting(times, workers, expected, setting):
    text = bottleneck_advice(times, workers=workers, cores=8, seconds=10, data_wait_pct=42.4)
    assert "42 %" in text and expected in text and setting in text
    assert (
        bottleneck_advice(times, workers=workers, cores=8, seconds=10, data_wait_pct=10.0) is None
    )


def test_skip_counts_and_substitutes_the_same_image_with_its_label_for_any_workers(tmp_path):
    root = write_folder(tmp_path / "one", train=12, val=11)
    (root / "train/class_0/0006.jpg").write_bytes(b"broken")
    (root / "val/class_0/0004.jpg").write_bytes(TRUNCATED)
    reference = train_batches(folder_data(root, on_bad_image="skip"))
    assert sorted(torch.cat([targets for _, targets in reference]).tolist()) == [0] * 6 + [1] * 6
    for workers in (0, 3):
        with closing(folder_data(root, workers=workers, on_bad_image="skip")) as data:
            same(train_batches(data), reference)
            assert data.bad_images.skipped == 1
            assert val_count(data) == 10, "a substitute would count another image twice"
            assert data.bad_images.skipped == 2


GROWING = {"size_schedule": [[0, 16], [2, 32]], "val_size": 24, "image_size": 20}
REFUSED = (
    [0, 128],
    [[1, 128]],
    [[0, 128], [0, 160]],
    [[0, 128], [4, 160], [3, 192]],
    [[0, 128], [5, 160]],  # of 5 epochs
    [[0, 128, 3]],
    [[0, 30]],
    [[0, 5000]],
    [[0, "big"]],
)


def test_a_good_schedule_and_bad_ones():
    good = [[0, 128], [5, 160]]
    assert checked_config({"epochs": 6, "data": {"size_schedule": good}}).data.size_schedule == good
    for schedule in REFUSED:
        with pytest.raises(ConfigError, match=r"data\.size_schedule"):
            checked_config({"epochs": 5, "data": {"size_schedule": schedule}})
    with pytest.raises(ConfigError, match="one size"):
        checked_config({"data": {"size_schedule": [[0, 128]], "name": "dataset", "dataset": "a:b"}})
    with pytest.raises(ConfigError, match="val_resize"):
        checked_config({"data": {"val_size": 256, "val_resize": 240}})


@pytest.mark.parametrize(
    ("name", "workers"),
    [("folder", 0), ("shards", 0), pytest.param("shards", 2, marks=pytest.mark.slow)],
)
def test_the_loader_changes_size_between_epochs(image_folder, tmp_path, name, workers):
    settings, images = {"name": "folder", "root": str(image_folder)}, 96
    if name == "shards":
        root = write(tmp_path / "shards", sound_shards())
        settings, images = {"name": "shards", "root": str(root)}, 18
    pids = set()
    with closing(data_of(**GROWING, **settings, workers=workers)) as data:
        for epoch, size in enumerate([16, 32, 32]):
            batches = list(data.train(epoch, FLOAT_CHANNELS_LAST))
            assert len(batches) == data.batch_count() == images // 4
            (last,) = data.train(epoch, FLOAT_CHANNELS_LAST, first_batch=len(batches) - 1)
            assert torch.equal(last.images, batches[-1].images)
            assert {batch.images.shape for batch in batches} == {(4, 3, size, size)}
            assert {b.images.shape[2] for b in data.validation(FLOAT_CHANNELS_LAST)} == {24}
            pids.add(tuple(process.pid for process in data.train_loader._pool.processes))
            fresh = data_of(**{**GROWING, **settings, "size_schedule": [], "image_size": size})
            for one, other in zip(batches, fresh.train(epoch, FLOAT_CHANNELS_LAST), strict=True):
                assert torch.equal(one.images, other.images)
    assert len(pids) == 1
