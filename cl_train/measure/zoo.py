"""What `cl-train zoo` measures: a row per model, each in its own process, in a table that a later
command continues.
"""

import json
import multiprocessing
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from cl_train.config.schema import (
    ConfigError,
    ZooSettings,
)
from cl_train.measure.paired import benchmark_layouts
from cl_train.measure.parity import check_parity
from cl_train.measure.suite import _input_shape
from cl_train.measure.timed_step import Workload, noise, place_batch
from cl_train.memory_format.audit import audit
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import CONVOLUTIONS
from cl_train.models import sources as models
from cl_train.step.cuda_graph import CAN_GO_ON_AFTER_FAILURE
from cl_train.step.make import StepSettings
from cl_train.step.precision import cast_model, resolve_precision
from cl_train.system.failures import explain_failure
from cl_train.system.files import write_json, write_text
from cl_train.system.tables import markdown_table

# Of the tutorial "Channels Last Memory Format in PyTorch".
TUTORIAL = (
    "alexnet", "mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3", "mobilenet_v2", "resnet101",
    "resnet152",
    "resnet18", "resnet34", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5",
    "shufflenet_v2_x1_0",
    "shufflenet_v2_x1_5", "shufflenet_v2_x2_0", "squeezenet1_0", "squeezenet1_1", "vgg11",
    "vgg11_bn", "vgg13",
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

GROUPS = {
    "tutorial": TUTORIAL,
    "torchvision": tuple(models.model_names()),
    "timm": TIMM,
    "video": tuple(models.video_model_names()),
}
_FIXED_SIZE = (
    "inception_v3",
    "vit_",
    "maxvit",
    "timm/vit_",
    "timm/mobilevit",
)  # accept one image size only


def row_from_child(name: str, settings: ZooSettings) -> dict[str, Any]:
    """The row of a model, measured in its own process: a crash or lack of memory is recorded as
    that model's error.
    """
    context = multiprocessing.get_context("forkserver")
    # Importing takes longer than most models. What a user's packages import may touch CUDA, and
    # forks of a process that did cannot use it: for CUDA torch alone is imported before the fork.
    context.set_forkserver_preload(["torch" if settings.device.startswith("cuda") else __name__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, name, settings), daemon=True)
    process.start()
    sender.close()
    limit_s = settings.model_time_limit_s
    try:
        row: dict[str, Any] = (
            receiver.recv() if receiver.poll(limit_s) else {"error": f"over {limit_s:g} s"}
        )
    except EOFError:
        process.join()
        row = {"error": f"its process ended with exit code {process.exitcode} (-9: out of memory)"}
    finally:
        process.kill()
        process.join()
    return {"model": name, **row}


def _child(sender: Any, name: str, settings: ZooSettings) -> None:
    try:
        sender.send(zoo_row(name, settings))
    except Exception as error:
        sender.send({"error": explain_failure(error)})


def zoo_row(name: str, settings: ZooSettings) -> dict[str, Any]:
    """Parity, speed and memory of both layouts, conversion, audit, and a verdict."""
    started_at = time.perf_counter()
    torch.manual_seed(0)
    usual_size = 112 if settings.frames else 224 if settings.speed else 64
    size = settings.image_size or usual_size
    if name.startswith(_FIXED_SIZE):
        size = models.usual_image_size(name)
    device = torch.device(settings.device)
    precision = resolve_precision(settings.precision, device)
    model = models.build_model(name, num_classes=1000, image_size=224).to(device)
    row: dict[str, Any] = {"model": name, "image_size": size}
    shape = _input_shape(size, settings.frames)
    try:
        parity = check_parity(model, image_size=shape, batch_size=2, precision=settings.precision)
        row["parity"] = {"passed": parity.passed, "why": str(parity)}
    except ConfigError as error:  # too large for this machine's memory
        row["parity"] = {"passed": None, "why": str(error)}
    for mode in ("train", "infer") if settings.speed else ():
        # On a GPU as CUDA graphs where the step can be recorded, because the host would limit both
        # layouts.
        for cuda_graph in (True, False) if device.type == "cuda" else (False,):
            step = StepSettings(precision, cuda_graph=cuda_graph)
            workload = Workload(settings.batch_size, shape, step, device, mode)
            with suppress(*([ConfigError] if cuda_graph and CAN_GO_ON_AFTER_FAILURE else [])):
                done = benchmark_layouts(model, workload, time_limit_s=settings.time_limit_s)
                row[mode] = {**done.to_dict(), "cuda_graph": cuda_graph}
                break
    model = cast_model(model, precision)
    row["convolutions"] = sum(isinstance(module, CONVOLUTIONS) for module in model.modules())
    row["converted"] = len(convert(model).changed)
    images = place_batch(noise((2, *shape)), device, precision.input_dtype, torch.channels_last)
    report = audit(model, images, precision=precision)
    row["audit"] = {**report.totals, "moved_pct": round(report.moved_pct, 2)}
    for direction in ("forward", "backward"):
        lost: Counter[str] = Counter()
        for call in report.of("lost", direction):
            lost[call.operator.removeprefix("aten.").partition(".")[0]] += call.count
        row["audit"][f"lost_{direction}"] = dict(lost)
    return {**row, "verdict": verdict(row), "seconds": round(time.perf_counter() - started_at, 1)}


def verdict(row: dict[str, Any]) -> str:
    """The verdict as text: correctness, then speed if it was measured, then lost layouts."""
    if row["parity"]["passed"] is False:
        return "do not use: the layouts compute different results"
    if row["convolutions"] == 0:
        return "no convolution: no gain possible"
    pairs = {mode: row[mode]["pairs"][0] for mode in ("train", "infer") if mode in row}
    words = [
        f"{mode} {pair['verdict'].replace('_', ' ')} ({pair['ratio']:.2f}x)"
        for mode, pair in pairs.items()
    ]
    lost, moved = row["audit"]["lost"], row["audit"]["moved_pct"]
    kept = (
        "keeps the layout"
        if lost == 0
        else f"loses the layout in {lost} call{'s' if lost > 1 else ''}"
    )
    return "; ".join([*words, f"{kept}, {moved:.1f} % of the step's bytes moved"])


# --- the zoo: its table ---------------------------------------------------------------------------


def open_table(path: Path, settings: ZooSettings, environment: dict[str, Any]) -> dict[str, Any]:
    """The table at `path`, to be continued, or a new one.

    Raises ConfigError: one with other settings, or no table.
    """
    equal = ("device", "precision", "batch_size", "image_size", "speed", "time_limit_s")
    options = {name: getattr(settings, name) for name in equal}  # of all rows
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return {"schema_version": 2, "options": options, "environment": environment, "rows": []}
    try:
        table = dict(json.loads(path.read_text(encoding="utf-8")))
        made_with = table["schema_version"], table["options"], table["environment"]["torch"]
        is_same = made_with == (2, options, environment["torch"])
    except (OSError, ValueError, KeyError, TypeError):
        is_same = False
    if not is_same:
        raise ConfigError(
            f"{path}: no table of these settings and this torch: remove it, or choose another out"
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
        "lost: operators that received channels_last and returned contiguous, with the number of"
        " calls. moved: bytes moved to change the layout, of all bytes of a training step. GiB:"
        " contiguous / channels_last.\n\n"
        f"{markdown_table([_flat(row, options['speed']) for row in table['rows']])}\n"
    )
    write_json(path, table)
    write_text(path.with_suffix(".md"), text)


def _flat(row: dict[str, Any], with_speed: bool) -> dict[str, Any]:
    """The same columns for every row, also for a failed model."""
    audited = row.get("audit", {})
    flat = {name: row.get(name) for name in ("model", "image_size", "convolutions")}
    passed = row.get("parity", {}).get("passed")
    flat["parity"] = {True: "passed", False: "FAILED", None: "not run"}[passed]
    for column in ("lost_forward", "lost_backward"):
        flat[column.replace("_", " ")] = ", ".join(
            f"{name} {count}" for name, count in audited.get(column, {}).items()
        )
    flat["moved %"] = audited.get("moved_pct")
    for mode in ("train", "infer") if with_speed else ():
        speeds, pairs = row.get(mode, {}).get("speeds", []), row.get(mode, {}).get("pairs", [{}])
        flat[f"{mode} images/s"] = speeds[-1]["images_per_s"] if speeds else None
        flat[f"{mode} ratio"] = pairs[0].get("ratio")
        flat[f"{mode} ci95"] = "-".join(f"{bound:.2f}" for bound in pairs[0].get("ci95", []))
        flat[f"{mode} GiB"] = " / ".join(f"{speed['peak_memory_gib']:.2f}" for speed in speeds)
    return {**flat, "verdict": row.get("verdict") or f"error: {row.get('error')}"}
