"""Makes both splits of a data set, as batches on the device, from the `data` settings: images or
synthetic data.
"""

import logging
import shlex
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data.bad_images import BadImages
from cl_train.data.class_names import matched_all
from cl_train.data.csv_lists import list_csv, list_csv_images
from cl_train.data.decode import Pixels
from cl_train.data.device import Batch, DeviceFormat, Normalise, to_device
from cl_train.data.images import (
    EXTENSIONS,
    FolderSplit,
    ImageSource,
    Indices,
    Split,
    list_folder,
    list_images,
    listed,
)
from cl_train.data.loader import DataSettings, HostLoader
from cl_train.data.order import SizeSchedule, permutation, repeated
from cl_train.data.sample import list_sample
from cl_train.data.stream import StreamLoader
from cl_train.data.tar_shards import list_shards
from cl_train.data.transforms import ImageReader, ImageTransform, Reader, WorkerTimes, label_mix
from cl_train.data.user_dataset import DatasetReader, SampleForm, check_first, open_datasets
from cl_train.errors import ConfigError
from cl_train.system.distributed import Dist
from cl_train.system.files import cache_folder

log = logging.getLogger(__name__)
_CHECKOUT = Path(__file__).resolve().parents[2]
# Generated data lies in the checkout, or for an installed package in the user's cache folder.
DATA_DIR = (_CHECKOUT if (_CHECKOUT / "pyproject.toml").is_file() else cache_folder()) / "data"
_SOURCES: dict[str, Callable[..., ImageSource]] = {  # by `data.name`; (root, cfg, training=)
    "sample": list_sample,
    "imagenet": list_folder,
    "folder": list_folder,
    "shards": list_shards,
    "csv": list_csv,
    "dataset": open_datasets,
    "imagenette": list_folder,
}


