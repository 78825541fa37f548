"""The groups of measurements of a GPU report, each run in a process of its own: see `gpu_report`."""

from __future__ import annotations

import csv
import functools
import importlib.util
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_report_images import write_jpegs
from benchmarks.roofline import Machine, roofline
from benchmarks.timm_loop import timm_step
from cl_train.comparison.model_cost import matmul_tflops
from cl_train.comparison.paired import release_memory
from cl_train.comparison.statistics import interval_of_rounds
from cl_train.comparison.zoo import TUTORIAL
from cl_train.config.validation import load
from cl_train.data.batch import Batch
from cl_train.models import registry as models
from cl_train.step.precision import kernel_selection, resolve_precision
from cl_train.system.distributed import Dist
from cl_train.system.environment import describe_environment, device_name
from cl_train.training.setup import assemble

ROOT = Path(__file__).resolve().parent.parent
LEARNING_RATE = 1e-4
COMPILE_S = 60.0  # how long a compilation may take before it is left out for want of time


@dataclass(frozen=True)
class Way:
    """One way to train: what the settings of a run would be."""

    name: str
    channels_last: bool = True
    compile: bool = False
    graph: bool = False
    timm: bool = False


EAGER_NCHW = Way("eager contiguous", channels_last=False)
EAGER = Way("eager channels_last")
GRAPHED = Way("graphed channels_last", graph=True)
COMPILED = Way("compiled channels_last", compile=True)
BEST = Way("compiled graphed channels_last", compile=True, graph=True)
COMPILED_NCHW = Way("compiled contiguous", channels_last=False, compile=True)
GRAPHED_NCHW = Way("graphed contiguous", channels_last=False, graph=True)
TIMM = Way("timm's loop, compiled channels_last", compile=True, timm=True)
ALL_WAYS = (EAGER_NCHW, EAGER, GRAPHED_NCHW, GRAPHED, COMPILED, BEST, COMPILED_NCHW)


@dataclass(frozen=True)
class Group:
    """Measurements that share a process. The first way is what the ratios refer to."""

    name: str
    limit_s: float
    model: str = ""
    precision: str = "fp16"
    batch_size: int = 256
    ways: tuple[Way, ...] = ()
    image_size: int = 224
    steps: int = 60  # timed steps per way, at least


def plan_groups(*, dry_run: bool) -> list[Group]:
    """In order of importance: what the time does not reach is left out and said so."""
    first = (EAGER_NCHW, EAGER, BEST, GRAPHED, TIMM, COMPILED)
    groups = [
        Group("environment", 40),
        Group("resnet50-fp16-256", 200, "resnet50", ways=first),
        *(
            Group(f"{name}-fp16-32", 60, name, batch_size=32, ways=(EAGER, GRAPHED, BEST))
            for name in ("resnet18", "mobilenet_v2", "squeezenet1_1")
        ),
        Group("tests", 120),
        Group("jpeg", 90, "resnet50"),
        Group("zoo", 130, steps=10),
        *(
            Group(f"resnet50-{precision}-{size}", 110, "resnet50", precision, size, ALL_WAYS)
            for size in (256, 32)
            for precision in ("fp16", "bf16", "fp16_o2", "tf32")
            if (precision, size) != ("fp16", 256)
        ),
        Group("bytes-eager", 90, "resnet50", batch_size=64, ways=(EAGER,)),
        Group("bytes-compiled", 90, "resnet50", batch_size=64, ways=(COMPILED,)),
    ]
    if not dry_run:
        return groups
    small = {"model": "tests.networks:small", "batch_size": 4, "image_size": 32}
    kept = {"resnet50-fp16-256", "squeezenet1_1-fp16-32", "resnet50-tf32-32", "jpeg", "bytes-eager"}
    tiny = []
    for group in groups:
        if group.name in kept:  # compilation is tried once
            ways = tuple(way for way in group.ways if way in (*first[:6], GRAPHED_NCHW))
            ways = ways if group.name == "resnet50-fp16-256" else tuple(way for way in ways if not way.compile)
            tiny.append(replace(group, **small, ways=ways, steps=2))  # type: ignore[arg-type]
        elif not group.model:
            tiny.append(replace(group, batch_size=4, image_size=32, steps=2))
    return tiny


