"""data=dataset: exact order, exact resume and seeded random numbers for any Dataset."""

import random

import numpy as np
import pytest
import torch

from cl_train.config.schema import AugmentConfig, ConfigError, DataConfig
from cl_train.data.build import build_data
from cl_train.data.loader import BadImageError
from cl_train.data.workers import WorkerError
from cl_train.system.distributed import Dist
from tests.data.image_folders import CPU, FLOAT_CHANNELS_LAST


def own_data(name, *, batch_size=4, seed=0, rank=0, world_size=1, **settings):
    cfg = DataConfig(
        name="dataset", dataset=f"tests.data.own_datasets:{name}", **{"image_size": 16, "workers": 0, **settings}
    )
    return build_data(cfg, AugmentConfig(), batch_size=batch_size, seed=seed, dist=Dist(rank, world_size, CPU))


def epoch_of(data, epoch=0, first_batch=0):
    batches = [(batch.images.clone(), batch.targets) for batch in data.train(epoch, FLOAT_CHANNELS_LAST, first_batch)]
    data.close()
    return batches


def same(first, second):
    assert len(first) == len(second) > 0
    for (images, targets), (other_images, other_targets) in zip(first, second, strict=True):
        assert torch.equal(images, other_images) and torch.equal(targets, other_targets)


@pytest.mark.parametrize("name", ["Tensors", "uint8", "Pictures", "Arrays"])
def test_batches_depend_on_seed_epoch_and_index_alone(name):
    state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    whole = epoch_of(own_data(name), epoch=2)
    assert torch.equal(state[0], torch.get_rng_state()) and random.getstate() == state[2]
    assert np.array_equal(state[1], np.random.get_state()[1])
    assert len(whole) == 7 and whole[0][0].is_contiguous(memory_format=torch.channels_last)
    for workers in (0, 1, 3):
        same(epoch_of(own_data(name, workers=workers), epoch=2, first_batch=3), whole[3:])
    ranks = [epoch_of(own_data(name, batch_size=2, rank=rank, world_size=2), epoch=2) for rank in (0, 1)]
    joined = [(torch.cat([a, b]), torch.cat([s, t])) for (a, s), (b, t) in zip(*ranks, strict=True)]
    same(joined, whole)
    assert not torch.equal(epoch_of(own_data(name), epoch=3)[0][0], whole[0][0])


def test_validation_is_the_same_in_every_epoch_and_complete():
    data = own_data("Tensors")
    first, second = ([batch.images for batch in data.validation(FLOAT_CHANNELS_LAST)] for _ in range(2))
    assert [len(images) for images in first] == [4, 3]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert data.classes == ("a", "b", "c") and data.train_images == 31 and data.val_images == 7


def test_uint8_is_normalised_and_floating_point_is_not():
    raw, ready = epoch_of(own_data("uint8"))[0][0], epoch_of(own_data("Tensors"))[0][0]
    assert raw.min() < 0 and ready.min() >= 0 and ready.max() < 3


def test_a_sample_that_raises_is_named_or_replaced():
    with pytest.raises(BadImageError, match=r"sample [46] of the train dataset.*KeyError.*own_datasets\.py, line"):
        epoch_of(own_data("Broken", workers=2))
    data = own_data("Broken", on_bad_image="skip")
    assert len(epoch_of(data)) == 7 and len(data.bad_images.reasons) == 2


def test_an_iterable_dataset_is_accepted_with_a_statement(caplog):
    with caplog.at_level("WARNING"):
        data = own_data("Stream")
    assert "IterableDataset" in caplog.text
    whole = epoch_of(data)
    assert [images[:, 0, 0, 0].tolist() for images, _ in whole] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    same(epoch_of(data, first_batch=2), whole[2:])


def test_incomplete_batches_of_the_workers_are_joined():
    batches = epoch_of(own_data("DividedStream", workers=2))
    assert [images[:, 0, 0, 0].tolist() for images, _ in batches] == [[0, 2, 1, 3], [4, 6, 5, 7], [8, 10, 9, 11]]
    assert batches[2][0].is_contiguous(memory_format=torch.channels_last)
    assert batches[2][1].tolist() == [0, 0, 1, 1]


def test_an_iterable_dataset_that_ends_early_is_named():
    with pytest.raises(WorkerError, match="after 3 of 4 batches of 4 samples on rank 0"):
        epoch_of(own_data("ShortStream"))


def test_the_time_in_the_dataset_is_measured():
    data = own_data("Pictures")
    epoch_of(data)
    assert data.times.images >= 28 and data.times.dataset_s > 0 and data.times.resize_s > 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("another_size", r"\[3, 17, 17\]"),
        ("without_classes", "neither `classes` nor `num_classes`"),
        ("failing", "/nowhere"),
        ("Tensor", "did you mean Tensors"),
        ("random", "no function"),
    ],
)
def test_what_cannot_be_used_is_refused(name, reason):
    with pytest.raises(ConfigError, match=reason):
        own_data(name)


@pytest.mark.parametrize("name", ["Tensors", pytest.param("Pictures", marks=pytest.mark.slow)])
def test_a_stopped_and_resumed_run_is_bit_identical(train, tmp_path, name):
    words = ("data=dataset", f"data.dataset=tests.data.own_datasets:{name}", "data.root=null", "batch_size=8")
    whole = train(*words, "data.workers=0")
    train(*words, "data.workers=2", "max_steps=4", folder=tmp_path / "parts")
    done = train(*words, "data.workers=1", "resume=auto", folder=tmp_path / "parts")
    assert done.losses == whole.losses and len(whole.losses) > 4
    for key, value in whole.checkpoint()["model"].items():
        assert torch.equal(done.checkpoint()["model"][key], value), key
