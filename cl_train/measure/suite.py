"""What `cl-train benchmark`, `zoo` (many models, each in its own process) and `loader_benchmark`
measure.
"""

import itertools
import json
import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cl_train.config.schema import (
    AugmentConfig,
    BenchmarkSettings,
    ConfigError,
    DataConfig,
    LoaderBenchmarkSettings,
    OptimConfig,
    ZooSettings,
)
from cl_train.config.validation import show
from cl_train.data.build import DATA_DIR, ImageData, build_data
from cl_train.data.loader import DataSettings
from cl_train.data.sample import ensure_sample
from cl_train.measure.paired import Comparison, benchmark_layouts
from cl_train.measure.parity import ParityReport, check_parity
from cl_train.measure.statistics import alternate, seconds_to_decide
from cl_train.measure.timed_step import LAYOUTS, Workload, noise, place_batch
from cl_train.memory_format.audit import audit
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import CONTIGUOUS, CONVOLUTIONS
from cl_train.models import sources as models
from cl_train.step.cuda_graph import CAN_GO_ON_AFTER_FAILURE
from cl_train.step.make import StepSettings
from cl_train.step.precision import cast_model, resolve_precision
from cl_train.system.distributed import Dist, choose_device
from cl_train.system.failures import explain_failure
from cl_train.system.files import write_json, write_text
from cl_train.system.machine import measured
from cl_train.system.tables import markdown_table

LONGEST_ADVISED_S = 3600.0
SECONDS_EACH = 60.0  # of the rounds of a combination, without a time_limit_s for all


@dataclass
class Combination:
    """A model and how it is measured, and what is known of it so far."""

    described: dict[str, Any]
    workload: Workload
    comparison: Comparison | None = None
    parity: dict[str, ParityReport] = field(default_factory=dict)  # by layout
    error: str | None = None
    set_up_s: float = 0.0  # of its last visit, without the rounds

    @property
    def is_undecided(self) -> bool:
        speeds = self.comparison.speeds if self.comparison else ()
        return any(speed.verdict == "inconclusive" for speed in speeds)

    def to_dict(self) -> dict[str, Any]:
        """The content of the JSON file: with `error` instead of speeds if it failed."""
        if self.comparison is None:
            text = f"  failed: {self.error}"
            return {**self.described, "error": self.error, "text": text, "pairs": []}
        notes = [f"  {report}" for report in self.parity.values() if not report.passed]
        to_decide = self._to_decide()
        if to_decide:
            notes.append(f"  to decide it, {to_decide}")
        return {
            **self.described,
            **self.comparison.to_dict(),
            "to_decide": to_decide,
            "parity": {layout: report.to_dict() for layout, report in self.parity.items()},
            "text": "\n".join([str(self.comparison), *notes]),
        }

    def _to_decide(self) -> str | None:
        """The command that probably decides it; None if it is decided, or no hour decides it."""
        if self.comparison is None or not self.is_undecided:
            return None
        seconds = max(
            seconds_to_decide(speed.ratio, self.comparison.seconds)
            for speed in self.comparison.speeds[1:]
        )
        if seconds > LONGEST_ADVISED_S:
            return None
        names = ("model", "mode", "precision", "batch_size", "compile", "cuda_graph")
        words = [f"{name}={show(self.described[name])}" for name in names if self.described[name]]
        words += [f"data.image_size={self.described['image_size']}", f"time_limit_s={seconds:.0f}"]
        return f"cl-train benchmark {' '.join(words)}"


def run_suite(settings: BenchmarkSettings) -> dict[str, Any]:
    """Measure every combination; prints each result as it is ready.

    With `time_limit_s` for several combinations, each ends with its verdict, and the time that is
    left goes to the undecided ones. Raises ConfigError: unknown models, or fewer than two layouts.
    """
    combinations = combinations_of(settings)
    shares_time = settings.time_limit_s is not None and len(combinations) > 1
    started_at = time.perf_counter()
    left = combinations
    while left:
        for place, one in enumerate(left):
            share_s = SECONDS_EACH
            if settings.time_limit_s is not None:
                left_s = settings.time_limit_s - (time.perf_counter() - started_at)
                share_s = max(0.0, left_s / (len(left) - place))
            _visit(one, settings, share_s, until_decided=shares_time)
            described = ", ".join(f"{key} {value}" for key, value in one.described.items())
            print(f"{described}\n{one.to_dict()['text']}", flush=True)

        left = [one for one in left if shares_time and one.is_undecided]
        if settings.time_limit_s is not None and left:
            left_s = settings.time_limit_s - (time.perf_counter() - started_at)
            left = [one for one in left if 2 * one.set_up_s < left_s / len(left)]

    device = choose_device(settings.device)
    return measured(settings, device, results=[one.to_dict() for one in combinations])


