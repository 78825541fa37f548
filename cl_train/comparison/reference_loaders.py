"""Other people's loaders on the same files, set up as their own documentation does, for comparison.

Each function returns (run, close): `run()` delivers at least `images` images in batches and returns how many.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_FFCV_QUALITY = 90

Run = Callable[[], int]
Close = Callable[[], None]


@dataclass(frozen=True)
class Load:
    """What to deliver: random resized crops, flipped by chance, of the images below `root/train`."""

    root: Path
    image_size: int
    batch_size: int
    images: int
    workers: int


def _until(batches: Iterator[Any], images: int, size_of: Callable[[Any], int]) -> int:
    seen = 0
    for batch in batches:
        seen += size_of(batch)
        if seen >= images:
            break
    return seen


def _nothing() -> None:
    pass


def torchvision_reference(load: Load) -> tuple[Run, Close]:
    """torchvision's references/classification: Pillow, float tensors from the workers, default collate."""
    from torchvision import datasets, transforms

    steps = [
        transforms.RandomResizedCrop(load.image_size),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
    loader = torch.utils.data.DataLoader(
        datasets.ImageFolder(str(load.root / "train"), transforms.Compose(steps)),
        load.batch_size,
        shuffle=True,
        num_workers=load.workers,
        drop_last=True,
        persistent_workers=load.workers > 0,
    )
    return lambda: _until(iter(loader), load.images, lambda batch: len(batch[1])), _nothing


def timm(load: Load) -> tuple[Run, Close]:
    """timm's training loader: uint8 batches from its fast_collate, as its GPU prefetcher takes them."""
    data, collate = importlib.import_module("timm.data"), importlib.import_module("timm.data.loader").fast_collate
    dataset = data.create_dataset("", str(load.root / "train"), is_training=True)
    loader = data.create_loader(
        dataset,
        (3, load.image_size, load.image_size),
        load.batch_size,
        is_training=True,
        use_prefetcher=False,
        collate_fn=collate,
        num_workers=load.workers,
        persistent_workers=load.workers > 0,
        color_jitter=0.0,
        device=torch.device("cpu"),
    )
    loader.dataset.transform.transforms[-2:] = [_as_uint8]  # in place of ToTensor and Normalize
    return lambda: _until(iter(loader), load.images, lambda batch: len(batch[1])), _nothing


def _as_uint8(image: Any) -> np.ndarray[Any, Any]:
    """uint8 [3, H, W], as timm's transform for its prefetcher gives them."""
    return np.rollaxis(np.array(image, dtype=np.uint8), 2)


def dali(load: Load) -> tuple[Run, Close]:
    """NVIDIA DALI on the CPU: fused decode of the random crop, antialiased resize, flip."""
    library, fn = importlib.import_module("nvidia.dali"), importlib.import_module("nvidia.dali.fn")

    def define() -> Any:
        data, labels = fn.readers.file(file_root=str(load.root / "train"), random_shuffle=True, name="files")
        images = fn.decoders.image_random_crop(
            data, device="cpu", random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        images = fn.resize(images, size=[load.image_size] * 2, antialias=True)
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    make = library.pipeline_def(define, batch_size=load.batch_size, num_threads=load.workers, device_id=None, seed=0)
    pipeline = make()
    pipeline.build()

    def run() -> int:
        seen = 0
        while seen < load.images:
            pipeline.run()
            seen += load.batch_size
        return seen

    return run, _nothing


def ffcv(load: Load) -> tuple[Run, Close]:
    """FFCV on the same pictures, which its writer compresses again (quality 90) into its own format first."""
    from torchvision.datasets import ImageFolder

    fields, decoders, loading, transforms, writer = (
        importlib.import_module(f"ffcv.{name}")
        for name in ("fields", "fields.decoders", "loader", "transforms", "writer")
    )
    folder = tempfile.TemporaryDirectory()
    file = f"{folder.name}/train.beton"
    columns = {"image": fields.RGBImageField(write_mode="jpg", jpeg_quality=_FFCV_QUALITY), "label": fields.IntField()}
    pictures = ImageFolder(str(load.root / "train"))
    writer.DatasetWriter(file, columns, num_workers=load.workers).from_indexed_dataset(pictures)
    crop = decoders.RandomResizedCropRGBImageDecoder((load.image_size, load.image_size))
    steps = [crop, transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.ToTorchImage()]
    loader = loading.Loader(
        file,
        batch_size=load.batch_size,
        num_workers=load.workers,
        order=loading.OrderOption.RANDOM,
        pipelines={"image": steps, "label": [decoders.IntDecoder(), transforms.ToTensor()]},
        drop_last=True,
    )
    return lambda: _until(iter(loader), load.images, lambda batch: len(batch[1])), folder.cleanup
