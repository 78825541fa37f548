"""Batches depend on the seed, the epoch and the index alone: not on workers, ranks or where the epoch began."""

import random

import numpy as np
import pytest
import torch

from cl_train.config.schema import AugmentConfig, ConfigError
from tests.data.image_folders import (
    CPU,
    FLOAT_CHANNELS_LAST,
    DeviceFormat,
    all_pixels,
    folder_data,
    train_batches,
    write_folder,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("images"), train=53, val=17)


def same(first, second):
    assert len(first) == len(second) > 0
    for (images, targets), (other_images, other_targets) in zip(first, second, strict=True):
        assert torch.equal(images, other_images) and torch.equal(targets, other_targets)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_do_not_depend_on_workers(root, workers):
    reference = train_batches(folder_data(root, batch_size=10), epoch=3)
    data = folder_data(root, batch_size=10, workers=workers)
    same(train_batches(data, epoch=3), reference)
    same(train_batches(data, epoch=3), reference)
    data.close()


def test_epochs_and_seeds_differ(root):
    data = folder_data(root)
    other_seed = folder_data(root, seed=1)
    first = all_pixels(train_batches(data, epoch=0))
    assert not torch.equal(first, all_pixels(train_batches(data, epoch=1)))
    assert not torch.equal(first, all_pixels(train_batches(other_seed, epoch=0)))


