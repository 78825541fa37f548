"""data=dataset: exact order, exact resume and seeded random numbers for any Dataset. Wrong ones,
map-style and streams, with and without workers: each is named, none is trained on.
"""

import itertools
import multiprocessing
import os
import random
import re
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from cl_train.config.schema import ConfigError
from cl_train.data import workers as data_workers
from cl_train.errors import BadImageError, WorkerError
from tests.data import image_folders
from tests.data import user_datasets as wrong
from tests.data.image_folders import FLOAT_CHANNELS_LAST, count_silence_from, same, val_count
from tests.processes import LIMIT_S, wait_until


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_streams_are_joined_and_counted_and_begin_anew_when_they_are_resumed(caplog):
    with caplog.at_level("WARNING"):
        data = own_data("Numbers")
    assert "resume is not exact" in caplog.text
    whole = epoch_of(data)
    assert [images[:, 0, 0, 0].tolist() for images, _ in whole] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    same(epoch_of(data, first_batch=2), whole[:1])
    batches = epoch_of(own_data("Numbers", workers=2))
    seen = [images[:, 0, 0, 0].tolist() for images, _ in batches]
    assert sorted(itertools.chain(*seen)) == list(range(12)) and all(
        len(values) == 4 for values in seen
    )
    assert all(
        targets.tolist() == [value % 2 for value in s]
        for (_, targets), s in zip(batches, seen, strict=True)
    )
    assert batches[2][0].is_contiguous(memory_format=torch.channels_last)
    seen = [images[:, 0, 0, 0].tolist() for images, _ in epoch_of(own_data("Numbers", workers=5))]
    assert sorted(itertools.chain(*seen)) == list(range(12)), "no worker has a whole batch"
    with pytest.raises(WorkerError, match="after 3 of 4 batches of 4 samples on rank 0"):
        epoch_of(own_data("short"))


@pytest.mark.parametrize(
    ("name", "reason"), [("Tensor", "did you mean Tensors"), ("random", "no function")]
)
def test_a_name_without_a_function_is_refused(name, reason):
    with pytest.raises(ConfigError, match=reason):
        own_data(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Tensors", "Pictures"])
def test_a_stopped_and_resumed_run_is_bit_identical(train, tmp_path, name):
    words = (
        "data=dataset",
        f"data.dataset=tests.data.user_datasets:{name}",
        "data.root=null",
        "batch_size=8",
    )
    whole = train(*words, "data.workers=0")
    train(*words, "data.workers=2", "max_steps=4", folder=tmp_path / "parts")
    done = train(*words, "data.workers=1", "resume=auto", folder=tmp_path / "parts")
    assert done.losses == whole.losses and len(whole.losses) > 4
    for key, value in whole.checkpoint()["model"].items():
        assert torch.equal(done.checkpoint()["model"][key], value), key


SLOW = pytest.mark.slow
KINDS = pytest.mark.parametrize("kind", [wrong.Samples, wrong.Stream])
WORKERS = pytest.mark.parametrize("workers", [0, pytest.param(2, marks=SLOW)])
INT64 = next(sample for sample, words in wrong.BAD_SAMPLES if words == "torch.int64")


def wrong_data(monkeypatch, train, val=wrong.Samples, **settings):
    """The data of these functions."""
    monkeypatch.setattr(data_workers, "_POLL_S", 0.1)
    monkeypatch.setattr(
        wrong, "built", lambda split, size: {"train": train, "val": val}[split](), raising=False
    )
    return own_data("built", **{"worker_timeout_s": LIMIT_S, "max_bad_images": 1000, **settings})


@WORKERS
@KINDS
def test_every_wrong_sample_is_named_with_its_reason(monkeypatch, kind, workers):
    """In every third place, and with a good sample in it after it was skipped.

    Never a value of the wrong one.
    """
    bad = {3 * place + 1: sample for place, (sample, _) in enumerate(wrong.BAD_SAMPLES)}
    count = 4 * len(bad)
    data = wrong_data(monkeypatch, lambda: kind(bad, count), workers=workers, on_bad_image="skip")
    batches = epoch_of(data)
    assert len(batches) == count // 4 and data.bad_images.skipped == len(bad)
    assert all(not images.any() and targets.tolist() == [1] * 4 for images, targets in batches)
    found = {}
    for name, reason in data.bad_images.reasons.items():
        parts = re.fullmatch(r"sample (\d+) of the train dataset(?: in worker (\d))?", name).groups(
            "0"
        )
        index, worker = map(int, parts)
        found[index * workers + worker if workers and kind is wrong.Stream else index] = reason
    for index, (sample, words) in zip(bad, wrong.BAD_SAMPLES, strict=True):
        assert re.search(words, found[index]) and "\n" not in found[index], (
            f"{sample}: {found[index]}"
        )


@WORKERS
@KINDS
def test_a_wrong_sample_ends_the_run_by_default_and_an_evaluation_can_leave_it_out(
    monkeypatch, kind, workers
):
    data = wrong_data(monkeypatch, lambda: kind({6: INT64}), workers=workers)
    with pytest.raises(BadImageError, match=r"^'sample [36] of the train dataset.*int64"):
        epoch_of(data)
    bad = dict.fromkeys((1, 6, 11), INT64)
    data = wrong_data(
        monkeypatch, wrong.Samples, lambda: kind(bad), workers=workers, on_bad_image="skip"
    )
    with closing(data):
        assert val_count(data) == 9 and data.bad_images.skipped == 3


FIRST = [
    (*row, LIMIT_S)
    for row in wrong.BAD_SAMPLES
    if row[1].startswith(("torch.int64", "1.7", "S", "Key", "mode I;"))
]
FIRST += [(wrong.FATAL["exit 0"], "", 0.4)]
FIRST += [
    pytest.param(sample, "", 0.4, marks=SLOW)
    for sample in (wrong.FATAL["killed"], wrong.HANGS["sleep"])
]


@KINDS
@pytest.mark.parametrize(("sample", "words", "limit_s"), FIRST)
def test_a_first_sample_that_is_wrong_or_ends_or_stops_its_process(
    monkeypatch, kind, sample, words, limit_s
):
    """The validation dataset is opened first: a machine too busy for the short limit gives the same
    message.
    """
    with pytest.raises(ConfigError, match=f"sample 0 of the val dataset.*{words}"):
        wrong_data(monkeypatch, wrong.Samples, lambda: kind({0: sample}), worker_timeout_s=limit_s)


@pytest.mark.parametrize(
    "case", ["exit 7", *(pytest.param(c, marks=SLOW) for c in ("exit 0", "aborts", *wrong.HANGS))]
)
def test_a_sample_that_ends_or_stops_its_worker_is_named_within_the_timeout(monkeypatch, case):
    monkeypatch.setattr(data_workers, "_CLOSE_S", 0.1)
    reach = count_silence_from(monkeypatch)
    end = {**wrong.FATAL, **wrong.HANGS}[case]
    data = wrong_data(monkeypatch, lambda: wrong.Samples({6: lambda: reach() or end()}), workers=2)
    data.train_loader._cfg = replace(data.train_loader._cfg, worker_timeout_s=1.0)
    reason = "worker_timeout_s" if case in wrong.HANGS else "(exited|was killed)"
    with pytest.raises(WorkerError, match=reason) as caught:
        epoch_of(data)
    assert "sample 6 of the train dataset" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["exit 7", "sleep"])
