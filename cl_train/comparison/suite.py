"""`scripts/benchmark.py`: many models, precisions and batches, each in both layouts; a table, JSON, and a gate."""

from __future__ import annotations

import itertools
import json
import math
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cl_train.comparison.model_cost import flops_per_image, matmul_tflops, time_by_kind
from cl_train.comparison.paired import (
    CHANNELS_LAST,
    CHANNELS_LAST_CONV,
    CONTIGUOUS,
    Effort,
    Layout,
    LayoutBenchmark,
    LayoutSpeed,
    Trial,
    Workload,
    benchmark_layouts,
    switches,
)
from cl_train.comparison.parity import check_parity, fitting_image_size
from cl_train.comparison.statistics import SMALLEST_DIFFERENCE
from cl_train.config.schema import PRECISIONS, ConfigError, OptimConfig, setting
from cl_train.config.validation import suggest, to_mapping
from cl_train.models import registry as models
from cl_train.step.precision import resolve_precision
from cl_train.system.distributed import choose_device
from cl_train.system.environment import describe_environment, device_name
from cl_train.system.machine_load import BUSY_PCT, TOO_BUSY_PCT

SCHEMA_VERSION = 1
MODES = ("train", "infer")
BLIND_WIDTH = 0.1  # of an interval / ratio: wider, and a gain could fall by several percent unseen
LAYOUTS = {layout.name: layout for layout in (CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_CONV)}


@dataclass
class BenchmarkSettings:
    """What to measure; of lists every combination. Lists are written a,b,c."""

    model: list[str] = setting(["resnet50"], "models, by the names that train.py takes")
    mode: list[str] = setting(["train"], "train, infer")
    precision: list[str] = setting(["auto"], "as in train.py")
    batch_size: list[int] = setting([32], "images per step")
    compile: list[bool] = setting([False], "torch.compile the model")
    compile_mode: str = setting("default", "mode of torch.compile")
    image_size: int | None = setting(None, "pixels; null = 224, or 299 for inception_v3", minimum=8)
    layouts: list[str] = setting(["contiguous", "channels_last"], "the first is what the others are compared with")
    num_classes: int = setting(1000, "outputs of the model", minimum=2)
    optimizer: str = setting("sgd", "of the training step", choices=("sgd", "adamw", "rmsprop"))
    device: str = setting("auto", "cuda where there is one, else cpu", choices=("auto", "cpu", "cuda"))
    target_ci: float = setting(0.02, "stop when the 95 % interval of the ratio is at most this wide", above=0)
    time_limit_s: float = setting(60.0, "stop after so many seconds per combination, warm-up not counted", above=0)
    parity: bool = setting(True, "first check that both layouts compute the same")
    detail: bool = setting(True, "time by kind of layer, forward, backward and optimizer")
    repetitions: int = setting(1, "measure every combination so many times, to see how the verdicts scatter", minimum=1)
    slowdown_pct: float = setting(0.0, "slow the last layout down on purpose, to test this program (CPU)", minimum=0)


@dataclass(frozen=True)
class Case:
    """One combination of the settings."""

    model: str
    mode: str
    precision: str  # resolved
    batch_size: int
    image_size: int
    compile: bool


def check_settings(settings: BenchmarkSettings) -> None:
    """Refuse what can be known to fail.

    Raises:
        ConfigError: every problem.
    """
    problems = []
    for name in settings.model:
        try:
            models.check_model(name)
        except ConfigError as error:
            problems += error.problems
    for key, values, known in (
        ("mode", settings.mode, MODES),
        ("precision", settings.precision, PRECISIONS),
        ("layouts", settings.layouts, tuple(LAYOUTS)),
    ):
        unknown = [value for value in values if value not in known]
        problems += [f"{key}={word}: must be one of {', '.join(known)}{suggest(word, known)}" for word in unknown]
    problems += [f"batch_size={size}: must be at least 1" for size in settings.batch_size if size < 1]
    if len(settings.layouts) < 2:
        problems.append("layouts: two or more are needed for a comparison")
    try:
        device = choose_device(settings.device)
        if settings.slowdown_pct and device.type != "cpu":
            problems.append("slowdown_pct is for device=cpu: a host that sleeps does not slow a GPU down")
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)


def run_suite(settings: BenchmarkSettings) -> dict[str, Any]:
    """Measure every combination; prints a line for each as it ends.

    Returns:
        What goes into the JSON file. A combination that failed has `error` instead of speeds.
    """
    device = choose_device(settings.device)
    results = []
    for case in [case for case in cases(settings, device) for _ in range(settings.repetitions)]:
        try:
            results.append(run_case(case, settings, device))
        except Exception as error:  # whatever a model raises: the results of the others stay
            why = (str(error) or type(error).__name__).splitlines()[0]
            results.append({**asdict(case), "error": why, "pairs": []})
        print(describe(results[-1]), flush=True)
    return {
        "schema_version": SCHEMA_VERSION,
        "command": shlex.join(sys.argv),
        "settings": to_mapping(settings),
        "device_name": device_name(device),
        "environment": describe_environment(device),
        "results": results,
    }


