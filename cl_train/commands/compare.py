"""Compare finished runs and say which layout is faster, or why that cannot be said.

    cl-train compare multirun/2026-11-20_12-00-00           recreate the report of a sweep
    cl-train compare outputs/A outputs/B                    two runs; out=FOLDER writes a report
    cl-train compare A1 B1 B2 A2                            repeats, in the order of their runs
    cl-train compare multirun/SWEEP compare_by=precision    the same runs by another setting
    cl-train compare parity=true model=resnet50             do both layouts compute the same?

Prints the report; writes comparison.md, .csv, .json, a chart and TensorBoard events into `out`, or
into the folder of a sweep. Exit codes: 0 done, 1 the layouts compute different results, 2 wrong
usage.
"""

from dataclasses import dataclass
from pathlib import Path

from cl_train.commands import settings_and_files
from cl_train.config import schema
from cl_train.config.fields import Range, setting, suggest
from cl_train.config.schema import FIELDS, OnDevice
from cl_train.errors import ConfigError
from cl_train.system.files import claim_output


@dataclass
class CompareSettings(OnDevice):
    """The report, and the check of parity."""

    compare_by: str | None = setting(
        None, "the compared setting; null = the sweep's, channels_last"
    )
    out: str | None = setting(None, "folder for the report; null = a sweep's own, or none")
    overwrite: bool = setting(False, schema.OVERWRITE_HELP)
    parity: bool = setting(False, "check that both layouts of `model` compute the same")
    model: str | None = setting(None, f"parity=true: {schema.MODEL_HELP}")
    precision: str = setting("fp32", "parity=true: of the step", choices=schema.PRECISIONS)
    batch_size: int = setting(4, "parity=true: images", Range(1))
    compile: bool = setting(False, "parity=true: also compare the compiled model")
    image_size: int | None = setting(
        None, "parity=true: pixels; null = the model's", Range(8), key="data.image_size"
    )
    seed: int = setting(0, "parity=true: seed of the weights", Range(0))


USAGE = "[FOLDER ...] [key=value ...]"
SETTINGS = {"settings": CompareSettings}
MARKERS = ("comparison.json", "sweep.json")  # of folders that hold reports


def main(words: list[str]) -> int:
    settings, names = settings_and_files(CompareSettings, words)
    folders = [Path(name) for name in names]
    by, out = settings.compare_by, Path(settings.out) if settings.out else None
    if by not in (None, *FIELDS):
        raise ConfigError(f"compare_by={by}: not a setting{suggest(str(by), FIELDS)}")
    if settings.parity and settings.model is None:
        raise ConfigError("parity=true needs model=NAME")
    if not folders and not settings.parity:
        raise ConfigError(
            "nothing to compare: name a sweep's folder, two run folders, or parity=true model=NAME"
        )
    has_parity = _check_parity(settings) if settings.parity else True
    if folders:
        from cl_train.commands.dashboard import write_dashboard
        from cl_train.sweeps.report import compare_folders

        if out:
            claim_output(out, overwrite=settings.overwrite, markers=MARKERS)
        write_dashboard(compare_folders(folders, by, out=out, show_table=True))
    return 0 if has_parity else 1


def _check_parity(settings: CompareSettings) -> bool:
    import torch

    from cl_train.measure.parity import check_parity
    from cl_train.models.sources import build_model, usual_image_size
    from cl_train.system.distributed import choose_device

    torch.manual_seed(settings.seed)
    name, device = str(settings.model), choose_device(settings.device)
    size = settings.image_size or usual_image_size(name)
    model = build_model(name, num_classes=100, image_size=size)
    outcome = check_parity(
        model,
        image_size=size,
        batch_size=settings.batch_size,
        precision=settings.precision,
        device=device,
        compile=settings.compile,
    )
    print(f"{name}: {outcome}")
    return bool(outcome.passed)
