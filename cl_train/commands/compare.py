"""Compare finished runs and say which layout is faster, or why that cannot be said.

    cl-train compare multirun/2026-11-20_12-00-00           recreate the report of a sweep
    cl-train compare outputs/A outputs/B                    two runs; out=FOLDER writes a report
    cl-train compare A1 B1 B2 A2                            repeats, in the order of their runs
    cl-train compare multirun/SWEEP compare_by=precision    the same runs by another setting
    cl-train compare parity=true model=resnet50             do both layouts compute the same?

Prints the report; writes comparison.md, .csv, .json, a chart and TensorBoard events into `out`, or
into the folder of a sweep. With folders and parity=true, pairs of a model that fails the check are
not comparable. Exit codes: 0 done, 1 the layouts compute different results, 2 wrong usage.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from cl_train.commands import settings_and_files
from cl_train.config.schema import (
    DEVICES,
    MODEL_HELP,
    OVERWRITE_HELP,
    PRECISIONS,
    Config,
    ConfigError,
    setting,
)
from cl_train.config.validation import setting_fields, suggest
from cl_train.system.files import output_folder


@dataclass
class CompareSettings:
    """The report, and the check of parity."""

    compare_by: str | None = setting(
        None, "the setting whose values are compared; null = the sweep's, channels_last"
    )
    out: str | None = setting(
        None, "folder for the report; null = a sweep's own, nowhere for other runs"
    )
    overwrite: bool = setting(False, OVERWRITE_HELP)
    parity: bool = setting(False, "check that both layouts of `model` compute the same")
    model: str | None = setting(None, f"parity=true: {MODEL_HELP}")
    precision: str = setting("fp32", "parity=true: precision of the step", choices=PRECISIONS)
    device: str = setting("auto", "parity=true: cuda if available, else cpu", choices=DEVICES)
    image_size: int | None = setting(
        None, "parity=true: pixels; null = the model's", minimum=8, key="data.image_size"
    )
    seed: int = setting(0, "parity=true: seed of the weights", minimum=0)


USAGE = "[FOLDER ...] [key=value ...]"
SETTINGS = {"settings": CompareSettings}
MARKERS = ("comparison.json", "sweep.json")  # of folders that hold reports


def main(words: list[str]) -> int:
    settings, names = settings_and_files(CompareSettings, words)
    folders, keys = [Path(name) for name in names], setting_fields(Config)
    if settings.compare_by not in (None, *keys):
        hint = suggest(str(settings.compare_by), keys)
        raise ConfigError(f"compare_by={settings.compare_by}: not a setting{hint}")
    if settings.parity and settings.model is None:
        raise ConfigError("parity=true needs model=NAME")
    if not folders and not settings.parity:
        raise ConfigError(
            "nothing to compare: name a sweep's folder, two run folders, or parity=true model=NAME"
        )
    failures: dict[str, str] = {}  # the reason by the model's name
    if settings.parity:
        import torch

        from cl_train.measure.parity import check_parity
        from cl_train.models.sources import build_model, usual_image_size
        from cl_train.system.distributed import choose_device

        torch.manual_seed(settings.seed)
        name, device = str(settings.model), choose_device(settings.device)
        size = settings.image_size or usual_image_size(name)
        model = build_model(name, num_classes=100, image_size=size)
        outcome = check_parity(model, image_size=size, precision=settings.precision, device=device)
        print(f"{name}: {outcome}")
        failures = {} if outcome.passed else {name: str(outcome)}
    if folders:
        from cl_train.sweeps.report import compare_folders

        out = Path(settings.out) if settings.out else None
        folder: AbstractContextManager[None] = nullcontext()
        if out:
            folder = output_folder(out, overwrite=settings.overwrite, markers=MARKERS)
        with folder:
            compare_folders(
                folders, settings.compare_by, out=out, parity_failures=failures, show_table=True
            )
    return 1 if failures else 0
