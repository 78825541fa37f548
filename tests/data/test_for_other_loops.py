"""For any training loop: image_loader, the loader of train.py with plain arguments, and
channels_last_collate.
"""

from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from cl_train import DevicePrefetcher, image_loader
from cl_train.commands import prepare_imagenet
from cl_train.config.schema import AugmentConfig
from cl_train.data.for_other_loops import channels_last_collate
from cl_train.errors import BadImageError
from tests.data.image_folders import (
    FLOAT_CHANNELS_LAST,
    folder_data,
    same,
    train_batches,
    write_folder,
)
from tests.processes import wait_until


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("images"), train=22, val=9)


def loader(root, split="train", **arguments):
    return image_loader(
        root, split, **{"batch_size": 4, "image_size": 32, "workers": 0, **arguments}
    )


def test_batches_are_those_of_train_and_an_epoch_resumes_at_any_batch(root):
    settings = {"seed": 3, "augment": AugmentConfig(crop_scale_min=0.08, flip=0.5)}
    data = folder_data(root, **settings)
    with loader(root, seed=3, workers=2) as batches:
        assert len(batches) == 5 and batches.classes == ("class_0", "class_1")
        for epoch in range(2):
            found = list(batches)
            same(found, train_batches(data, epoch))
            for images, _ in found:
                assert images.dtype == torch.uint8
                assert images.is_contiguous(memory_format=torch.channels_last)
    resumed = loader(root, seed=3)
    resumed.set_epoch(1, first_batch=3)
    same(list(resumed), train_batches(data, 1, first_batch=3))
    same(list(resumed), train_batches(data, 2))
    ours = list(loader(root, rank=1, world_size=2, seed=3))
    same(ours, train_batches(folder_data(root, rank=1, world_size=2, **settings)))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_on_a_device_batches_are_normalised(root, memory_format):
    expected = list(folder_data(root).validation(FLOAT_CHANNELS_LAST))
    ready = loader(root, "val", device="cpu", dtype=torch.bfloat16, memory_format=memory_format)
    assert len(ready) == 3
    for (images, targets), batch in zip(ready, expected, strict=True):
        assert images.dtype == torch.bfloat16 and images.is_contiguous(memory_format=memory_format)
        assert torch.equal(images, batch.images.bfloat16()) and torch.equal(targets, batch.targets)
    prefetched = DevicePrefetcher(loader(root, "val"), "cpu")
    assert len(prefetched) == len(list(prefetched)) == 3, "and a second epoch:"
    for (images, _), batch in zip(prefetched, expected, strict=True):
        assert torch.equal(images, batch.images)


def test_bad_images_are_named(tmp_path, capsys):
    root = write_folder(tmp_path, train=4, val=4)
    broken = root / "train/class_0/0000.jpg"
    broken.write_bytes(broken.read_bytes()[:-30])  # its first bytes are right
    advice = r"0000\.jpg' cannot be used: .*skip_bad_images=True"
    with pytest.raises(BadImageError, match=advice) as error:
        list(loader(root))
    find = str(error.value).partition("cl-train prepare_imagenet ")[2].split()
    assert prepare_imagenet.main(find) == 1 and str(broken) in capsys.readouterr().out
    tolerant = loader(root, skip_bad_images=True)
    assert [len(targets) for _, targets in tolerant] == [4]
    assert list(tolerant.bad_images.reasons) == [str(broken)]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"split": "test"}, "train"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"batch_size": 8, "rank": 0, "world_size": 3}, "one step takes 24 images"),
        ({"val_fraction": 2}, "data.val_fraction=2"),
        ({"root": Path(__file__).parent}, r"has no folder .* data\.val_fraction=0\.1"),
        ({"rank": 3, "world_size": 2}, "rank=3, world_size=2"),
        ({"world_size": 2}, "give both"),
        ({"device": "cpu", "dtype": torch.float8_e4m3fn}, "float8"),
    ],
)
def test_wrong_arguments_are_value_errors(root, arguments, named):
    arguments = {"root": root, **arguments}
    with pytest.raises(ValueError, match=named) as caught:
        loader(arguments.pop("root"), **arguments)
    assert "\n" not in str(caught.value)


