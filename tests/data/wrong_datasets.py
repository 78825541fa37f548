"""Wrong Datasets of a user: each function breaks one promise, in the sample, the target, the length or the process."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

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


def raising(error):
    def bad(size):
        raise error

    return bad


def pil(mode, **options):
    return image(lambda size: Image.new(mode, (options.get("width", size), size)))


# What a sample may be instead of (image, label), and the words that its message must have.
BAD_SAMPLES = {
    "none": (lambda size: None, "NoneType"),
    "image alone": (lambda size: torch.zeros(3, size, size), r"\(image, label\)"),
    "one-tuple": (lambda size: (torch.zeros(3, size, size),), r"\(image, label\)"),
    "dict": (lambda size: {"image": torch.zeros(3, size, size), "label": 1}, "dict"),
    "text": (lambda size: "ab", r"\(image, label\)"),
    "no image": (image(lambda size: None), "NoneType"),
    "path": (image(lambda size: "/a.jpg"), "str"),
    "list": (image(lambda size: [[0.0] * size] * size), "list"),
    "int64": (image(lambda size: torch.full((3, size, size), 300)), "int64"),
    "int32": (image(lambda size: torch.full((3, size, size), -1, dtype=torch.int32)), "int32"),
    "int8": (image(lambda size: torch.zeros(3, size, size, dtype=torch.int8)), "int8"),
    "int16": (image(lambda size: torch.zeros(3, size, size, dtype=torch.int16)), "int16"),
    "bool": (image(lambda size: torch.zeros(3, size, size, dtype=torch.bool)), "bool"),
    "complex": (image(lambda size: torch.zeros(3, size, size, dtype=torch.complex64)), "complex64"),
    "nan": (image(lambda size: torch.full((3, size, size), float("nan"))), "NaN"),
    "infinite": (image(lambda size: torch.full((3, size, size), float("inf"))), "infinite"),
    "one channel": (image(lambda size: torch.zeros(1, size, size)), r"\[1, 16, 16\]"),
    "four channels": (image(lambda size: torch.zeros(4, size, size)), r"\[4, 16, 16\]"),
    "two dimensions": (image(lambda size: torch.zeros(size, size)), r"\[16, 16\]"),
    "channels last": (image(lambda size: torch.zeros(size, size, 3)), r"\[16, 16, 3\]"),
    "another size": (image(lambda size: torch.zeros(3, size + 1, size)), r"\[3, 17, 16\]"),
    "empty tensor": (image(lambda size: torch.zeros(3, 0, size)), r"\[3, 0, 16\]"),
    "uint8 after float": (image(lambda size: torch.zeros(3, size, size, dtype=torch.uint8)), "first sample"),
    "meta tensor": (image(lambda size: torch.zeros(3, size, size, device="meta")), "meta"),
    "sparse tensor": (image(lambda size: torch.zeros(3, size, size).to_sparse()), "sparse"),
    "float array": (image(lambda size: np.zeros((size, size, 3))), "float64"),
    "uint16 array": (image(lambda size: np.zeros((size, size, 3), np.uint16)), "uint16"),
    "planar array": (image(lambda size: np.zeros((3, size, size), np.uint8)), r"\[3, 16, 16\]"),
    "grey array": (image(lambda size: np.zeros((size, size), np.uint8)), r"\[16, 16\]"),
    "object array": (image(lambda size: np.array([None])), "object"),
    "empty array": (image(lambda size: np.zeros((0, 4, 3), np.uint8)), "4 x 0 pixels"),
    "pil I;16": (pil("I;16"), "I;16"),
    "pil I": (pil("I"), "mode I"),
    "pil F": (pil("F"), "mode F"),
    "pil without pixels": (pil("RGB", width=0), "0 x 16 pixels"),
    "pil after float": (pil("RGB"), "first sample"),
    "label 1.7": (label(1.7), "1.7"),
    "label 1.0": (label(1.0), "1.0"),
    "label tensor 1.5": (label(torch.tensor(1.5)), "float32"),
    "label true": (label(True), "True"),
    "label none": (label(None), "None"),
    "label text": (label("1"), "'1'"),
    "label nan": (label(float("nan")), "nan"),
    "label complex": (label(1j), "1j"),
    "one-hot label": (label(torch.tensor([0, 1, 0])), r"\[3\]"),
    "label list": (label([1]), r"\[1\]"),
    "label -1": (label(-1), "-1 of 3 classes"),
    "label 3": (label(3), "3 of 3 classes"),
    "label 2**70": (label(2**70), "of 3 classes"),
    "label array": (label(np.array([0, 2])), r"\[2\]"),
    "key error": (raising(KeyError("row")), "KeyError"),
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


def locked(size):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def joined(size):
    thread = threading.Thread(target=sleep, args=(0,), daemon=True)
    thread.start()
    thread.join()


HANGS = {
    "sleep": sleep,
    "busy": busy,
    "locked": locked,
    "pipe": lambda size: os.read(os.pipe()[0], 1),
    "joined": joined,
    "child": lambda size: subprocess.run(["sleep", "10000"], check=True),
    "queue": lambda size: queue.Queue().get(),
}
ATTRIBUTES = (
    {"classes": 5},
    {"classes": "cats"},
    {"classes": ()},
    {"classes": {"cat": 1}},
    {"classes": {"cat"}},
    {"classes": ("a",), "num_classes": 2},
    {"num_classes": "x"},
    {"num_classes": 0},
    {"num_classes": -3},
    {"num_classes": 2.5},
    {"num_classes": True},
    {"num_classes": 10**12},
    {"num_classes": None},
)
LENGTHS = (0, -1, 2.5, "x", None, 2**70, 10**12)
