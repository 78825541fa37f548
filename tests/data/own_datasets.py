"""Datasets of a user, unknown to the package: their transforms use all three kinds of random numbers."""

import itertools
import random

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, get_worker_info

NAMES = ("Tensors", "uint8", "Pictures", "Arrays")  # that can be used


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


class Arrays(Tensors):
    """Without transforms of its own."""

    def __getitem__(self, index):
        return np.full((40 + index, 50, 3), 5 * index, dtype=np.uint8), index % 3


class Pictures(Arrays):
    def __getitem__(self, index):
        pixels, label = super().__getitem__(index)
        return Image.fromarray(pixels), label


class Stream(IterableDataset):
    num_classes = 2

    def __init__(self, split, size):
        self.size = size

    def __len__(self):
        return 12

    def __iter__(self):
        return iter([(torch.full((3, self.size, self.size), float(number)), number % 2) for number in range(12)])


class DividedStream(Stream):
    """Divided among the workers."""

    def __iter__(self):
        worker = get_worker_info()
        return itertools.islice(super().__iter__(), worker.id, None, worker.num_workers)


class ShortStream(Stream):
    """Has fewer samples than its length says."""

    def __len__(self):
        return 16


def uint8(split, size):
    return Tensors(split, size, torch.uint8)