def test_a_loader_that_is_no_longer_used_ends_its_workers(root):
    batches = loader(root, workers=1)
    next(iter(batches))
    (worker,) = batches._loader._pool.processes
    assert worker.is_alive()
    del batches
    wait_until(lambda: not worker.is_alive())


def test_a_second_thread_is_refused_until_the_iteration_of_the_first_has_ended(root):
    batches = loader(root)
    first = iter(batches)
    next(first)
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(RuntimeError, match="iterates over this loader"):
            thread.submit(next, iter(batches)).result()
        assert len(list(first)) == 4 and len(thread.submit(list, batches).result()) == 5


Pair = namedtuple("Pair", "image label")


def arrays(count=5, shape=(8, 12, 3), dtype=np.uint8):
    return list(np.random.default_rng(0).integers(0, 255, (count, *shape)).astype(dtype))


def is_nhwc(batch):
    _, channels, height, width = batch.shape
    return batch.stride() == (height * width * channels, 1, width * channels, channels)


@pytest.mark.parametrize("shape", [(8, 12, 3), (8, 12, 1), (1, 1, 3), (6, 6, 16)])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_every_kind_of_image_becomes_the_same_channels_last_batch(shape, count, dtype):
    hwc = arrays(count, shape, dtype)
    expected = torch.stack([torch.from_numpy(image) for image in hwc]).permute(0, 3, 1, 2)
    planar = [torch.from_numpy(image.transpose(2, 0, 1).copy()) for image in hwc]
    interleaved = [torch.from_numpy(image).permute(2, 0, 1) for image in hwc]
    kinds = {
        "array": hwc,
        "interleaved": interleaved,
        "mixed strides": [*interleaved[:1], *planar[1:]],
        "flipped": [image[:, ::-1].copy()[:, ::-1] for image in hwc],
    }
    if dtype == np.uint8 and shape[2] <= 4:
        pictures = [image.squeeze(2) if shape[2] == 1 else image for image in hwc]
        kinds["PIL"] = list(map(Image.fromarray, pictures))
    for kind, images in kinds.items():
        batch = channels_last_collate(images)
        assert torch.equal(batch, expected) and batch.dtype == expected.dtype, kind
        assert is_nhwc(batch), kind
    half = channels_last_collate([image.bfloat16() for image in planar])
    assert torch.equal(half, expected.bfloat16()) and is_nhwc(half)


def test_structure_is_kept_and_the_rest_is_default_collates():
    named = channels_last_collate([Pair(image, 0.5) for image in arrays(3)])
    assert isinstance(named, Pair) and named.label.dtype == torch.float64 and is_nhwc(named.image)
    extra = {"box": torch.ones(4), "name": "a", "tags": (1, 2)}
    batch = channels_last_collate([{"views": [image, image], **extra} for image in arrays(3)])
    assert all(map(is_nhwc, batch["views"])) and batch["box"].shape == (3, 4)
    assert batch["name"] == ["a"] * 3 and batch["tags"][1].tolist() == [2, 2, 2]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_worker_hands_over_a_batch_in_shared_memory(workers):
    samples = [
        (torch.from_numpy(image).permute(2, 0, 1), label) for label, image in enumerate(arrays(6))
    ]
    batches = list(DataLoader(samples, 3, collate_fn=channels_last_collate, num_workers=workers))
    assert [labels.tolist() for _, labels in batches] == [[0, 1, 2], [3, 4, 5]]
    assert all(is_nhwc(images) and images.is_shared() == (workers == 1) for images, _ in batches)
    assert torch.equal(batches[1][0], torch.stack([image for image, _ in samples[3:]]))


GOOD = arrays(1)[0]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([GOOD, np.zeros((8, 13, 3), np.uint8)], ["sample 1", "(8, 13, 3)", "(8, 12, 3)"]),
        ([GOOD, None], ["sample 1", "NoneType", "(8, 12, 3)"]),
        ([{"x": GOOD}, {"y": GOOD}], ["sample 1"]),
        ([Image.fromarray(GOOD), Image.new("L", (12, 8))], ["sample 1", "mode L"]),
        ([Image.new("P", (12, 8))], ["convert"]),
        ([], ["empty"]),
    ],
)
def test_what_cannot_be_collated_is_refused_with_its_index_and_both_forms(samples, words):
    with pytest.raises(ValueError, match="cannot collate") as caught:
        channels_last_collate(samples)
    assert all(word in str(caught.value) for word in words)
