"""image_loader: the loader of train.py with plain arguments."""

import threading

import pytest
import torch

from cl_train import DevicePrefetcher, image_loader
from cl_train.config.schema import AugmentConfig
from cl_train.data.loader import BadImageError
from tests.data.image_folders import FLOAT_CHANNELS_LAST, folder_data, same, train_batches, write_folder
from tests.processes import wait_until


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("images"), train=22, val=9)


def loader(root, split="train", **arguments):
    return image_loader(root, split, **{"batch_size": 4, "image_size": 32, "workers": 0, **arguments})


def test_batches_are_those_of_train_and_an_epoch_resumes_at_any_batch(root):
    data = folder_data(root, seed=3, augment=AugmentConfig(crop_scale_min=0.08, flip=0.5))
    with loader(root, seed=3, workers=2) as batches:
        assert len(batches) == 5 and batches.classes == ("class_0", "class_1")
        for epoch in range(2):
            found = list(batches)
            same(found, train_batches(data, epoch))
            assert all(i.dtype == torch.uint8 and i.is_contiguous(memory_format=torch.channels_last) for i, _ in found)
    resumed = loader(root, seed=3)
    resumed.set_epoch(1, first_batch=3)
    same(list(resumed), train_batches(data, 1, first_batch=3))
    same(list(resumed), train_batches(data, 2))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_on_a_device_batches_are_normalised(root, memory_format):
    expected = list(folder_data(root).validation(FLOAT_CHANNELS_LAST))
    ready = loader(root, "val", device="cpu", dtype=torch.bfloat16, memory_format=memory_format)
    assert len(ready) == 3
    for (images, targets), batch in zip(ready, expected, strict=True):
        assert images.dtype == torch.bfloat16 and images.is_contiguous(memory_format=memory_format)
        assert torch.equal(images, batch.images.bfloat16()) and torch.equal(targets, batch.targets)
    for (images, _), batch in zip(DevicePrefetcher(loader(root, "val"), "cpu"), expected, strict=True):
        assert torch.equal(images, batch.images)


def test_ranks_share_an_epoch(root):
    whole = [targets for _, targets in loader(root, batch_size=8)]
    ranks = [[targets for _, targets in loader(root, rank=rank, world_size=2)] for rank in (0, 1)]
    assert torch.equal(torch.cat(whole), torch.cat([torch.cat(pair) for pair in zip(*ranks, strict=True)]))
    assert [len(loader(root, "val", rank=rank, world_size=2)) for rank in (0, 1)] == [2, 1]


def test_bad_images_are_named(tmp_path):
    root = write_folder(tmp_path, train=4, val=4)
    broken = root / "train" / "class_0" / "0000.jpg"
    broken.write_bytes(b"")
    with pytest.raises(BadImageError, match=r"0000\.jpg"):
        list(loader(root))
    tolerant = loader(root, skip_bad_images=True)
    assert [len(targets) for _, targets in tolerant] == [4]
    assert list(tolerant.bad_images.reasons) == [str(broken)]
    (root / "train" / "class_0" / "0002.jpg").write_bytes(b"")  # a class without an image is accepted too
    assert [targets.tolist() for _, targets in loader(root, skip_bad_images=True)] == [[1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"split": "test"}, "train"),
        ({"root": "/nowhere"}, "nowhere"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"batch_size": 1000}, "22 training images are fewer than one batch of all ranks, 1000"),
        ({"batch_size": 8, "rank": 0, "world_size": 3}, "fewer than one batch of all ranks, 24"),
        ({"image_size": 0}, "image_size=0"),
        ({"image_size": 10**6}, "image_size"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**40}, "seed="),
        ({"workers": -1}, "workers=-1"),
        ({"val_fraction": 2}, "val_fraction=2"),
        ({"rank": 3, "world_size": 2}, "rank=3, world_size=2"),
        ({"rank": 1}, "give both"),
        ({"world_size": 2}, "give both"),
        ({"rank": 0.5, "world_size": 2}, "rank=0.5"),
        ({"rank": 0, "world_size": 0}, "world_size=0"),
        ({"device": "cpu", "dtype": torch.float8_e4m3fn}, "float8"),
        ({"device": "cpu", "memory_format": torch.channels_last_3d}, "channels_last_3d"),
        ({"mean": (0.5,), "std": (0.5,)}, "three numbers"),
        ({"std": (0.5, 0.5, 0.0)}, "above 0"),
        ({"mean": (0.5, 0.5, float("nan"))}, "mean"),
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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_thread_gets_an_error_at_once_and_the_first_goes_on(root, workers):
    with loader(root, workers=workers) as batches:
        epoch, caught = iter(batches), []
        whole = [next(epoch)[1].tolist()]

        def second():
            with pytest.raises(RuntimeError, match="another thread") as error:
                next(iter(batches))
            caught.append(error)

        thread = threading.Thread(target=second)
        thread.start()
        thread.join(20)
        assert not thread.is_alive() and len(caught) == 1
        whole += [targets.tolist() for _, targets in epoch]
    assert whole == [targets.tolist() for _, targets in loader(root)]
