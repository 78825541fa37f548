"""How fast images reach the training, and what limits them: all pipelines on the same files, interleaved.

Every pipeline delivers batches of random resized crops with flips. Rounds are interleaved, so that a busy machine hurts
all of them; ratios are medians over rounds of ratios within a round. Processor time per image, which other programs on
the machine disturb less, stands beside the rates.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import simplejpeg
import torch

from cl_train.comparison import reference_loaders
from cl_train.comparison.reference_loaders import MEAN, STD, Close, Load, Run
from cl_train.config.benchmarks import LoaderBenchmarkSettings
from cl_train.config.schema import AugmentConfig, ConfigError, DataConfig
from cl_train.data.batch import DeviceFormat
from cl_train.data.build import DATA_DIR, build_data
from cl_train.data.decode import JPEG_MAGIC, BadImage
from cl_train.data.device import Normalise
from cl_train.data.folder import read_folder
from cl_train.data.image_data import ImageData
from cl_train.data.image_loader import default_workers
from cl_train.data.sample import ensure_sample
from cl_train.data.source import Split
from cl_train.system.distributed import Dist, choose_device
from cl_train.system.environment import describe_environment

REFERENCE = "torchvision reference"
OTHERS: dict[str, tuple[str, Callable[[Load], tuple[Run, Close]]]] = {
    REFERENCE: ("torchvision", reference_loaders.torchvision_reference),
    "timm": ("timm", reference_loaders.timm),
    "DALI on the CPU": ("nvidia.dali", reference_loaders.dali),
    "FFCV": ("ffcv", reference_loaders.ffcv),
}
_DECODE_SAMPLE = 256  # images decoded for the decode limit
_CLOCK_MS = 1e-3  # a short round can end within one tick of the processor clock


@dataclass
class Pipeline:
    """A way to deliver images. `workers`: processes; 0 = not counted in workers."""

    name: str
    workers: int
    run: Run
    close: Close
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # processor time per image, of this process and its workers

    @property
    def images_per_s(self) -> float:
        return median(self.rates)


def benchmark(settings: LoaderBenchmarkSettings) -> dict[str, Any]:
    """Measure every pipeline that can run here. Returns the result as plain values, as the JSON line has them.

    Raises:
        ConfigError: no such folder, or fewer images than one batch.
    """
    root = Path(settings.root).expanduser() if settings.root else ensure_sample(DATA_DIR / "sample")
    split = read_folder(root).train
    cores = len(os.sched_getaffinity(0))
    if any(count < 1 for count in settings.workers):
        raise ConfigError("workers: at least 1 each")
    counts = settings.workers or [2**power for power in range(5) if 2**power <= cores]
    pipelines, missing = _pipelines(settings, root, counts)
    torch.set_num_threads(1)  # the pipelines' workers are what is measured
    sources = _jpeg_bytes(split)
    pipelines.insert(
        0, Pipeline("decode only (libjpeg-turbo), one core", 1, lambda: _decode_all(sources), lambda: None)
    )
    try:
        for number in range(settings.rounds + 1):
            for pipeline in pipelines:
                start, busy = time.perf_counter(), _processor_s()
                images = pipeline.run()
                if number:  # the first round starts workers and fills the page cache
                    pipeline.rates.append(images / (time.perf_counter() - start))
                    pipeline.cpu_ms.append((_processor_s() - busy) / images * 1e3)
    finally:
        for pipeline in pipelines:
            pipeline.close()
    return _result(settings, root, split, pipelines, missing, cores)


def _processor_s() -> float:
    """Processor time of this process, its running children and those it has waited for, seconds."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    tick = os.sysconf("SC_CLK_TCK")
    for task in Path("/proc/self/task").glob("*/children"):
        for pid in task.read_text().split():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                total += (int(words[11]) + int(words[12])) / tick
    return total


