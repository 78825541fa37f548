"""data=dataset: exact order, exact resume and seeded random numbers for any Dataset."""

import itertools
import random
from contextlib import closing

import numpy as np
import pytest
import torch

from cl_train.config.schema import ConfigError
from cl_train.data.workers import WorkerError
from tests.data.image_folders import FLOAT_CHANNELS_LAST, data_of, same
from tests.data.own_datasets import NAMES


def own_data(name, **settings):
    return data_of(name="dataset", dataset=f"tests.data.own_datasets:{name}", image_size=16, **settings)


def epoch_of(data, epoch=0, first_batch=0):
    with closing(data):
        return [(batch.images.clone(), batch.targets) for batch in data.train(epoch, FLOAT_CHANNELS_LAST, first_batch)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_batches_depend_on_seed_epoch_and_index_alone(name):
    state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    whole = epoch_of(own_data(name), epoch=2)
    assert torch.equal(state[0], torch.get_rng_state()) and random.getstate() == state[2]
    assert np.array_equal(state[1], np.random.get_state()[1])
    assert len(whole) == 7 and whole[0][0].is_contiguous(memory_format=torch.channels_last)
    for workers in (0, 3):
        same(epoch_of(own_data(name, workers=workers), epoch=2, first_batch=3), whole[3:])
    ranks = [epoch_of(own_data(name, batch_size=2, rank=rank, world_size=2), epoch=2) for rank in (0, 1)]
    same([tuple(map(torch.cat, zip(*batches, strict=True))) for batches in zip(*ranks, strict=True)], whole)
    assert not torch.equal(epoch_of(own_data(name), epoch=3)[0][0], whole[0][0])


def test_validation_is_the_same_in_every_epoch_and_complete():
    data = own_data("Tensors")
    first, second = ([batch.images for batch in data.validation(FLOAT_CHANNELS_LAST)] for _ in range(2))
    assert [len(images) for images in first] == [4, 3]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert data.classes == ("a", "b", "c") and data.train_images == 31 and data.val_images == 7


def test_uint8_is_normalised_and_floating_point_is_not_and_the_time_is_measured():
    data = own_data("Pictures")
    epoch_of(data)
    assert data.times.images >= 28 and data.times.dataset_s > 0 and data.times.resize_s > 0
    raw, ready = epoch_of(own_data("uint8"))[0][0], epoch_of(own_data("Tensors"))[0][0]
    assert raw.min() < 0 and ready.min() >= 0 and ready.max() < 3


@pytest.mark.slow
def test_iterable_datasets_are_resumed_joined_and_counted(caplog):
    with caplog.at_level("WARNING"):
        data = own_data("Stream")
    assert "IterableDataset" in caplog.text
    whole = epoch_of(data)
    assert [images[:, 0, 0, 0].tolist() for images, _ in whole] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    same(epoch_of(data, first_batch=2), whole[2:])
    batches = epoch_of(own_data("DividedStream", workers=2))
    seen = [images[:, 0, 0, 0].tolist() for images, _ in batches]
    assert sorted(itertools.chain(*seen)) == list(range(12)) and all(len(values) == 4 for values in seen)
    assert all(targets.tolist() == [value % 2 for value in s] for (_, targets), s in zip(batches, seen, strict=True))
    assert batches[2][0].is_contiguous(memory_format=torch.channels_last)
    with closing(own_data("DividedStream", workers=5)) as data:  # an epoch of 12 samples ends at the second worker
        second = [
            [(batch.images.clone(), batch.targets) for batch in data.train(epoch, FLOAT_CHANNELS_LAST)]
            for epoch in range(2)
        ][1]
    same(epoch_of(own_data("DividedStream", workers=5), epoch=1, first_batch=1), second[1:])
    with pytest.raises(WorkerError, match="after 3 of 4 batches of 4 samples on rank 0"):
        epoch_of(own_data("ShortStream"))


@pytest.mark.parametrize(("name", "reason"), [("Tensor", "did you mean Tensors"), ("random", "no function")])
def test_a_name_without_a_function_is_refused(name, reason):
    with pytest.raises(ConfigError, match=reason):
        own_data(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Tensors", "Pictures"])
def test_a_stopped_and_resumed_run_is_bit_identical(train, tmp_path, name):
    words = ("data=dataset", f"data.dataset=tests.data.own_datasets:{name}", "data.root=null", "batch_size=8")
    whole = train(*words, "data.workers=0")
    train(*words, "data.workers=2", "max_steps=4", folder=tmp_path / "parts")
    done = train(*words, "data.workers=1", "resume=auto", folder=tmp_path / "parts")
    assert done.losses == whole.losses and len(whole.losses) > 4
    for key, value in whole.checkpoint()["model"].items():
        assert torch.equal(done.checkpoint()["model"][key], value), key
