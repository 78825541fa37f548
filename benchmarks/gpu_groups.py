"""The measurements of a GPU report, one group per process; started by `gpu_report`."""

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_plan import Group, Variant, all_groups, has_time_for, tiny_groups
from cl_train.comparison.alternation import alternate
from cl_train.comparison.timed_model import CHANNELS_LAST, CONTIGUOUS, TimedModel, Workload, noise
from cl_train.comparison.zoo import TUTORIAL
from cl_train.data.sample import SampleSpec, ensure_sample
from cl_train.models.sources import build_model
from cl_train.step.precision import kernel_selection, resolve_precision
from cl_train.system.environment import describe_environment, device_name
from cl_train.system.memory import peak_memory_of_step_gib, release_memory
from cl_train.system.timing import step_times_s, timed_s

ROOT = Path(__file__).resolve().parent.parent
LEARNING_RATE = 1e-4
WARM_UP_STEPS = 6

Step = Callable[[], object]


class Rows:
    """The rows of one group: lines of JSON on stdout, its log, where they survive if the group is killed."""

    def __init__(self, group: Group, time_limit_s: float) -> None:
        self.group = group
        self._ends_at = time.monotonic() + time_limit_s

    def add(self, variant: Variant | None = None, **values: Any) -> None:
        if variant is not None:
            names = ("model", "precision", "batch_size", "image_size")
            labels = {name: getattr(self.group, name) for name in names}
            values = labels | {"variant": variant.name, "compile": variant.compile} | values
        print(json.dumps({"group": self.group.name, **values}), flush=True)

    def add_speed(self, variant: Variant, seconds: float, **values: Any) -> None:
        self.add(variant, images_per_s=self.group.batch_size / seconds, step_ms=1000 * seconds, **values)

    @property
    def left_s(self) -> float:
        return self._ends_at - time.monotonic()


# --- one group --------------------------------------------------------------------------------------------------------


def run_group(name: str, folder: Path, time_limit_s: float, *, dry_run: bool) -> None:
    """Measure one group on the GPU, or on the CPU for a dry run."""
    group = next(group for group in (tiny_groups() if dry_run else all_groups()) if group.name == name)
    rows, device = Rows(group, time_limit_s), torch.device("cpu" if dry_run else "cuda")
    precision = resolve_precision(group.precision, device)
    with kernel_selection(tf32=precision.tf32, autotune=True):
        if name == "environment":
            measure_machine(rows, device)
        elif name == "jpeg":
            measure_jpegs(rows, device, folder)
        elif name == "zoo":
            for model in ("squeezenet1_1", "shufflenet_v2_x0_5") if dry_run else TUTORIAL:
                rows.group = replace(group, model=model)
                if rows.left_s > 10:
                    measure_variants(rows, device)
                    release_memory()
        elif name.startswith("bytes"):
            step_for_ncu(rows.group, device)
        else:
            measure_variants(rows, device)


def measure_machine(rows: Rows, device: torch.device) -> None:
    """Versions, copy bandwidth (bytes read plus bytes written) and matmul rates, which the roofline refers to."""
    on_cuda = device.type == "cuda"
    source = torch.randn(2**30 if on_cuda else 2**22, device=device)  # 4 GiB: many times the cache
    target = torch.empty_like(source)
    seconds = statistics.median(timed_s(lambda: target.copy_(source), device) for _ in range(20))
    dtypes = {"half": (torch.float16 if on_cuda else torch.bfloat16, False), "tf32": (torch.float32, True)}
    rows.add(
        device=device_name(device),
        cores=os.cpu_count(),
        copy_bytes_per_s=2 * source.nbytes / seconds,
        flops_per_s={name: 1e12 * matmul_tflops(device, *dtype) for name, dtype in dtypes.items()},
        environment=describe_environment(device),
    )


def matmul_tflops(device: torch.device, dtype: torch.dtype, tf32: bool) -> float:
    """TFLOP/s of the fastest large square matmul in 0.5 s: a power-limited GPU does not reach the data sheet's peak."""
    size = 8192 if device.type == "cuda" else 2048
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times: list[float] = []
    with kernel_selection(tf32=tf32, autotune=False):
        while len(times) < 2 or sum(times) < 0.5:
            times.append(timed_s(lambda: left @ right, device))
    return 2 * size**3 / min(times) / 1e12


# --- variants in alternating blocks -----------------------------------------------------------------------------------


