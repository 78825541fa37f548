"""A zoo of models in both layouts: converted, compared, audited, timed. One process per model; resumable.

    cl-train zoo                             the 28 models of PyTorch's channels_last tutorial
    cl-train zoo speed=false                 without timing: minutes, on a CPU
    cl-train zoo model=torchvision           every classification model of torchvision
    cl-train zoo model=timm                  ten families of timm
    cl-train zoo 'model=resnet*,timm/convnext_atto' device=cuda precision=fp16 batch_size=256

Writes zoo-<precision>-<device>-torch<version>.json and .md after each model. Run the same command again to continue.
Exit codes: 0 done, 1 a model failed or its layouts differ, 2 wrong usage.
"""

from __future__ import annotations

import fnmatch
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cl_train.config.schema import DEVICES, PRECISION_HELP, PRECISIONS, ConfigError, setting
from cl_train.config.validation import settings_from_arguments, suggest

if TYPE_CHECKING:  # torch is imported only after the settings have been checked
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
    model_time_limit_s: float = setting(900.0, "timeout per model, seconds", above=0)
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
        device.type, precision.name, settings.batch_size, settings.image_size, settings.speed, settings.time_limit_s
    )
    names = chosen_models(settings.model)
    path = Path(settings.out) / f"{table_name(settings, device.type, precision.name)}.json"
    environment = {**describe_environment(device), "device_name": device_name(device)}
    table = zoo.open_table(path, asdict(options), environment)
    missing = [name for name in names if not zoo.is_done(table, name)]
    print(f"{len(names)} models, {len(names) - len(missing)} of them done in {path}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs `finally`, which ends the child
    for name in missing:
        row = {"model": name, **measure_in_child(name, options, settings.model_time_limit_s)}
        zoo.add_row(path, table, row)
        print(f"{name}: {row.get('verdict') or row['error']} ({row.get('seconds', 0):.0f} s)", flush=True)
    bad = [row["model"] for row in table["rows"] if "error" in row or row["parity"]["passed"] is False]
    print(f"written: {path} and .md; " + (f"failed: {', '.join(bad)}" if bad else "every model passed"))
    return 1 if bad else 0


def table_name(settings: ZooSettings, device: str, precision: str) -> str:
    """For instance "zoo-bf16-cpu-torch2.15"; names the group if it is not the tutorial's, and `speed=false`."""
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
    known = [*models.model_names(), *zoo.TIMM]
    for word in words:
        found = zoo.group_names(word) if word in zoo.GROUPS else fnmatch.filter(known, word)
        if not found and word.startswith("timm/"):
            models.check_model(word.partition(":")[0])
            found = [word]
        if not found:
            problems.append(f"model={word}: no such model{suggest(word, [*zoo.GROUPS, *known])}")
        names += [name for name in found if name not in names]
    if problems:
        raise ConfigError(problems)
    return names


def measure_in_child(name: str, options: ZooOptions, time_limit_s: float) -> dict[str, Any]:
    """The row of a model, measured in its own process: a crash or lack of memory is recorded as that model's error."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cl_train.comparison.zoo"])  # importing torch takes longer than most models
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, name, options), daemon=True)
    process.start()
    sender.close()
    try:
        row: dict[str, Any] = receiver.recv() if receiver.poll(time_limit_s) else {"error": f"over {time_limit_s:g} s"}
    except EOFError:
        process.join()
        row = {"error": f"its process ended with exit code {process.exitcode} (-9: out of memory)"}
    finally:
        process.kill()
        process.join()
    return row


def _child(sender: Any, name: str, options: ZooOptions) -> None:
    from cl_train.comparison import zoo
    from cl_train.memory_format.model_call import explain_failure

    try:
        sender.send(zoo.measure_model(name, options))
    except Exception as error:
        sender.send({"error": explain_failure(error)})
