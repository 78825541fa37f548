"""What `cl-train zoo` measures: a row per model, in a table that a later command continues."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cl_train.config.schema import BenchmarkSettings, ZooSettings
from cl_train.errors import ConfigError
from cl_train.measure.suite import Combination, combinations_of, in_child, run_each
from cl_train.measure.timed_step import input_shape
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import CONVOLUTIONS
from cl_train.models import sources as models
from cl_train.system.files import read_json, write_json, write_text
from cl_train.system.tables import markdown_table

# The models of the tutorial "Channels Last Memory Format in PyTorch".
TUTORIAL = (
    "alexnet", "mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3", "mobilenet_v2", "resnet101",
    "resnet152", "resnet18", "resnet34", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5",
    "shufflenet_v2_x1_0", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0", "squeezenet1_0",
    "squeezenet1_1", "vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19",
    "vgg19_bn", "wide_resnet101_2", "wide_resnet50_2",
)  # fmt: skip

# One model per family of timm, with the operators that matter for the layout.
TIMM = (
    "timm/resnet50_gn",  # GroupNorm
    "timm/resnetv2_50",  # pre-activation, weight-standardised convolutions and GroupNorm
    "timm/nfnet_l0",  # scaled weight standardisation, no normalisation
    "timm/mobilenetv3_small_100",  # depthwise, squeeze and excitation
    "timm/efficientnet_lite0",  # depthwise
    "timm/regnety_002",  # grouped convolutions
    "timm/convnext_atto",  # LayerNorm in channels_last order
    "timm/mobilevit_xxs",  # convolutions and attention
    "timm/vit_tiny_patch16_224",  # attention only
    "timm/resnet10t",  # a deep stem
)

GROUPS = {
    "tutorial": TUTORIAL,
    "torchvision": tuple(models.model_names()),
    "timm": TIMM,
    "video": tuple(models.video_model_names()),
}
_OWN_SIZE = ("inception_v3", "maxvit", "timm/mobilevit")  # do not run on every size of image
_EQUAL = ("device", "precision", "batch_size", "image_size", "speed", "time_limit_s")  # in a table


def run_zoo(names: Sequence[str], settings: ZooSettings, path: Path, table: dict[str, Any]) -> None:
    """Measures each model in its own process, and adds its row to the table."""

    def keep(row: dict[str, Any]) -> None:
        add_row(path, table, row)
        outcome = row.get("verdict") or row["error"]
        print(f"{row['model']}: {outcome} ({row.get('seconds', 0):.0f} s)", flush=True)

    limit_s = settings.model_time_limit_s
    run_each(names, partial(in_child, zoo_row, settings=settings, limit_s=limit_s), keep, path)


def zoo_row(name: str, settings: ZooSettings) -> dict[str, Any]:
    """Measures parity, speed and memory of both layouts, conversion and audit; returns the row.

    A model that does not run on every image size keeps its own, as the row's `image_size` says.
    """
    started_at = time.perf_counter()
    size = None if name.startswith(_OWN_SIZE) else settings.image_size
    shape = input_shape(name, size, settings.frames)
    row: dict[str, Any] = {"model": name, "image_size": shape[-1]}
    for mode in ("train", "infer") if settings.speed else ():
        one = combination_for(name, mode, shape[-1], settings)
        row[mode] = timed = one.result(is_checked=mode == "train")  # the check covers both
        if "error" in timed:
            return {"model": name, "error": timed["error"]}
    checked = row.get("train") or combination_for(name, "train", shape[-1], settings).checked()
    parity = checked["parity"]["channels_last"]
    row["parity"] = {"passed": parity["passed"], "why": parity["text"]}
    row["audit"] = checked["audit"][name]

    model = models.build_model(name, num_classes=1000, image_size=shape[-1])
    row["convolutions"] = sum(isinstance(module, CONVOLUTIONS) for module in model.modules())
    row["converted"] = len(convert(model).changed)
    return {**row, "verdict": verdict(row), "seconds": round(time.perf_counter() - started_at, 1)}


def combination_for(name: str, mode: str, image_size: int, settings: ZooSettings) -> Combination:
    benchmark = BenchmarkSettings(
        model=[name],
        mode=[mode],
        precision=[settings.precision],
        batch_size=[settings.batch_size],
        image_size=image_size,
        frames=settings.frames,
        device=settings.device,
        time_limit_s=settings.time_limit_s,
    )
    return combinations_of(benchmark)[0]


def verdict(row: dict[str, Any]) -> str:
    """Returns the verdict in words: correctness, speed if it was measured, and lost layouts."""
    if row["parity"]["passed"] is False:
        return "do not use: the layouts compute different results"
    if row["convolutions"] == 0:
        return "no convolution: no gain possible"
    words = []
    for mode in ("train", "infer"):
        if mode in row:
            pair = row[mode]["pairs"][0]
            words.append(f"{mode} {pair['verdict'].replace('_', ' ')} ({pair['ratio']:.2f}x)")
    lost, moved = row["audit"]["lost"], row["audit"]["moved_pct"]
    layout = f"loses the layout in {lost} calls" if lost else "keeps the layout"
    return "; ".join([*words, f"{layout}, {moved:.1f} % of the step's bytes moved"])


def open_table(path: Path, settings: ZooSettings, environment: dict[str, Any]) -> dict[str, Any]:
    """Returns the table at `path`, to be continued, or a new one.

    Raises ConfigError: the file is no table, or one with other settings.
    """
    options = {name: getattr(settings, name) for name in _EQUAL}
    table = {"schema_version": 2, "options": options, "environment": environment, "rows": []}
    if not path.exists():
        return table
    try:
        earlier = read_json(path)
        torch_then, rows = earlier["environment"]["torch"], earlier["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        earlier, torch_then = {}, None
    if earlier.get("options") != options or torch_then != environment["torch"]:
        raise ConfigError(
            f"{path}: no table of these settings and this torch: remove it, or choose another out"
        )
    return {**table, "rows": rows}


def add_row(path: Path, table: dict[str, Any], row: dict[str, Any]) -> None:
    """Adds a row, or replaces that of the same model, and writes the table as .json and .md."""
    rows = {entry["model"]: entry for entry in [*table["rows"], row]}
    table["rows"] = [rows[name] for name in sorted(rows)]
    environment, precision = table["environment"], table["options"]["precision"]
    title = f"torch {environment['torch']}, {environment['device_name']}, {precision}"
    text = (
        f"# channels_last, model by model: {title}\n\n"
        "lost: operators that received channels_last and returned contiguous, with the number of"
        " calls. GiB: contiguous / channels_last.\n\n"
        f"{markdown_table([_columns(row, table['options']['speed']) for row in table['rows']])}\n"
    )
    write_json(path, table)
    write_text(path.with_suffix(".md"), text)


def _columns(row: dict[str, Any], with_speed: bool) -> dict[str, Any]:
    """Returns the same columns for every row, also for a failed model."""
    audited = row.get("audit", {})
    columns = {name: row.get(name) for name in ("model", "image_size", "convolutions")}
    passed = row.get("parity", {}).get("passed")
    columns["parity"] = {True: "passed", False: "FAILED", None: "not run"}[passed]
    for direction in ("forward", "backward"):
        lost = audited.get(f"lost_{direction}", {}).items()
        columns[f"lost {direction}"] = ", ".join(f"{name} {count}" for name, count in lost)
    for mode in ("train", "infer") if with_speed else ():
        timed = row.get(mode, {"speeds": [], "pairs": [{}]})
        (pair,), speeds = timed["pairs"], timed["speeds"]
        columns[f"{mode} images/s"] = speeds[-1]["images_per_s"] if speeds else None
        columns[f"{mode} ratio"] = pair.get("ratio")
        columns[f"{mode} ci95"] = "-".join(f"{bound:.2f}" for bound in pair.get("ci95") or ())
        peaks = [speed["peak_memory_gib"] for speed in speeds]
        columns[f"{mode} GiB"] = " / ".join("-" if gib is None else f"{gib:.2f}" for gib in peaks)
    return {**columns, "verdict": row.get("verdict") or f"error: {row.get('error')}"}
