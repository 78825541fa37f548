"""`cl-train benchmark`: models, modes, precisions and batches, each in several layouts."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from cl_train.comparison.paired import benchmark_layouts
from cl_train.comparison.parity import check_parity
from cl_train.comparison.timed_model import CHANNELS_LAST, CHANNELS_LAST_CONV, CONTIGUOUS, Workload
from cl_train.config.benchmarks import BenchmarkSettings
from cl_train.config.schema import ConfigError, OptimConfig
from cl_train.config.validation import to_mapping
from cl_train.memory_format.model_call import explain_failure
from cl_train.models import registry as models
from cl_train.step.precision import resolve_precision
from cl_train.system.distributed import choose_device
from cl_train.system.environment import describe_environment, device_name

LAYOUTS = {layout.name: layout for layout in (CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_CONV)}


def run_suite(settings: BenchmarkSettings) -> dict[str, Any]:
    """Measure every combination; prints each result as it is ready.

    Returns:
        The content of the JSON file. A combination that failed has `error` instead of speeds.

    Raises:
        ConfigError: unknown models, or fewer than two layouts.
    """
    for name in settings.model:
        models.check_model(name)
    if len(settings.layouts) < 2:
        raise ConfigError("layouts: a comparison needs two or more")
    device = choose_device(settings.device)
    results = []
    for name, workload in combinations(settings, device):
        described = describe_workload(name, workload)
        try:
            results.append({**described, **_measure(name, workload, settings)})
        except Exception as error:  # whatever a model raises: the results of the others stay
            why = str(error) if isinstance(error, ConfigError) else explain_failure(error)
            results.append({**described, "error": why, "text": f"  failed: {why}", "pairs": []})
        flags = [str(value) for key, value in described.items() if key not in ("compile", "cuda_graph")]
        flags += [key for key in ("compile", "cuda_graph") if described[key]]
        print(f"{' '.join(flags)}\n{results[-1]['text']}", flush=True)
    return {
        "schema_version": 1,
        "command": shlex.join(sys.argv),
        "settings": to_mapping(settings),
        "device_name": device_name(device),
        "environment": describe_environment(device),
        "results": results,
    }


def combinations(settings: BenchmarkSettings, device: torch.device) -> Iterator[tuple[str, Workload]]:
    lists = (settings.model, settings.mode, settings.precision, settings.batch_size)
    for name, mode, precision, batch_size, compile, cuda_graph in itertools.product(
        *lists, settings.compile, settings.cuda_graph
    ):
        size = settings.image_size or models.usual_image_size(name)
        resolved, optim = resolve_precision(precision, device), OptimConfig(name=settings.optimizer)
        yield (
            name,
            Workload(
                batch_size, (3, size, size), resolved, device, mode, compile=compile, cuda_graph=cuda_graph, optim=optim
            ),
        )


def describe_workload(name: str, workload: Workload) -> dict[str, Any]:
    fields = ("mode", "batch_size", "compile", "cuda_graph")
    plain = {field: getattr(workload, field) for field in fields}
    return {"model": name, "precision": workload.precision.name, "image_size": workload.input_shape[-1], **plain}


def _measure(name: str, workload: Workload, settings: BenchmarkSettings) -> dict[str, Any]:
    """Parity, then speed. Layouts that compute different results are not comparable."""
    torch.manual_seed(0)
    size = workload.input_shape[-1]
    model = models.build_model(name, num_classes=1000, image_size=size)
    layouts = [LAYOUTS[layout] for layout in settings.layouts]
    notes, parity = [], []
    for layout in layouts:
        if settings.parity and layout is not CONTIGUOUS:
            report = check_parity(
                model,
                image_size=size,
                precision=workload.precision.name,
                device=workload.device,
                conversion=layout.conversion,
            )
            parity.append({"layout": layout.name, "passed": report.passed, "text": str(report)})
            notes += [] if report.passed else [f"  {report}"]
    done = benchmark_layouts(model, workload, layouts, target_ci=settings.target_ci, time_limit_s=settings.time_limit_s)
    differing = [row["layout"] for row in parity if row["passed"] is False]
    speeds = [replace(speed, verdict="not_comparable") if speed.layout in differing else speed for speed in done.speeds]
    done = replace(done, speeds=tuple(speeds))
    return {**done.to_dict(), "parity": parity, "text": "\n".join([str(done), *notes])}