@pytest.mark.parametrize("first_batch", [1, 7, 12])
def test_starting_within_an_epoch_gives_the_same_rest(root, first_batch):
    data = folder_data(root, workers=2)
    whole = train_batches(data)
    assert len(whole) == data.batch_count() == 13
    same(train_batches(data, first_batch=first_batch), whole[first_batch:])
    data.close()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_together_see_one_processs_batches(root, world_size):
    whole = train_batches(folder_data(root, batch_size=12))
    ranks = [
        train_batches(folder_data(root, batch_size=12 // world_size, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for number, (images, targets) in enumerate(whole):
        assert torch.equal(torch.cat([rank[number][0] for rank in ranks]), images)
        assert torch.equal(torch.cat([rank[number][1] for rank in ranks]), targets)


@pytest.mark.parametrize("count", [7, 97, 101])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_has_every_image_once(tmp_path, count, world_size):
    root = write_folder(tmp_path, train=12, val=count)
    seen = []
    for rank in range(world_size):
        data = folder_data(root, rank=rank, world_size=world_size)
        batches = [(host.images.clone(), host.targets.clone()) for host in data.val_loader.batches()]
        seen += [images[row].numpy().tobytes() for images, _ in batches for row in range(len(images))]
        assert data.val_images == count
    assert len(seen) == count and len(set(seen)) == count


def test_labels_belong_to_their_images(root):
    """A crop of the whole image with neither flip nor choice: each row is its file's picture, with its label."""
    whole = AugmentConfig(crop_scale_min=1.0, crop_ratio_min=0.1, crop_ratio_max=10.0, flip=0.0)
    data = folder_data(root, augment=whole, workers=2)
    reader = data.train_loader.reader
    expected = {}
    row = torch.empty(32, 32, 3, dtype=torch.uint8).permute(2, 0, 1)
    for index in range(len(reader)):
        label = reader.read(row, index, 0, random_index=index)
        assert f"class_{label}" in reader.name(index)
        expected[row.numpy().tobytes()] = label
    assert len(expected) == 53
    for images, targets in train_batches(data):
        for image, target in zip(images, targets, strict=True):
            assert expected[image.numpy().tobytes()] == target
    data.close()


def test_validation_in_the_middle_of_an_epoch_disturbs_nothing(root):
    reference = train_batches(folder_data(root))
    data = folder_data(root, workers=2)
    seen = []
    for number, host in enumerate(data.train_loader.batches(0)):
        seen.append((host.images.clone(), host.targets.clone()))
        if number == 4:
            assert sum(len(batch.targets) for batch in data.validation(FLOAT_CHANNELS_LAST)) == 17
    same(seen, reference)
    data.close()


@pytest.mark.parametrize(
    "policy",
    [
        *("randaugment", "three_augment", "timm"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("trivialaugment", "autoaugment", "augmix")),
    ],
)
def test_policies_are_seeded_per_image_and_leave_the_global_generator_alone(root, policy):
    augment = AugmentConfig(policy=policy, erase=0.5)
    torch.manual_seed(5)
    before, others = torch.get_rng_state(), (np.random.get_state()[2], random.getstate())
    reference = train_batches(folder_data(root, augment=augment))
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[2], random.getstate()) == others
    data = folder_data(root, augment=augment, workers=3)
    same(train_batches(data), reference)
    data.close()
    plain = train_batches(folder_data(root))
    assert not torch.equal(all_pixels(plain), all_pixels(reference))


def test_erasing_takes_the_mean_colour_and_its_probability(root):
    data = folder_data(root, augment=AugmentConfig(erase=1.0), batch_size=50)
    ((images, _),) = train_batches(data)
    mean = torch.tensor([124, 116, 104], dtype=torch.uint8).view(1, 3, 1, 1)
    erased = (images == mean).all(dim=1).flatten(1).sum(dim=1)
    assert (erased >= 0.02 * 32 * 32 * 0.8).all()


@pytest.mark.parametrize(
    "augment", [AugmentConfig(mixup=0.2), AugmentConfig(cutmix=1.0), AugmentConfig(mixup=0.2, cutmix=1.0)]
)
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_mixed_batches_are_seeded_and_keep_the_layout(root, augment, memory_format):
    form = DeviceFormat(CPU, torch.float32, memory_format)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again = (list(folder_data(root, augment=augment).train(2, form)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    plain = list(folder_data(root).train(2, form))
    for batch, other, unmixed in zip(first, again, plain, strict=True):
        assert torch.equal(batch.images, other.images) and torch.equal(batch.targets, other.targets)
        assert batch.targets.shape == (4, 2) and batch.targets.is_floating_point()
        assert torch.allclose(batch.targets.sum(dim=1), torch.ones(4))
        assert batch.images.is_contiguous(memory_format=memory_format)
        assert unmixed.targets.shape == (4,)
    assert any(not torch.equal(batch.images, unmixed.images) for batch, unmixed in zip(first, plain, strict=True))


def test_an_abandoned_epoch_leaves_the_next_one_as_it_is(root):
    whole = train_batches(folder_data(root))
    data = folder_data(root, workers=2)
    for _ in range(3):
        batches = data.train_loader.batches(5)
        next(batches)
        batches.close()
    same(train_batches(data), whole)
    data.close()


def test_a_second_iteration_ends_the_first_with_an_error(root):
    data = folder_data(root)
    first = data.train_loader.batches(0)
    next(first)
    next(data.train_loader.batches(1))
    with pytest.raises(RuntimeError, match="another iteration"):
        next(first)


def test_repeated_images_have_their_own_random_numbers_and_a_resumed_epoch_is_the_same(root):
    data = folder_data(root, augment=AugmentConfig(repeats=2), batch_size=8)
    plain = folder_data(root, batch_size=8)
    whole = train_batches(data)
    assert len(whole) == len(train_batches(plain))
    for images, targets in whole:
        assert torch.equal(targets[:4], targets[4:])
        assert all(not torch.equal(one, other) for one, other in zip(images[:4], images[4:], strict=True))
    resumed = [host.images.clone() for host in data.train_loader.batches(0, first_batch=2)]
    assert all(torch.equal(one, images) for one, (images, _) in zip(resumed, whole[2:], strict=True))


def test_more_repeats_than_images_of_a_global_batch_are_refused(root):
    assert folder_data(root, augment=AugmentConfig(repeats=8), batch_size=4, world_size=2).batch_count() == 6
    with pytest.raises(ConfigError, match=r"augment\.repeats=9.* 8 "):
        folder_data(root, augment=AugmentConfig(repeats=9), batch_size=4, world_size=2)
