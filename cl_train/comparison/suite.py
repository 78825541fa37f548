"""`cl-train benchmark`: models, modes, precisions and batches, each in several layouts."""

import itertools
from dataclasses import replace
from typing import Any

import torch

from cl_train.comparison.paired import benchmark_layouts
from cl_train.comparison.parity import check_parity
from cl_train.comparison.timed_model import CHANNELS_LAST, CHANNELS_LAST_CONV, CONTIGUOUS, Workload
from cl_train.config.benchmarks import BenchmarkSettings
from cl_train.config.schema import ConfigError, OptimConfig
from cl_train.memory_format.model_call import explain_failure
from cl_train.models import sources as models
from cl_train.step.precision import resolve_precision
from cl_train.system.distributed import choose_device
from cl_train.system.machine import measured

LAYOUTS = {layout.name: layout for layout in (CONTIGUOUS, CHANNELS_LAST, CHANNELS_LAST_CONV)}


def run_suite(settings: BenchmarkSettings) -> dict[str, Any]:
    """Measure every combination; prints each result as it is ready.

    Returns:
        The content of the JSON file. A combination that failed has `error` instead of speeds.

    Raises:
        ConfigError: unknown models, or fewer than two layouts.
    """
    combined = ("model", "mode", "precision", "batch_size", "compile", "cuda_graph")
    if empty := [name for name in combined if not getattr(settings, name)]:
        raise ConfigError([f"{name}= is empty: name at least one" for name in empty])
    for name in settings.model:
        models.check_model(name)
    if len(settings.layouts) < 2:
        raise ConfigError("layouts: a comparison needs two or more")
    device, s = choose_device(settings.device), settings
    results = []
    for name, mode, precision, batch_size, compile, cuda_graph in itertools.product(
        s.model, s.mode, s.precision, s.batch_size, s.compile, s.cuda_graph
    ):
        size = s.image_size or models.usual_image_size(name)
        workload = Workload(
            batch_size, (3, size, size), resolve_precision(precision, device), device, mode, compile,
            cuda_graph=cuda_graph, optim=OptimConfig(name=s.optimizer),
        )  # fmt: skip
        described: dict[str, Any] = {"model": name, "precision": workload.precision.name, "mode": mode}
        described |= {"batch_size": batch_size, "compile": compile, "cuda_graph": cuda_graph, "image_size": size}
        try:
            result = {**described, **_measure(name, workload, settings)}
        except Exception as error:  # a model may raise any exception: keep the results of the others
            why = str(error) if isinstance(error, ConfigError) else explain_failure(error)
            result = {**described, "error": why, "text": f"  failed: {why}", "pairs": []}
        results.append(result)
        print(f"{', '.join(f'{key} {value}' for key, value in described.items())}\n{result['text']}", flush=True)
    return measured(settings, device, results=results)


def _measure(name: str, workload: Workload, settings: BenchmarkSettings) -> dict[str, Any]:
    """Parity, then speed. Layouts that compute different results are not comparable."""
    torch.manual_seed(0)
    size, precision = workload.input_shape[-1], workload.precision.name
    model = models.build_model(name, num_classes=1000, image_size=size)
    layouts = [LAYOUTS[layout] for layout in settings.layouts]
    reports = {
        layout.name: check_parity(
            model,
            image_size=size,
            precision=precision,
            device=workload.device,
            conversion=layout.conversion,
            mode="infer" if workload.mode == "infer" else "both",
        )
        for layout in layouts
        if settings.parity and layout is not CONTIGUOUS
    }
    done = benchmark_layouts(model, workload, layouts, target_ci=settings.target_ci, time_limit_s=settings.time_limit_s)
    differing = [layout for layout, report in reports.items() if report.passed is False]
    speeds = [replace(one, verdict="not_comparable") if one.layout in differing else one for one in done.speeds]
    done = replace(done, speeds=tuple(speeds))
    notes = [f"  {report}" for report in reports.values() if not report.passed]
    parity = {layout: report.to_dict() for layout, report in reports.items()}
    return {**done.to_dict(), "parity": parity, "text": "\n".join([str(done), *notes])}
