"""Real sweeps that compare a setting with itself: how many are called different?

    python -m benchmarks.aa_sweeps sweeps=30 time_limit_s=1800 out=FILE.json

Each trains a small network with two seeds, compared by the seed, with repeats=auto; every second
one runs beside a process that keeps one core busy.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cl_train.cli import exit_code
from cl_train.config.arguments import settings_from_arguments
from cl_train.config.fields import Range
from cl_train.config.schema import setting
from cl_train.system.files import read_json, write_json
from cl_train.system.machine import document_of

TRAIN = """-m cl_train train -m seed=0,1 compare_by=seed repeats=auto max_repeats=6
    experiment=smoke data.workers=1 checkpoint.every_epochs=0"""


@dataclass
class Settings:
    sweeps: int = setting(30, "number of sweeps", Range(1))
    time_limit_s: float = setting(1800.0, "begin no sweep that would end later", Range(above=0))
    work: str = setting("outputs/aa_sweeps", "folder for the sweeps")
    out: str | None = setting(None, "JSON file to write")


@contextmanager
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def sweep(folder: Path) -> dict[str, Any]:
    """The outcome of a sweep, with the speed of each run."""
    shutil.rmtree(folder, ignore_errors=True)
    started_at = time.monotonic()
    command = [sys.executable, *TRAIN.split(), f"hydra.sweep.dir={folder}"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    (pair,) = read_json(folder / "comparison.json")["pairs"]
    summaries = [read_json(path) for path in sorted(folder.glob("*/summary.json"))]
    outcome = {name: pair[name] for name in ("verdict", "ratio", "ci95", "n", "notes")}
    return {
        **outcome,
        "exit_code": done.returncode,
        "images_per_s": [one["images_per_s"]["end_to_end"]["median"] for one in summaries],
        "others_pct": [one["others_pct"] for one in summaries],
        "seconds": round(time.monotonic() - started_at, 1),
    }


def main(words: list[str]) -> int:
    settings = settings_from_arguments(Settings, words)
    work, started_at = Path(settings.work).absolute(), time.monotonic()
    sweeps: list[dict[str, Any]] = []
    for number in range(settings.sweeps):
        taken_s = time.monotonic() - started_at
        if number and taken_s * (number + 1) / number > settings.time_limit_s:
            break
        beside = "a busy process" if number % 2 else "nothing"
        with busy_process() if number % 2 else nullcontext():
            sweeps.append({"beside": beside, **sweep(work / str(number))})
        print(f"{number}: {sweeps[-1]}", flush=True)
        if settings.out:
            write_json(
                Path(settings.out), document_of(settings, torch.device("cpu"), sweeps=sweeps)
            )
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
