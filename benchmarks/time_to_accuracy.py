"""Time to accuracy: train.py against timm's train.py and torchvision's reference script.

    git clone https://github.com/huggingface/pytorch-image-models timm
    git clone https://github.com/pytorch/vision
    python -m benchmarks.time_to_accuracy timm_train=timm/train.py \
        torchvision_references=vision/references/classification out=FILE.json chart=FILE.png

docs/benchmarks.md explains the choices. The clock starts with the process, and an accuracy counts when its line is
printed. The same command continues an interrupted measurement: finished runs are kept in `work`.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cl_train.config.schema import ConfigError, setting
from cl_train.config.validation import settings_from_arguments, stop_with
from cl_train.data.sample import ensure_sample
from cl_train.system.environment import describe_environment, device_name
from cl_train.system.files import write_json
from cl_train.system.machine_load import MachineLoad

ROOT = Path(__file__).resolve().parent.parent
TARGET = 95.0  # top-1, percent
RUN_LIMIT_S = 300.0
IMAGE_SIZE = {"digits": 32, "sample": 64}
EPOCHS = {"cl_train": 5, "timm": 5, "torchvision": 8}  # its small crops take longer: no option changes them
OURS = """{script} data=folder data.root={data} data.image_size={size} model=resnet18 channels_last=true batch_size=32
    data.workers=2 epochs={epochs} seed={seed} hydra.run.dir={out} overwrite=true"""
TIMM = """{script} --data-dir {data} --val-split val --num-classes 10 --model resnet18
    --model-kwargs zero_init_last=False --input-size 3 {size} {size} --crop-pct 0.875 -b 32 -j 2 --epochs {epochs}
    --seed {seed} --output {out} --device cpu --amp --amp-dtype bfloat16 --channels-last --lr-base 0.1
    --weight-decay 1e-4 --sched-on-updates --warmup-epochs 0 --smoothing 0 --scale 0.35 1 --hflip 0 --color-jitter 0
    --train-interpolation bilinear"""
# Crops and flips have no options, and AMP needs CUDA there.
TORCHVISION = """{script} --data-path {data} --model resnet18 --train-crop-size {size} --val-crop-size {size}
    --val-resize-size {resize} -b 32 -j 2 --epochs {epochs} --output-dir {out} --device cpu --opt sgd_nesterov
    --lr 0.0125 --wd 5e-4 --norm-weight-decay 0 --bias-weight-decay 0 --lr-scheduler cosineannealinglr
    --label-smoothing 0.1"""
SEEDED = """import runpy, sys, torch; torch.manual_seed({seed}); del sys.argv[0]; sys.path.insert(0, "{folder}")
runpy.run_path(sys.argv[0], run_name="__main__")"""  # torchvision's script has no option for the seed
# Per program: the line that ends the start-up, and the line with an evaluation's top-1.
LINES = {
    "cl_train": (r"^channels_last: ", r"^ \* Prec@1 (?P<top1>[\d.]+)"),
    "timm": (r"Scheduled epochs", r"Test: \[ *(\d+)/\1\].*Acc@1: +[\d.]+ \( *(?P<top1>[\d.]+)\)"),
    "torchvision": (r"^Start training", r"^Test:  Acc@1 (?P<top1>[\d.]+)"),
}


@dataclass
class Settings:
    timm_train: str | None = setting(None, "train.py in a clone of timm's repository; null = without timm")
    torchvision_references: str | None = setting(None, "torchvision's references/classification; null = without it")
    data: list[str] = setting(["digits", "sample"], "data sets: digits, sample")
    seeds: int = setting(5, "runs of each program on each data set", minimum=1)
    work: str = setting("outputs/time_to_accuracy", "folder for data, logs and finished runs")
    out: str | None = setting(None, "JSON file to write")
    chart: str | None = setting(None, "PNG file to draw (needs matplotlib)")


def write_digits(folder: Path) -> None:
    """scikit-learn's 1,797 digits, 8 x 8 enlarged to 32 x 32, as folders of PNG files; 360 are for validation."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    unfinished = folder.with_name(folder.name + ".unfinished")
    for place, index in enumerate(np.random.default_rng(0).permutation(len(digits.target))):
        path = unfinished / ("val" if place < 360 else "train") / str(digits.target[index]) / f"{index:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        grey = Image.fromarray((digits.images[index] * 255 / 16).round().astype(np.uint8))
        grey.resize((32, 32), Image.Resampling.BILINEAR).convert("RGB").save(path)
    unfinished.rename(folder)


