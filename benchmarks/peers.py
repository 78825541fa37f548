"""cl_train against others that do the same work, in alternating blocks. Keys are those of
`cl-train`.

    python -m benchmarks.peers overhead model=resnet18 data.image_size=224 rounds=4 out=FILE.json
    python -m benchmarks.peers loader data.root=/datasets/imagenet data.workers=8 out=FILE.json
    python -m benchmarks.peers updates model=resnet18,resnet50 time_limit_s=180 out=FILE.json

overhead: training on synthetic data against a bare forward-backward-step loop with the same model,
on one fixed batch. The ratio is bare step time / cl_train's step time, the median over the rounds:
1 means no overhead. loader: `cl-train loader_benchmark` with timm's loader, on the same files.
updates: what the optimizer and the EMA take on weights in channels_last, as training runs them and
as torch does by itself, against contiguous weights.
"""

import io
import itertools
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cl_train.cli import exit_code
from cl_train.commands import Result, print_result
from cl_train.config.command_line import check_command_line
from cl_train.config.fields import Range
from cl_train.config.schema import JsonResult, LoaderBenchmarkSettings, OptimConfig, setting
from cl_train.config.validation import optional_module
from cl_train.errors import ConfigError
from cl_train.measure.alternate import Block, Stop, alternate
from cl_train.measure.loaders import Pipeline, benchmark_loaders
from cl_train.models.sources import build_model
from cl_train.step.optim import build_optimizer, in_memory_order
from cl_train.step.precision import EMA, autocast, kernel_selection, resolve_precision
from cl_train.system.distributed import choose_device
from cl_train.system.machine import document_of, timed_s
from cl_train.system.run_folder import counted_windows, read_records, windows_of
from cl_train.training.loop import train

CPU = torch.device("cpu")


# --- overhead -------------------------------------------------------------------------------------


@dataclass
class OverheadSettings(JsonResult):
    model: str = setting("resnet18", "name of a model")
    batch_size: int = setting(32, "images per step", Range(1))
    image_size: int = setting(
        224, "height and width of the images, pixels", Range(8), key="data.image_size"
    )
    steps: int = setting(10, "measured steps per block, after as many for warm-up", Range(2))
    rounds: int = setting(4, "rounds, each of two blocks per side", Range(1))


def overhead(settings: OverheadSettings) -> Result:
    device = choose_device("auto")
    sides = [partial(side, settings, device) for side in (bare_steps, cl_train_steps)]
    done = alternate(sides, Stop.after(settings.rounds))
    ratios = done.ratios(1)
    ratio = statistics.median(ratios)
    bare_ms, cl_train_ms = (
        [1000 * seconds for seconds in done.times_s(number)] for number in (0, 1)
    )
    times = {"bare_step_ms": bare_ms, "cl_train_step_ms": cl_train_ms}
    spread = f"{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds"
    text = f"cl_train / bare loop, images per second: {ratio:.3f} ({spread})"
    return document_of(settings, device, **times, ratio=ratio, ratios=ratios), text


def bare_steps(settings: OverheadSettings, device: torch.device) -> Block:
    """The shortest correct training loop, in channels_last with fused SGD."""
    precision, size = resolve_precision("auto", device), settings.image_size
    torch.manual_seed(0)
    model = build_model(settings.model, num_classes=1000, image_size=size)
    model = model.to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.0125, momentum=0.9, weight_decay=1e-4, fused=True
    )
    images = torch.randn(settings.batch_size, 3, size, size, device=device)
    images = images.to(precision.input_dtype, memory_format=torch.channels_last)
    targets = torch.randint(1000, (settings.batch_size,), device=device)
    scaler = torch.amp.GradScaler(device.type, enabled=precision.scales_loss)

    def steps() -> None:
        for _ in range(settings.steps):
            with autocast(precision, device):
                loss = torch.nn.functional.cross_entropy(model(images).float(), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

    with kernel_selection(tf32=precision.tf32, autotune=True):  # as `train`
        steps()
        return Block(timed_s(steps, device) / settings.steps)


def cl_train_steps(settings: OverheadSettings, device: torch.device) -> Block:
    """The same with `train`: the step time of one window of `steps` steps, from metrics.jsonl."""
    images = settings.batch_size * 2 * settings.steps
    words = f"""channels_last=true epochs=1 evaluate_every=-1 device={device.type}
        data=synthetic data.synthetic_images={images} data.image_size={settings.image_size}
        model={settings.model} batch_size={settings.batch_size} log_every={settings.steps}
        warmup_steps=1"""
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stdout(io.StringIO()):
            assert train(check_command_line(words.split())[0], Path(folder)).exit_code == 0
        windows = counted_windows(windows_of(read_records(Path(folder))[0]))
    return Block(statistics.fmean(window.step_ms for window in windows) / 1000)


# --- updates of the weights -----------------------------------------------------------------------


@dataclass
class UpdateSettings(JsonResult):
    model: list[str] = setting(["resnet18", "resnet50"], "names of models")
    threads: list[int] = setting([1, 2], "numbers of threads", Range(1))
    time_limit_s: float = setting(180.0, "seconds for all of them", Range(above=0))


UPDATES = ("sgd", "adamw", "adam", "rmsprop", "ema")
SIDES = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "torch": torch.channels_last,  # without views in the order of memory
}


