"""The user's own torch Dataset or IterableDataset. Nothing that it does can end the program without a line that names
its sample: exceptions, `sys.exit`, and, in a worker, a crash or a hang. No value is converted unless its meaning is
certain."""

import math
import operator
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info

from cl_train.config.schema import ConfigError, DataConfig
from cl_train.config.validation import user_function
from cl_train.data.images import BadImage, ImageSource, Pixels
from cl_train.data.transforms import ImageTransform, seeded_everywhere
from cl_train.data.workers import WorkerError, Workers
from cl_train.system.distributed import Dist

Label = int | npt.NDArray[np.float32]
_MOST_CLASSES = 1_000_000
_SHOWN = 300  # characters of a message of the user's code


def read_datasets(root: Path, cfg: DataConfig, *, training: bool) -> ImageSource:
    """What the user's function returns for ("train", image_size) and ("val", val_size). Raises ConfigError."""
    assert cfg.dataset is not None, "`load` requires data.dataset"
    function, built = user_function("data.dataset", cfg.dataset), list[Any]()
    for split, size in (("train", cfg.image_size), ("val", cfg.val_size or cfg.image_size)):
        try:
            built.append(function(split, size))
            if len(built[-1]) == 0:
                raise ValueError(f"the {split} dataset is empty")
            classes = _class_names(built[0])
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"data.dataset={cfg.dataset}: ({split!r}, {size}) must return a Dataset with a length, and the one for"
                f" 'train' `classes` (names) or `num_classes`: {_reason(error)}"
            ) from error
    return ImageSource(classes, built[0], built[1], f"{cfg.dataset}-{len(built[0])}-{len(built[1])}")


def _class_names(dataset: Any) -> tuple[str, ...]:
    names: Any = getattr(dataset, "classes", None)
    count: Any = getattr(dataset, "num_classes", None)
    if names is None:
        if isinstance(count, bool) or not 1 <= operator.index(count) <= _MOST_CLASSES:
            raise ValueError(f"`num_classes` is {count}, not a number from 1 to {_MOST_CLASSES}")
        return tuple(f"class_{label}" for label in range(count))
    if isinstance(names, str) or not isinstance(names, Sequence | np.ndarray):
        raise TypeError(f"`classes` must be a list of names in the order of the labels, not {_described(names)}")
    if len(names) == 0 or count not in (None, len(names)):
        raise ValueError(f"`classes` has {len(names)} names, and `num_classes` is {count}")
    return tuple(map(str, names))


class DatasetReader:
    """Reads the samples of a map-style Dataset, (image, label, ...). It has the public members of `ImageReader`.

    A PIL image, a uint8 array [H, W, 3], or a uint8 tensor [3, H, W] of another size than the required one gets the
    transforms of the settings. Other tensors [3, size, size] are not transformed: uint8 is normalised on the device,
    floating point is assumed to be normalised. A label is the number of a class, or in all samples a floating-point
    vector [classes] of numbers from 0 to 1 (multi-label). Raises ConfigError: the first sample cannot be used.
    """

    def __init__(
        self, dataset: Any, classes: int, size: int, transform: ImageTransform, timeout_s: float, dist: Dist
    ) -> None:
        self._dataset, self._classes, self._transform, self._dist = dataset, classes, transform, dist
        self._samples, self.times = len(dataset), np.zeros(5)
        self.dtype, self.label_shape = torch.uint8, ()
        # The first sample is read in a worker: files that the Dataset opens then must not be shared by all workers.
        try:
            with closing(Workers(self._first_form, 1, timeout_s, self.name)) as workers:
                self.dtype, self.label_shape, problem = next(workers.results(iter([size])))
        except WorkerError as error:
            problem = str(error)
        if problem:
            raise ConfigError(f"data.dataset: {self.name(0)} at {size} px: {problem}")

    def __len__(self) -> int:
        return self._samples

    def name(self, index: int) -> str:
        return f"sample {index} of the {'train' if self._transform.training else 'val'} dataset"

    def read(self, row: Tensor, index: int, epoch: int, random_index: int) -> Label:
        """Write sample `index` into `row`; return its label. Raises BadImage for any exception of the dataset."""
        begin = perf_counter()
        try:
            sample = self._load(index, epoch if self._transform.training else 0, random_index)
            loaded = perf_counter()
            if not isinstance(sample, tuple | list) or len(sample) < 2:
                raise TypeError(f"a sample must be (image, label), not {_described(sample)}")
            image, label = checked_image(sample[0], row), checked_label(sample[1], self._classes)
            if np.shape(label) != self.label_shape:
                raise TypeError(f"the label is {_described(sample[1])}, unlike that of the first sample")
            if isinstance(image, Tensor):
                row.copy_(image)
                if row.is_floating_point() and not math.isfinite(row.sum().item()):
                    raise ValueError("the image has pixels that are NaN or infinite")
            else:
                self._transform(row, image, epoch, random_index)
            self.times += (0, 0, perf_counter() - loaded, 1, loaded - begin)
            return label
        except StreamEnd:
            raise
        except (Exception, SystemExit) as error:
            raise BadImage(_reason(error)) from error

    def _load(self, index: int, epoch: int, random_index: int) -> Any:
        with seeded_everywhere(self._transform.seed, epoch, random_index):
            return self._dataset[index]

    def _first_form(self, _: int, image_size: int) -> tuple[torch.dtype, tuple[int, ...], str]:
        """The dtype of images and the shape of labels, from the first sample, or why it cannot be used."""
        problem = ""
        with suppress(Exception, SystemExit):  # `read` has the reason
            image, label, *_ = self._load(0, 0, 0)
            self.dtype = torch.float32 if isinstance(image, Tensor) and image.is_floating_point() else torch.uint8
            self.label_shape = np.shape(checked_label(label, self._classes))
        try:
            self.read(torch.empty(image_size, image_size, 3, dtype=self.dtype).permute(2, 0, 1), 0, 0, 0)
        except (BadImage, StreamEnd) as error:
            problem = str(error)
        return self.dtype, self.label_shape, problem


