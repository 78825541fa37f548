"""What `cl-train loader_benchmark` measures: loaders of the same files, in turns."""

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cl_train.config.schema import AugmentConfig, DataConfig, LoaderBenchmarkSettings
from cl_train.data.build import DATA_DIR, ImageData, build_data, search_command
from cl_train.data.loader import DataSettings
from cl_train.data.sample import ensure_sample
from cl_train.errors import BadImageError, ConfigError
from cl_train.measure.alternate import Block, Stop, alternate
from cl_train.system.distributed import Dist
from cl_train.system.machine import document_of
from cl_train.system.tables import markdown_table


@dataclass
class Pipeline:
    """`batches` begins an epoch and yields something of each batch's length."""

    name: str
    workers: int
    batches: Callable[[], Iterable[Sized]]
    close: Callable[[], object] = lambda: None

    def block(self, images: int) -> Block:
        started_at, seen = time.perf_counter(), 0
        for batch in self.batches():
            seen += len(batch)
            if seen >= images:
                break
        return Block((time.perf_counter() - started_at) / seen)


def benchmark_loaders(
    settings: LoaderBenchmarkSettings, *others: Callable[[LoaderBenchmarkSettings, int], Pipeline]
) -> tuple[dict[str, Any], str]:
    """Returns the JSON document and its text; `others` make more pipelines, with the most workers.

    Raises ConfigError: no such folder, no whole batch, or a bad image.
    """
    folder = settings.root and Path(settings.root).expanduser()
    root = folder or ensure_sample(DATA_DIR / "sample-large")
    if (root / "train").is_dir():  # else a folder of classes
        root /= "train"
    cores = len(os.sched_getaffinity(0))
    workers = settings.workers or [2**power for power in range(5) if 2**power <= cores]
    settings = replace(settings, root=str(root), workers=workers)
    pipelines = [ours(settings, count) for count in workers]
    torch.set_num_threads(1)  # the workers are measured, not this process
    try:
        pipelines[:0] = [make(settings, workers[-1]) for make in (torchvision_reference, *others)]
        variants = [partial(pipeline.block, settings.images) for pipeline in pipelines]
        for variant in variants:
            variant()  # starts workers and fills the page cache
        done = alternate(variants, Stop.after(settings.rounds))
    except BadImageError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:  # of the others' readers, which name no file
        reason = str(error).strip().rpartition("\n")[2]
        advice = f"to find all: {search_command(str(root))}"
        raise ConfigError(f"an image cannot be used: {reason}; {advice}") from error
    finally:
        for pipeline in pipelines:
            pipeline.close()
    rows: list[dict[str, Any]] = [
        {
            "pipeline": one.name,
            "workers": one.workers,
            "images_per_s": round(1 / median(done.times_s(number)), 1),
            "ratio": round(median(done.ratios(number)), 2),
        }
        for number, one in enumerate(pipelines)
    ]
    our_rows = rows[-len(workers) :]
    per_core = max(row["images_per_s"] / min(cores, row["workers"]) for row in our_rows)
    needed = -(-int(settings.gpu_images_per_s) // max(1, int(per_core)))
    answer = f"this machine has {cores}: {'enough' if needed <= cores else 'too few'}"
    wanted = f"{settings.gpu_images_per_s:,.0f} images/s need {needed} cores of this kind"
    text = f"{markdown_table(rows)}\n{wanted}; {answer}"
    for number, row in enumerate(rows):
        row["block_s_per_image"] = [round(seconds, 8) for seconds in done.times_s(number)]
    results = {"rows": rows, "cores": cores, "cores_needed": needed}
    results["images_per_s_needed"] = settings.gpu_images_per_s
    return document_of(settings, torch.device("cpu"), schema_version=3, **results), text


def ours(settings: LoaderBenchmarkSettings, workers: int) -> Pipeline:
    """Returns cl_train's own pipeline: uint8 NHWC batches in shared memory, not yet on a device."""
    # No validation images are needed: the least share takes one image of each class.
    cfg = DataConfig(
        name="folder",
        root=settings.root,
        val_fraction=1e-9,
        image_size=settings.image_size,
        workers=workers,
    )
    dist, augment = Dist(0, 1, torch.device("cpu")), AugmentConfig(crop_scale_min=0.08, flip=0.5)
    data = build_data(DataSettings(cfg, augment, settings.batch_size, seed=0, dist=dist))
    assert isinstance(data, ImageData)
    data.bad_images.remedy = "other images"
    loader, epochs = data.train_loader, itertools.count()

    def batches() -> Iterable[Sized]:
        return (batch.targets for batch in loader.batches(next(epochs)))

    return Pipeline("cl_train", workers, batches, data.close)


def torchvision_reference(settings: LoaderBenchmarkSettings, workers: int) -> Pipeline:
    """Returns the pipeline of torchvision's references/classification: Pillow, float tensors and
    the default collate.
    """
    from torchvision import datasets, transforms

    crop = transforms.RandomResizedCrop(settings.image_size)
    flip = transforms.RandomHorizontalFlip()
    normalise = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    steps = transforms.Compose([crop, flip, transforms.ToTensor(), normalise])
    loader = torch.utils.data.DataLoader(
        datasets.ImageFolder(str(settings.root), steps),
        settings.batch_size,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=True,
    )
    return Pipeline("torchvision reference", workers, lambda: (targets for _, targets in loader))