def combinations_of(settings: BenchmarkSettings) -> list[Combination]:
    """All combinations of the settings. Raises ConfigError as `run_suite`."""
    names = ("model", "mode", "precision", "batch_size", "compile", "cuda_graph")
    if empty := [name for name in names if not getattr(settings, name)]:
        raise ConfigError([f"{name}= is empty: name at least one" for name in empty])
    for model in settings.model:
        models.check_model(model)
    if len(settings.layouts) < 2:
        raise ConfigError("layouts: a comparison needs two or more")
    device = choose_device(settings.device)
    combinations = []
    for values in itertools.product(*(getattr(settings, name) for name in names)):
        described = dict(zip(names, values, strict=True))
        usual_size = 112 if settings.frames else models.usual_image_size(described["model"])
        described["image_size"] = size = settings.image_size or usual_size
        if settings.frames:
            described["frames"] = settings.frames
        precision = resolve_precision(described["precision"], device)
        described["precision"] = precision.name
        step = StepSettings(
            precision,
            OptimConfig(name=settings.optimizer),
            compile=described["compile"],
            cuda_graph=described["cuda_graph"],
        )
        shape = _input_shape(size, settings.frames)
        workload = Workload(described["batch_size"], shape, step, device, described["mode"])
        combinations.append(Combination(described, workload))
    return combinations


def _input_shape(size: int, frames: int) -> tuple[int, ...]:
    """Of an RGB image, or of a video."""
    return (3, frames, size, size) if frames else (3, size, size)


def _visit(
    one: Combination, settings: BenchmarkSettings, time_limit_s: float, *, until_decided: bool
) -> None:
    """Measure a combination, or go on with it. A model may raise any exception, which must not lose
    the results of the others.
    """
    started_at = time.perf_counter()
    try:
        one.comparison = _measure(one, settings, time_limit_s, until_decided=until_decided)
        one.set_up_s = time.perf_counter() - started_at - one.comparison.seconds
    except Exception as error:
        one.error = explain_failure(error)


def _measure(
    one: Combination, settings: BenchmarkSettings, time_limit_s: float, *, until_decided: bool
) -> Comparison:
    """Parity, then speed. Layouts that compute different results are not comparable."""
    torch.manual_seed(0)
    workload = one.workload
    model = models.build_model(
        one.described["model"], num_classes=1000, image_size=workload.input_shape[-1]
    )
    layouts = [LAYOUTS[layout] for layout in settings.layouts]
    for layout in layouts:
        if settings.parity and layout is not CONTIGUOUS and layout.name not in one.parity:
            one.parity[layout.name] = check_parity(
                model,
                conversion=layout.conversion,
                mode="infer" if workload.mode == "infer" else "both",
                image_size=workload.input_shape,
                precision=workload.precision.name,
                device=workload.device,
            )
    done = benchmark_layouts(
        model,
        workload,
        layouts,
        target_ci=settings.target_ci,
        time_limit_s=time_limit_s,
        until_decided=until_decided,
        earlier=one.comparison,
    )
    differing = [layout for layout, report in one.parity.items() if report.passed is False]
    speeds = [
        replace(speed, verdict="not_comparable") if speed.layout in differing else speed
        for speed in done.speeds
    ]
    return replace(done, speeds=tuple(speeds))


# --- the zoo: a row per model ---------------------------------------------------------------------

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


# --- loaders --------------------------------------------------------------------------------------