class ImageData:
    """The training and validation images of one run, as this rank sees them.

    `fingerprint` identifies the list of files and the classes, not their content. `bad_images` are
    those of this rank so far. Raises ConfigError: the images do not fit the settings.
    """

    def __init__(self, source: ImageSource, settings: DataSettings) -> None:
        cfg, augment = settings.data, settings.augment
        self._settings = settings
        self.notes = source.notes
        self.classes, self.num_classes = source.classes, len(source.classes)
        self.fingerprint = source.fingerprint
        files = len(source.val) + (len(source.train) if settings.training else 0)
        most = str(cfg.max_bad_images)
        limit = int(float(most[:-1]) / 100 * files) if most.endswith("%") else int(most)
        is_folder = cfg.root is not None and isinstance(source.val, FolderSplit)
        search = search_command(str(cfg.root), cfg.extensions) if is_folder else ""
        self.bad_images = BadImages(cfg.on_bad_image == "skip", limit, most, search)
        self._label_of: torch.Tensor | None = None
        self.class_counts = class_counts(source.train, self.num_classes)
        self._mix = label_mix(augment, self.num_classes, settings.seed, settings.dist)
        if settings.training and augment.repeats > settings.global_batch_size:
            raise ConfigError(
                f"augment.repeats={augment.repeats} is more than the {settings.global_batch_size}"
                " images of a step; raise batch_size"
            )
        val_sizes = SizeSchedule(((0, cfg.eval_size),))
        self.val_loader = self.train_loader = self._loader(source.val, val_sizes, training=False)
        if settings.training:
            self.train_loader = self._loader(source.train, size_schedule(cfg), training=True)
        self.workers = self.train_loader.workers
        self.train_images = self.train_loader.sample_count
        self.val_images = self.val_loader.sample_count

    def _loader(
        self, images: Any, sizes: SizeSchedule, *, training: bool
    ) -> HostLoader | StreamLoader:
        settings, cfg = self._settings, self._settings.data
        transform = ImageTransform(cfg, settings.augment, settings.seed, training=training)
        if isinstance(images, Split):
            reader: Reader = ImageReader(images, transform)
        else:
            form = SampleForm(self.num_classes, sizes.largest, transform)
            check_first(form, images, cfg.worker_timeout_s)
            if isinstance(images, IterableDataset):
                return StreamLoader(images, form, settings, self.bad_images)
            reader = DatasetReader(images, form)
        count = len(reader)

        def order(epoch: int) -> Indices:  # refers to no loader: a cycle would keep its memory
            indices = permutation(settings.seed, epoch, count)
            return repeated(indices, settings.augment.repeats, settings.global_batch_size)

        order_of = order if training else None
        return HostLoader(reader, sizes, settings, self.bad_images, order_of)

    def evaluate_as(self, classes: Sequence[str], what: str) -> None:
        """Gives the validation images the labels of `classes`, matched by name; `what` has these
        classes. Raises ConfigError: the data has others.
        """
        self._label_of = torch.tensor(matched_all(self.classes, classes, what))
        self.classes, self.num_classes = tuple(classes), len(classes)

    def start(self) -> None:
        """Starts the workers. Call it before the model is built: each fork would share the memory
        of the model page by page.
        """
        self.train_loader.start()
        self.val_loader.start()

    def batch_count(self) -> int:
        """Returns the full batches of each rank in an epoch; other images are dropped."""
        return self.train_loader.batch_count()

    @property
    def times(self) -> WorkerTimes:
        """The seconds that workers spent on training images."""
        return self.train_loader.times

    def train(
        self, epoch: int, form: DeviceFormat, first_batch: int = 0
    ) -> Generator[Batch, None, None]:
        """Yields this rank's batches of `epoch`, from number `first_batch` on."""
        batches = self.train_loader.batches(epoch, first_batch)
        yield from to_device(batches, self._normalise(form), self._mix)

    def validation(self, form: DeviceFormat) -> Iterator[Batch]:
        """Returns the batches of this rank's images, `rank::world_size`: no padding, no duplicates,
        and no bad images if these are skipped.
        """
        batches = to_device(self.val_loader.batches(), self._normalise(form))
        if self._label_of is None:
            return batches
        label_of = self._label_of.to(form.device)
        return (replace(batch, targets=label_of[batch.targets]) for batch in batches)

    def validation_indices(self) -> list[int]:
        """Returns the images of this rank's last `validation`; none for an IterableDataset."""
        if isinstance(self.val_loader, StreamLoader):
            return []
        bad, dist = self.bad_images.reasons, self._settings.dist
        indices = range(dist.rank, self.val_images, dist.world_size)
        return [index for index in indices if not bad or self.validation_name(index) not in bad]

    def validation_name(self, index: int) -> str:
        assert isinstance(self.val_loader, HostLoader)
        return self.val_loader.reader.name(index)

    def validation_pixels(self, index: int) -> Pixels:
        """Validation image `index` as the model sees it, uint8 [H, W, 3]. Raises BadImage."""
        assert isinstance(self.val_loader, HostLoader)
        reader, size = self.val_loader.reader, self.val_loader.sizes.image_size_at(0)
        pixels = torch.empty(size, size, 3, dtype=reader.dtype)
        reader.read(pixels.permute(2, 0, 1), index, epoch=0, random_index=index)
        if pixels.is_floating_point():
            cfg = self._settings.data
            pixels = 255 * (pixels * torch.tensor(cfg.std) + torch.tensor(cfg.mean)).clamp(0, 1)
        return np.asarray(pixels.to(torch.uint8))

    def close(self) -> None:
        """Ends the workers and frees their memory."""
        self.train_loader.close()
        self.val_loader.close()

    def _normalise(self, form: DeviceFormat) -> Normalise:
        return Normalise(self._settings.data.mean, self._settings.data.std, form)


def class_counts(images: Any, classes: int) -> list[int] | None:
    """Counts the images per class; a Dataset needs `targets`, as in torchvision. None: unknown."""
    labels = images.labels if isinstance(images, Split) else getattr(images, "targets", None)
    with suppress(TypeError, ValueError):
        counts: list[int] = np.bincount(np.asarray(labels), minlength=classes).tolist()
        return counts
    return None


