"""The speed of our loader and of torchvision's reference pipeline: random resized crops with flips of the same files.

Rounds are interleaved, A B C C B A, so that other load on the machine affects all pipelines alike; a ratio is the
median of the ratios within a round.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cl_train.comparison.alternation import alternate
from cl_train.config.benchmarks import LoaderBenchmarkSettings
from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data.build import DATA_DIR, ImageData, build_data
from cl_train.data.sample import ensure_sample
from cl_train.memory_format.audit_report import markdown_table
from cl_train.system.distributed import Dist
from cl_train.system.machine import measured

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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


def benchmark(settings: LoaderBenchmarkSettings) -> dict[str, Any]:
    """Measure; returns the content of the JSON file. Raises ConfigError: no such folder, or no whole batch."""
    settings = with_defaults(settings)
    own = [ours(settings, count) for count in settings.workers]  # raises ConfigError for a missing folder
    result = measure([torchvision_reference(settings, settings.workers[-1]), *own], settings)
    rows = [row for row in result["rows"] if row["pipeline"] == "cl_train"]
    per_core = max(row["images_per_s"] / min(result["cores"], row["workers"]) for row in rows)
    needed = settings.gpu_images_per_s
    return {**result, "images_per_s_needed": needed, "cores_needed": -(-int(needed) // max(1, int(per_core)))}


def measure(pipelines: Sequence[Pipeline], settings: LoaderBenchmarkSettings) -> dict[str, Any]:
    """Rates of all pipelines, and their ratios to the first one; closes them."""
    torch.set_num_threads(1)  # the workers are measured, not this process
    blocks = [pipeline.seconds_per_image for pipeline in pipelines]
    try:
        for pipeline in pipelines:
            pipeline.run()  # starts workers and fills the page cache
        done = alternate(blocks, target_ci=math.inf, time_limit_s=math.inf, min_rounds=settings.rounds)
    finally:
        for pipeline in pipelines:
            pipeline.close()
    rows = [
        {
            "pipeline": pipeline.name,
            "workers": pipeline.workers,
            "images_per_s": round(1 / done.median_s(index), 1),
            "ratio": round(median(done.round_ratios(index)), 2),
        }
        for index, pipeline in enumerate(pipelines[: len(done.blocks)])
    ]
    return measured(settings, torch.device("cpu"), schema_version=3, cores=len(os.sched_getaffinity(0)), rows=rows)


def table(result: dict[str, Any]) -> str:
    """The result as text; the last line is the conclusion."""
    lines = [markdown_table(result["rows"])]
    if "cores_needed" in result:
        answer = "enough" if result["cores_needed"] <= result["cores"] else "too few"
        lines.append(
            f"{result['images_per_s_needed']:,.0f} images/s need {result['cores_needed']} cores of this kind; "
            f"this machine has {result['cores']}: {answer}"
        )
    return "\n".join(lines)


# --- pipelines --------------------------------------------------------------------------------------------------------


def ours(settings: LoaderBenchmarkSettings, workers: int, decoder: str = "simplejpeg") -> Pipeline:
    """uint8 NHWC batches in shared memory, as training receives them before the copy to the device."""
    cfg = DataConfig(
        name="folder", root=settings.root, image_size=settings.image_size, workers=workers, decoder=decoder
    )
    dist, augment = Dist(0, 1, torch.device("cpu")), AugmentConfig(crop_scale_min=0.08, flip=0.5)
    data = build_data(cfg, augment, batch_size=settings.batch_size, seed=0, dist=dist)
    assert isinstance(data, ImageData)
    epochs = itertools.count()

    def run() -> int:
        images = 0
        for batch in data.train_loader.batches(next(epochs)):
            images += len(batch.targets)
            if images >= settings.images:
                break
        return images

    return Pipeline("cl_train" if decoder == "simplejpeg" else f"cl_train, {decoder}", workers, run, data.close)


def torchvision_reference(settings: LoaderBenchmarkSettings, workers: int) -> Pipeline:
    """torchvision's references/classification: Pillow, float tensors from the workers, default collate."""
    from torchvision import datasets, transforms

    crop, flip = transforms.RandomResizedCrop(settings.image_size), transforms.RandomHorizontalFlip()
    transform = transforms.Compose([crop, flip, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    loader = torch.utils.data.DataLoader(
        datasets.ImageFolder(f"{settings.root}/train", transform),
        settings.batch_size,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=True,
    )
    return Pipeline("torchvision reference", workers, lambda: deliver(loader, settings.images))


def deliver(loader: Any, images: int) -> int:
    """Take batches (images, targets) until `images` are delivered; returns their number."""
    seen = 0
    for _, targets in loader:
        seen += len(targets)
        if seen >= images:
            break
    return seen
