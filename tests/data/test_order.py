"""Order and random numbers are pure functions of (seed, epoch, index)."""

import numpy as np
import pytest
from timm.data.distributed_sampler import RepeatAugSampler

from cl_train.data.order import (
    BATCHES,
    RandomNumbers,
    SizeSchedule,
    order_of_rank,
    permutation,
    repeated,
)


def test_the_order_depends_on_seed_and_epoch_and_stays_the_same_between_releases():
    """A resumed run of an older version must see the same order."""
    assert permutation(0, 0, 8).tolist() == [7, 4, 2, 6, 5, 0, 1, 3]
    orders = {tuple(permutation(seed, epoch, 1000)) for seed, epoch in ((0, 0), (0, 1), (1, 0))}
    assert len(orders) == 3 and all(sorted(order) == list(range(1000)) for order in orders)


def test_streams_of_order_samples_and_batches_do_not_share_numbers():
    order = np.random.Generator(np.random.Philox(key=[3, 5], counter=[0, 0, 0, 1]))
    streams = [
        order,
        *(RandomNumbers().of(3, 5, index) for index in (0, 1)),
        RandomNumbers().of(3, 5, 0, BATCHES),
    ]
    numbers = np.concatenate([stream.random(64) for stream in streams])
    assert len(np.unique(numbers)) == len(numbers)


@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_repeated_augmentation_gives_each_rank_the_images_of_timms_sampler(repeats):
    """With as many ranks as copies; each copy of an image has an index, and so random numbers, of
    its own.
    """
    count, batch_size = 1000, 8
    order = repeated(np.arange(count), repeats, batch_size * repeats)
    assert len(np.unique(order)) == len(order)
    for rank in range(repeats):
        sampler = RepeatAugSampler(
            range(count), repeats, rank, shuffle=False, num_repeats=repeats, selected_round=0
        )
        ours = order_of_rank(order, batch_size, rank, repeats) % count
        assert ours.tolist() == list(sampler)[: len(ours)]


@pytest.mark.parametrize(
    ("points", "sizes"),
    [
        ([[0, 128], [6, 160], [12, 192]], [128] * 3 + [160] * 6 + [192] * 5),
        ([[0, 96], [8, 224]], [96, 128, 128, 160, 160, 192, 192, 224, 224, 224]),
        ([[0, 16], [4, 32]], [16, 16, 32, 32, 32, 32]),
        ([[0, 28], [2, 32]], [28, 32, 32]),
        ([[0, 192], [3, 128]], [192, 160, 160, 128]),
        ([[0, 100]], [100, 100]),
    ],
)
def test_sizes_by_epoch(points, sizes):
    schedule = SizeSchedule(tuple((epoch, size) for epoch, size in points))
    assert [schedule.image_size_at(epoch) for epoch in range(len(sizes))] == sizes
    assert all(schedule.image_size_at(epoch) == size for epoch, size in points)
