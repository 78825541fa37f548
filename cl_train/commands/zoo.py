"""A zoo of models in both memory formats: converted, compared, audited, timed. One process per model; resumable.

    cl-train zoo                             the 28 models of the channels_last tutorial
    cl-train zoo --no-speed                  without timing: minutes, on a CPU
    cl-train zoo --models torchvision        every classification model of torchvision
    cl-train zoo --models timm               ten families of timm
    cl-train zoo --models 'resnet*,timm/convnext_atto' --device cuda --precision fp16 --batch 256

Writes zoo-<precision>-<device>-torch<version>.json, .md and .csv into --out after each model (other groups are
named, and tables without speeds: zoo-<group>-layout-...); called again, it goes on with what is missing or failed.
Exit code 1: a model failed or its layouts differ; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from cl_train.comparison import zoo
from cl_train.config.schema import ConfigError
from cl_train.config.validation import suggest
from cl_train.models import registry as models
from cl_train.step.precision import resolve_precision
from cl_train.system.distributed import choose_device
from cl_train.system.environment import describe_environment, device_name


def main(words: list[str]) -> int:
    options = _options(words)
    device = choose_device(options.device)
    precision = resolve_precision(options.precision, device)
    zoo_options = zoo.ZooOptions(
        device.type, precision.name, options.batch, options.image_size, options.speed, options.seconds
    )
    names = chosen_models(options.models)
    group = options.models if options.models in zoo.GROUPS else "chosen"
    path = Path(options.out) / f"{stem(group, device, zoo_options.speed, precision.name)}.json"
    environment = {**describe_environment(device), "device_name": device_name(device)}
    table = zoo.open_table(path, asdict(zoo_options), environment)
    missing = [name for name in names if not zoo.is_done(table, name)]
    print(f"{len(names)} models, {len(names) - len(missing)} of them done in {path}")
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, leave_at_once)
    jobs = 1 if zoo_options.speed or device.type == "cuda" else options.jobs  # timings need the machine for themselves
    for row in rows(missing, zoo_options, jobs, options.timeout):
        zoo.add_row(path, table, row)
        print(f"{row['model']}: {row.get('verdict') or row['error']} ({row.get('seconds', 0):.0f} s)", flush=True)
    bad = [row["model"] for row in table["rows"] if "error" in row or row["parity"]["passed"] is False]
    print(f"written: {path} and .md, .csv" + (f"; failed: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


def leave_at_once(signum: int, frame: FrameType | None) -> NoReturn:
    """End with the models that are being zoo_options; the rows so far are on the disk."""
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(128 + signum)


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", default="tutorial", help="tutorial, torchvision, timm, or names and shell patterns, by commas")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--precision", default="auto", choices=("auto", "fp32", "tf32", "fp16", "bf16", "fp16_o2"))
    add("--batch", type=int, default=32, help="images per step of the timing")
    add("--image-size", type=int, default=None, help="pixels; default 224 with speed, 64 without, where a model lets")
    add("--no-speed", dest="speed", action="store_false", help="leave the timing out")
    add("--seconds", type=float, default=20.0, help="time limit of each timing")
    add("--timeout", type=float, default=900.0, help="seconds after which a model is given up")
    add("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="models at once, without speed on a CPU")
    add("--out", default="results", help="folder of the tables")
    options = parser.parse_args(words)
    return options


def stem(group: str, device: torch.device, has_speed: bool, precision: str) -> str:
    """For instance "zoo-bf16-cpu-torch2.15"; groups other than the tutorial's are named, and tables without speeds."""
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    named = ("" if group == "tutorial" else f"-{group}") + ("" if has_speed else "-layout")
    return f"zoo{named}-{precision}-{device.type}-torch{version}"


def chosen_models(words: str) -> list[str]:
    """The models that `--models` names.

    Raises:
        ConfigError: a name or pattern that fits nothing.
    """
    if words in zoo.GROUPS:
        return zoo.group_names(words)
    names: list[str] = []
    problems = []
    for word in words.split(","):
        found = fnmatch.filter([*models.model_names(), *zoo.TIMM], word)
        if not found and word.startswith("timm/"):
            models.check_model(word.partition(":")[0])
            found = [word]
        if not found:
            near = suggest(word, [*zoo.GROUPS, *models.model_names()])
            problems.append(f"--models {word}: no such model{near}")
        names += [name for name in found if name not in names]
    if problems:
        raise ConfigError(problems)
    return names


def rows(names: list[str], zoo_options: zoo.ZooOptions, jobs: int, timeout_s: float) -> Iterator[dict[str, Any]]:
    """A row for each model as it is done, each from a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cl_train.comparison.zoo"])  # importing torch takes longer than most models
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(_in_own_process, context, name, zoo_options, jobs, timeout_s) for name in names]
        for future in as_completed(futures):
            yield future.result()


def _in_own_process(
    context: ForkServerContext, name: str, zoo_options: zoo.ZooOptions, jobs: int, timeout_s: float
) -> dict[str, Any]:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, name, zoo_options, max(1, torch.get_num_threads() // jobs)))
    process.start()
    sender.close()
    try:
        row: dict[str, Any] = receiver.recv() if receiver.poll(timeout_s) else {"error": f"gave up after {timeout_s} s"}
    except EOFError:
        process.join()
        row = {"error": f"its process ended with exit code {process.exitcode} (-9: out of memory)"}
    finally:
        process.kill()  # it has nothing left to say
        process.join()
    return {"model": name, **row}


def _child(sender: Any, name: str, zoo_options: zoo.ZooOptions, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        sender.send(zoo.measure_model(name, zoo_options))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        sender.send({"error": f"{type(error).__name__} at {where}: {str(error).splitlines()[0] if str(error) else ''}"})
