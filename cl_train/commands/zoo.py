"""A zoo of models in both layouts: converted, compared, audited, timed. One process per model; resumable.

    cl-train zoo                             the 28 models of PyTorch's channels_last tutorial
    cl-train zoo speed=false                 without timing: minutes, on a CPU
    cl-train zoo model=torchvision           every classification model of torchvision
    cl-train zoo model=timm                  ten families of timm
    cl-train zoo 'model=resnet*,timm/convnext_atto' device=cuda precision=fp16 batch_size=256

Writes zoo-<precision>-<device>-torch<version>.json and .md after each model; the same command continues.
Exit codes: 0 done, 1 a model failed or its layouts differ, 2 wrong usage.
"""

from __future__ import annotations

import fnmatch
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from cl_train.config.schema import DEVICES, PRECISION_HELP, PRECISIONS, ConfigError, setting
from cl_train.config.validation import settings_from_arguments, suggest

if TYPE_CHECKING:  # torch is imported only once the settings are right
    from cl_train.comparison.zoo import ZooOptions


@dataclass
class ZooSettings:
    """Which models, and how they are measured."""

    model: list[str] = setting(["tutorial"], "tutorial, torchvision, timm, or names and shell patterns")
    device: str = setting("auto", "cuda if available, else cpu", choices=DEVICES)
    precision: str = setting("auto", PRECISION_HELP, choices=PRECISIONS)
    batch_size: int = setting(32, "images per step of the timing", minimum=1)
    image_size: int | None = setting(
        None, "side of the images, pixels; null = 224, or 64 with speed=false", minimum=8, key="data.image_size"
    )
    speed: bool = setting(True, "time both layouts")
    time_limit_s: float = setting(20.0, "seconds for each timing", above=0)
    model_time_limit_s: float = setting(900.0, "seconds after which a model is given up", above=0)
    jobs: int = setting(2, "models at once, with speed=false on a CPU", minimum=1)
    out: str = setting("results", "folder for the tables")


USAGE = "[key=value ...]"
SETTINGS = {"settings": ZooSettings}


def main(words: list[str]) -> int:
    settings = settings_from_arguments(ZooSettings, words)
    from cl_train.comparison import zoo
    from cl_train.step.precision import resolve_precision
    from cl_train.system.distributed import choose_device
    from cl_train.system.environment import describe_environment, device_name

    device = choose_device(settings.device)
    precision = resolve_precision(settings.precision, device)
    options = zoo.ZooOptions(
        device.type,
        precision.name,
        settings.batch_size,
        settings.image_size,
        settings.speed,
        settings.time_limit_s,
    )
    names = chosen_models(settings.model)
    path = Path(settings.out) / f"{table_name(settings, device.type, precision.name)}.json"
    environment = {**describe_environment(device), "device_name": device_name(device)}
    table = zoo.open_table(path, asdict(options), environment)
    missing = [name for name in names if not zoo.is_done(table, name)]
    print(f"{len(names)} models, {len(names) - len(missing)} of them done in {path}")
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _leave_at_once)
    jobs = 1 if settings.speed or device.type == "cuda" else settings.jobs  # a timing needs the machine for itself
    for row in rows(missing, options, jobs, settings.model_time_limit_s):
        zoo.add_row(path, table, row)
        print(f"{row['model']}: {row.get('verdict') or row['error']} ({row.get('seconds', 0):.0f} s)", flush=True)
    bad = [row["model"] for row in table["rows"] if "error" in row or row["parity"]["passed"] is False]
    print(f"written: {path} and .md; " + (f"failed: {', '.join(bad)}" if bad else "every model passed"))
    return 1 if bad else 0


def _leave_at_once(signum: int, frame: FrameType | None) -> NoReturn:
    """End with the models that are being measured; the finished rows are on the disk."""
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(128 + signum)


def table_name(settings: ZooSettings, device: str, precision: str) -> str:
    """For instance "zoo-bf16-cpu-torch2.15"; groups other than the tutorial's are named, and tables without speeds."""
    import torch

    from cl_train.comparison import zoo

    group = settings.model[0] if len(settings.model) == 1 and settings.model[0] in zoo.GROUPS else "chosen"
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    named = ("" if group == "tutorial" else f"-{group}") + ("" if settings.speed else "-layout")
    return f"zoo{named}-{precision}-{device}-torch{version}"


def chosen_models(words: Sequence[str]) -> list[str]:
    """The models that `model=` names: groups, names and shell patterns.

    Raises:
        ConfigError: a name or pattern that fits nothing.
    """
    from cl_train.comparison import zoo
    from cl_train.models import registry as models

    names: list[str] = []
    problems = []
    for word in words:
        if word in zoo.GROUPS:
            found = zoo.group_names(word)
        else:
            found = fnmatch.filter([*models.model_names(), *zoo.TIMM], word)
        if not found and word.startswith("timm/"):
            models.check_model(word.partition(":")[0])
            found = [word]
        if not found:
            problems.append(f"model={word}: no such model{suggest(word, [*zoo.GROUPS, *models.model_names()])}")
        names += [name for name in found if name not in names]
    if problems:
        raise ConfigError(problems)
    return names


def rows(names: list[str], options: ZooOptions, jobs: int, timeout_s: float) -> Iterator[dict[str, Any]]:
    """A row for each model as it is done, each from a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cl_train.comparison.zoo"])  # importing torch takes longer than most models
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(_in_own_process, context, name, options, jobs, timeout_s) for name in names]
        for future in as_completed(futures):
            yield future.result()


def _in_own_process(
    context: ForkServerContext, name: str, options: ZooOptions, jobs: int, timeout_s: float
) -> dict[str, Any]:
    import torch

    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, name, options, max(1, torch.get_num_threads() // jobs)))
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


def _child(sender: Any, name: str, options: ZooOptions, threads: int) -> None:
    import torch

    from cl_train.comparison import zoo

    torch.set_num_threads(threads)
    try:
        sender.send(zoo.measure_model(name, options))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        sender.send({"error": f"{type(error).__name__} at {where}: {str(error).splitlines()[0] if str(error) else ''}"})