def cases(settings: BenchmarkSettings, device: torch.device) -> Iterator[Case]:
    what = itertools.product(settings.model, settings.mode, settings.precision, settings.batch_size)
    for (model, mode, precision, batch_size), compile_ in itertools.product(what, settings.compile):
        size = settings.image_size or models.usual_image_size(model)
        resolved = resolve_precision(precision, device).name
        yield Case(model, mode, resolved, batch_size, size, compile_)


def run_case(case: Case, settings: BenchmarkSettings, device: torch.device) -> dict[str, Any]:
    """Parity, then speed, then where the time goes."""
    torch.manual_seed(0)
    model = models.build_model(case.model, num_classes=settings.num_classes, image_size=case.image_size)
    workload = Workload(
        batch_size=case.batch_size,
        image_size=case.image_size,
        precision=resolve_precision(case.precision, device),
        device=device,
        mode=case.mode,
        compile=case.compile,
        compile_mode=settings.compile_mode,
        optim=OptimConfig(name=settings.optimizer),
    )
    layouts = [LAYOUTS[name] for name in settings.layouts]
    result: dict[str, Any] = {**asdict(case)}
    if settings.parity:
        result["parity"] = _parity(model, workload, layouts)
    effort = Effort(settings.target_ci, settings.time_limit_s)
    done = benchmark_layouts(model, workload, layouts, effort, slowdown=settings.slowdown_pct / 100)
    workload = replace(workload, batch_size=done.batch_size)
    with switches(workload):
        result |= _speeds(done, model, workload)
        if settings.detail:
            result["milliseconds_by_kind"] = {layout.name: _detail(model, layout, workload) for layout in layouts}
    is_too_busy = device.type == "cpu" and (done.others_pct or 0.0) >= TOO_BUSY_PCT
    if is_too_busy or result.get("parity", {}).get("passed") is False:
        for pair in result["pairs"]:
            pair["verdict"] = "not_comparable"
    return result


def _parity(model: nn.Module, workload: Workload, layouts: list[Layout]) -> dict[str, Any]:
    """On a few small images."""
    image_size = fitting_image_size(model, workload.image_size, workload.input_channels)
    said: dict[str, Any] = {"passed": None, "why": "no layout is converted", "first_divergence": None}
    for layout in layouts:
        if layout.channels_last and said["passed"] is not False:
            report = check_parity(
                model,
                image_size=image_size,
                precision=workload.precision,
                device=workload.device,
                input_channels=workload.input_channels,
                conversion=layout.conversion,
                steps=1,
            )
            said = {"passed": report.passed, "why": str(report), "first_divergence": report.first_divergence}
    return said


def _speeds(done: LayoutBenchmark, model: nn.Module, workload: Workload) -> dict[str, Any]:
    flops = flops_per_image(model, workload.image_size, workload.input_channels, workload.mode)
    precision = workload.precision
    peak = matmul_tflops(workload.device, precision.input_dtype, precision.tf32)
    first = done.speeds[0]
    return {
        "batch_size": done.batch_size,
        "batch_size_requested": done.batch_size_requested,
        "gflops_per_image": None if flops is None else round(flops / 1e9, 3),
        "matmul_tflops": round(peak, 3),
        "speeds": [_speed_row(speed, flops, peak) for speed in done.speeds],
        "pairs": [_pair_row(first, speed) for speed in done.speeds[1:]],
        "rounds": done.rounds,
        "seconds": round(done.seconds, 1),
        "stopped_by": done.stopped_by,
        "others_pct": _rounded(done.others_pct, 1),
    }


def _speed_row(speed: LayoutSpeed, flops: int | None, peak_tflops: float) -> dict[str, Any]:
    """`mfu_pct` is model FLOPs utilisation: arithmetic done / what the device's matmul would do in the time."""
    mfu = None if flops is None else 100 * speed.images_per_s * flops / (peak_tflops * 1e12)
    return {
        "layout": speed.layout,
        "images_per_s": round(speed.images_per_s, 2),
        "step_ms": round(speed.step_ms, 3),
        "peak_memory_gib": _rounded(speed.peak_memory_gib, 4),
        "mfu_pct": _rounded(mfu, 2),
    }


def _pair_row(first: LayoutSpeed, speed: LayoutSpeed) -> dict[str, Any]:
    interval = speed.versus_first
    return {
        "baseline": first.layout,
        "candidate": speed.layout,
        "ratio": round(interval.ratio, 4),
        "ci95": [round(interval.low, 4), round(interval.high, 4)],
        "n": interval.n,
        "verdict": speed.verdict,
    }


def _detail(model: nn.Module, layout: Layout, workload: Workload) -> dict[str, dict[str, float]]:
    trial = Trial(model, layout, workload)
    trial.step_times(2)
    table = time_by_kind(trial.step, workload.device)
    return {kind: {phase: round(ms, 3) for phase, ms in phases.items()} for kind, phases in table.items()}


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


# --- the table --------------------------------------------------------------------------------------------------------


