"""`cl-train benchmark`: models, precisions and batches, each in several layouts, and a check against a baseline."""

from __future__ import annotations

import itertools
import json
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cl_train.comparison.model_cost import flops_per_image, matmul_tflops, time_by_kind
from cl_train.comparison.paired import Comparison, benchmark_layouts, measurement_state
from cl_train.comparison.parity import check_parity
from cl_train.comparison.statistics import SMALLEST_DIFFERENCE
from cl_train.comparison.timed_model import CHANNELS_LAST, CHANNELS_LAST_CONV, CONTIGUOUS, Layout, TimedModel, Workload
from cl_train.config.benchmarks import BenchmarkSettings
from cl_train.config.schema import ConfigError, OptimConfig
from cl_train.config.validation import to_mapping
from cl_train.memory_format.model_call import explain_failure
from cl_train.models import registry as models
from cl_train.step.precision import resolve_precision
from cl_train.system.distributed import choose_device
from cl_train.system.environment import describe_environment, device_name

SCHEMA_VERSION = 1
TOO_WIDE = 0.1  # interval / ratio above which a loss of several percent would not be seen
LAYOUTS = {layout.name: layout for layout in (CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_CONV)}


@dataclass(frozen=True)
class Combination:
    """One combination of the settings."""

    model: str
    mode: str
    precision: str  # resolved
    batch_size: int
    image_size: int
    compile: bool
    cuda_graph: bool


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
    if len(settings.layouts) < 2:
        problems.append("layouts: a comparison needs two or more")
    try:
        choose_device(settings.device)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)


def run_suite(settings: BenchmarkSettings) -> dict[str, Any]:
    """Measure every combination; prints each result as it is ready.

    Returns:
        The content of the JSON file. A combination that failed has `error` instead of speeds.
    """
    device = choose_device(settings.device)
    results = []
    for combination in combinations(settings, device):
        try:
            results.append(measure(combination, settings, device))
        except Exception as error:  # whatever a model raises: the results of the others stay
            why = str(error) if isinstance(error, ConfigError) else explain_failure(error)
            results.append({**asdict(combination), "error": why, "pairs": []})
        print(describe(results[-1]), flush=True)
    return {
        "schema_version": SCHEMA_VERSION,
        "command": shlex.join(sys.argv),
        "settings": to_mapping(settings),
        "device_name": device_name(device),
        "environment": describe_environment(device),
        "results": results,
    }


def combinations(settings: BenchmarkSettings, device: torch.device) -> Iterator[Combination]:
    lists = (settings.model, settings.mode, settings.precision, settings.batch_size)
    for model, mode, precision, batch_size, compile, graph in itertools.product(
        *lists, settings.compile, settings.cuda_graph
    ):
        size = settings.image_size or models.usual_image_size(model)
        resolved = resolve_precision(precision, device).name
        yield Combination(model, mode, resolved, batch_size, size, compile, graph)


def measure(combination: Combination, settings: BenchmarkSettings, device: torch.device) -> dict[str, Any]:
    """Parity, then speed, then time by kind of layer."""
    torch.manual_seed(0)
    size = combination.image_size
    model = models.build_model(combination.model, num_classes=1000, image_size=size)
    workload = Workload(
        batch_size=combination.batch_size,
        input_shape=(3, size, size),
        precision=resolve_precision(combination.precision, device),
        device=device,
        mode=combination.mode,
        compile=combination.compile,
        cuda_graph=combination.cuda_graph,
        optim=OptimConfig(name=settings.optimizer),
    )
    layouts = [LAYOUTS[name] for name in settings.layouts]
    result: dict[str, Any] = {**asdict(combination)}
    if settings.parity:
        result["parity"] = _parity(model, workload, layouts)
    done = benchmark_layouts(model, workload, layouts, target_ci=settings.target_ci, time_limit_s=settings.time_limit_s)
    workload = replace(workload, batch_size=done.batch_size)
    with measurement_state(workload):
        result |= {**done.to_dict(), "text": str(done), **_utilisation(done, model, workload)}
        if settings.detail:
            result["milliseconds_by_kind"] = {layout.name: _detail(model, layout, workload) for layout in layouts}
    if result.get("parity", {}).get("passed") is False:
        for pair in result["pairs"]:
            pair["verdict"] = "not_comparable"
    return result


def _parity(model: nn.Module, workload: Workload, layouts: list[Layout]) -> dict[str, Any]:
    """Of the first layout that fails, else of the last."""
    outcome: dict[str, Any] = {}
    for layout in layouts:
        if layout.memory_format != torch.contiguous_format and outcome.get("passed") is not False:
            report = check_parity(
                model,
                image_size=workload.input_shape[-1],
                precision=workload.precision.name,
                device=workload.device,
                conversion=layout.conversion,
            )
            outcome = {"passed": report.passed, "why": str(report)}
    return outcome