def test_a_stream_that_ends_or_stops_its_worker_ends_the_run(monkeypatch, case):
    samples = {6: {**wrong.FATAL, **wrong.HANGS}[case]}
    data = wrong_data(monkeypatch, lambda: wrong.Stream(samples), workers=2, worker_timeout_s=5.0)
    before = multiprocessing.active_children()
    with pytest.raises(WorkerError, match=r"data\.dataset: .*(exited|timed out)"):
        epoch_of(data)
    left = [child for child in multiprocessing.active_children() if child not in before]
    wait_until(lambda: not any(child.is_alive() for child in left))


class EndlessStream(wrong.Stream):
    def __iter__(self):
        return iter(wrong.good, None)


@WORKERS
def test_a_stream_that_is_longer_than_its_length(monkeypatch, workers):
    """Training takes what it needs; an evaluation of more samples than there are would be wrong."""
    data = wrong_data(monkeypatch, EndlessStream, EndlessStream, workers=workers)
    assert len(list(data.train(0, FLOAT_CHANNELS_LAST))) == 3
    with closing(data), pytest.raises(WorkerError, match="more than the 12 samples of its length"):
        val_count(data)


class RaisingStream(wrong.Stream):
    """A generator, which ends with the exception."""

    def __iter__(self):
        yield from [wrong.good(), wrong.good()]
        raise OSError("the connection was lost")


@WORKERS
def test_a_stream_that_raises_is_named_also_if_bad_samples_are_skipped(monkeypatch, workers):
    for action, error, words in (
        ("error", BadImageError, r"sample 2 of the train dataset.*the connection was lost"),
        ("skip", WorkerError, r"ended after \d of 3 batches.*the connection was lost"),
    ):
        data = wrong_data(monkeypatch, RaisingStream, workers=workers, on_bad_image=action)
        with pytest.raises(error, match=words):
            epoch_of(data)


def with_attributes(**attributes):
    def made():
        dataset = wrong.Samples()
        vars(dataset).update({"num_classes": None, **attributes})
        return dataset

    return made


WRONG = [
    (with_attributes(classes=names), "classes") for names in (5, "cats", (), {"cat": 1}, {"cat"})
]
WRONG += [
    (with_attributes(num_classes=n), "classes") for n in ("x", 0, -3, 2.5, True, 10**12, None)
]
WRONG += [(with_attributes(classes=("a",), num_classes=2), "classes")]
WRONG += [(partial(wrong.Samples, (), n), "length|empty") for n in (0, -1, 2.5, "x", None, 2**70)]
WRONG += [(partial(wrong.Samples, (), 10**12), "order of 1000000000000 samples|length")]
WRONG += [
    (lambda: None, "must return a Dataset.*TypeError"),
    (partial(sys.exit, 0), "must return a Dataset.*SystemExit"),
    (partial(iter, [1]), "must return a Dataset.*TypeError"),
    (partial(os.listdir, "/nowhere"), "must return a Dataset.*FileNotFoundError.*/nowhere"),
]


@pytest.mark.parametrize(("made", "words"), WRONG)
def test_what_is_no_dataset_of_known_classes_and_length_is_refused(monkeypatch, made, words):
    with pytest.raises(ConfigError, match=words):
        wrong_data(monkeypatch, made)
    if "length" in words:
        with pytest.raises(ConfigError, match=words):
            wrong_data(monkeypatch, wrong.Samples, made)
