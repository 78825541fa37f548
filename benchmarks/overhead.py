"""What the harness costs: training on synthetic data against a bare forward-backward-step loop, in one process.

    python benchmarks/overhead.py model=resnet18 batch_size=32 image_size=224 rounds=7 output=results/FILE.json

Both sides train the same model on one fixed batch, take turns (A B B A ...), and leave warm-up out. The ratio is the
median over rounds of bare step time / harness step time: 1 means that the harness costs nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cl_train.config.schema import ConfigError, setting
from cl_train.config.validation import load, settings_from_arguments, stop_with
from cl_train.models.registry import build_model
from cl_train.step.precision import autocast, build_scaler, resolve_precision
from cl_train.system.distributed import choose_device
from cl_train.system.environment import describe_environment, device_name
from cl_train.training.loop import train


@dataclass
class Settings:
    """What is measured."""

    model: str = setting("resnet18", "a model's name")
    precision: str = setting("auto", "precision of both sides", choices=("auto", "fp32", "tf32", "bf16"))
    batch_size: int = setting(32, "images per step", minimum=1)
    image_size: int = setting(224, "pixels", minimum=8)
    steps: int = setting(10, "measured steps per round and side, after as many to warm up", minimum=2)
    rounds: int = setting(7, "pairs of blocks", minimum=1)
    device: str = setting("auto", "cuda or cpu", choices=("auto", "cpu", "cuda"))
    output: str | None = setting(None, "a JSON file to write")


def bare_step_ms(settings: Settings) -> float:
    """The shortest honest training loop: forward, backward, step, zero_grad; channels_last, fused SGD."""
    device = choose_device(settings.device)
    precision = resolve_precision(settings.precision, device)
    torch.manual_seed(0)
    model = build_model(settings.model, num_classes=1000, image_size=settings.image_size)
    model = model.to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0125, momentum=0.9, weight_decay=1e-4, fused=True)
    images = torch.randn(settings.batch_size, 3, settings.image_size, settings.image_size, device=device)
    images = images.to(precision.input_dtype, memory_format=torch.channels_last)
    targets = torch.randint(1000, (settings.batch_size,), device=device)
    scaler = build_scaler(precision, device)
    for step in range(2 * settings.steps):
        if step == settings.steps:
            wait_for(device)
            start = time.perf_counter()
        with autocast(precision, device):
            loss = torch.nn.functional.cross_entropy(model(images).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    wait_for(device)
    return 1000 * (time.perf_counter() - start) / settings.steps


def harness_step_ms(settings: Settings) -> float:
    """The same through `train`: the mean step time of one window of `steps` steps, as it reports it."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = load(
            {
                "data": {
                    "name": "synthetic",
                    "image_size": settings.image_size,
                    "synthetic_images": settings.batch_size * 2 * settings.steps,
                },
                "model": settings.model,
                "precision": settings.precision,
                "batch_size": settings.batch_size,
                "channels_last": "true",
                "device": settings.device,
                "epochs": 1,
                "evaluate_every": -1,
                "max_steps": 2 * settings.steps,  # a window that warms up, and one that counts
                "log_every": settings.steps,
                "warmup_steps": 1,
            }
        )
        with contextlib.redirect_stdout(io.StringIO()):  # its lines of progress
            assert train(cfg, Path(folder)) == 0
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    measured = [record["step_ms"] for record in records if not record["warmup"]]
    return statistics.fmean(measured)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(settings: Settings) -> dict[str, object]:
    bare: list[float] = []
    harness: list[float] = []
    for number in range(settings.rounds):
        sides = [(bare, bare_step_ms), (harness, harness_step_ms)]
        for values, side in sides if number % 2 == 0 else reversed(sides):
            values.append(side(settings))
        print(f"round {number + 1}: bare {bare[-1]:.1f} ms, harness {harness[-1]:.1f} ms", flush=True)
    ratios = [plain / ours for plain, ours in zip(bare, harness, strict=True)]
    device = choose_device(settings.device)
    return {
        "schema_version": 1,
        "command": " ".join(sys.argv),
        "device_name": device_name(device),
        "environment": describe_environment(device),
        "settings": vars(settings),
        "bare_step_ms": bare,
        "harness_step_ms": harness,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="key=value")
    try:
        settings = settings_from_arguments(Settings, parser.parse_args().settings)
        result = measure(settings)
    except ConfigError as error:
        stop_with(error)
    if settings.output:
        Path(settings.output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"harness / bare, images per second: {result['ratio']:.3f} (median of {settings.rounds} rounds)")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