# --- rows -----------------------------------------------------------------------------------------------------------


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows so far; of several about the same thing the last counts. A line that a kill cut off is dropped."""
    path = folder / "rows.jsonl"
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        key = tuple(row.get(name) for name in ("group", "model", "precision", "batch_size", "way"))
        if row.get("peak_memory_gib") is None and key in rows:  # memory is measured alone, speed in turns
            row["peak_memory_gib"] = rows[key].get("peak_memory_gib")
        rows[key] = row
    return list(rows.values())


class Rows:
    """Appends a group's rows to the file, each in one write."""

    def __init__(self, group: Group, folder: Path, ends_at: float) -> None:
        self.group, self.folder, self.ends_at = group, folder, ends_at

    def add(self, **values: Any) -> None:
        with (self.folder / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"group": self.group.name, **values}) + "\n")

    @property
    def left_s(self) -> float:
        return self.ends_at - time.monotonic()


def run_group(name: str, folder: Path, seconds: float, *, dry_run: bool) -> None:
    """The work of one group, on the GPU, or on the CPU for a dry run."""
    group = next(group for group in plan_groups(dry_run=dry_run) if group.name == name)
    rows = Rows(group, folder, time.monotonic() + seconds - 5)
    device = torch.device("cpu" if dry_run else "cuda")
    if group.name == "environment":
        measure_machine(rows, device)
    elif group.name == "tests":
        run_tests(rows)
    elif group.name == "jpeg":
        measure_jpegs(rows, device)
    elif group.name == "zoo":
        names = ("squeezenet1_1", "shufflenet_v2_x0_5") if dry_run else TUTORIAL
        for name in names:
            if rows.left_s < 8:
                break
            one = replace(group, model=name, ways=(EAGER_NCHW, EAGER), batch_size=4 if dry_run else 64)
            measure_ways(rows, one, device)
            release_memory(device)
    elif group.name.startswith("bytes"):
        run_profiled_steps(group, device)
    else:
        measure_ways(rows, group, device)


def measure_machine(rows: Rows, device: torch.device) -> None:
    """Environment, clocks, copy bandwidth (bytes read plus bytes written) and matmul rate: the ceilings of the rest."""
    on_cuda = device.type == "cuda"
    source = torch.randn(2**30 if on_cuda else 2**22, device=device)  # 4 GiB: many times the cache
    target = torch.empty_like(source)
    seconds = statistics.median(_timed_s(lambda: target.copy_(source), device) for _ in range(20))
    dtype = torch.float16 if on_cuda else torch.float32
    rows.add(
        device=device_name(device),
        copy_bytes_per_s=2 * source.nbytes / seconds,
        matmul_flops_per_s=matmul_tflops(device, dtype, False) * 1e12,
        environment=describe_environment(device),
        clocks=_clocks() if on_cuda else None,
        cores=os.cpu_count(),
    )


def _clocks() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    fields = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,utilization.gpu"
    done = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv"], capture_output=True, text=True)
    return done.stdout.strip() or None