class SyntheticData:
    """Stands in for `ImageData` in training. All steps of one format and image size get the same
    batch of noise: do not write into it.
    """

    def __init__(self, settings: DataSettings) -> None:
        cfg = settings.data
        self._settings, self._sizes = settings, size_schedule(cfg)
        self.num_classes, self.workers = cfg.synthetic_classes, 0
        self.classes = tuple(f"class_{label}" for label in range(self.num_classes))
        self.train_images = cfg.synthetic_images
        self.class_counts = [1] * self.num_classes
        self.val_images = settings.batch_size * settings.dist.world_size
        facts = (self.train_images, self.num_classes, cfg.image_size, settings.seed)
        self.fingerprint = "-".join(map(str, ("synthetic", *facts)))
        self.bad_images, self.times = BadImages(skip=True, limit=0), WorkerTimes()
        self._batch = cache(self._noise)

    def start(self) -> None:
        """Does nothing: there are no workers."""

    def batch_count(self) -> int:
        return self._settings.batch_count(self.train_images, training=True)

    def train(
        self, epoch: int, form: DeviceFormat, first_batch: int = 0
    ) -> Generator[Batch, None, None]:
        for _ in range(first_batch, self.batch_count()):
            yield self._batch(form, self._sizes.image_size_at(epoch))

    def validation(self, form: DeviceFormat) -> Iterator[Batch]:
        cfg = self._settings.data
        yield self._batch(form, cfg.eval_size)

    def validation_indices(self) -> list[int]:
        return []

    def close(self) -> None:
        self._batch.cache_clear()

    def _noise(self, form: DeviceFormat, size: int) -> Batch:
        count = self._settings.batch_size
        generator = torch.Generator().manual_seed(self._settings.seed)
        images = torch.randn(count, 3, size, size, generator=generator)
        targets = torch.randint(self.num_classes, (count,), generator=generator)
        return Batch(form.place(images), targets.to(form.device))


Data = ImageData | SyntheticData


def build_data(settings: DataSettings) -> Data:
    """Returns the data of `settings` for this rank. Raises ConfigError: it is missing, or does not
    fit the settings or memory.
    """
    data = SyntheticData(settings) if settings.data.name == "synthetic" else _image_data(settings)
    if settings.training and data.train_images < settings.global_batch_size:
        most = data.train_images * settings.batch_size // settings.global_batch_size
        advice = f"batch_size={most} fits" if most else "start fewer processes"
        raise ConfigError(
            f"one step takes {settings.global_batch_size} images (batch_size x accumulate_steps x"
            f" processes), and there are {data.train_images} training images: {advice}"
        )
    return data


def _image_data(settings: DataSettings) -> ImageData:
    cfg = settings.data
    root = DATA_DIR / cfg.name if cfg.root is None else Path(cfg.root).expanduser()
    source = _SOURCES[cfg.name](root, cfg, training=settings.training)
    counts = class_counts(source.val, len(source.classes)) or ()
    absent = [name for name, count in zip(source.classes, counts, strict=False) if not count]
    if absent:
        of_classes = f"no validation images of {len(absent)} of {len(source.classes)} classes"
        source = replace(source, notes=(*source.notes, f"{of_classes}: {listed(absent)}"))
    for note in source.notes if settings.dist.is_main else ():
        log.info("%s", note)
    return ImageData(source, settings)


def search_command(root: str, extensions: Sequence[str] = EXTENSIONS) -> str:
    """The command that finds every bad image of a folder."""
    words = [f"data.root={root}", "expect=any", "deep=true"]
    if {*extensions} - {*EXTENSIONS}:
        words.append(f"data.extensions=[{','.join(extensions)}]")
    return f"cl-train prepare_imagenet verify {shlex.join(words)}"


def size_schedule(cfg: DataConfig) -> SizeSchedule:
    points = tuple((epoch, size) for epoch, size in cfg.size_schedule)
    return SizeSchedule(points or ((0, cfg.image_size),))


def images_of_folder(
    cfg: DataConfig, classes: tuple[str, ...], batch_size: int, dist: Dist
) -> ImageData:
    """Returns the images to predict: all below `data.root` or its folder of validation images, or
    those that `data.csv` names.
    """
    assert cfg.root is not None
    root = Path(cfg.root).expanduser()
    if cfg.csv is None:
        source = list_images(root, classes, cfg.extensions)
    else:
        source = list_csv_images(root, cfg, classes)
    cfg = replace(cfg, max_bad_images="100%")
    settings = DataSettings(cfg, AugmentConfig(), batch_size, seed=0, dist=dist, training=False)
    return ImageData(source, settings)
