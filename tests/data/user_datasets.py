"""Datasets of a user, unknown to the package: their transforms use all three kinds of random numbers, or each breaks a
promise, in the sample, the target, the length or the process."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time

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


class Numbers(IterableDataset):
    num_classes = 2

    def __init__(self, split, size):
        self.size = size

    def __len__(self):
        return 12

    def __iter__(self):
        return iter([(torch.full((3, self.size, self.size), float(number)), number % 2) for number in range(12)])


class DividedNumbers(Numbers):
    """Divided among the workers."""

    def __iter__(self):
        worker = get_worker_info()
        return itertools.islice(super().__iter__(), worker.id, None, worker.num_workers)


class ShortNumbers(Numbers):
    """Has fewer samples than its length says."""

    def __len__(self):
        return 16


def uint8(split, size):
    return Tensors(split, size, torch.uint8)


COUNT = 12


def good(size):
    return torch.zeros(3, size, size, requires_grad=True), np.int64(1)


class Samples(Dataset):
    """`bad(size)` makes the samples of these indices; all others are zeros of class 1 of 3."""

    num_classes = 3

    def __init__(self, size, bad, count=COUNT):
        self.size, self.bad, self.count = size, bad, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.bad[index](self.size) if index in self.bad else good(self.size)


class Stream(Samples, IterableDataset):
    """The same samples as a stream, which survives exceptions; divided among the workers."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return map(self.__getitem__, range(first, self.count, step))


def built(split, size):
    """What the test has put into `current`."""
    return current(split, size)


def current(split, size):
    raise NotImplementedError


def image(make):
    return lambda size: (make(size), 1)


def label(value):
    return lambda size: (torch.zeros(3, size, size), value)


def pil(mode, width=None):
    return image(lambda size: Image.new(mode, (size if width is None else width, size)))


def raising(error):
    def bad(size):
        raise error

    return bad


INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64)
IMAGES = {
    "nothing": (lambda size: None, "NoneType"),
    "path": (lambda size: "/a.jpg", "str"),
    "list": (lambda size: [[0.0] * size] * size, "list"),
    "nan": (lambda size: torch.full((3, size, size), float("nan")), "NaN"),
    "infinite": (lambda size: torch.full((3, size, size), float("inf")), "infinite"),
    "two dimensions": (lambda size: torch.zeros(size, size), r"\[16, 16\]"),
    "channels last": (lambda size: torch.zeros(size, size, 3), r"\[16, 16, 3\]"),
    "another size": (lambda size: torch.zeros(3, size + 1, size), r"\[3, 17, 16\]"),
    "empty tensor": (lambda size: torch.zeros(3, 0, size), r"\[3, 0, 16\]"),
    "uint8 after float": (lambda size: torch.zeros(3, size, size, dtype=torch.uint8), "first sample"),
    "meta tensor": (lambda size: torch.zeros(3, size, size, device="meta"), "meta"),
    "sparse tensor": (lambda size: torch.zeros(3, size, size).to_sparse(), "sparse"),
    "float array": (lambda size: np.zeros((size, size, 3)), "float64"),
    "uint16 array": (lambda size: np.zeros((size, size, 3), np.uint16), "uint16"),
    "planar array": (lambda size: np.zeros((3, size, size), np.uint8), r"\[3, 16, 16\]"),
    "grey array": (lambda size: np.zeros((size, size), np.uint8), r"\[16, 16\]"),
    "object array": (lambda size: np.array([None]), "object"),
    "empty array": (lambda size: np.zeros((0, 4, 3), np.uint8), r"\[0, 4, 3\]"),
    **{str(t): (lambda size, t=t: torch.ones((3, size, size), dtype=t), str(t)) for t in INTEGERS},
    **{f"{c} channels": (lambda size, c=c: torch.zeros(c, size, size), rf"\[{c}, 16, 16\]") for c in (1, 4)},
}
LABELS = [(1.7, "1.7"), (1.0, "1.0"), (True, "True"), (None, "None"), ("1", "'1'"), (float("nan"), "nan"), (1j, "1j")]
LABELS += [(-1, "-1 of 3 classes"), (3, "3 of 3 classes"), (2**70, "of 3 classes"), ([1], r"\[1\]")]
LABELS += [(torch.tensor(1.5), "float32"), (torch.tensor([0, 1, 0]), r"\[3\]"), (np.array([0, 2]), r"\[2\]")]

# What a sample may be instead of (image, label), and the words that its message must have.
BAD_SAMPLES = {
    "none": (lambda size: None, "NoneType"),
    "image alone": (lambda size: torch.zeros(3, size, size), r"\(image, label\)"),
    "one-tuple": (lambda size: (torch.zeros(3, size, size),), r"\(image, label\)"),
    "dict": (lambda size: {"image": torch.zeros(3, size, size), "label": 1}, "dict"),
    "text": (lambda size: "ab", r"\(image, label\)"),
    **{f"image {name}": (image(make), words) for name, (make, words) in IMAGES.items()},
    **{f"pil {mode}": (pil(mode), f"mode {mode}") for mode in ("I;16", "I", "F")},
    "pil without pixels": (pil("RGB", width=0), "0 x 16 pixels"),
    "pil after float": (pil("RGB"), "first sample"),
    **{f"label {value!r}": (label(value), words) for value, words in LABELS},
    "key error": (raising(KeyError("row")), r"KeyError: 'row' \(user_datasets\.py, line \d+\)"),
    "several lines": (raising(ValueError("a\nb\nc")), "ValueError: a b c"),
    "memory error": (raising(MemoryError()), "MemoryError"),
    "not implemented": (raising(NotImplementedError("x")), "NotImplementedError"),
    "system exit": (lambda size: sys.exit(0), "SystemExit"),
}

# What ends or stops the process that reads it, where that is a worker.
FATAL_SAMPLES = {
    "exit 0": lambda size: os._exit(0),
    "exit 7": lambda size: os._exit(7),
    "killed": lambda size: os.kill(os.getpid(), signal.SIGKILL),
    "aborts": lambda size: os.abort(),
}


def sleep(size):
    time.sleep(10_000)


def busy(size):
    while True:
        pass


HANGS = {
    "sleep": sleep,
    "busy": busy,
    "child": lambda size: subprocess.run(["sleep", "10000"], check=True),
}
ATTRIBUTES = [{"classes": names} for names in (5, "cats", (), {"cat": 1}, {"cat"})]
ATTRIBUTES += [{"num_classes": count} for count in ("x", 0, -3, 2.5, True, 10**12, None)]
ATTRIBUTES += [{"classes": ("a",), "num_classes": 2}]
LENGTHS = (0, -1, 2.5, "x", None, 2**70, 10**12)