def _pipelines(
    settings: LoaderBenchmarkSettings, root: Path, counts: list[int]
) -> tuple[list[Pipeline], dict[str, str]]:
    pipelines = []
    for workers in counts:
        pipelines.append(_ours(settings, root, workers))
    most = max(counts)
    pipelines.append(_ours(settings, root, most, decoder="pillow"))
    missing: dict[str, str] = {}
    load = reference_loaders.Load(root, settings.image_size, settings.batch_size, settings.images, most)
    for name, (module, build) in OTHERS.items() if settings.others else ():
        if not _is_installed(module):
            missing[name] = "not installed"
            continue
        try:
            pipelines.append(Pipeline(name, most, *build(load)))
        except Exception as error:  # somebody else's installation; the other pipelines are still worth measuring
            missing[name] = f"does not start: {(str(error) or type(error).__name__).splitlines()[0]}"
    return pipelines, missing


def _versions_of_others() -> dict[str, str | None]:
    """Of the other loaders that are there; DALI's package has the CUDA version in its name."""
    found: dict[str, str | None] = {}
    for name in ("simplejpeg", "pillow", "timm", "ffcv", "nvidia-dali-cuda120", "nvidia-dali-cuda130"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _ours(settings: LoaderBenchmarkSettings, root: Path, workers: int, **changes: Any) -> Pipeline:
    cfg = DataConfig(name="folder", root=str(root), image_size=settings.image_size, workers=workers, **changes)
    dist = Dist(0, 0, 1, torch.device("cpu"))
    data = build_data(cfg, AugmentConfig(), batch_size=settings.batch_size, seed=0, dist=dist)
    assert isinstance(data, ImageData)
    epochs = iter(range(10**9))

    def run() -> int:
        images = 0
        for host in data.train_loader.batches(next(epochs)):
            images += len(host.targets)
            host.release()
            if images >= settings.images:
                break
        return images

    words = [f"{key}={str(value).lower()}" for key, value in changes.items()]
    return Pipeline(" ".join(["cl_train", *words]), workers, run, data.close)


# --- limits ---


def _jpeg_bytes(split: Split) -> list[bytes]:
    step = max(1, len(split) // _DECODE_SAMPLE)
    sources = []
    for index in range(0, len(split), step):
        try:
            data = split.read(index)
            if data.startswith(JPEG_MAGIC) and simplejpeg.decode_jpeg_header(data)[2] in ("YCbCr", "Gray"):
                sources.append(data)
        except (BadImage, ValueError):
            continue
    if not sources:
        raise ConfigError("no ordinary JPEG among the training images")
    return sources[:_DECODE_SAMPLE]


def _decode_all(sources: list[bytes]) -> int:
    buffer = np.empty(100_000_000, dtype=np.uint8)
    for data in sources:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        if height * width * 3 <= buffer.size:
            simplejpeg.decode_jpeg(data, "RGB", buffer=buffer, strict=False)
    return len(sources)


def collate_against_memcpy(batch_size: int, size: int, rounds: int = 30) -> float:
    """Rate of writing ready rows (uint8 HWC) into a channels_last batch / rate of one memcpy of the same bytes."""
    rows = [torch.randint(0, 256, (size, size, 3), dtype=torch.uint8) for _ in range(batch_size)]
    whole = torch.stack(rows)
    batch = torch.zeros(batch_size, size, size, 3, dtype=torch.uint8)
    images, target = batch.permute(0, 3, 1, 2), batch.numpy()
    ratios = []
    for _ in range(rounds):
        start = time.perf_counter()
        for row, image in zip(rows, images, strict=True):
            image.copy_(row.permute(2, 0, 1))
        middle = time.perf_counter()
        np.copyto(target, whole.numpy())
        ratios.append((time.perf_counter() - middle) / (middle - start))
    assert torch.equal(batch, whole)
    return median(ratios)


def device_times(settings: LoaderBenchmarkSettings) -> dict[str, Any]:
    """Milliseconds per batch to copy uint8 to the device and to normalise it there; on a CPU only the latter."""
    device = choose_device(settings.device)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    shape = (settings.batch_size, settings.image_size, settings.image_size, 3)
    host = torch.randint(0, 256, shape, dtype=torch.uint8).permute(0, 3, 1, 2)
    normalise = Normalise(MEAN, STD, DeviceFormat(device, dtype, torch.channels_last))
    if device.type == "cuda":
        host = host.pin_memory()
    times: dict[str, Any] = {"device": device.type, "batch_size": settings.batch_size}
    if device.type == "cuda":
        times["copy_ms"] = _milliseconds(lambda: host.to(device, non_blocking=True), device)
    there = host.to(device)
    times["normalise_ms"] = _milliseconds(lambda: normalise(there), device)
    return times


def _milliseconds(work: Callable[[], Any], device: torch.device, rounds: int = 30) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the host waits: this is what is measured

    times = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


# --- result ---


def _result(
    settings: LoaderBenchmarkSettings,
    root: Path,
    split: Split,
    pipelines: list[Pipeline],
    missing: dict[str, str],
    cores: int,
) -> dict[str, Any]:
    limit = pipelines[0]
    reference = next((pipeline for pipeline in pipelines if pipeline.name == REFERENCE), None)
    rows = []
    for pipeline in pipelines:
        used = min(cores, max(1, pipeline.workers))
        of_limit = [rate / (used * most) for rate, most in zip(pipeline.rates, limit.rates, strict=True)]
        row = {
            "pipeline": pipeline.name,
            "workers": pipeline.workers,
            "images_per_s": round(pipeline.images_per_s, 1),
            "spread": [round(min(pipeline.rates), 1), round(max(pipeline.rates), 1)],
            "cpu_ms_per_image": round(median(pipeline.cpu_ms), 3),
            "decode_limit_pct": round(100 * median(of_limit), 1),
            "ratio_to_reference": None,
            "cpu_ratio_to_reference": None,
        }
        if reference is not None:
            ratios = [rate / base for rate, base in zip(pipeline.rates, reference.rates, strict=True)]
            row["ratio_to_reference"] = round(median(ratios), 2)
            less = [base / max(ms, _CLOCK_MS) for ms, base in zip(pipeline.cpu_ms, reference.cpu_ms, strict=True)]
            row["cpu_ratio_to_reference"] = round(median(less), 2)
        rows.append(row)
    ours = [pipeline for pipeline in pipelines if pipeline.name == "cl_train"]
    per_core = max(pipeline.images_per_s / min(cores, pipeline.workers) for pipeline in ours)
    return {
        "schema_version": 1,
        "command": shlex.join(sys.argv),
        "environment": {**describe_environment(torch.device("cpu")), **_versions_of_others()},
        "root": str(root),
        "images": len(split),
        "image_size": settings.image_size,
        "batch_size": settings.batch_size,
        "rounds": settings.rounds,
        "cores": cores,
        "default_workers": default_workers(1),
        "rows": rows,
        "missing": missing,
        "collate_to_memcpy": round(collate_against_memcpy(settings.batch_size, settings.image_size), 2),
        "device": device_times(settings),
        "images_per_s_per_core": round(per_core, 1),
        "gpu_images_per_s": settings.gpu_images_per_s,
        "cores_needed": -(-int(settings.gpu_images_per_s) // max(1, int(per_core))),
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    heads = ("images/s", "CPU ms/image", "of decode limit", "/ reference", "by CPU time")
    lines = [f"{'pipeline':40} workers " + " ".join(f"{head:>15}" for head in heads)]
    for row in result["rows"]:
        cells = [f"{row['images_per_s']:.0f}", f"{row['cpu_ms_per_image']:.2f}", f"{row['decode_limit_pct']:.0f} %"]
        cells += [
            "" if row[key] is None else f"{row[key]:.2f}x" for key in ("ratio_to_reference", "cpu_ratio_to_reference")
        ]
        lines.append(f"{row['pipeline']:40} {row['workers']:>7} " + " ".join(f"{cell:>15}" for cell in cells))
    lines += [f"{name}: {why}" for name, why in result["missing"].items()]
    device = result["device"]
    copy = f"copy {device['copy_ms']:.2f} ms, " if "copy_ms" in device else ""
    lines.append(
        f"{device['device']}, a batch of {device['batch_size']}: {copy}normalise {device['normalise_ms']:.2f} ms"
    )
    lines.append(f"collate: {result['collate_to_memcpy']:.2f} of memcpy's rate")
    lines.append(
        f"{result['gpu_images_per_s']:,.0f} images/s need {result['cores_needed']} cores of this kind"
        f" ({result['images_per_s_per_core']:.0f} images/s each)"
    )
    return "\n".join(lines)
