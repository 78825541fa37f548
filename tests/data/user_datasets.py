"""Datasets of a user, unknown to the package: their transforms use all three kinds of random
numbers, or each breaks a promise, in the sample, the target, the length or the process.
"""

import os
import random
import time
from functools import partial

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, get_worker_info

SIZE = 16  # pixels, of all wrong samples


class Tensors(Dataset):
    classes = ("a", "b", "c")

    def __init__(self, split, size, dtype=torch.float32):
        self.count, self.size, self.dtype = (31 if split == "train" else 7), size, dtype

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        noise = torch.rand(3, self.size, self.size) + float(np.random.rand()) + random.random()
        image = noise * 50 if self.dtype == torch.uint8 else noise
        return image.to(self.dtype), torch.tensor(index % 3), {"extra": index}


uint8 = partial(Tensors, dtype=torch.uint8)


class Arrays(Tensors):
    """Without transforms of its own."""

    def __getitem__(self, index):
        return np.full((40 + index, 50, 3), 5 * index, dtype=np.uint8), index % 3


class Pictures(Arrays):
    def __getitem__(self, index):
        pixels, label = super().__getitem__(index)
        return Image.fromarray(pixels), label


def of_worker(samples):
    worker = get_worker_info()
    return samples[worker.id :: worker.num_workers] if worker else samples


class Numbers(IterableDataset):
    """Each image is filled with its number. Divided among the workers."""

    num_classes = 2

    def __init__(self, split, size):
        self.size = size

    def __len__(self):
        return 12

    def __iter__(self):
        for number in of_worker(range(12)):
            yield torch.full((3, self.size, self.size), float(number)), number % 2


# --- that cannot be used --------------------------------------------------------------------------


def good():
    return torch.zeros(3, SIZE, SIZE, requires_grad=True), np.int64(1)


class Samples(Dataset):
    """`bad` has the samples of these indices, or functions that give them; all others are zeros of
    class 1 of 3.
    """

    num_classes = 3

    def __init__(self, bad=(), count=12):
        self.bad, self.count = dict(bad), count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        sample = self.bad.get(index, good)
        return sample() if callable(sample) else sample


class Stream(Samples, IterableDataset):
    """The same samples as a stream, which survives exceptions; divided among the workers."""

    def __iter__(self):
        return map(self.__getitem__, of_worker(range(self.count)))


def failing():
    raise KeyError("two\nlines")


ZEROS = torch.zeros(3, SIZE, SIZE)
# What a sample may be instead of (image, label), and the words that its message must have.
BAD_SAMPLES = [
    (ZEROS, r"\(image, label\)"),
    ({"image": ZEROS, "label": 1}, "dict"),
    ((None, 1), "NoneType"),
    ((torch.full_like(ZEROS, float("nan")), 1), "NaN"),
    ((torch.zeros(16, 16, 3), 1), r"\[16, 16, 3\]"),
    ((ZEROS.long(), 1), "torch.int64"),
    ((ZEROS.byte(), 1), "first sample"),
    ((np.zeros((SIZE, SIZE, 3)), 1), "float64"),
    ((Image.new("F", (SIZE, SIZE)), 1), "BadImage: 32 bits per pixel"),
    ((ZEROS, 1.0), "1.0"),
    ((ZEROS, -1), "-1 of 3 classes"),
    ((ZEROS, torch.tensor([0, 1, 0])), r"int64 \[3\], not the number of one class"),
    (failing, r"KeyError at .*user_datasets\.py:\d+ .*: 'two.*lines'"),
]
# What ends or stops the process that reads it, where that is a worker.
END, HANG = partial(os._exit, 7), partial(time.sleep, 10_000)
