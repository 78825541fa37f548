"""The user's own torch Dataset, and the checks of its samples.

No value is converted unless its meaning is certain; a message names the sample.
"""

import math
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from cl_train.config.schema import DataConfig
from cl_train.config.validation import user_function
from cl_train.data.decode import BadImage, Pixels, rgb
from cl_train.data.images import ImageSource
from cl_train.data.transforms import ImageTransform, WorkerTimes, seeded_everywhere
from cl_train.data.workers import Workers, begin_sample
from cl_train.errors import ConfigError, WorkerError
from cl_train.system.failures import explain_failure


def open_datasets(root: Path, cfg: DataConfig, *, training: bool) -> ImageSource:
    """Returns what the user's function makes for ("train", image_size) and ("val", val_size).
    Raises ConfigError: these are no Datasets with classes.
    """
    assert cfg.dataset is not None, "`load` requires data.dataset"
    function, built = user_function("data.dataset", cfg.dataset), list[Any]()
    for split, size in (("train", cfg.image_size), ("val", cfg.eval_size)):
        try:
            built.append(function(split, size))
            if len(built[-1]) == 0:
                raise ValueError(f"the {split} dataset is empty")
            classes = _class_names(built[0])
        except Exception as error:
            raise ConfigError(
                f"data.dataset: {cfg.dataset}({split!r}, {size}) must return a Dataset with a"
                " length, and the one for 'train' `classes` (names) or `num_classes`:"
                f" {explain_failure(error)}"
            ) from error
    train, val = built
    return ImageSource(classes, train, val, f"{cfg.dataset}-{len(train)}-{len(val)}")


def _class_names(dataset: Any) -> tuple[str, ...]:
    names: Any = getattr(dataset, "classes", None)
    count: Any = getattr(dataset, "num_classes", None)
    if names is None:
        names = [f"class_{label}" for label in range(count)]
    if isinstance(names, str) or len(names) == 0 or count not in (None, len(names)):
        raise ValueError(f"`classes` is {names!r:.40}, and `num_classes` is {count}")
    return tuple(map(str, names))


class SampleForm:
    """Checks samples (image, label, ...) of the user and writes their images into rows.

    The transforms of the settings are applied to encoded files (bytes), PIL images, uint8 arrays
    [H, W, 3], and uint8 tensors [3, H, W] of another size than the required one. Tensors [3, size,
    size] are not transformed: uint8 is normalised on the device, floating point is assumed to be
    normalised. The first sample decides the `dtype` of the images.
    """

    def __init__(self, classes: int, size: int, transform: ImageTransform) -> None:
        self.classes, self.size, self.transform = classes, size, transform
        self.dtype = torch.uint8

    def name(self, index: int) -> str:
        return f"sample {index} of the {'train' if self.transform.training else 'val'} dataset"

    def take_from(self, sample: Any) -> None:
        """Checks the first sample and sets `dtype` by it. Raises TypeError, ValueError."""
        image, _ = _image_and_label(sample)
        if isinstance(image, Tensor) and image.is_floating_point():
            self.dtype = torch.float32
        self.write(torch.empty(self.size, self.size, 3, dtype=self.dtype).permute(2, 0, 1), sample)

    def write(self, row: Tensor, sample: Any, epoch: int = 0, random_index: int = 0) -> int:
        """Writes the image into `row`; returns the label. Raises TypeError, ValueError."""
        given, given_label = _image_and_label(sample)
        label = _checked_label(given_label, self.classes)
        if isinstance(given, bytes) and not row.is_floating_point():
            self.transform.write_encoded(row, given, epoch, random_index)
            return label
        image = _checked_image(given, row, upright=self.transform.upright)
        if not isinstance(image, Tensor):
            self.transform(row, image, epoch, random_index)
            return label
        row.copy_(image)
        if row.is_floating_point() and not math.isfinite(row.sum().item()):
            raise ValueError("the image has pixels that are NaN or infinite")
        return label