def _timed_s(work: Callable[[], object], device: torch.device) -> float:
    """Waits for the device before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began_at = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began_at


def measure_ways(rows: Rows, group: Group, device: torch.device) -> None:
    """Build every way, time it alone at once, then all in alternating blocks; ratios are to the first way."""
    with kernel_selection(tf32=resolve_precision(group.precision, device).tf32, autotune=True):
        _measure_ways(rows, group, device)


def _measure_ways(rows: Rows, group: Group, device: torch.device) -> None:
    steps: dict[Way, Callable[[], object]] = {}
    for way in group.ways:
        if way.timm and importlib.util.find_spec("timm") is None:
            continue
        if rows.left_s < (COMPILE_S if way.compile else 10):
            print(f"left out for want of time: {way.name}", flush=True)
            continue
        try:
            steps[way] = _ready(way, group, device, rows)
        except Exception as error:  # another way may work all the same, and this one's reason must be in the report
            traceback.print_exc()
            rows.add(**_what(group, way), outcome=f"{way.name} failed: {type(error).__name__}: {str(error)[:200]}")
            release_memory(device)
    if len(steps) < 2:
        return
    blocks = _alternate(list(steps.values()), group.steps, device, rows)
    first = blocks[0]
    for way, seconds_of_blocks in zip(steps, blocks, strict=True):
        log_ratios = [_log_mean(first, i) - _log_mean(seconds_of_blocks, i) for i in range(0, len(first), 2)]
        interval = interval_of_rounds(log_ratios)
        rows.add(
            **_speed_row(group, way, statistics.median(seconds_of_blocks), rows),
            versus=next(iter(steps)).name,
            ratio=interval.ratio,
            ci95=[interval.low, interval.high],
            timed_steps=len(seconds_of_blocks) * _block_steps(group),
            alone=False,
        )


def _ready(way: Way, group: Group, device: torch.device, rows: Rows) -> Callable[[], object]:
    """Build the step, warm it up, time it alone."""
    began_at, before = time.monotonic(), 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    step = build_step(way, group, device)
    for _ in range(6):  # kernels chosen, compiled, recorded
        step()
    seconds = statistics.median(_timed_s(step, device) for _ in range(3))
    peak = (torch.cuda.max_memory_allocated(device) - before) / 2**30 if device.type == "cuda" else None
    rows.add(**_speed_row(group, way, seconds, rows), peak_memory_gib=peak, timed_steps=3, alone=True)
    print(f"{way.name}: ready after {time.monotonic() - began_at:.0f} s", flush=True)
    return step


def _block_steps(group: Group) -> int:
    return max(1, group.steps // 10)


def _alternate(
    steps: Sequence[Callable[[], object]], at_least: int, device: torch.device, rows: Rows
) -> list[list[float]]:
    """Seconds per step of each block, in the order A B C C B A. After two rounds, want of time ends it."""
    per_block = max(1, at_least // 10)
    order = [*range(len(steps)), *reversed(range(len(steps)))]
    blocks: list[list[float]] = [[] for _ in steps]

    def block(step: Callable[[], object]) -> None:
        for _ in range(per_block):
            step()

    for number in range(5):
        if number >= 2 and rows.left_s < 5:
            break
        for index in order:
            blocks[index].append(_timed_s(lambda i=index: block(steps[i]), device) / per_block)  # type: ignore[misc]
    return blocks


def _log_mean(seconds: Sequence[float], first: int) -> float:
    return (math.log(seconds[first]) + math.log(seconds[first + 1])) / 2


def _what(group: Group, way: Way) -> dict[str, Any]:
    return {
        "model": group.model,
        "precision": group.precision,
        "batch_size": group.batch_size,
        "image_size": group.image_size,
        "way": way.name,
    }


def _speed_row(group: Group, way: Way, seconds: float, rows: Rows) -> dict[str, Any]:
    images_per_s = group.batch_size / seconds
    speed = {"images_per_s": images_per_s, "step_ms": 1000 * seconds}
    return {**_what(group, way), **speed, **_shares(group, images_per_s, rows.folder)}


def _shares(group: Group, images_per_s: float, folder: Path) -> dict[str, float | None]:
    """Percent of what the measured copy bandwidth and matmul rate permit, per pattern; None where it is not known."""
    machine = next((row for row in read_rows(folder) if row["group"] == "environment"), None)
    if machine is None:
        return {}
    peaks = Machine(machine["matmul_flops_per_s"], machine["copy_bytes_per_s"])
    bytes_each = 4 if group.precision in ("fp32", "tf32") else 2
    limits = {name: _limit(group.model, group.image_size, name, peaks, bytes_each) for name in ("eager", "fused")}
    return {f"pct_of_{k}_roofline": None if v is None else 100 * images_per_s / v for k, v in limits.items()}


@functools.lru_cache
def _limit(name: str, image_size: int, pattern: str, peaks: Machine, element_bytes: int) -> float | None:
    with torch.device("meta"):
        model = models.build_model(name, num_classes=1000)
    try:
        found = roofline(model, peaks, pattern=pattern, image_size=image_size, element_bytes=element_bytes)
    except ValueError:
        return None
    return found.images_per_s


def build_step(way: Way, group: Group, device: torch.device) -> Callable[[], object]:
    """The step that a run with these settings takes, on one fixed batch on the device."""
    precision = resolve_precision(group.precision, device)
    torch.manual_seed(0)
    size = group.image_size
    images = torch.randn(group.batch_size, 3, size, size, device=device)
    layout = torch.channels_last if way.channels_last else torch.contiguous_format
    batch = Batch(
        images.to(precision.input_dtype, memory_format=layout),
        torch.randint(1000, (group.batch_size,), device=device),
    )
    if way.timm:
        name = "test_resnet" if ":" in group.model else group.model  # timm's own smallest, in a dry run
        return timm_step(
            name, images.to(memory_format=layout), batch.targets, compile=way.compile and device.type == "cuda"
        )
    cfg = load(
        {
            "model": group.model,
            "precision": group.precision,
            "batch_size": group.batch_size,
            "channels_last": way.channels_last,
            "compile": way.compile,
            "cuda_graph": way.graph,
            "device": device.type,
            "data": {"name": "synthetic", "image_size": size},
        }
    )
    assembly = assemble(cfg, precision, 1000, Dist(0, 0, 1, device), LEARNING_RATE)
    return lambda: assembly.step([batch])


def run_tests(rows: Rows) -> None:
    """The GPU tests; without a GPU they skip themselves, which counts as run here."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/test_gpu.py", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-8000:], done.stderr[-2000:], flush=True)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
    rows.add(way="pytest -m gpu", outcome=last, exit_code=done.returncode)
    if done.returncode not in (0, 5):
        raise SystemExit(1)


