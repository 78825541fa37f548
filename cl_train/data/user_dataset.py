"""The user's own torch Dataset: `data=dataset data.dataset=package.module:function`."""

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from cl_train.config.schema import AugmentConfig, ConfigError, DataConfig
from cl_train.config.user_function import user_function
from cl_train.data.augment import seeded_everywhere
from cl_train.data.decode import BadImage
from cl_train.data.image_reader import ImageTransform, WorkerTimes

BySize = Mapping[int, Any]  # image size -> Dataset; all have the same samples


def load_datasets(
    name: str | None, train_sizes: Sequence[int], val_size: int
) -> tuple[BySize, BySize, tuple[str, ...], str]:
    """Train and val datasets, the classes and the fingerprint. The user's function is called with ("train", size) once
    per size of `data.size_schedule`, and with ("val", val_size).

    Raises ConfigError if the function is missing or fails, or its results have no or different lengths, or no classes.
    """
    assert name is not None, "config/rules.py requires data.dataset"
    function = user_function("data.dataset", name)

    def build(split: str, size: int) -> Any:
        try:
            dataset = function(split, size)
            len(dataset)
        except Exception as error:
            raise ConfigError(
                f"data.dataset={name}: ({split!r}, {size}) must return a Dataset with a length: {_reason(error)}"
            ) from error
        return dataset

    train, val = {size: build("train", size) for size in train_sizes}, {val_size: build("val", val_size)}
    if len({len(dataset) for dataset in train.values()}) > 1:
        counts = ", ".join(f"{len(dataset)} at {size} px" for size, dataset in train.items())
        raise ConfigError(f"data.dataset={name}: {counts}; the image size must not change the training samples")
    classes, count = (getattr(train[train_sizes[0]], attribute, None) for attribute in ("classes", "num_classes"))
    if classes is None and count is None:
        raise ConfigError(f"data.dataset={name}: set `classes` (names) or `num_classes` on the train dataset")
    names = tuple(map(str, classes or (f"class_{label}" for label in range(int(count or 0)))))
    return train, val, names, f"{name}-{samples_of(train)}-{samples_of(val)}"


def samples_of(datasets: BySize) -> int:
    return len(next(iter(datasets.values())))


def is_stream(datasets: BySize) -> bool:
    return isinstance(next(iter(datasets.values())), IterableDataset)


class DatasetReader:
    """Reads the samples of a map-style Dataset, (image, label, ...). It has the public members of `ImageReader`.

    A PIL image, or a uint8 array [H, W, 3], gets the transforms of the settings; so does a uint8 tensor [3, H, W] of
    another size than the required one. Other tensors [3, size, size] are not transformed: uint8 is normalised on the
    device, floating point is assumed to be normalised.
    """

    def __init__(
        self, datasets: BySize, classes: int, cfg: DataConfig, augment: AugmentConfig, seed: int, *, training: bool
    ) -> None:
        """Raises ConfigError if the first sample cannot be used."""
        self._datasets, self._classes, self._seed, self._training = datasets, classes, seed, training
        self._transform = ImageTransform(cfg, augment, seed, training=training)
        self.dtype, self.times = torch.uint8, WorkerTimes()
        for size, dataset in datasets.items():
            try:
                with seeded_everywhere(self._seed, 0, 0):
                    image = dataset[0][0]
                if isinstance(image, Tensor) and image.is_floating_point():
                    self.dtype = torch.float32
                self.read(torch.empty(size, size, 3, dtype=self.dtype).permute(2, 0, 1), 0, 0, 0)
            except Exception as error:
                raise ConfigError(f"data.dataset: {self.name(0)} at {size} px: {_reason(error)}") from error

    def __len__(self) -> int:
        return samples_of(self._datasets)

    def name(self, index: int) -> str:
        return f"sample {index} of the {'train' if self._training else 'val'} dataset"

    def read(self, row: Tensor, index: int, epoch: int, random_index: int) -> int:
        """Write sample `index` into `row`; return its label. Raises BadImage for any exception of the dataset."""
        size, begin = row.shape[-1], perf_counter()
        try:
            with seeded_everywhere(self._seed, epoch if self._training else 0, random_index):
                image, label = self._datasets[size][index][:2]
            loaded = perf_counter()
            pixels = _raw_pixels(image, size)
            if pixels is None:
                if image.shape != row.shape or image.is_floating_point() != row.is_floating_point():
                    raise ValueError(f"{image.dtype} {list(image.shape)} instead of {row.dtype} {list(row.shape)}")
                row.copy_(image)
            else:
                self._transform(row, pixels, epoch, random_index)
            if not 0 <= int(label) < self._classes:
                raise ValueError(f"label {int(label)} of {self._classes} classes")
            self.times.add(WorkerTimes(resize_s=perf_counter() - loaded, images=1, dataset_s=loaded - begin))
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


def _reason(error: Exception) -> str:
    """The error, and its location in the user's code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"
