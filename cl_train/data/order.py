"""The order, the random numbers and the size of the images, by seed, epoch and index alone.

Philox is a counter-based generator: a key and a counter determine the numbers, so workers, ranks
and resumed runs share no state (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011).
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cl_train.data.images import Indices

# The last counter word separates the streams, so that no two purposes share a number.
_ORDER, SAMPLES, BATCHES = 1, 2, 3
_GRID = 32  # image sizes grow in these steps: the total stride of most networks


def permutation(seed: int, epoch: int, count: int) -> Indices:
    """Returns a random order of `count` training images. It sorts Philox words, because NumPy may
    change `Generator.permutation`.
    """
    words = np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, _ORDER]).random_raw(count)
    return np.argsort(words, kind="stable")


def repeated(order: Indices, repeats: int, global_batch_size: int) -> Indices:
    """Returns the order of repeated augmentation (Hoffer et al., "Augment your batch", 2020).

    Each global batch, of all ranks and micro-steps, holds its images `repeats` times, in an epoch
    of the same length. Copy c of image i is index i + c * images, with random numbers of its own.
    As with timm's RepeatAugSampler, `repeats` ranks hold different copies.
    """
    if repeats == 1:
        return order
    batches = len(order) // global_batch_size
    distinct = -(-global_batch_size // repeats)
    images = order[: batches * distinct].reshape(batches, 1, distinct)
    copies = images + len(order) * np.arange(repeats).reshape(repeats, 1)
    return copies.reshape(batches, -1)[:, :global_batch_size].reshape(-1)


class RandomNumbers:
    """Returns a generator for each sample or batch, valid until the next call. It is always the
    same one, set anew: a new one would take five times as long.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(0)
        self._state: Any = self._philox.state  # of a generator that has no numbers in its buffers
        self._generator = np.random.Generator(self._philox)

    def of(self, seed: int, epoch: int, index: int, stream: int = SAMPLES) -> np.random.Generator:
        """Returns the generator of item `index` in `stream`. In `BATCHES`, for MixUp and CutMix,
        `index` also distinguishes ranks.
        """
        numbers = self._state["state"]
        numbers["key"][:] = seed, epoch
        numbers["counter"][:] = 0, index, 0, stream
        self._philox.state = self._state
        return self._generator


def order_of_rank(order: Indices, batch_size: int, rank: int, world_size: int) -> Indices:
    """Returns the samples of `rank`: its share of each full batch of all ranks."""
    batches = len(order) // (batch_size * world_size)
    whole = order[: batches * batch_size * world_size]
    return whole.reshape(batches, world_size, batch_size)[:, rank].reshape(-1)


@dataclass(frozen=True)
class SizeSchedule:
    """Image sizes that grow (Howard et al., DAWNBench 2018). `points` are (epoch from 0, image size
    in pixels).
    """

    points: tuple[tuple[int, int], ...]

    @property
    def image_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({self.image_size_at(epoch) for epoch in range(self.points[-1][0] + 1)}))

    @property
    def largest(self) -> int:
        return self.image_sizes[-1]

    def image_size_at(self, epoch: int) -> int:
        """Returns the size in pixels: linear between `points`, rounded to a multiple of 32, or of
        the largest power of two that divides both sizes: [0, 16], [4, 32] gives 16, 16, 32, 32, ...
        """
        for (first, start), (last, end) in pairwise(self.points):
            if epoch < last:
                grid = math.gcd(_GRID, start, end)
                size = start + (end - start) * (epoch - first) / (last - first)
                return grid * math.floor(size / grid + 0.5)
        return self.points[-1][1]