@dataclass
class Pipeline:
    """One way to load: `batches` begins an epoch and yields something of each batch's length."""

    name: str
    workers: int
    batches: Callable[[], Iterable[Sized]]
    close: Callable[[], object] = lambda: None

    def seconds_per_image(self, images: int) -> float:
        """Of the first batches of an epoch, until `images` are delivered."""
        started_at, seen = time.perf_counter(), 0
        for batch in self.batches():
            seen += len(batch)
            if seen >= images:
                break
        return (time.perf_counter() - started_at) / seen


def benchmark_loaders(
    settings: LoaderBenchmarkSettings, *others: Callable[[LoaderBenchmarkSettings, int], Pipeline]
) -> tuple[dict[str, Any], str]:
    """The content of the JSON file, and its text; `others` make more pipelines, of the largest
    number of workers.

    Raises ConfigError: no such folder, or no whole batch.
    """
    folder = settings.root and Path(settings.root).expanduser()
    root = folder or ensure_sample(DATA_DIR / "sample-large")
    cores = len(os.sched_getaffinity(0))
    workers = settings.workers or [2**power for power in range(5) if 2**power <= cores]
    settings = replace(settings, root=str(root), workers=workers)
    pipelines = [ours(settings, count) for count in workers]
    torch.set_num_threads(1)  # the workers are measured, not this process
    try:
        pipelines[:0] = [make(settings, workers[-1]) for make in (torchvision_reference, *others)]
        blocks = [partial(pipeline.seconds_per_image, settings.images) for pipeline in pipelines]
        for block in blocks:
            block()  # starts workers and fills the page cache
        done = alternate(
            blocks, target_ci=math.inf, time_limit_s=math.inf, min_rounds=settings.rounds
        )
    finally:
        for pipeline in pipelines:
            pipeline.close()
    rows: list[dict[str, Any]] = []
    for index, one in enumerate(pipelines):
        seconds = done.blocks[index]
        rows.append(
            {
                "pipeline": one.name,
                "workers": one.workers,
                "images_per_s": round(1 / median(seconds), 1),
                "ratio": round(median(done.round_ratios(index)), 2),
                "block_s_per_image": [round(value, 8) for value in seconds],
            }
        )
    per_core = max(
        row["images_per_s"] / min(cores, row["workers"]) for row in rows[-len(workers) :]
    )
    needed = -(-int(settings.gpu_images_per_s) // max(1, int(per_core)))
    answer = f"this machine has {cores}: {'enough' if needed <= cores else 'too few'}"
    text = f"{settings.gpu_images_per_s:,.0f} images/s need {needed} cores of this kind; {answer}"
    results = {
        "rows": rows,
        "cores": cores,
        "images_per_s_needed": settings.gpu_images_per_s,
        "cores_needed": needed,
    }
    result = measured(settings, torch.device("cpu"), schema_version=3, **results)
    shown = [{name: row[name] for name in row if name != "block_s_per_image"} for row in rows]
    return result, f"{markdown_table(shown)}\n{text}"


def ours(settings: LoaderBenchmarkSettings, workers: int) -> Pipeline:
    """uint8 NHWC batches in shared memory, as training receives them before the copy to the
    device.
    """
    cfg = DataConfig(
        name="folder", root=settings.root, image_size=settings.image_size, workers=workers
    )
    dist, augment = Dist(0, 1, torch.device("cpu")), AugmentConfig(crop_scale_min=0.08, flip=0.5)
    data = build_data(DataSettings(cfg, augment, settings.batch_size, seed=0, dist=dist))
    assert isinstance(data, ImageData)
    loader, epochs = data.train_loader, itertools.count()
    return Pipeline(
        "cl_train",
        workers,
        lambda: (batch.targets for batch in loader.batches(next(epochs))),
        data.close,
    )


def torchvision_reference(settings: LoaderBenchmarkSettings, workers: int) -> Pipeline:
    """torchvision's references/classification: Pillow, float tensors from the workers, default
    collate.
    """
    from torchvision import datasets, transforms

    crop = transforms.RandomResizedCrop(settings.image_size)
    flip = transforms.RandomHorizontalFlip()
    normalise = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    files = datasets.ImageFolder(
        f"{settings.root}/train", transforms.Compose([crop, flip, transforms.ToTensor(), normalise])
    )
    loader = torch.utils.data.DataLoader(
        files,
        settings.batch_size,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=True,
    )
    return Pipeline("torchvision reference", workers, lambda: (targets for _, targets in loader))
