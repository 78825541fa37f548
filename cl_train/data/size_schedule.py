"""Growing images (progressive resizing): the size of the training images and of their batches in each epoch.

Early epochs on small images take less time and cost little accuracy (Howard et al., DAWNBench 2018; FFCV's recipes).
Everything here is a pure function of the epoch, so a resumed run continues with the same sizes.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

GRID = 32  # the total stride of most networks


@dataclass(frozen=True)
class SizeSchedule:
    """The images and the batches of each epoch.

    points: (epoch, image size in pixels); epochs ascend from 0. batch_size: per rank, of the largest images.
    scales_batch: batches of smaller images are larger, by the ratio of the areas, rounded down to a multiple of 8.
    """

    points: tuple[tuple[int, int], ...]
    batch_size: int
    scales_batch: bool = False

    @classmethod
    def constant(cls, image_size: int, batch_size: int) -> "SizeSchedule":
        return cls(((0, image_size),), batch_size)

    @property
    def image_sizes(self) -> tuple[int, ...]:
        """All sizes, in ascending order."""
        return tuple(sorted({self.image_size_at(epoch) for epoch in range(self.points[-1][0] + 1)}))

    def image_size_at(self, epoch: int) -> int:
        """The side of the training images in `epoch`, pixels: linear between `points`.

        Sizes in between are rounded to a multiple of 32, or of the largest power of two that divides both given sizes
        if that is smaller: [0, 16], [4, 32] gives 16, 16, 32, 32, 32. The last size remains.
        """
        for (first, start), (last, end) in pairwise(self.points):
            if epoch < last:
                grid = math.gcd(GRID, start, end)
                size = start + (end - start) * (epoch - first) / (last - first)
                return grid * math.floor(size / grid + 0.5)
        return self.points[-1][1]

    def batch_size_at(self, epoch: int) -> int:
        return self.batch_size_of(self.image_size_at(epoch))

    def batch_size_of(self, image_size: int) -> int:
        if not self.scales_batch:
            return self.batch_size
        return max(self.batch_size, self.batch_size * self.image_sizes[-1] ** 2 // image_size**2 // 8 * 8)
