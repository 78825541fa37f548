"""A zoo of models in both layouts: converted, compared, audited, timed. One process per model;
resumable.

    cl-train zoo                             the 28 models of PyTorch's channels_last tutorial
    cl-train zoo speed=false                 without timing: minutes, on a CPU
    cl-train zoo model=torchvision           every classification model of torchvision
    cl-train zoo model=timm                  ten families of timm
    cl-train zoo 'model=resnet*,timm/convnext_atto' device=cuda precision=fp16 batch_size=256

Writes zoo-<precision>-<device>-torch<version>.json and .md after each model. Run the same command
again to continue. Exit codes: 0 done, 1 a model failed or its layouts differ, 2 wrong usage, 130 or
143 stopped by a signal.
"""

import fnmatch
from dataclasses import replace
from pathlib import Path

from cl_train.config.arguments import settings_from_arguments
from cl_train.config.fields import suggest
from cl_train.config.schema import ZooSettings
from cl_train.errors import ConfigError
from cl_train.system.files import claim_output

SETTINGS = {"settings": ZooSettings}


def main(words: list[str]) -> int:
    settings = settings_from_arguments(ZooSettings, words)
    from cl_train.measure import zoo
    from cl_train.step.precision import resolve_precision
    from cl_train.system.distributed import choose_device
    from cl_train.system.machine import describe_environment, device_name

    device = choose_device(settings.device)
    precision = resolve_precision(settings.precision, device).name
    settings = replace(settings, device=str(device), precision=precision)
    names = chosen_models(settings.model)
    environment = {**describe_environment(device), "device_name": device_name(device)}
    is_group = len(settings.model) == 1 and settings.model[0] in zoo.GROUPS
    group = settings.model[0] if is_group else "chosen"
    named = ("" if group == "tutorial" else f"-{group}") + ("" if settings.speed else "-layout")
    named += f"-{settings.frames}frames" if settings.frames else ""
    version = ".".join(str(environment["torch"]).split("+")[0].split(".")[:2])
    path = Path(settings.out) / f"zoo{named}-{settings.precision}-{device.type}-torch{version}.json"
    claim_output(path.parent, overwrite=True)  # before the first model
    table = zoo.open_table(path, settings, environment)
    done = {row["model"] for row in table["rows"] if "error" not in row}
    missing = [name for name in names if name not in done]
    print(f"{len(names)} models, {len(names) - len(missing)} of them done in {path}")
    zoo.run_zoo(missing, settings, path, table)
    rows = table["rows"]
    bad = [row["model"] for row in rows if "error" in row or row["parity"]["passed"] is False]
    outcome = f"failed: {', '.join(bad)}" if bad else "every model passed"
    print(f"written: {path} and .md; {outcome}")
    return 1 if bad else 0


def chosen_models(words: list[str]) -> list[str]:
    """Finds models by groups, names and shell patterns. Raises ConfigError: one fits nothing."""
    from cl_train.measure.zoo import GROUPS, TIMM
    from cl_train.models import sources as models

    every_name, problems = [*models.model_names(), *models.video_model_names(), *TIMM], []
    names: list[str] = []
    for word in words:
        matches = list(GROUPS.get(word, ())) or fnmatch.filter(every_name, word)
        if not matches and (word.startswith("timm/") or ":" in word):
            models.check_model(word)
            matches = [word]
        if not matches:
            problems.append(f"model={word}: no such model{suggest(word, [*GROUPS, *every_name])}")
        names += matches
    if problems or not names:
        raise ConfigError(problems or "model= is empty: name models, or a group of them")
    return list(dict.fromkeys(names))