def measure_jpegs(rows: Rows, device: torch.device) -> None:
    """train.py on JPEGs of ImageNet's size with all cores, and the same run on one fixed batch."""
    group, dry = rows.group, device.type == "cpu"
    root, cores = rows.folder / "images", len(os.sched_getaffinity(0))
    images = write_jpegs(
        root, distinct=8 if dry else 256, copies=2 if dry else 24, size=(64, 48) if dry else (500, 375)
    )
    words = [
        *(f"model={group.model}", f"device={device.type}", "channels_last=true", f"batch_size={group.batch_size}"),
        *("evaluate_every=-1", "epochs=50", "tensorboard=false", f"data.image_size={group.image_size}"),
    ]
    if dry:
        words += ["max_steps=4", "log_every=2", "warmup_steps=1", "precision=fp32", "data.workers=1"]
    else:
        words += ["max_steps=100", "log_every=10", "warmup_steps=30", "precision=fp16", f"data.workers={cores}"]
    speeds = {}
    sources = {
        "synthetic": ["data=synthetic", f"data.synthetic_images={images}"],
        "JPEGs": ["data=folder", f"data.root={root}"],
    }
    for name, source in sources.items():
        run = rows.folder / f"run-{name}"
        subprocess.run([sys.executable, "train.py", *words, *source, f"hydra.run.dir={run}"], cwd=ROOT, check=True)
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        speeds[name] = summary["images_per_s"]["end_to_end"]["median"]
        rows.add(
            **_speed_row(group, Way(f"train.py on {name}"), group.batch_size / speeds[name], rows),
            data_wait_pct=summary["data_wait_pct"],
            ratio=speeds[name] / speeds["synthetic"],
            versus="train.py on synthetic",
            cores=cores,
        )


def run_profiled_steps(group: Group, device: torch.device) -> None:
    """One step between profiler marks: ncu counts the bytes of each kernel, `dram_bytes` sums them up."""
    step = build_step(group.ways[0], group, device)
    for _ in range(6):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


_UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def dram_bytes(text: str) -> float | None:
    """Bytes read and written in ncu's CSV, over all kernels; None where it has none."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    moved = [
        float(row["Metric Value"].replace(",", "")) * _UNITS[row["Metric Unit"]]
        for row in csv.DictReader(lines)
        if row.get("Metric Name", "").startswith("dram__bytes")
    ]
    return sum(moved) if moved else None
