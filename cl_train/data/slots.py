"""Batches in shared memory that loader workers fill in place.

The memory consists of anonymous shared mappings: they have no name that could remain after a crash, take no space in
/dev/shm, and are freed with the last process that maps them. No pixel is pickled or copied between processes.
"""

import contextlib
import math
import mmap

import torch
from torch import Tensor


class Slots:
    """`count` batches, stored NHWC, with their targets. Each has room for the largest images.

    Attributes:
        targets: int64 [count, largest batch size].
        iteration: int64 [1]: the number of the iteration that is running; workers skip the tasks of other ones.
        progress: int64 [workers, 3]: samples begun, index of the last one, process id.
    """

    def __init__(self, count: int, batch_size: int, image_size: int, dtype: torch.dtype, workers: int) -> None:
        self._pixels = _shared((count, batch_size * image_size**2 * 3), dtype)
        self.targets = _shared((count, batch_size), torch.int64)
        words = _shared((1 + 3 * max(1, workers),), torch.int64).numpy()
        self.iteration, self.progress = words[:1], words[1:].reshape(-1, 3)
        self._pinned: list[Tensor] = []

    def images(self, slot: int, image_size: int) -> Tensor:
        """The slot as images [rows that fit, 3, image_size, image_size] in channels_last."""
        pixels = self._pixels[slot]
        shape = (len(pixels) // (image_size**2 * 3), image_size, image_size, 3)
        return pixels[: math.prod(shape)].view(shape).permute(0, 3, 1, 2)

    def pin(self) -> None:
        """Page-lock the memory, so that copies to the GPU overlap with computation."""
        for memory in () if self._pinned else (self._pixels, self.targets):
            if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
                self._pinned.append(memory)
            else:  # copies still work, only slower; CUDA reports the error again at the next kernel: clear it
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device="cuda")

    def unpin(self) -> None:
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop().data_ptr())


def _shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