def command_of(program: str, script: Path, values: dict[str, Any]) -> list[str]:
    template = {"cl_train": OURS, "timm": TIMM, "torchvision": TORCHVISION}[program]
    words = [word.format(script=script, **values) for word in template.split()]
    seeded = SEEDED.format(seed=values["seed"], folder=script.parent)
    return [sys.executable, *(["-c", seeded] if program == "torchvision" else []), *words]


def run_program(program: str, command: list[str], log: Path) -> dict[str, Any]:
    """Run `command` and time its lines: `start_s`, the start-up, and `points`, [seconds, top-1] of each evaluation."""
    start_line, accuracy_line = LINES[program]
    start_s: float | None = None
    points: list[list[float]] = []
    load, started_at, cpu_before = MachineLoad(), time.monotonic(), os.times()
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, cwd=log.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
    )
    timer = threading.Timer(RUN_LIMIT_S, process.kill)
    timer.start()
    with process, log.open("w", encoding="utf-8") as file:
        for line in process.stdout or ():
            seconds = round(time.monotonic() - started_at, 3)
            file.write(f"{seconds:.3f} {line}")
            if not points and re.search(start_line, line):
                start_s = seconds
            if found := re.search(accuracy_line, line):
                points.append([seconds, float(found["top1"])])
    timer.cancel()
    total_s, cpu = round(time.monotonic() - started_at, 3), os.times()
    cpu_s = round(sum(cpu[2:4]) - sum(cpu_before[2:4]), 2)  # of the program and its workers
    run = {"exit_code": process.returncode, "start_s": start_s, "points": points, "total_s": total_s}
    return run | {"cpu_s": cpu_s, "others_pct": load.others_pct()}


def finished_run(name: str, program: str, script: Path, seed: int, work: Path) -> dict[str, Any]:
    """The run with this seed, from `work` if it was finished before."""
    epochs, size = EPOCHS[program], IMAGE_SIZE[name]
    folder = work / f"{name}-{epochs}-{program}-{seed}"
    if (folder / "run.json").exists():
        return dict(json.loads((folder / "run.json").read_text(encoding="utf-8")))
    folder.mkdir(parents=True, exist_ok=True)
    values = {"data": work / name, "size": size, "resize": round(size * 256 / 224), "epochs": epochs, "seed": seed}
    command = command_of(program, script, {**values, "out": folder / "out"})
    run: dict[str, Any] = {"data": name, "program": program, "seed": seed, "epochs": epochs}
    run |= run_program(program, command, folder / "run.log")
    if run["exit_code"] == 0 and len(run["points"]) == epochs:
        write_json(folder / "run.json", run)
    else:
        run["why"] = f"failed: see {folder.name}/run.log"
    return run


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """The results after each seed; for each seed and data set the programs take turns, in alternating order."""
    work = Path(settings.work).absolute()
    folder = settings.torchvision_references
    given = {"cl_train": ROOT / "train.py", "timm": settings.timm_train, "torchvision": folder and f"{folder}/train.py"}
    scripts = {name: Path(path).absolute() for name, path in given.items() if path}
    problems = [f"data={name}: choose from {', '.join(IMAGE_SIZE)}" for name in settings.data if name not in IMAGE_SIZE]
    problems += [f"{path} does not exist; clone the repository first" for path in scripts.values() if not path.exists()]
    if problems:
        raise ConfigError(problems)
    if not (work / "digits").exists():
        write_digits(work / "digits")
    ensure_sample(work / "sample")
    runs = []
    for seed in range(settings.seeds):
        for name in settings.data:
            for program in scripts if seed % 2 == 0 else reversed(scripts):
                run = finished_run(name, program, scripts[program], seed, work)
                runs.append(run)
                top1 = " ".join(f"{value:.1f}" for _, value in run["points"])
                print(f"{name} seed {seed} {program}: {seconds_to(run):.1f} s; {top1} {run.get('why', '')}", flush=True)
        yield {
            "schema_version": 1,
            "device_name": device_name(torch.device("cpu")),
            "environment": describe_environment(torch.device("cpu")),
            "commits": {name: commit_of(path.parent) for name, path in scripts.items()},
            "options": {"cl_train": OURS.split(), "timm": TIMM.split(), "torchvision": TORCHVISION.split()},
            "summary": {name: summarize([run for run in runs if run["data"] == name]) for name in settings.data},
            "runs": runs,
        }