class StreamEnd(Exception):
    """An IterableDataset has no further sample."""


class StreamReader(DatasetReader):
    """Reads the samples of an IterableDataset forward, in the place of a map-style one. Each worker has its own stream,
    which `begin` starts anew. The last sample is kept, so that it can also take the place of a bad one before it."""

    _iteration, _next_row = 0, 0
    _stream: Iterator[Any] | None = None
    _taken = 0  # samples of the stream
    _last: Any = None  # sample, or the exception in its place

    def name(self, index: int) -> str:
        worker = get_worker_info()
        return super().name(index) + (f" in worker {worker.id}" if worker else "")

    def begin(self, iteration: int, epoch: int, rows: int) -> range:
        """The next indices of iteration `iteration` in this worker."""
        if iteration != self._iteration:
            self._iteration, self._next_row, self._taken, self._stream = iteration, 0, 0, None
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
        self._next_row += rows
        return range(self._next_row - rows, self._next_row)

    def _load(self, index: int, epoch: int, random_index: int) -> Any:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        seed_index = (index * workers + number) * self._dist.world_size + self._dist.rank
        if self._taken <= index:
            self._taken += 1
            try:
                with seeded_everywhere(self._transform.seed, epoch, seed_index):
                    self._stream = iter(self._dataset) if self._stream is None else self._stream
                    self._last = next(self._stream)
            except StopIteration:
                raise StreamEnd("it yields no sample") from None
            except (Exception, SystemExit) as error:
                self._last = error
        if isinstance(self._last, BaseException):
            raise self._last
        return self._last


def checked_image(image: Any, row: Tensor) -> Pixels | Tensor:
    """uint8 [H, W, 3] of an image that needs transforms, or a tensor to copy into `row`. Raises TypeError: neither."""
    pixels = image
    if isinstance(image, Image.Image) and image.mode[0] not in "IF":  # those have more than 8 bits per channel
        pixels = np.array(image.convert("RGB"))
    elif isinstance(image, Tensor) and image.device.type == "cpu" and image.layout == torch.strided:
        is_of_row = image.shape == row.shape and image.is_floating_point() == row.is_floating_point()
        if is_of_row and (image.dtype == torch.uint8 or image.is_floating_point()):
            return image.detach()
        pixels = image.permute(1, 2, 0).numpy() if image.ndim == 3 and image.dtype == torch.uint8 else image
    is_picture = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.size > 0
    if not is_picture or pixels.shape[2] != 3 or row.is_floating_point():
        kinds = "a PIL image of 8 bits per channel, a uint8 array [H, W, 3], or a uint8 tensor [3, H, W]"
        expected = f"{_described(row)}, as the first sample" if row.is_floating_point() else kinds
        raise TypeError(f"the image must be {expected}, not {_described(image)}")
    return np.require(pixels, requirements=["C", "W"])


def checked_label(label: Any, classes: int) -> Label:
    """The number of a class, or float32 [classes]. Raises TypeError or ValueError: the label is neither."""
    if isinstance(label, Tensor | np.ndarray) and tuple(label.shape) == (classes,) and classes > 1:
        vector = torch.as_tensor(label).detach()
        if vector.is_floating_point():
            if not ((vector >= 0) & (vector <= 1)).all():
                raise ValueError("the label has numbers that are not from 0 to 1")
            return np.asarray(vector, np.float32)
    is_scalar = isinstance(label, Tensor | np.ndarray | np.generic) and math.prod(label.shape) == 1
    value = label.item() if is_scalar else label
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"the label is {_described(label)}, not a whole number")
    if not 0 <= value < classes:
        raise ValueError(f"label {value} of {classes} classes")
    return value


def _described(value: Any) -> str:
    if isinstance(value, Tensor) and (value.device.type != "cpu" or value.layout != torch.strided):
        return f"a tensor {value.layout} on {value.device}"
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, Image.Image):
        return f"a PIL image of mode {value.mode}, {value.width} x {value.height} pixels"
    return f"{type(value).__name__} {value!r:.40}"


def _reason(error: BaseException) -> str:
    """The error in one line, and its location unless it was raised by the checks of this file."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f" ({Path(frame.filename).name}, line {frame.lineno})" if frame.filename != __file__ else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN]}{where}"
