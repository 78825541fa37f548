"""Order and random numbers are pure functions of (seed, epoch, index)."""

import numpy as np
import pytest

from cl_train.data.order import batch_generator, permutation, rank_share, sample_generator


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
