"""data=dataset: exact order, exact resume and seeded random numbers for any Dataset. Wrong ones,
map-style and streams, with and without workers: each is named, none is trained on.
"""

import os
import random
import re
from contextlib import closing

import numpy as np
import pytest
import torch

from cl_train.config.schema import AugmentConfig
from cl_train.errors import BadImageError, ConfigError, WorkerError
from tests.data import image_folders
from tests.data import user_datasets as wrong
from tests.data.image_folders import FLOAT_CHANNELS_LAST, same, val_count
from tests.processes import LIMIT_S

SLOW = pytest.mark.slow
WORKERS = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=SLOW)])


def own_data(name, **settings):
    return image_folders.data_of(
        name="dataset", dataset=f"tests.data.user_datasets:{name}", image_size=16, **settings
    )


def epoch_of(data, epoch=0, first_batch=0):
    with closing(data):
        return [
            (batch.images.clone(), batch.targets)
            for batch in data.train(epoch, FLOAT_CHANNELS_LAST, first_batch)
        ]


@SLOW
@pytest.mark.parametrize("name", ["Tensors", "uint8", "Pictures", "Arrays"])
def test_batches_depend_on_seed_epoch_and_index_alone(name):
    def states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    before, whole = states(), epoch_of(own_data(name), epoch=2)
    assert states() == before
    assert len(whole) == 7 and whole[0][0].is_contiguous(memory_format=torch.channels_last)
    for workers in (0, 3):
        same(epoch_of(own_data(name, workers=workers), epoch=2, first_batch=3), whole[3:])
    ranks = [
        epoch_of(own_data(name, batch_size=2, rank=rank, world_size=2), epoch=2) for rank in (0, 1)
    ]
    same(
        [tuple(map(torch.cat, zip(*batches, strict=True))) for batches in zip(*ranks, strict=True)],
        whole,
    )
    assert not torch.equal(epoch_of(own_data(name), epoch=3)[0][0], whole[0][0])


def test_validation_is_complete_and_equal_in_every_epoch_and_only_uint8_is_normalised() -> None:
    data = own_data("Tensors")
    first, second = (
        [batch.images for batch in data.validation(FLOAT_CHANNELS_LAST)] for _ in range(2)
    )
    assert [len(images) for images in first] == [4, 3]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert data.classes == ("a", "b", "c") and data.train_images == 31 and data.val_images == 7
    data = own_data("Pictures")
    epoch_of(data)
    assert data.times.images >= 28 and data.times.dataset_s > 0 and data.times.resize_s > 0
    raw, ready = epoch_of(own_data("uint8"))[0][0], epoch_of(own_data("Tensors"))[0][0]
    assert raw.min() < 0 and ready.min() >= 0 and ready.max() < 3


@WORKERS
def test_a_stream_is_divided_and_begins_anew_when_it_is_resumed(caplog, workers):
    with caplog.at_level("WARNING"):
        data = own_data("Numbers", workers=workers)
    assert "resume is not exact" in caplog.text
    whole = epoch_of(data)
    seen = [images[:, 0, 0, 0].tolist() for images, _ in whole]
    if workers == 0:
        assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    # six samples for each of two workers: a full batch of each, then the first one begins again
    else:
        assert seen == [[0, 2, 4, 6], [1, 3, 5, 7], [0, 2, 4, 6]]
    assert [targets.tolist() for _, targets in whole] == [
        [n % 2 for n in numbers] for numbers in seen
    ]
    assert whole[2][0].is_contiguous(memory_format=torch.channels_last)
    same(epoch_of(data, first_batch=2), whole[:1])
    assert val_count(data) == 12


@pytest.mark.parametrize(
    ("name", "reason"), [("Tensor", "did you mean Tensors"), ("random", "no function")]
)
def test_a_name_without_a_function_is_refused(name, reason):
    with pytest.raises(ConfigError, match=reason):
        own_data(name)


KINDS = pytest.mark.parametrize("kind", [wrong.Samples, wrong.Stream])
INT64 = next(sample for sample, words in wrong.BAD_SAMPLES if words == "torch.int64")


def wrong_data(monkeypatch, train, val=wrong.Samples, **settings):
    """The data of these functions."""
    monkeypatch.setattr(
        wrong, "built", lambda split, size: {"train": train, "val": val}[split](), raising=False
    )
    return own_data("built", **{"worker_timeout_s": LIMIT_S, "max_bad_images": 1000, **settings})


