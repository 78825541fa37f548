"""Overhead of cl_train: training on synthetic data against a bare forward-backward-step loop, in one process.

    python -m benchmarks.overhead model=resnet18 batch_size=32 data.image_size=224 rounds=4 out=results/FILE.json

Both sides train the same model on one fixed batch, without warm-up. A round is A B B A; the ratio is bare step time /
cl_train's step time, the median over the rounds: 1 means no overhead.
"""

import contextlib
import io
import json
import math
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cl_train.cli import exit_code
from cl_train.commands.json_result import print_result
from cl_train.comparison.alternation import alternate
from cl_train.config.schema import setting
from cl_train.config.validation import load
from cl_train.models.sources import build_model
from cl_train.step.precision import autocast, build_scaler, resolve_precision
from cl_train.system.distributed import choose_device
from cl_train.system.machine import measured, timed_s
from cl_train.training.loop import train


@dataclass
class OverheadSettings:
    """Settings of the overhead measurement."""

    model: str = setting("resnet18", "name of a model")
    batch_size: int = setting(32, "images per step", minimum=1)
    image_size: int = setting(224, "height and width of the images, pixels", minimum=8, key="data.image_size")
    steps: int = setting(10, "measured steps per block, after as many for warm-up", minimum=2)
    rounds: int = setting(4, "rounds, each of two blocks per side", minimum=1)
    out: str | None = setting(None, "file for the result as JSON")
    json: bool = setting(False, "print the result as JSON")


def bare_step_s(settings: OverheadSettings, device: torch.device) -> float:
    """The shortest correct training loop: forward, backward, step, zero_grad; channels_last and fused SGD."""
    precision, size = resolve_precision("auto", device), settings.image_size
    torch.manual_seed(0)
    model = build_model(settings.model, num_classes=1000, image_size=size)
    model = model.to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0125, momentum=0.9, weight_decay=1e-4, fused=True)
    images = torch.randn(settings.batch_size, 3, size, size, device=device)
    images = images.to(precision.input_dtype, memory_format=torch.channels_last)
    targets = torch.randint(1000, (settings.batch_size,), device=device)
    scaler = build_scaler(precision, device)

    def steps() -> None:
        for _ in range(settings.steps):
            with autocast(precision, device):
                loss = torch.nn.functional.cross_entropy(model(images).float(), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

    steps()
    return timed_s(steps, device) / settings.steps


def cl_train_step_s(settings: OverheadSettings, device: torch.device) -> float:
    """The same with `train`: the step time of one window of `steps` steps, from metrics.jsonl."""
    steps, size = settings.steps, settings.image_size
    data = {"name": "synthetic", "synthetic_images": settings.batch_size * 2 * steps, "image_size": size}
    values = {"model": settings.model, "batch_size": settings.batch_size, "device": device.type, "data": data}
    values |= {"channels_last": "true", "epochs": 1, "log_every": steps, "warmup_steps": 1, "evaluate_every": -1}
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            assert train(load(values), Path(folder)).exit_code == 0
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    windows = [record for record in records if record["kind"] == "train" and not record["warmup"]]
    return statistics.fmean(window["step_ms"] for window in windows) / 1000


def measure(settings: OverheadSettings) -> tuple[dict[str, Any], str]:
    device = choose_device("auto")
    sides = [partial(side, settings, device) for side in (bare_step_s, cl_train_step_s)]
    done = alternate(sides, target_ci=math.inf, time_limit_s=math.inf, min_rounds=settings.rounds)
    ratios = done.round_ratios(1)
    bare_ms, cl_train_ms = ([1000 * seconds for seconds in block] for block in done.blocks)
    times = {"bare_step_ms": bare_ms, "cl_train_step_ms": cl_train_ms}
    result = measured(settings, device, **times, ratio=statistics.median(ratios), ratios=ratios)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} rounds"
    return result, f"cl_train / bare loop, images per second: {statistics.median(ratios):.3f} ({spread})"


def main(words: list[str]) -> int:
    print_result(OverheadSettings, words, measure)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
