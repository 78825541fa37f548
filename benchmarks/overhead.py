"""Overhead of cl_train: training on synthetic data against a bare forward-backward-step loop, in one process.

    python -m benchmarks.overhead model=resnet18 batch_size=32 data.image_size=224 rounds=7 out=results/FILE.json

Both sides train the same model on one fixed batch, alternate (A B B A ...), and exclude warm-up. The ratio is the
median over rounds of bare step time / cl_train's step time: 1 means no overhead.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cl_train.config.schema import ConfigError, setting
from cl_train.config.validation import load, settings_from_arguments, stop_with
from cl_train.models.registry import build_model
from cl_train.step.precision import autocast, build_scaler, resolve_precision
from cl_train.system.distributed import choose_device
from cl_train.system.environment import describe_environment, device_name
from cl_train.system.files import write_json
from cl_train.system.timing import timed_s
from cl_train.training.loop import train


@dataclass
class OverheadSettings:
    """Settings of the overhead measurement."""

    model: str = setting("resnet18", "name of a model")
    batch_size: int = setting(32, "images per step", minimum=1)
    image_size: int = setting(224, "height and width of the images, pixels", minimum=8, key="data.image_size")
    steps: int = setting(10, "measured steps per round and side, after as many for warm-up", minimum=2)
    rounds: int = setting(7, "pairs of blocks", minimum=1)
    out: str | None = setting(None, "JSON file to write")


def bare_step_ms(settings: OverheadSettings, device: torch.device) -> float:
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
    return 1000 * timed_s(steps, device) / settings.steps


def cl_train_step_ms(settings: OverheadSettings, device: torch.device) -> float:
    """The same with `train`: the step time of one window of `steps` steps, from metrics.jsonl."""
    steps, size = settings.steps, settings.image_size
    data = {"name": "synthetic", "synthetic_images": settings.batch_size * 2 * steps, "image_size": size}
    words = {"model": settings.model, "batch_size": settings.batch_size, "device": device.type, "data": data}
    words |= {"channels_last": "true", "epochs": 1, "log_every": steps, "warmup_steps": 1, "evaluate_every": -1}
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            assert train(load(words), Path(folder)) == 0
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return statistics.fmean(
        record["step_ms"] for record in records if record["kind"] == "train" and not record["warmup"]
    )


def measure(settings: OverheadSettings) -> dict[str, object]:
    device = choose_device("auto")
    bare: list[float] = []
    ours: list[float] = []
    for number in range(settings.rounds):
        sides = [(bare, bare_step_ms), (ours, cl_train_step_ms)]
        for values, side in sides if number % 2 == 0 else reversed(sides):
            values.append(side(settings, device))
        print(f"round {number + 1}: bare {bare[-1]:.1f} ms, cl_train {ours[-1]:.1f} ms", flush=True)
    ratios = [bare_ms / our_ms for bare_ms, our_ms in zip(bare, ours, strict=True)]
    return {
        "schema_version": 1,
        "command": " ".join(sys.argv),
        "device_name": device_name(device),
        "environment": describe_environment(device),
        "settings": asdict(settings),
        "bare_step_ms": bare,
        "cl_train_step_ms": ours,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main(words: list[str]) -> None:
    try:
        settings = settings_from_arguments(OverheadSettings, words)
        result = measure(settings)
    except ConfigError as error:
        stop_with(error)
    if settings.out:
        write_json(Path(settings.out), result)
    print(f"cl_train / bare loop, images per second: {result['ratio']:.3f} (median of {settings.rounds} rounds)")


if __name__ == "__main__":
    main(sys.argv[1:])