@WORKERS
@KINDS
def test_every_wrong_sample_is_named_with_its_reason_and_never_used(monkeypatch, kind, workers):
    bad = {3 * place + 1: sample for place, (sample, _) in enumerate(wrong.BAD_SAMPLES)}
    data = wrong_data(
        monkeypatch, wrong.Samples, lambda: kind(bad, 80), workers=workers, on_bad_image="skip"
    )
    with closing(data):
        batches = [(batch.images, batch.targets) for batch in data.validation(FLOAT_CHANNELS_LAST)]
    assert sum(len(targets) for _, targets in batches) == 80 - len(bad)
    assert all(not images.any() and targets.eq(1).all() for images, targets in batches)
    assert data.bad_images.skipped == len(bad) == len(data.bad_images.reasons)
    reasons = {}
    pattern = r"sample (\d+) of the val dataset(?: in worker (\d))?"
    for name, reason in data.bad_images.reasons.items():
        index, worker = map(int, re.fullmatch(pattern, name).groups("0"))
        is_divided = workers and kind is wrong.Stream
        reasons[index * workers + worker if is_divided else index] = reason
    for index, (_, words) in zip(bad, wrong.BAD_SAMPLES, strict=True):
        assert re.search(words, reasons[index]) and "\n" not in reasons[index]


@WORKERS
@KINDS
def test_a_wrong_sample_ends_the_run_by_default_and_training_can_skip_it(
    monkeypatch, kind, workers
):
    data = wrong_data(monkeypatch, lambda: kind({6: INT64}), workers=workers)
    with pytest.raises(BadImageError, match=r"^'sample [36] of the train dataset.*int64"):
        epoch_of(data)
    skips = {"workers": workers, "on_bad_image": "skip"}
    data = wrong_data(monkeypatch, lambda: kind({6: INT64}), **skips)
    assert [targets.tolist() for _, targets in epoch_of(data)] == [[1] * 4] * 3
    assert data.bad_images.skipped >= 1


@KINDS
@pytest.mark.parametrize(
    ("sample", "words", "limit_s"),
    [
        (INT64, "torch.int64", LIMIT_S),
        (wrong.END, "exited with 7", LIMIT_S),
        pytest.param(wrong.HANG, "no loader worker", 0.4, marks=SLOW),
    ],
)
def test_a_first_sample_that_is_wrong_or_ends_or_stops_its_process(
    monkeypatch, kind, sample, words, limit_s
):
    """A machine too busy for the short limit gives the same message."""
    with pytest.raises(ConfigError, match=f"sample 0 of the val dataset.*{words}"):
        wrong_data(monkeypatch, wrong.Samples, lambda: kind({0: sample}), worker_timeout_s=limit_s)


class EndlessStream(wrong.Stream):
    def __iter__(self):
        return iter(wrong.good, None)


class LostStream(wrong.Stream):
    """A generator, which ends with the exception."""

    def __iter__(self):
        yield wrong.good()
        raise OSError("the storage was lost")


class UnopenedStream(wrong.Stream):
    """Fails from the second epoch on, with the error that a DataLoader raises for a timeout."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        if self.epoch:
            raise RuntimeError("the storage was lost")
        return super().__iter__()


@WORKERS
def test_a_stream_of_another_length_than_its_own(monkeypatch, workers):
    """Training takes what it needs and begins again; an evaluation counts what it gets."""
    data = wrong_data(monkeypatch, EndlessStream, EndlessStream, workers=workers)
    assert len(epoch_of(data)) == 3 and val_count(data) > 12
    data = wrong_data(monkeypatch, lambda: wrong.Stream(count=12), workers=workers)
    data.train_loader.sample_count = 24
    assert len(epoch_of(data)) == 6
    data = wrong_data(monkeypatch, LostStream, workers=workers, on_bad_image="skip")
    with pytest.raises(WorkerError, match=r"fewer than 4 good.*was lost"):
        epoch_of(data)
    data = wrong_data(monkeypatch, UnopenedStream, workers=workers)
    with pytest.raises(BadImageError, match="the storage was lost"):
        epoch_of(data, epoch=1)


def test_a_stream_repeats_no_images(monkeypatch):
    with pytest.raises(ConfigError, match=r"augment\.repeats does not work"):
        wrong_data(monkeypatch, wrong.Stream, augment=AugmentConfig(repeats=2))


def with_attributes(**attributes):
    dataset = wrong.Samples()
    vars(dataset).update({"num_classes": None, **attributes})
    return dataset


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: with_attributes(classes="cats"), "classes"),
        (lambda: with_attributes(num_classes=0), "classes"),
        (lambda: with_attributes(), "classes"),
        (lambda: with_attributes(classes=("a",), num_classes=2), "classes"),
        (lambda: wrong.Samples(count=0), "empty"),
        (lambda: None, "must return a Dataset.*TypeError"),
        (lambda: os.listdir("/nowhere"), "must return a Dataset.*FileNotFoundError.*/nowhere"),
    ],
)
def test_what_is_no_dataset_of_known_classes_and_length_is_refused(monkeypatch, made, words):
    with pytest.raises(ConfigError, match=words):
        wrong_data(monkeypatch, made)
