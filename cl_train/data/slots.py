"""Batches in shared memory that loader workers fill in place.

The memory is an anonymous shared mapping: it has no name that could remain after a crash, takes no space in /dev/shm,
and is freed with the last process that maps it. No pixel is pickled or copied between processes.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

from cl_train.data.size_schedule import SizeSchedule

_PAGE = 4096


class Slots:
    """`count` batches, stored NHWC, with their targets. Each has room for the largest batch of the schedule.

    Attributes:
        targets: int64 [largest batch size], one per slot.
        stream: int64 [1]: the iteration that is running; workers skip the tasks of another one.
        progress: int64 [workers, 3]: samples begun, index of the last one, process id.
    """

    def __init__(self, count: int, sizes: SizeSchedule, dtype: torch.dtype, workers: int) -> None:
        pixel_bytes = slot_bytes(sizes, dtype)
        target_bytes = 8 * max(map(sizes.batch_size_of, sizes.image_sizes))
        words = 1 + 3 * max(1, workers)
        stride, header = _pages(pixel_bytes + target_bytes), _pages(8 * words)
        self._memory = torch.frombuffer(mmap.mmap(-1, header + count * stride), dtype=torch.uint8)
        self._pinned = False
        shared = self._memory[: 8 * words].view(torch.int64).numpy()
        self.stream, self.progress = shared[:1], shared[1:].reshape(-1, 3)
        starts = range(header, header + count * stride, stride)
        self._pixels = [self._memory[start:][:pixel_bytes].view(dtype) for start in starts]
        self.targets = [self._memory[start + pixel_bytes :][:target_bytes].view(torch.int64) for start in starts]

    def images(self, slot: int, image_size: int) -> torch.Tensor:
        """The slot as images [rows that fit, 3, image_size, image_size] in channels_last."""
        pixels = self._pixels[slot]
        rows = len(pixels) // (image_size**2 * 3)
        shape = (rows, image_size, image_size, 3)
        return pixels[: math.prod(shape)].view(shape).permute(0, 3, 1, 2)

    def pin(self) -> None:
        """Page-lock the memory, so that copies to the GPU overlap with computation."""
        if self._pinned:
            return
        result = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), len(self._memory), 0)
        self._pinned = int(result) == 0  # if the system refuses, copies still work, only slower
        if not self._pinned:
            with contextlib.suppress(RuntimeError):  # CUDA reports the error again at the next kernel: clear it
                torch.zeros(1, device="cuda")

    def unpin(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._pinned = False


def slot_bytes(sizes: SizeSchedule, dtype: torch.dtype = torch.uint8) -> int:
    """Bytes of the largest batch's pixels, rounded up so that the targets behind them are aligned."""
    pixels = max(sizes.batch_size_of(size) * size**2 * 3 for size in sizes.image_sizes)
    return -(-pixels * dtype.itemsize // 8) * 8


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