def _utilisation(done: Comparison, model: nn.Module, workload: Workload) -> dict[str, Any]:
    """`mfu_pct` per layout: model FLOPs utilisation, the FLOPs done / what the device's matmul does in the time."""
    flops = flops_per_image(model, workload.input_shape, workload.mode)
    if flops is None:
        return {"gflops_per_image": None, "mfu_pct": None}
    precision = workload.precision
    peak = matmul_tflops(workload.device, precision.input_dtype, precision.tf32) * 1e12
    mfu = {speed.layout: round(100 * speed.images_per_s * flops / peak, 2) for speed in done.speeds}
    return {"gflops_per_image": round(flops / 1e9, 3), "matmul_tflops": round(peak / 1e12, 3), "mfu_pct": mfu}


def _detail(model: nn.Module, layout: Layout, workload: Workload) -> dict[str, dict[str, float]]:
    timed = TimedModel(model, layout, workload)
    timed.warm_up()
    table = time_by_kind(timed.step, workload.device)
    return {kind: {phase: round(ms, 3) for phase, ms in phases.items()} for kind, phases in table.items()}


def describe(result: dict[str, Any]) -> str:
    """One combination in a few lines."""
    lines = [_name(result)]
    if "error" in result:
        return f"{lines[0]}\n  failed: {result['error']}"
    if result.get("parity", {}).get("passed") is False:
        lines.append(f"  not comparable: {result['parity']['why']}")
    lines.append(result["text"])
    if result["mfu_pct"]:
        shares = ", ".join(f"{layout} {share:.1f} %" for layout, share in result["mfu_pct"].items())
        lines.append(f"  of the fastest matmul's FLOP/s: {shares}")
    for layout, table in result.get("milliseconds_by_kind", {}).items():
        kinds = [
            f"{kind} {phases['forward']:.1f} + {phases['backward']:.1f} + {phases['optimizer']:.1f}"
            for kind, phases in list(table.items())[:6]
        ]
        lines.append(f"  {layout}, ms per step (forward + backward + optimizer): {', '.join(kinds)}")
    return "\n".join(lines)


def _name(result: dict[str, Any]) -> str:
    flags = [result["mode"], result["precision"], f"batch {result.get('batch_size_requested', result['batch_size'])}"]
    flags += [f"{result['image_size']} px"]
    flags += [name for name in ("compile", "cuda_graph") if result.get(name)]
    return f"{result['model']} ({', '.join(flags)})"


# --- regression check -------------------------------------------------------------------------------------------------


def read_baseline(path: Path) -> dict[str, Any]:
    """The JSON file of an earlier run.

    Raises:
        ConfigError: not such a file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        _ = document["settings"], document["device_name"], [result["pairs"] for result in document["results"]]
        version = document["schema_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"baseline={path}: not a file that `cl-train benchmark` wrote ({error})") from None
    if version != SCHEMA_VERSION:
        raise ConfigError(f"baseline={path}: schema version {version}; this version reads {SCHEMA_VERSION}")
    return dict(document)


def check_gate(baseline: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Ratios that fell below the baseline's by more than both intervals allow, and what could not be compared.

    Raises:
        ConfigError: measured on another device, or no combination in common.
    """
    if baseline["device_name"] != current["device_name"]:
        raise ConfigError(
            f"the baseline was measured on {baseline['device_name']}, this is {current['device_name']}: "
            "measure a baseline of this machine with out=FILE"
        )
    before, now = _pairs_by_name(baseline), _pairs_by_name(current)
    if not before.keys() & now.keys():
        raise ConfigError("the baseline has none of these combinations; without settings its own are measured")
    problems = [_regression(name, before[name], now[name]) for name in before if name in now]
    if baseline["settings"] == current["settings"]:
        problems += [f"{name}: failed, or ran at another batch" for name in before if name not in now]
    return [problem for problem in problems if problem]


def _pairs_by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{_name(result)} {pair['candidate']}": pair for result in document["results"] for pair in result["pairs"]}


def _regression(name: str, before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The intervals are independent: their half widths (of the logarithms) add as squares."""
    if now["verdict"] == "not_comparable":
        return f"{name}: not comparable (the machine is busy, or the layouts compute different results)"
    change = math.log(now["ratio"] / before["ratio"])
    halves = [math.log(pair["ci95"][1] / pair["ratio"]) if pair["ci95"][1] else math.inf for pair in (before, now)]
    if change < -math.hypot(*halves) and change <= -SMALLEST_DIFFERENCE:
        return f"{name}: {now['ratio']:.3f}x, was {before['ratio']:.3f}x"
    if now["ci95"][1] - now["ci95"][0] > TOO_WIDE * now["ratio"]:
        return f"{name}: measured too coarsely to see a small loss ({now['ratio']:.3f}x, interval {now['ci95']})"
    return None