def measure_variants(rows: Rows, device: torch.device) -> None:
    """Prepare each variant and time it separately, then time all in alternating blocks for the ratios."""
    group = rows.group
    steps: dict[Variant, Step] = {}
    for variant in group.variants:
        if variant.timm and importlib.util.find_spec("timm") is None:
            continue
        if not has_time_for(variant, rows.left_s, len(steps)):
            print(f"skipped for lack of time: {variant.name}", flush=True)
            continue
        try:
            steps[variant] = prepare(variant, rows, device)
        except Exception as error:  # the other variants may work; report the reason
            traceback.print_exc()
            rows.add(variant, outcome=f"{type(error).__name__}: {str(error)[:200]}")
            release_memory()
    if len(steps) < 2:
        return
    baseline = group.baseline if group.baseline in steps else next(iter(steps))
    order = [baseline, *(variant for variant in steps if variant is not baseline)]
    count = max(1, group.steps // 10)
    blocks = [lambda step=steps[variant]: statistics.median(step_times_s(step, count, device)) for variant in order]
    found = alternate(blocks, target_ci=0.01, time_limit_s=min(group.blocks_s * len(order), rows.left_s), min_rounds=5)
    for index, ratio in enumerate(found.speed_ratios()):  # the last ones are missing if memory ran out
        rows.add_speed(order[index], found.median_s(index), versus=baseline.name, **ratio.to_dict())


def prepare(variant: Variant, rows: Rows, device: torch.device) -> Step:
    """Build the step, warm it up (kernels chosen, compiled, recorded), and add a row with its speed and peak memory."""
    held_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    step = build_step(variant, rows.group, device)
    step_times_s(step, WARM_UP_STEPS, device)
    seconds = statistics.median(step_times_s(step, 3, device))
    peak_memory_gib = peak_memory_of_step_gib(step, 0, held_bytes, device)
    rows.add_speed(variant, seconds, peak_memory_gib=peak_memory_gib)
    print(f"{variant.name}: ready with {rows.left_s:.0f} s left", flush=True)
    return step


def build_step(variant: Variant, group: Group, device: torch.device) -> Step:
    """The training step with these settings, on one fixed batch on the device."""
    shape = (3, group.image_size, group.image_size)
    if variant.timm:
        name = "test_resnet" if ":" in group.model else group.model  # timm's smallest, for a dry run
        images = noise((group.batch_size, *shape)).to(device, memory_format=torch.channels_last)
        return timm_step(name, images, compile=variant.compile and device.type == "cuda")
    precision = resolve_precision(group.precision, device)
    workload = Workload(group.batch_size, shape, precision, device, compile=variant.compile, cuda_graph=variant.graph)
    torch.manual_seed(0)
    model = build_model(group.model, num_classes=1000)
    return TimedModel(model, CHANNELS_LAST if variant.channels_last else CONTIGUOUS, workload).step


def timm_step(name: str, images: torch.Tensor, *, compile: bool) -> Step:
    """A step of timm's `train.py --amp --channels-last --torchcompile`, with timm's parts and without its logging."""
    import timm
    from timm.optim import create_optimizer_v2
    from timm.utils import NativeScaler

    device = images.device
    targets = torch.randint(1000, (len(images),), device=device)
    model = timm.create_model(name, num_classes=1000).to(device).to(memory_format=torch.channels_last).train()
    optimizer = create_optimizer_v2(model, opt="sgd", lr=LEARNING_RATE, momentum=0.9, weight_decay=1e-4)
    scaler = NativeScaler(device=device.type)
    trained = torch.compile(model) if compile else model

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.float16 if device.type == "cuda" else torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(trained(images), targets)
        scaler(loss, optimizer, parameters=model.parameters())
        optimizer.zero_grad()

    return step


# --- memory traffic ---------------------------------------------------------------------------------------------------


def step_for_ncu(group: Group, device: torch.device) -> None:
    """One step between ncu's marks, for which it counts the bytes of each kernel: see `gpu_report.dram_bytes`."""
    step = build_step(group.variants[0], group, device)
    step_times_s(step, WARM_UP_STEPS, device)
    with torch.cuda.profiler.profile() if device.type == "cuda" else nullcontext():
        timed_s(step, device)


# --- a whole run on JPEGs ---------------------------------------------------------------------------------------------


def measure_jpegs(rows: Rows, device: torch.device, folder: Path) -> None:
    """train.py with the best settings: on one fixed batch, then on generated JPEGs of ImageNet's size, all cores.

    Each run folder also has `operators.txt`, the operators and kernels that take the most time.
    """
    group, dry_run = rows.group, device.type == "cpu"
    root, cores = folder / "images", len(os.sched_getaffinity(0))
    ensure_sample(root, SampleSpec(train_per_class=2 if dry_run else 600, val_per_class=1))
    words = [
        *(f"model={group.model}", f"precision={group.precision}", f"batch_size={group.batch_size}"),
        *(f"data.image_size={group.image_size}", f"data.workers={cores}", f"device={device.type}"),
        *("channels_last=true", f"compile={not dry_run}", "cuda_graph=auto", "profile=true"),
        *("epochs=50", "evaluate_every=-1", "checkpoint.every_epochs=0"),
        *(("max_steps=14", "log_every=2", "warmup_steps=10") if dry_run else ("max_steps=100", "warmup_steps=30")),
    ]
    sources = {"one fixed batch": ["data=synthetic"], "JPEGs": ["data=folder", f"data.root={root}"]}
    fixed_images_per_s = 0.0
    for name, source in sources.items():
        run = folder / f"run-{name.replace(' ', '-')}"
        shutil.rmtree(run, ignore_errors=True)
        subprocess.run([sys.executable, "train.py", *words, *source, f"hydra.run.dir={run}"], cwd=ROOT, check=True)
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        images_per_s = summary["images_per_s"]["end_to_end"]["median"]
        fixed_images_per_s = fixed_images_per_s or images_per_s
        variant = Variant(f"train.py on {name}", compile=not dry_run, graph=not dry_run)
        rows.add_speed(
            variant,
            group.batch_size / images_per_s,
            data_wait_pct=summary["data_wait_pct"],
            ratio=images_per_s / fixed_images_per_s,
            versus="train.py on one fixed batch",
            cores=cores,
        )


if __name__ == "__main__":
    run_group(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), dry_run=sys.argv[4] == "dry_run")
