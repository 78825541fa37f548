"""Time to accuracy and seconds per epoch: train.py against that of timm, with the same recipe.

    git clone https://github.com/huggingface/pytorch-image-models timm
    python -m benchmarks.time_to_accuracy timm_train=timm/train.py out=FILE.json

docs/benchmarks.md explains the choices. The clock starts with the process, and an accuracy counts
when its line is printed. The result is written after each seed.
"""

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import OverheadSettings, bare_steps
from cl_train.cli import exit_code
from cl_train.config.arguments import settings_from_arguments
from cl_train.config.fields import Range
from cl_train.config.schema import setting
from cl_train.data.sample import ensure_sample
from cl_train.errors import ConfigError
from cl_train.step.precision import bf16_is_faster_on_cpu
from cl_train.system.files import write_json
from cl_train.system.machine import document_of
from cl_train.system.processes import MachineLoad

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
TARGET = 95.0  # top-1, percent
IMAGE_SIZE = {"digits": 32, "sample": 128}
EPOCHS, BATCH_SIZE = 5, 32

OURS = """{script} data=folder data.root={data} data.image_size={size} model=resnet18
    channels_last=true batch_size={batch} data.workers=2 epochs={epochs} seed={seed}
    hydra.run.dir={out} overwrite=true"""
TIMM = """{script} --data-dir {data} --val-split val --num-classes 10 --model resnet18
    --input-size 3 {size} {size} --crop-pct 0.875 -b {batch} -j 2 --epochs {epochs}
    --warmup-epochs 0 --seed {seed} --output {out} --device cpu --channels-last {amp} --opt momentum
    --model-kwargs zero_init_last=False --lr-base 0.1 --weight-decay 1e-4 --sched-on-updates
    --smoothing 0 --scale 0.35 1 --hflip 0 --color-jitter 0 --train-interpolation bilinear"""
OPTIONS = {"cl_train": OURS, "timm, recipe of train.py": TIMM}
LINES = {  # with an evaluation's top-1
    "cl_train": r"^ \* Prec@1 (?P<top1>[\d.]+)",
    "timm, recipe of train.py": r"Test: \[ *(\d+)/\1\].*Acc@1: +[\d.]+ \( *(?P<top1>[\d.]+)\)",
}


@dataclass
class Settings:
    timm_train: str = setting("timm/train.py", "train.py in a clone of timm's repository")
    data: list[str] = setting(["digits", "sample"], "data sets", choices=("digits", "sample"))
    seeds: int = setting(5, "runs of each program on each data set", Range(1))
    work: str = setting("outputs/time_to_accuracy", "folder for data and logs")
    out: str | None = setting(None, "JSON file to write")