def updates(settings: UpdateSettings) -> Result:
    cases = list(itertools.product(settings.model, UPDATES, settings.threads))
    case_s = settings.time_limit_s / len(cases) - 1
    rows: list[dict[str, Any]] = []
    for model, update, threads in cases:
        torch.set_num_threads(threads)
        variants = [partial(updates_block, update_of(model, update, side)) for side in SIDES]
        done = alternate(variants, Stop(math.inf, case_s, least_rounds=2))
        block_ms = {
            side: [round(1000 * seconds, 4) for seconds in done.times_s(number)]
            for number, side in enumerate(SIDES)
        }
        row: dict[str, Any] = {"model": model, "update": update, "threads": threads}
        row["ms"] = {side: statistics.median(times) for side, times in block_ms.items()}
        row |= {"ratio": 1 / done.intervals()[1].ratio, "block_ms": block_ms}
        rows.append(row)
        print(f"{model} {update} {threads}: {row['ms']}, ratio {row['ratio']:.2f}", flush=True)
    worst = max(row["ratio"] for row in rows)
    text = f"channels_last / contiguous, milliseconds: at most {worst:.2f}"
    return document_of(settings, CPU, rows=rows), text


def update_of(name: str, update: str, side: str) -> Callable[[], object]:
    """One update of a new model's weights, or of their average."""
    torch.manual_seed(0)
    model = build_model(name, num_classes=1000, image_size=224).to(memory_format=SIDES[side])
    if update == "ema":
        return partial(EMA(model, 0.999).update, model.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    if update != "adam":
        cfg = OptimConfig(name=update)
        optimizer = build_optimizer(cfg, model, dict(model.named_parameters()), lr=1e-3)

    def step() -> None:
        with nullcontext() if side == "torch" else in_memory_order(optimizer):
            optimizer.step()

    return step


def updates_block(update: Callable[[], object]) -> Block:
    update()  # finds the caches full of another side's tensors, or not, by the order of the blocks
    return Block(timed_s(lambda: [update() for _ in range(10)], CPU) / 10)


# --- the loader -----------------------------------------------------------------------------------


def timm(settings: LoaderBenchmarkSettings, workers: int) -> Pipeline:
    """timm's training loader: uint8 batches from its fast_collate, as for its GPU prefetcher."""
    modules = ("timm.data", "timm.data.loader")
    data, loader = (optional_module(name, "peers loader") for name in modules)
    images = data.create_loader(
        data.create_dataset("", str(settings.root), is_training=True),
        (3, settings.image_size, settings.image_size),
        settings.batch_size,
        is_training=True,
        use_prefetcher=False,
        collate_fn=loader.fast_collate,
        num_workers=workers,
        persistent_workers=True,
        color_jitter=0.0,
        device=CPU,
    )
    # uint8 [3, H, W] instead of ToTensor and Normalize, as in timm's transform for its prefetcher
    images.dataset.transform.transforms[-2:] = [
        lambda image: np.rollaxis(np.array(image, dtype=np.uint8), 2)
    ]
    return Pipeline("timm", workers, lambda: (targets for _, targets in images))


COMMANDS: dict[str, tuple[type, Callable[[Any], Result]]] = {
    "overhead": (OverheadSettings, overhead),
    "loader": (LoaderBenchmarkSettings, lambda settings: benchmark_loaders(settings, timm)),
    "updates": (UpdateSettings, updates),
}


def main(words: list[str]) -> int:
    if not words or words[0] not in COMMANDS:
        raise ConfigError(f"name what to measure: {', '.join(COMMANDS)}")
    schema, measure = COMMANDS[words[0]]
    print_result(schema, words[1:], measure)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
