"""Is the loader fast enough? Our loader and torchvision's reference pipeline on the same files.

Both deliver batches of random resized crops with flips. Rounds are interleaved, so that other load on the machine
affects all pipelines; a ratio is the median over rounds of the ratios within a round.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cl_train.config.benchmarks import LoaderBenchmarkSettings
from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data.build import DATA_DIR, build_data
from cl_train.data.sample import ensure_sample
from cl_train.data.splits import ImageData
from cl_train.system.distributed import Dist
from cl_train.system.environment import describe_environment

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Load:
    """What a pipeline delivers per round: at least `images` images of `root/train`, in batches."""

    root: Path
    image_size: int
    batch_size: int
    images: int
    workers: int  # processes


@dataclass
class Pipeline:
    """One way to load: `run` delivers the images of a round and returns their number."""

    name: str
    workers: int
    run: Callable[[], int]
    close: Callable[[], object] = lambda: None
    rates: list[float] = field(default_factory=list)  # images/s, one per round


def loads_of(settings: LoaderBenchmarkSettings) -> list[Load]:
    """One per number of workers."""
    root = Path(settings.root).expanduser() if settings.root else ensure_sample(DATA_DIR / "sample")
    cores = len(os.sched_getaffinity(0))
    counts = settings.workers or [2**power for power in range(5) if 2**power <= cores]
    return [Load(root, settings.image_size, settings.batch_size, settings.images, count) for count in counts]


def benchmark(settings: LoaderBenchmarkSettings) -> dict[str, Any]:
    """Measure; returns the content of the JSON file.

    Raises:
        ConfigError: no such folder, or fewer images than one batch.
    """
    loads = loads_of(settings)
    own = [ours(load) for load in loads]  # raises ConfigError for a missing folder
    result = measure([torchvision_reference(loads[-1]), *own], settings)
    rows = [row for row in result["rows"] if row["pipeline"] == "cl_train"]
    per_core = max(row["images_per_s"] / min(result["cores"], row["workers"]) for row in rows)
    needed = settings.gpu_images_per_s
    return {**result, "images_per_s_needed": needed, "cores_needed": -(-int(needed) // max(1, int(per_core)))}


def measure(pipelines: Sequence[Pipeline], settings: LoaderBenchmarkSettings) -> dict[str, Any]:
    """Rates of all pipelines, round by round, and ratios to the first one; closes them."""
    torch.set_num_threads(1)  # the workers are measured, not this process
    try:
        for number in range(settings.rounds + 1):
            for pipeline in pipelines:
                started_at = time.perf_counter()
                images = pipeline.run()
                if number:  # the first round starts workers and fills the page cache
                    pipeline.rates.append(images / (time.perf_counter() - started_at))
    finally:
        for pipeline in pipelines:
            pipeline.close()
    rows = [
        {
            "pipeline": pipeline.name,
            "workers": pipeline.workers,
            "images_per_s": round(median(pipeline.rates), 1),
            "ratio": round(median(a / b for a, b in zip(pipeline.rates, pipelines[0].rates, strict=True)), 2),
        }
        for pipeline in pipelines
    ]
    return {
        "schema_version": 2,
        "command": shlex.join(sys.argv),
        "environment": describe_environment(torch.device("cpu")),
        "image_size": settings.image_size,
        "batch_size": settings.batch_size,
        "rounds": settings.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """The result as text; the last line is the conclusion."""
    lines = [f"{'pipeline':30} workers     images/s       ratio"]
    for row in result["rows"]:
        lines.append(f"{row['pipeline']:30} {row['workers']:7} {row['images_per_s']:12.0f} {row['ratio']:10.2f}x")
    if "cores_needed" in result:
        answer = "enough" if result["cores_needed"] <= result["cores"] else "too few"
        lines.append(
            f"{result['images_per_s_needed']:,.0f} images/s need {result['cores_needed']} cores of this kind; "
            f"this machine has {result['cores']}: {answer}"
        )
    return "\n".join(lines)


# --- pipelines --------------------------------------------------------------------------------------------------------


def ours(load: Load, decoder: str = "simplejpeg") -> Pipeline:
    """uint8 NHWC batches in shared memory, as training receives them before the copy to the device."""
    cfg = DataConfig(
        name="folder", root=str(load.root), image_size=load.image_size, workers=load.workers, decoder=decoder
    )
    dist = Dist(0, 0, 1, torch.device("cpu"))
    data = build_data(cfg, AugmentConfig(crop_scale_min=0.08, flip=0.5), batch_size=load.batch_size, seed=0, dist=dist)
    assert isinstance(data, ImageData)
    epochs = iter(range(10**9))

    def run() -> int:
        images = 0
        for batch in data.train_loader.batches(next(epochs)):
            images += len(batch.targets)
            batch.release()
            if images >= load.images:
                break
        return images

    return Pipeline("cl_train" if decoder == "simplejpeg" else f"cl_train, {decoder}", load.workers, run, data.close)


def torchvision_reference(load: Load) -> Pipeline:
    """torchvision's references/classification: Pillow, float tensors from the workers, default collate."""
    from torchvision import datasets, transforms

    crop, flip = transforms.RandomResizedCrop(load.image_size), transforms.RandomHorizontalFlip()
    transform = transforms.Compose([crop, flip, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    images = datasets.ImageFolder(str(load.root / "train"), transform)
    loader = torch.utils.data.DataLoader(
        images, load.batch_size, shuffle=True, num_workers=load.workers, drop_last=True, persistent_workers=True
    )
    return Pipeline("torchvision reference", load.workers, lambda: deliver(loader, load.images))


def deliver(loader: Any, images: int) -> int:
    """Take batches (images, targets) until `images` are delivered; returns their number."""
    seen = 0
    for _, targets in loader:
        seen += len(targets)
        if seen >= images:
            break
    return seen