def commit_of(folder: Path) -> str:
    return subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()


def seconds_to(run: dict[str, Any]) -> float:
    """Seconds from the start of the process to the first evaluation that reaches the target; inf if none does."""
    return next((seconds for seconds, top1 in run["points"] if top1 >= TARGET), float("inf"))


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Per program the seconds to the target, null if most runs missed it, and our ratio to the better of the others."""
    summary: dict[str, Any] = {}
    for program in dict.fromkeys(run["program"] for run in runs):
        own = [run for run in runs if run["program"] == program]
        seconds = [seconds_to(run) for run in own]
        reached = [value for value in seconds if value < float("inf")]
        summary[program] = {
            "runs": len(own),
            "reached": len(reached),
            "median_s": median(seconds),
            "range_s": [min(reached), max(reached)] if reached else None,
            "median_without_start_s": median([s - (run["start_s"] or 0) for s, run in zip(seconds, own, strict=True)]),
            "median_final_top1": median([run["points"][-1][1] if run["points"] else 0.0 for run in own]),
        }
    for key in ("median_s", "median_without_start_s"):
        ours = summary["cl_train"][key]
        others = [row[key] for program, row in summary.items() if program in ("timm", "torchvision") and row[key]]
        summary[f"ratio_of_{key}"] = round(ours / min(others), 3) if ours and others else None
    return summary


def median(values: list[float]) -> float | None:
    found = statistics.median(values)
    return round(found, 3) if found < float("inf") else None


def draw(result: dict[str, Any], path: Path) -> None:
    """Accuracy over seconds, a line per run; a dot is a program's median time to the target."""
    from matplotlib.figure import Figure

    colours = {"cl_train": "#1a7f37", "timm": "#b35900", "torchvision": "#0969da"}
    figure = Figure(figsize=(9, 3.4))
    axes = figure.subplots(1, len(result["summary"]), squeeze=False)
    for axis, (name, summary) in zip(axes[0], result["summary"].items(), strict=True):
        for run in (run for run in result["runs"] if run["data"] == name and run["points"]):
            axis.plot(*zip(*run["points"], strict=True), color=colours[run["program"]], linewidth=0.9, alpha=0.5)
        for program in (program for program in colours if program in summary):
            seconds = summary[program]["median_s"]
            label = f"{program}: {f'{seconds:.0f} s' if seconds else 'not reached'}"
            axis.plot(seconds or float("nan"), TARGET, "o", color=colours[program], label=label)
        axis.axhline(TARGET, color="black", linewidth=0.7, linestyle="--")
        axis.set(title=name, xlabel="seconds from the start of the process", ylim=(40, 101), xlim=(0, None))
        axis.legend(title=f"median to {TARGET:g} %", loc="lower right", fontsize=8, title_fontsize=8)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("top-1, %")
    figure.suptitle(f"ResNet-18 on {result['device_name']}, one line per run", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(words: list[str]) -> int:
    """Returns 0 if all runs were completed, else 1."""
    try:
        settings = settings_from_arguments(Settings, words)
        for result in measure(settings):
            if settings.out:
                write_json(Path(settings.out), result)
            if settings.chart:
                draw(result, Path(settings.chart))
    except ConfigError as error:
        stop_with(error)
    print(json.dumps(result["summary"], indent=1))
    return int(any("why" in run for run in result["runs"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
