"""Image folders and unusual files for the tests of the data part."""

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data import workers as data_workers
from cl_train.data.build import Data, ImageData, build_data
from cl_train.data.device import DeviceFormat
from cl_train.data.loader import DataSettings
from cl_train.system.distributed import Dist
from tests.processes import LIMIT_S

CPU = torch.device("cpu")
FLOAT_CHANNELS_LAST = DeviceFormat(CPU, torch.float32, torch.channels_last)
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    """A picture with structure at all scales, as photographs have."""
    rng = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3))
    for cells in (2, 5, 12, 30, 80):
        coarse = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        pixels += (
            np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=float) / 5
        )
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@cache
def jpeg(height: int = 48, width: int = 64, seed: int = 0) -> bytes:
    return encoded(noise(height, width, seed), quality=90)


def count_silence_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Workers count as silent after 1 s, but only once one of them has called the function
    returned: until then a busy machine may be slow.
    """
    reached = data_workers.shared((1,), torch.int64)
    timeout_s = property(lambda _: 1.0 if reached else LIMIT_S, lambda *_: None)
    monkeypatch.setattr(data_workers.Workers, "_timeout_s", timeout_s, raising=False)

    def reach() -> None:
        reached.fill_(1)

    return reach


def write_folder(root: Path, *, train: int, val: int, classes: int = 2) -> Path:
    """`train` and `val` small JPEGs in all, dealt to the classes in turn."""
    for split, count in (("train", train), ("val", val)):
        for label in range(classes):
            (root / split / f"class_{label}").mkdir(parents=True, exist_ok=True)
        for number in range(count):
            path = root / split / f"class_{number % classes}" / f"{number:04d}.jpg"
            path.write_bytes(jpeg(40 + number % 7, 50 + number % 5, seed=number))
    return root


def data_of(*, batch_size: int = 4, seed: int = 0, **settings: Any) -> Data:
    """Without workers; `settings` as in DataConfig, and `augment` and the fields of Dist."""
    augment = settings.pop("augment", AugmentConfig())
    dist = Dist(settings.pop("rank", 0), settings.pop("world_size", 1), settings.pop("device", CPU))
    micro_steps = settings.pop("accumulate_steps", 1)
    cfg = DataConfig(**{"workers": 0, **settings})
    return build_data(DataSettings(cfg, augment, batch_size, seed, dist, micro_steps))


def folder_data(root: Path, **settings: Any) -> ImageData:
    """The data of `root` at 32 px."""
    data = data_of(**{"name": "folder", "root": str(root), "image_size": 32, **settings})
    assert isinstance(data, ImageData)
    return data


def train_batches(data: ImageData, epoch: int = 0, first_batch: int = 0) -> Batches:
    """Copies of an epoch's batches."""
    return [
        (host.images.clone(), host.targets.clone())
        for host in data.train_loader.batches(epoch, first_batch)
    ]


def val_count(data: ImageData) -> int:
    return sum(len(batch.targets) for batch in data.validation(FLOAT_CHANNELS_LAST))


def same(first: Batches, second: Batches) -> None:
    assert len(first) == len(second) > 0
    for (images, targets), (other_images, other_targets) in zip(first, second, strict=True):
        assert torch.equal(images, other_images) and torch.equal(targets, other_targets)


def all_pixels(batches: Batches) -> torch.Tensor:
    return torch.cat([images for images, _ in batches])
