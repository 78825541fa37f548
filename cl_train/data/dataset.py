"""The user's own torch Dataset: `data=dataset data.dataset=package.module:function`."""

from __future__ import annotations

import logging
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from cl_train.config.schema import ConfigError
from cl_train.config.user_function import user_function
from cl_train.data.augment import seeded
from cl_train.data.bad_images import BadImages
from cl_train.data.collate import channels_last_collate
from cl_train.data.decode import BadImage
from cl_train.data.device import HostBatch
from cl_train.data.images import ImageSettings, ImageTransform, WorkerTimes
from cl_train.data.loader import HostLoader, Loader, LoaderSettings
from cl_train.data.order import permutation, sample_generator
from cl_train.data.source import Indices

log = logging.getLogger(__name__)
STREAM_NOTE = (
    "data.dataset is an IterableDataset: it controls order and random numbers, which depend on data.workers; a resumed"
    " epoch reads the skipped batches again; it must divide its samples among ranks and workers itself"
)


def load_datasets(name: str | None, image_size: int) -> tuple[list[Any], tuple[str, ...]]:
    """Both splits, by calling the user's function with ("train" or "val", image_size), and their classes.

    Raises:
        ConfigError: no such function, it fails, or its result has no length or no classes.
    """
    if name is None:
        raise ConfigError("data=dataset needs data.dataset=package.module:function")
    function = user_function("data.dataset", name)
    datasets = []
    for split in ("train", "val"):
        try:
            datasets.append(function(split, image_size))
            len(datasets[-1])
        except Exception as error:
            raise ConfigError(
                f"data.dataset={name}: ({split!r}, {image_size}) must return a Dataset with a length: {_reason(error)}"
            ) from error
    classes, count = (getattr(datasets[0], attribute, None) for attribute in ("classes", "num_classes"))
    if classes is None and count is None:
        raise ConfigError(f"data.dataset={name}: set `classes` (names) or `num_classes` on the train dataset")
    return datasets, tuple(map(str, classes or (f"class_{label}" for label in range(int(count or 0)))))


def dataset_loader(
    dataset: Any, split: str, classes: int, images: ImageSettings, settings: LoaderSettings, bad_images: BadImages
) -> Loader:
    if isinstance(dataset, IterableDataset):
        log.warning(STREAM_NOTE)
        return StreamLoader(dataset, settings, images.seed, training=split == "train")
    order = partial(_order, images.seed, len(dataset)) if split == "train" else None
    return HostLoader(DatasetReader(dataset, split, classes, images), settings, bad_images, order)


def _order(seed: int, count: int, epoch: int) -> Indices:
    return permutation(seed, epoch, count)


class DatasetReader:
    """The samples of a map-style Dataset, (image, label, ...): a `cl_train.data.loader.SampleReader`.

    A PIL image, or a uint8 array [H, W, 3], gets the transforms of the settings; so does a uint8 tensor [3, H, W] of
    another size than the required one. Other tensors [3, size, size] are not transformed: uint8 is normalised on the
    device, floating point is assumed to be normalised.
    """

    def __init__(self, dataset: Any, split: str, classes: int, settings: ImageSettings) -> None:
        """Raises ConfigError if the first sample cannot be used."""
        self._dataset, self._split, self._classes, self._settings = dataset, split, classes, settings
        self._transform = ImageTransform(settings)
        self.image_size, self.dtype, self.times = settings.size, torch.uint8, WorkerTimes()
        try:
            with seeded_everywhere(settings.seed, 0, 0):
                image = dataset[0][0]
            if isinstance(image, Tensor) and image.is_floating_point():
                self.dtype = torch.float32
            self.read(torch.empty(settings.size, settings.size, 3, dtype=self.dtype).permute(2, 0, 1), 0, 0, 0)
        except Exception as error:
            raise ConfigError(f"data.dataset: {self.name(0)}: {_reason(error)}") from error

    def __len__(self) -> int:
        return len(self._dataset)

    def name(self, index: int) -> str:
        return f"sample {index} of the {self._split} dataset"

    def read(self, row: Tensor, index: int, epoch: int, random_index: int) -> int:
        """Write sample `index` into `row`; return its label. Raises BadImage for any exception of the dataset."""
        training = self._split == "train"
        try:
            with seeded_everywhere(self._settings.seed, epoch if training else 0, random_index):
                image, label = self._dataset[index][:2]
            pixels = _raw_pixels(image, self.image_size)
            if pixels is None:
                if image.shape != row.shape or image.is_floating_point() != row.is_floating_point():
                    raise ValueError(f"{image.dtype} {list(image.shape)} instead of {row.dtype} {list(row.shape)}")
                row.copy_(image)
            elif training:
                self._transform.train(row, pixels, epoch, random_index)
            else:
                self._transform.validation(row, pixels)
            if not 0 <= int(label) < self._classes:
                raise ValueError(f"label {int(label)} of {self._classes} classes")
            return int(label)
        except Exception as error:
            raise BadImage(_reason(error)) from error


def _raw_pixels(image: Any, size: int) -> np.ndarray[Any, Any] | None:
    """uint8 [H, W, 3] of an image that needs transforms; None for a tensor that is ready."""
    if isinstance(image, Image.Image):
        return np.array(image.convert("RGB"))
    if isinstance(image, Tensor):
        if image.dtype != torch.uint8 or image.shape == (3, size, size):
            return None
        image = image.permute(1, 2, 0).contiguous().numpy()
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise TypeError("the image must be a PIL image, a uint8 array [H, W, 3] or a tensor [3, H, W]")
    return image


@contextmanager
def seeded_everywhere(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python by the arguments; restore their states afterwards."""
    word = int(sample_generator(seed, epoch, index).integers(2**32))
    numpy_state, python_state = np.random.get_state(), random.getstate()
    np.random.seed(word)
    random.seed(word)
    try:
        with seeded(word):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


class StreamLoader:
    """One rank's batches of an IterableDataset, which controls order, random numbers and shares of workers and ranks.

    It has the members of `cl_train.data.loader.HostLoader`.
    """

    def __init__(self, dataset: Any, settings: LoaderSettings, seed: int, *, training: bool) -> None:
        self._dataset, self._settings, self._seed, self._training = dataset, settings, seed, training
        self.samples = len(dataset)
        self.times = WorkerTimes()

    def __len__(self) -> int:
        total = self._settings.batch_size * self._settings.world_size
        return self.samples // total if self._training else -(-self.samples // total)

    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[HostBatch]:
        s = self._settings
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        loader = DataLoader(
            self._dataset,
            s.batch_size,
            num_workers=s.workers,
            collate_fn=channels_last_collate,
            drop_last=self._training,
            pin_memory=s.pin_memory,
            generator=torch.Generator().manual_seed(self._seed + epoch),
        )
        for number, (images, targets, *_) in enumerate(loader):
            if self._training and number >= len(self):
                return
            if number >= first_batch:
                yield HostBatch(images, targets, number, release=lambda: None)

    def close(self) -> None:
        """Nothing to do: the workers end with the iteration."""


def _reason(error: Exception) -> str:
    """The error, and its location in the user's code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"
