"""Batches in shared memory that loader workers fill in place.

The memory is an anonymous shared mapping: it has no name that could be left behind, takes no space in /dev/shm, and is
freed with the last process that maps it. No pixel is pickled or copied between processes.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_PAGE = 4096
PROGRESS_COLUMNS = 3  # samples begun, index of the last one, process id


class Slots:
    """`count` batches of `batch_size` images [3, size, size], stored NHWC, with int64 targets.

    Attributes:
        stream: int64 [1]: the stream of batches that is being read; workers skip tasks of another one.
        progress: int64 [workers, 3]: what each worker is doing, see `PROGRESS_COLUMNS`.
    """

    def __init__(self, count: int, batch_size: int, image_size: int, dtype: torch.dtype, workers: int) -> None:
        pixel_bytes = slot_bytes(batch_size, image_size, dtype)
        target_bytes = batch_size * 8
        stride = _pages(pixel_bytes + target_bytes)
        header = _pages(8 + max(1, workers) * PROGRESS_COLUMNS * 8)
        self._memory = torch.frombuffer(mmap.mmap(-1, header + count * stride), dtype=torch.uint8)
        self._pinned = False
        words = self._memory[:header].view(torch.int64).numpy()
        self.stream = words[:1]
        self.progress = words[1 : 1 + max(1, workers) * PROGRESS_COLUMNS].reshape(-1, PROGRESS_COLUMNS)
        self._images, self._targets = [], []
        for start in range(header, header + count * stride, stride):
            flat = self._memory[start : start + pixel_bytes].view(dtype)
            self._images.append(flat.view(batch_size, image_size, image_size, 3).permute(0, 3, 1, 2))
            self._targets.append(self._memory[start + pixel_bytes :][:target_bytes].view(torch.int64))

    def images(self, slot: int) -> Tensor:
        """[batch_size, 3, H, W], channels_last."""
        return self._images[slot]

    def targets(self, slot: int) -> Tensor:
        """int64 [batch_size]."""
        return self._targets[slot]

    def pin(self) -> None:
        """Page-lock the memory, so that copies to the GPU overlap with computation."""
        if self._pinned:
            return
        result = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), len(self._memory), 0)
        self._pinned = int(result) == 0  # if the system refuses, copies still work, only slower
        if not self._pinned:
            with contextlib.suppress(RuntimeError):  # CUDA reports the refusal again at the next kernel: consume it
                torch.zeros(1, device="cuda")

    def unpin(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._pinned = False


def slot_bytes(batch_size: int, image_size: int, dtype: torch.dtype = torch.uint8) -> int:
    """Bytes of one batch's pixels, rounded up so that the targets behind them are aligned."""
    return -(-batch_size * image_size * image_size * 3 * dtype.itemsize // 8) * 8


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
