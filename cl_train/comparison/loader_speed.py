"""The speed of our loader and of torchvision's reference pipeline: random resized crops and flips of the same files."""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cl_train.comparison.statistics import alternate
from cl_train.config.schema import AugmentConfig, DataConfig, LoaderBenchmarkSettings
from cl_train.data.build import DATA_DIR, ImageData, build_data
from cl_train.data.sample import ensure_sample
from cl_train.memory_format.audit_report import markdown_table
from cl_train.system.distributed import Dist
from cl_train.system.machine import measured


@dataclass
class Pipeline:
    """One way to load: `run` delivers the images of a round and returns their number."""

    name: str
    workers: int
    run: Callable[[], int]
    close: Callable[[], object] = lambda: None

    def seconds_per_image(self) -> float:
        started_at = time.perf_counter()
        images = self.run()
        return (time.perf_counter() - started_at) / images


def with_defaults(settings: LoaderBenchmarkSettings) -> LoaderBenchmarkSettings:
    """The settings with a folder of images and at least one number of workers."""
    root = Path(settings.root).expanduser() if settings.root else ensure_sample(DATA_DIR / "sample-large")
    cores = len(os.sched_getaffinity(0))
    workers = settings.workers or [2**power for power in range(5) if 2**power <= cores]
    return replace(settings, root=str(root), workers=workers)


def benchmark(settings: LoaderBenchmarkSettings) -> tuple[dict[str, Any], str]:
    """The content of the JSON file, and its text. Raises ConfigError: no such folder, or no whole batch."""
    settings = with_defaults(settings)
    loaders = [ours(settings, count) for count in settings.workers]  # raises ConfigError for a missing folder
    result, table = measure([torchvision_reference(settings, settings.workers[-1]), *loaders], settings)
    rate, cores = settings.gpu_images_per_s, result["cores"]
    per_core = max(row["images_per_s"] / min(cores, row["workers"]) for row in result["rows"][1:])
    needed = -(-int(rate) // max(1, int(per_core)))
    answer = f"this machine has {cores}: {'enough' if needed <= cores else 'too few'}"
    table += f"\n{rate:,.0f} images/s need {needed} cores of this kind; {answer}"
    return {**result, "images_per_s_needed": rate, "cores_needed": needed}, table


def measure(pipelines: Sequence[Pipeline], settings: LoaderBenchmarkSettings) -> tuple[dict[str, Any], str]:
    """Rates of all pipelines, and their ratios to the first one, also as a table; closes them."""
    torch.set_num_threads(1)  # the workers are measured, not this process
    try:
        for pipeline in pipelines:
            pipeline.run()  # starts workers and fills the page cache
        blocks = [pipeline.seconds_per_image for pipeline in pipelines]
        done = alternate(blocks, target_ci=math.inf, time_limit_s=math.inf, min_rounds=settings.rounds)
    finally:
        for pipeline in pipelines:
            pipeline.close()
    rows = []
    for index, one in enumerate(pipelines):
        rate, ratio = round(1 / median(done.blocks[index]), 1), round(median(done.round_ratios(index)), 2)
        rows.append({"pipeline": one.name, "workers": one.workers, "images_per_s": rate, "ratio": ratio})
    cores = len(os.sched_getaffinity(0))
    return measured(settings, torch.device("cpu"), schema_version=3, cores=cores, rows=rows), markdown_table(rows)


# --- pipelines --------------------------------------------------------------------------------------------------------


def ours(settings: LoaderBenchmarkSettings, workers: int, decoder: str = "simplejpeg") -> Pipeline:
    """uint8 NHWC batches in shared memory, as training receives them before the copy to the device."""
    size = settings.image_size
    cfg = DataConfig(name="folder", root=settings.root, image_size=size, workers=workers, decoder=decoder)
    dist, augment = Dist(0, 1, torch.device("cpu")), AugmentConfig(crop_scale_min=0.08, flip=0.5)
    data = build_data(cfg, augment, batch_size=settings.batch_size, seed=0, dist=dist)
    assert isinstance(data, ImageData)
    loader, epochs = data.train_loader, itertools.count()
    name = "cl_train" if decoder == "simplejpeg" else f"cl_train, {decoder}"

    def run() -> int:
        return deliver((batch.targets for batch in loader.batches(next(epochs))), settings.images)

    return Pipeline(name, workers, run, data.close)


def torchvision_reference(settings: LoaderBenchmarkSettings, workers: int) -> Pipeline:
    """torchvision's references/classification: Pillow, float tensors from the workers, default collate."""
    from torchvision import datasets, transforms

    crop, flip = transforms.RandomResizedCrop(settings.image_size), transforms.RandomHorizontalFlip()
    normalise = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    files = datasets.ImageFolder(
        f"{settings.root}/train", transforms.Compose([crop, flip, transforms.ToTensor(), normalise])
    )
    loader = torch.utils.data.DataLoader(
        files, settings.batch_size, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=True
    )
    return Pipeline("torchvision reference", workers, lambda: deliver((y for _, y in loader), settings.images))


def deliver(targets: Iterable[Any], images: int) -> int:
    """Take batches, given by their targets, until `images` are delivered; returns their number."""
    seen = 0
    for batch in targets:
        seen += len(batch)
        if seen >= images:
            break
    return seen