class DatasetReader:
    def __init__(self, dataset: Any, form: SampleForm) -> None:
        self._dataset, self._form, self._samples = dataset, form, len(dataset)
        self.dtype, self.name = form.dtype, form.name

    def __len__(self) -> int:
        return self._samples

    def read(
        self, row: Tensor, index: int, epoch: int, random_index: int
    ) -> tuple[int, WorkerTimes]:
        begin = perf_counter()
        transform = self._form.transform
        epoch = epoch if transform.training else 0
        try:
            with seeded_everywhere(transform.seed, epoch, random_index):
                sample = self._dataset[index]
            loaded = perf_counter()
            label = self._form.write(row, sample, epoch, random_index)
        except Exception as error:
            raise BadImage(explain_failure(error)) from error
        times = {"resize_s": perf_counter() - loaded, "dataset_s": loaded - begin}
        return label, WorkerTimes(**times, images=1)


def check_first(form: SampleForm, dataset: Any, timeout_s: float) -> None:
    """Sets the `dtype` of `form` by the first sample. Raises ConfigError.

    A worker reads it: workers would share a file that the dataset opens here.
    """

    def first(index: int) -> tuple[torch.dtype, str]:
        begin_sample(index)
        try:
            with seeded_everywhere(form.transform.seed, 0, 0):
                is_stream = isinstance(dataset, IterableDataset)
                form.take_from(next(iter(dataset)) if is_stream else dataset[0])
        except Exception as error:
            return form.dtype, explain_failure(error)
        return form.dtype, ""

    try:
        loaded = Workers([0], 1, form.name, timeout_s, batch_size=None, collate_fn=first)
        with closing(loaded) as workers:
            form.dtype, problem = workers.next()
    except WorkerError as error:
        problem = str(error)
    if problem:
        raise ConfigError(f"data.dataset: {form.name(0)} at {form.size} px: {problem}")


def _image_and_label(sample: Any) -> tuple[Any, Any]:
    if not isinstance(sample, tuple | list) or len(sample) < 2:
        raise TypeError(f"a sample must be (image, label), not {_described(sample)}")
    return sample[0], sample[1]


def _checked_image(image: Any, row: Tensor, *, upright: bool) -> Pixels | Tensor:
    """Returns the pixels, uint8 [H, W, 3], of an image that needs transforms, or a tensor to copy
    into `row`. Raises TypeError.
    """
    pixels = image
    if isinstance(image, Tensor):
        are_floats = image.is_floating_point() and row.is_floating_point()
        if image.shape == row.shape and (are_floats or image.dtype == row.dtype):
            return image.detach()
        if image.ndim == 3 and image.dtype == torch.uint8:
            pixels = image.permute(1, 2, 0).numpy()
    elif isinstance(image, Image.Image):
        pixels = rgb(image, upright=upright)
    is_picture = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.size > 0
    if is_picture and pixels.shape[2:] == (3,) and not row.is_floating_point():
        return np.require(pixels, requirements=["C", "W"])
    expected = "encoded (bytes), a PIL image, a uint8 array [H, W, 3] or tensor [3, H, W]"
    if row.is_floating_point():
        expected = f"{_described(row)}, as the first sample"
    raise TypeError(f"the image must be {expected}, not {_described(image)}")


def _checked_label(label: Any, classes: int) -> int:
    """Returns the number of a class. Raises TypeError, ValueError."""
    is_scalar = isinstance(label, Tensor | np.ndarray | np.generic) and math.prod(label.shape) == 1
    value = label.item() if is_scalar else label
    if not isinstance(value, int):
        raise TypeError(f"the label is {_described(label)}, not the number of one class")
    if not 0 <= value < classes:
        raise ValueError(f"label {value} of {classes} classes")
    return value


def _described(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, Image.Image):
        return f"a PIL image of mode {value.mode}"
    return f"{type(value).__name__} {value!r:.40}"