def describe(result: dict[str, Any]) -> str:
    """One combination in a few lines."""
    flags = [result["mode"], result["precision"], f"batch {result['batch_size']}", f"{result['image_size']} px"]
    flags += ["compiled"] * result["compile"]
    lines = [f"{result['model']} ({', '.join(flags)})"]
    if "error" in result:
        return f"{lines[0]}\n  failed: {result['error']}"
    if result["batch_size"] != result["batch_size_requested"]:
        requested = result["batch_size_requested"]
        lines.append(f"  memory ran out at batch {requested}: all layouts at {result['batch_size']}")
    if result.get("parity", {}).get("passed") is False:
        lines.append(f"  {result['parity']['why']}")
    others_pct = result["others_pct"] or 0.0
    if others_pct >= BUSY_PCT:
        lines.append(f"  other processes took {others_pct:.0f} % of the cores meanwhile: measure on a quiet machine")
    verdicts = ["", *(_pair_words(pair) for pair in result["pairs"])]
    for speed, verdict in zip(result["speeds"], verdicts, strict=True):
        mfu = "" if speed["mfu_pct"] is None else f"{speed['mfu_pct']:6.1f} % of matmul"
        lines.append(
            f"  {speed['layout']:<18} {speed['images_per_s']:10.1f} images/s {speed['step_ms']:10.2f} ms"
            f" {speed['peak_memory_gib']:8.2f} GiB {mfu}  {verdict}"
        )
    for layout, table in result.get("milliseconds_by_kind", {}).items():
        lines.append(f"  {layout}, ms per step (forward + backward + optimizer): {_kinds(table)}")
    return "\n".join(lines)


def _pair_words(pair: dict[str, Any]) -> str:
    low, high = pair["ci95"]
    return f"{pair['ratio']:.3f}x [{low:.3f}, {high:.3f}] {pair['verdict'].replace('_', ' ')}"


def _kinds(table: dict[str, dict[str, float]]) -> str:
    parts = []
    for kind, phases in list(table.items())[:6]:
        parts.append(f"{kind} {phases['forward']:.1f} + {phases['backward']:.1f} + {phases['optimizer']:.1f}")
    return ", ".join(parts)


def count_verdicts(document: dict[str, Any]) -> str:
    """How the verdicts of repeated measurements scatter, such as "no difference 19, faster 1"."""
    counts = Counter(pair["verdict"] for result in document["results"] for pair in result["pairs"])
    return ", ".join(f"{verdict.replace('_', ' ')} {count}" for verdict, count in counts.most_common())


# --- the gate ---------------------------------------------------------------------------------------------------------


def read_baseline(path: Path) -> dict[str, Any]:
    """An earlier run's JSON file.

    Raises:
        ConfigError: not such a file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version = document["schema_version"]
        _ = document["settings"], document["device_name"], [result["pairs"] for result in document["results"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--baseline {path}: not a file that this program wrote ({error})") from None
    if version != SCHEMA_VERSION:
        raise ConfigError(f"--baseline {path}: schema version {version}, this program knows {SCHEMA_VERSION}")
    return dict(document)


def check_gate(baseline: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Gains that fell by more than both intervals together allow; empty when the gate is passed.

    Raises:
        ConfigError: measured on another device, or nothing in common.
    """
    if baseline["device_name"] != current["device_name"]:
        raise ConfigError(
            f"the baseline was measured on {baseline['device_name']}, this is {current['device_name']}: "
            "measure a baseline of this machine with --output"
        )
    before, now = _pairs_by_case(baseline), _pairs_by_case(current)
    common = [key for key in before if key in now]
    if not common:
        raise ConfigError("the baseline has none of these combinations; without settings its own are measured")
    is_same_suite = baseline["settings"] == current["settings"]
    missing = [f"{key}: not measured, it failed or ran at another batch" for key in before if key not in now]
    fallen = [line for key in common if (line := _fallen(key, before[key], now[key]))]
    return fallen + (missing if is_same_suite else [])


def blind_spots(current: dict[str, Any]) -> list[str]:
    """Combinations measured too coarsely for the gate to mean anything."""
    return [
        f"{case}: {_pair_words(pair)}"
        for case, pair in _pairs_by_case(current).items()
        if pair["ci95"][1] - pair["ci95"][0] > BLIND_WIDTH * pair["ratio"]
    ]


def _pairs_by_case(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {}
    for result in document["results"]:
        for pair in result["pairs"]:
            case = [result[name] for name in ("model", "mode", "precision", "batch_size", "image_size")]
            flags = ["compiled"] * result["compile"]
            found[" ".join([*map(str, case), *flags, pair["candidate"]])] = pair
    return found


def _fallen(case: str, before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The two intervals are independent: their half widths (of the logarithms) add up as squares."""
    if now["verdict"] == "not_comparable":
        return f"{case}: not comparable (the machine is busy, or the layouts compute different things)"
    change = math.log(now["ratio"] / before["ratio"])
    halves = [math.log(pair["ci95"][1] / pair["ratio"]) if pair["ci95"][1] else math.inf for pair in (before, now)]
    if change >= -math.hypot(*halves) or change > -SMALLEST_DIFFERENCE:
        return None
    return f"{case}: {_pair_words(now)}, was {_pair_words(before)}"
