"""The user's own torch Dataset: `data=dataset data.dataset=package.module:function`."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
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
from cl_train.data.augment import seeded_everywhere
from cl_train.data.bad_images import BadImages
from cl_train.data.collate import channels_last_collate
from cl_train.data.decode import BadImage
from cl_train.data.device import HostBatch
from cl_train.data.image_reader import ImageSettings, ImageTransform, WorkerTimes
from cl_train.data.loader import HostLoader, Loader, LoaderSettings
from cl_train.data.order import permutation
from cl_train.data.source import Indices

log = logging.getLogger(__name__)
STREAM_NOTE = (
    "data.dataset is an IterableDataset: it controls order and random numbers, which depend on data.workers; a resumed"
    " epoch reads the skipped batches again; it must divide its samples among ranks and workers itself"
)


BySize = Mapping[int, Any]  # image size -> Dataset; all have the same samples


def load_datasets(
    name: str | None, train_sizes: Sequence[int], val_size: int
) -> tuple[BySize, BySize, tuple[str, ...]]:
    """Train and val datasets, and the classes. The user's function is called with ("train", size) once per size of
    `data.size_schedule`, and with ("val", val_size).

    Raises:
        ConfigError: no such function, it fails, or its result has no length or no classes.
    """
    if name is None:
        raise ConfigError("data=dataset needs data.dataset=package.module:function")
    function = user_function("data.dataset", name)
    train: dict[int, Any] = {}
    val: dict[int, Any] = {}
    for split, size in [*(("train", size) for size in train_sizes), ("val", val_size)]:
        try:
            dataset = function(split, size)
            length = len(dataset)
        except Exception as error:
            raise ConfigError(
                f"data.dataset={name}: ({split!r}, {size}) must return a Dataset with a length: {_reason(error)}"
            ) from error
        (train if split == "train" else val)[size] = dataset
        if split == "train" and length != (expected := len(train[train_sizes[0]])):
            raise ConfigError(
                f"data.dataset={name}: {expected} training samples at {train_sizes[0]} px, but {length} at {size} px;"
                " the image size must not change the samples"
            )
    classes, count = (getattr(train[train_sizes[0]], attribute, None) for attribute in ("classes", "num_classes"))
    if classes is None and count is None:
        raise ConfigError(f"data.dataset={name}: set `classes` (names) or `num_classes` on the train dataset")
    return train, val, tuple(map(str, classes or (f"class_{label}" for label in range(int(count or 0)))))


def dataset_loader(
    datasets: BySize, split: str, classes: int, images: ImageSettings, settings: LoaderSettings, bad_images: BadImages
) -> Loader:
    dataset = next(iter(datasets.values()))
    if isinstance(dataset, IterableDataset):
        if settings.repeats > 1:
            raise ConfigError("augment.repeats does not work with an IterableDataset, which controls its own order")
        log.warning(STREAM_NOTE)
        return StreamLoader(datasets, settings, images.seed, training=split == "train")
    order = partial(_order, images.seed, len(dataset)) if split == "train" else None
    return HostLoader(DatasetReader(datasets, split, classes, images), settings, bad_images, order)


def _order(seed: int, count: int, epoch: int) -> Indices:
    return permutation(seed, epoch, count)


class DatasetReader:
    """The samples of a map-style Dataset, (image, label, ...): a `cl_train.data.loader.SampleReader`.

    A PIL image, or a uint8 array [H, W, 3], gets the transforms of the settings; so does a uint8 tensor [3, H, W] of
    another size than the required one. Other tensors [3, size, size] are not transformed: uint8 is normalised on the
    device, floating point is assumed to be normalised.
    """

    def __init__(self, datasets: BySize, split: str, classes: int, settings: ImageSettings) -> None:
        """Raises ConfigError if the first sample cannot be used."""
        self._datasets, self._split, self._classes, self._settings = datasets, split, classes, settings
        self._transform = ImageTransform(settings)
        self.dtype, self.times = torch.uint8, WorkerTimes()
        for size, dataset in datasets.items():
            try:
                with seeded_everywhere(settings.seed, 0, 0):
                    image = dataset[0][0]
                if isinstance(image, Tensor) and image.is_floating_point():
                    self.dtype = torch.float32
                self.read(torch.empty(size, size, 3, dtype=self.dtype).permute(2, 0, 1), 0, 0, 0)
            except Exception as error:
                raise ConfigError(f"data.dataset: {self.name(0)} at {size} px: {_reason(error)}") from error

    def __len__(self) -> int:
        return len(next(iter(self._datasets.values())))

    def name(self, index: int) -> str:
        return f"sample {index} of the {self._split} dataset"

    def read(self, row: Tensor, index: int, epoch: int, random_index: int) -> int:
        """Write sample `index` into `row`; return its label. Raises BadImage for any exception of the dataset."""
        training, size = self._split == "train", row.shape[-1]
        try:
            with seeded_everywhere(self._settings.seed, epoch if training else 0, random_index):
                image, label = self._datasets[size][index][:2]
            pixels = _raw_pixels(image, size)
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


class StreamLoader:
    """One rank's batches of an IterableDataset, which controls order, random numbers and shares of workers and ranks.

    It has the members of `cl_train.data.loader.HostLoader`.
    """

    def __init__(self, datasets: BySize, settings: LoaderSettings, seed: int, *, training: bool) -> None:
        self._datasets, self._settings, self._seed, self._training = datasets, settings, seed, training
        self.samples = len(next(iter(datasets.values())))
        self.times = WorkerTimes()

    def batch_count(self, epoch: int = 0) -> int:
        total = self._settings.sizes.batch_size_at(epoch) * self._settings.world_size
        return self.samples // total if self._training else -(-self.samples // total)

    def batches(self, epoch: int = 0, first_batch: int = 0) -> Iterator[HostBatch]:
        s = self._settings
        dataset = self._datasets[s.sizes.image_size_at(epoch)]
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        loader = DataLoader(
            dataset,
            s.sizes.batch_size_at(epoch),
            num_workers=s.workers,
            collate_fn=channels_last_collate,
            drop_last=self._training,
            pin_memory=s.pin_memory,
            generator=torch.Generator().manual_seed(self._seed + epoch),
        )
        for number, (images, targets, *_) in enumerate(loader):
            if self._training and number >= self.batch_count(epoch):
                return
            if number >= first_batch:
                yield HostBatch(images, targets, number, release=lambda: None)

    def close(self) -> None:
        """Nothing to do: the workers end with the iteration."""


def _reason(error: Exception) -> str:
    """The error, and its location in the user's code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"
