"""Many models in both memory formats: each converted, checked for parity, audited and timed, in its own process.

The table, one row per model, is written as JSON and as Markdown after each model.
"""

import json
import multiprocessing
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cl_train.comparison.paired import benchmark_layouts
from cl_train.comparison.parity import check_parity
from cl_train.comparison.timed_model import Workload
from cl_train.config.benchmarks import ZooSettings
from cl_train.config.schema import ConfigError
from cl_train.memory_format.audit import audit
from cl_train.memory_format.audit_report import markdown_table
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import CONVOLUTIONS
from cl_train.memory_format.model_call import explain_failure
from cl_train.models import sources as models
from cl_train.step.loss import loss_of
from cl_train.step.precision import Precision, cast_model, resolve_precision
from cl_train.system.files import write_json, write_text

SCHEMA_VERSION = 2

# The models of the tutorial "Channels Last Memory Format in PyTorch": "full support ... 8%-35% gains on Volta devices".
TUTORIAL = (
    "alexnet", "mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3", "mobilenet_v2", "resnet101", "resnet152",
    "resnet18", "resnet34", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0",
    "shufflenet_v2_x1_5", "shufflenet_v2_x2_0", "squeezenet1_0", "squeezenet1_1", "vgg11", "vgg11_bn", "vgg13",
    "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn", "wide_resnet101_2", "wide_resnet50_2",
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

GROUPS = {"tutorial": TUTORIAL, "torchvision": tuple(models.model_names()), "timm": TIMM}
_FIXED_SIZE = ("vit_", "maxvit", "timm/vit_", "timm/mobilevit")  # accept one image size only
_OPTIONS = ("device", "precision", "batch_size", "image_size", "speed", "time_limit_s")  # equal for all rows


def image_size_of(name: str, settings: ZooSettings) -> int:
    """Side of the images for `name`, pixels."""
    if name == "inception_v3" or name.startswith(_FIXED_SIZE):
        return models.usual_image_size(name)
    return settings.image_size or (224 if settings.speed else 64)


def measure_in_child(name: str, settings: ZooSettings) -> dict[str, Any]:
    """The row of a model, measured in its own process: a crash or lack of memory is recorded as that model's error."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # importing torch takes longer than most models
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, name, settings), daemon=True)
    process.start()
    sender.close()
    limit_s = settings.model_time_limit_s
    try:
        row: dict[str, Any] = receiver.recv() if receiver.poll(limit_s) else {"error": f"over {limit_s:g} s"}
    except EOFError:
        process.join()
        row = {"error": f"its process ended with exit code {process.exitcode} (-9: out of memory)"}
    finally:
        process.kill()
        process.join()
    return {"model": name, **row}


def _child(sender: Any, name: str, settings: ZooSettings) -> None:
    try:
        sender.send(measure_model(name, settings))
    except Exception as error:
        sender.send({"error": explain_failure(error)})


def measure_model(name: str, settings: ZooSettings) -> dict[str, Any]:
    """One row: conversion, parity, audit, speed and memory of both layouts, and a verdict."""
    started_at = time.perf_counter()
    torch.manual_seed(0)
    size, device = image_size_of(name, settings), torch.device(settings.device)
    precision = resolve_precision(settings.precision, device)
    model = models.build_model(name, num_classes=1000, image_size=224).to(device)
    row: dict[str, Any] = {"model": name, "image_size": size}
    try:
        report = check_parity(model, image_size=size, batch_size=2, precision=settings.precision)
        row["parity"] = {"passed": report.passed, "why": str(report)}
    except ConfigError as error:  # too large for this machine's memory
        row["parity"] = {"passed": None, "why": str(error)}
    for mode in ("train", "infer") if settings.speed else ():
        workload = Workload(settings.batch_size, (3, size, size), precision, device, mode=mode)
        row[mode] = _speed(model, workload, settings.time_limit_s)
    row |= _convert_and_audit(model, precision, size, device)
    row["verdict"] = verdict(row)
    row["seconds"] = round(time.perf_counter() - started_at, 1)
    return row


def _convert_and_audit(model: nn.Module, precision: Precision, size: int, device: torch.device) -> dict[str, Any]:
    model = cast_model(model, precision)
    converted = len(convert(model).changed)
    convolutions = sum(isinstance(module, CONVOLUTIONS) for module in model.modules())
    images = torch.randn(2, 3, size, size).to(device, precision.input_dtype, memory_format=torch.channels_last)
    targets = torch.zeros(2, dtype=torch.int64, device=device)
    report = audit(model, images, precision=precision, loss=lambda output: loss_of(output, targets))
    audited: dict[str, Any] = {**report.totals, "moved_pct": round(report.moved_pct, 2)}
    for direction in ("forward", "backward"):
        lost: Counter[str] = Counter()
        for call in report.of("lost", direction):
            lost[call.operator.removeprefix("aten.").partition(".")[0]] += call.count
        audited[f"lost_{direction}"] = dict(lost)
    return {"convolutions": convolutions, "converted": converted, "audit": audited}


def _speed(model: nn.Module, workload: Workload, time_limit_s: float) -> dict[str, Any]:
    """On a GPU both layouts run as CUDA graphs, because the host would limit both if they ran eagerly; else eagerly."""
    if workload.device.type == "cuda":
        with suppress(ConfigError):  # the step cannot be recorded
            done = benchmark_layouts(model, replace(workload, cuda_graph=True), time_limit_s=time_limit_s)
            return {**done.to_dict(), "cuda_graph": True}
    return {**benchmark_layouts(model, workload, time_limit_s=time_limit_s).to_dict(), "cuda_graph": False}


def verdict(row: dict[str, Any]) -> str:
    """The verdict as text: correctness, then speed if it was measured, then lost layouts."""
    if row["parity"]["passed"] is False:
        return "do not use: the layouts compute different results"
    if row["convolutions"] == 0:
        return "no convolution: no gain possible"
    pairs = {mode: row[mode]["pairs"][0] for mode in ("train", "infer") if mode in row}
    words = [f"{mode} {pair['verdict'].replace('_', ' ')} ({pair['ratio']:.2f}x)" for mode, pair in pairs.items()]
    lost, moved = row["audit"]["lost"], row["audit"]["moved_pct"]
    kept = "keeps the layout" if lost == 0 else f"loses the layout in {lost} call{'s' if lost > 1 else ''}"
    return "; ".join([*words, f"{kept}, {moved:.1f} % of the step's bytes moved"])


# --- the table --------------------------------------------------------------------------------------------------------


def open_table(path: Path, settings: ZooSettings, environment: dict[str, Any]) -> dict[str, Any]:
    """The table at `path`, to be continued, or a new one.

    Raises ConfigError: the file was made with other settings, or is not such a table.
    """
    options = {name: value for name, value in asdict(settings).items() if name in _OPTIONS}
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return {"schema_version": SCHEMA_VERSION, "options": options, "environment": environment, "rows": []}
    try:
        table = dict(json.loads(path.read_text(encoding="utf-8")))
        is_same = table["schema_version"] == SCHEMA_VERSION and table["options"] == options
        is_same = is_same and table["environment"]["torch"] == environment["torch"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a table of `cl-train zoo` ({error}); remove it, or use another out") from error
    if not is_same:
        raise ConfigError(
            f"{path}: made with other settings or another torch ({table['environment']['torch']}), so new rows would "
            "not compare: remove it, or choose another out"
        )
    return table


def add_row(path: Path, table: dict[str, Any], row: dict[str, Any]) -> None:
    """Add a row, or replace that of the same model, and write .json and .md."""
    others = [known for known in table["rows"] if known["model"] != row["model"]]
    table["rows"] = sorted([*others, row], key=lambda known: known["model"])
    options, environment = table["options"], table["environment"]
    title = f"torch {environment['torch']}, {environment['device_name']}, {options['precision']}"
    text = (
        f"# channels_last, model by model: {title}\n\n"
        "lost: operators that received channels_last and returned contiguous, with the number of calls. moved: bytes "
        "moved to change the layout, of all bytes of a training step. GiB: contiguous / channels_last.\n\n"
        f"{markdown_table([_flat(row, options['speed']) for row in table['rows']])}\n"
    )
    write_json(path, table)
    write_text(path.with_suffix(".md"), text)


def is_done(table: dict[str, Any], model: str) -> bool:
    return any(row["model"] == model and "error" not in row for row in table["rows"])


def _flat(row: dict[str, Any], with_speed: bool) -> dict[str, Any]:
    """The same columns for every row, also for a failed model."""
    audited, flat = row.get("audit", {}), {name: row.get(name) for name in ("model", "image_size", "convolutions")}
    flat["parity"] = {True: "passed", False: "FAILED", None: "not run"}[row.get("parity", {}).get("passed")]
    for column in ("lost_forward", "lost_backward"):
        flat[column.replace("_", " ")] = ", ".join(f"{name} {count}" for name, count in audited.get(column, {}).items())
    flat["moved %"] = audited.get("moved_pct")
    for mode in ("train", "infer") if with_speed else ():
        speeds, pairs = row.get(mode, {}).get("speeds", []), row.get(mode, {}).get("pairs", [{}])
        flat[f"{mode} images/s"] = speeds[-1]["images_per_s"] if speeds else None
        flat[f"{mode} ratio"] = pairs[0].get("ratio")
        flat[f"{mode} ci95"] = "-".join(f"{bound:.2f}" for bound in pairs[0].get("ci95", []))
        flat[f"{mode} GiB"] = " / ".join(f"{speed['peak_memory_gib']:.2f}" for speed in speeds)
    return {**flat, "verdict": row.get("verdict") or f"error: {row.get('error')}"}