def write_digits(folder: Path) -> None:
    """scikit-learn's 1,797 digits, 8 x 8 enlarged to 32 x 32, as PNG files; 360 for validation."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    unfinished = folder.with_name(folder.name + ".unfinished")
    for place, index in enumerate(np.random.default_rng(0).permutation(len(digits.target))):
        split = "val" if place < 360 else "train"
        path = unfinished / split / str(digits.target[index]) / f"{index:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        grey = Image.fromarray((digits.images[index] * 255 / 16).round().astype(np.uint8))
        grey.resize((32, 32), Image.Resampling.BILINEAR).convert("RGB").save(path)
    unfinished.rename(folder)


def run_to_end(accuracy_line: str, command: list[str], log: Path) -> Record:
    """Run `command`; `points` are [seconds, top-1] of each evaluation."""
    points: list[list[float]] = []
    load, started_at = MachineLoad(), time.monotonic()
    process = subprocess.Popen(
        ["env", "PYTHONUNBUFFERED=1", *command],
        cwd=log.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
    )
    with process, log.open("w", encoding="utf-8") as file:
        for line in process.stdout or ():
            seconds = round(time.monotonic() - started_at, 3)
            file.write(f"{seconds:.3f} {line}")
            if found := re.search(accuracy_line, line):
                points.append([seconds, float(found["top1"])])
    total_s = round(time.monotonic() - started_at, 3)
    run = {"exit_code": process.returncode, "points": points, "total_s": total_s}
    return run | {"others_pct": load.others_pct()}


def options_of(program: str) -> list[str]:
    """timm gets the precision that train.py chooses by itself."""
    amp = "--amp --amp-dtype bfloat16" if bf16_is_faster_on_cpu() else ""
    return OPTIONS[program].replace("{amp}", amp).split()


def run_of(data: str, program: str, script: Path, seed: int, work: Path) -> Record:
    folder = work / f"{data}-{program.partition(',')[0]}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "out"
    values = {"script": script, "data": work / data, "size": IMAGE_SIZE[data], "out": out}
    values |= {"seed": seed, "epochs": EPOCHS, "batch": BATCH_SIZE}
    command = [sys.executable, *(word.format(**values) for word in options_of(program))]
    run: Record = {"data": data, "program": program, "seed": seed, "epochs": EPOCHS}
    run |= run_to_end(LINES[program], command, folder / "run.log")
    shutil.rmtree(out, ignore_errors=True)  # checkpoints, more than 1 GB per run
    return run


def measure(settings: Settings) -> Iterator[Record]:
    """The results after each seed; the programs take turns, in alternating order."""
    work, timm = Path(settings.work).absolute(), Path(settings.timm_train).absolute()
    if not timm.exists():
        raise ConfigError(f"{timm} does not exist; clone the repository first")
    if not (work / "digits").exists():
        write_digits(work / "digits")
    ensure_sample(work / "sample")
    scripts = dict(zip(OPTIONS, (ROOT / "train.py", timm), strict=True))
    facts = {
        "target_top1": TARGET,
        "commits": {name: commit_of(script.parent) for name, script in scripts.items()},
        "options": {name: options_of(name) for name in scripts},
    }
    runs: list[Record] = []
    for seed in range(settings.seeds):
        for data in settings.data:
            floor_s = bare_epoch_s(data, work)
            for name in list(scripts) if seed % 2 == 0 else reversed(scripts):
                run = run_of(data, name, scripts[name], seed, work) | {"floor_s": floor_s}
                runs.append(run)
                took = f"{seconds_to(run):.1f} s of {run['total_s']:.0f} s"
                print(f"{data} seed {seed} {name}: {took}", flush=True)
        by_data = {data: [run for run in runs if run["data"] == data] for data in settings.data}
        summary = {data: summarize(found) for data, found in by_data.items()}
        yield document_of(settings, torch.device("cpu"), **facts, summary=summary, runs=runs)


def bare_epoch_s(data: str, work: Path) -> float:
    """The floor of an epoch: its training steps in a bare loop on one batch in memory."""
    step = OverheadSettings(batch_size=BATCH_SIZE, image_size=IMAGE_SIZE[data], steps=10)
    images = sum(path.is_file() for path in (work / data / "train").rglob("*"))
    return images // BATCH_SIZE * bare_steps(step, torch.device("cpu")).seconds


def commit_of(folder: Path) -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()


def seconds_to(run: Record) -> float:
    """To the first evaluation that reaches the target; inf if none does."""
    return next((seconds for seconds, top1 in run["points"] if top1 >= TARGET), math.inf)


def epoch_s(run: Record) -> float | None:
    """Seconds between evaluations: training, evaluation and checkpoint, without the first."""
    times = [after - before for (before, _), (after, _) in pairwise(run["points"])]
    return statistics.median(times) if times else None


def summarize(runs: list[Record]) -> Record:
    """Medians and ranges per program; `target_s` is null if most runs missed the target.
    `share_of_floor`: of a later epoch's seconds, those of its training steps in a bare loop.
    """
    summary: Record = {}
    ours = {run["seed"]: run for run in runs if run["program"] == "cl_train"}
    for name in dict.fromkeys(run["program"] for run in runs):
        finished = [run for run in runs if run["program"] == name]
        seconds = [seconds_to(run) for run in finished]
        reached = sum(value < math.inf for value in seconds)
        epochs = [(run, each) for run in finished if (each := epoch_s(run)) is not None]
        pairs = [(run, ours[run["seed"]]) for run in finished if run["seed"] in ours]
        targets = [tuple(map(seconds_to, pair)) for pair in pairs]
        both_s = [tuple(map(epoch_s, pair)) for pair in pairs]
        ratios = [theirs / our for theirs, our in targets if max(theirs, our) < math.inf]
        epoch_ratios = [theirs / our for theirs, our in both_s if theirs and our]
        summary[name] = {
            "runs": len(finished),
            "reached": reached,
            "target_s": median_and_range(seconds) if 2 * reached > len(seconds) else None,
            "first_s": median_and_range([run["points"][0][0] for run in finished if run["points"]]),
            "epoch_s": median_and_range([each for _, each in epochs]),
            "share_of_floor": median_and_range([run["floor_s"] / each for run, each in epochs]),
            "theirs_over_ours": {
                "target": median_and_range(ratios),
                "epoch": median_and_range(epoch_ratios),
            },
        }
    return summary


def median_and_range(values: list[float]) -> list[float] | None:
    """[median, least, largest]; an infinite one is null in JSON."""
    if not values:
        return None
    found = (statistics.median(values), min(values), max(values))
    return [round(value, 3) if math.isfinite(value) else None for value in found]  # type: ignore


def main(words: list[str]) -> int:
    settings = settings_from_arguments(Settings, words)
    if settings.out:
        Path(settings.out).parent.mkdir(parents=True, exist_ok=True)
    for result in measure(settings):
        if settings.out:
            write_json(Path(settings.out), result)
    print(json.dumps(result["summary"], indent=1))
    return int(any(run["exit_code"] for run in result["runs"]))


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
