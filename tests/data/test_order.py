"""Order and random numbers are pure functions of (seed, epoch, index)."""

import numpy as np
import pytest
from timm.data.distributed_sampler import RepeatAugSampler

from cl_train.data.order import batch_generator, permutation, rank_share, repeated, sample_generator


def test_permutation_is_a_permutation_that_depends_on_seed_and_epoch():
    orders = [permutation(seed, epoch, 1000) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert sorted(order.tolist()) == list(range(1000))
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])


def test_permutation_stays_the_same_between_releases():
    """A resumed run of an older version must see the same order."""
    assert permutation(0, 0, 8).tolist() == [7, 4, 2, 6, 5, 0, 1, 3]


def test_streams_of_order_samples_and_batches_do_not_share_numbers():
    first = [
        np.random.Generator(np.random.Philox(key=[3, 5], counter=[0, 0, 0, 1])).random(64),
        sample_generator(3, 5, 0).random(64),
        batch_generator(3, 5, 0).random(64),
        sample_generator(3, 5, 1).random(64),
    ]
    numbers = np.concatenate(first)
    assert len(np.unique(numbers)) == len(numbers)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
def test_ranks_together_hold_the_same_global_batch_for_any_world_size(world_size):
    order = permutation(7, 2, 100)
    shares = [rank_share(order, 3, 12 // world_size, rank, world_size) for rank in range(world_size)]
    assert np.concatenate(shares).tolist() == order[36:48].tolist()


@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_repeated_augmentation_gives_each_rank_the_images_of_timms_sampler(repeats):
    """With as many ranks as copies; each copy of an image has an index, and so random numbers, of its own."""
    count, batch_size = 1000, 8
    order = repeated(np.arange(count), repeats, batch_size * repeats)
    assert len(np.unique(order)) == len(order)
    for rank in range(repeats):
        sampler = RepeatAugSampler(range(count), repeats, rank, shuffle=False, num_repeats=repeats, selected_round=0)
        theirs = list(sampler)
        for batch in range(len(order) // (batch_size * repeats)):
            ours = rank_share(order, batch, batch_size, rank, repeats) % count
            assert ours.tolist() == theirs[batch * batch_size : (batch + 1) * batch_size]


@pytest.mark.parametrize(("repeats", "batch_size"), [(1, 8), (3, 8), (4, 6), (4, 8), (5, 3)])
def test_repeated_batches_have_equal_sizes_for_any_number_of_repeats(repeats, batch_size):
    permuted = permutation(0, 0, 103)
    order = repeated(permuted, repeats, batch_size)
    assert len(order) == 103 // batch_size * batch_size
    for batch in (order % 103).reshape(-1, batch_size):
        shown, copies = np.unique(batch, return_counts=True)
        assert len(shown) == -(-batch_size // repeats) and copies.max() <= repeats
        assert batch_size % repeats or copies.min() == repeats
    if repeats == 1:
        assert order.tolist() == permuted[: len(order)].tolist()
