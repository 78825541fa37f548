"""What `cl-train benchmark` measures: every combination of its settings, in one process."""

import itertools
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cl_train.config.schema import BenchmarkSettings, OptimConfig
from cl_train.config.validation import show
from cl_train.errors import ConfigError
from cl_train.measure.alternate import Stop
from cl_train.measure.paired import Comparison, benchmark_layouts
from cl_train.measure.parity import ParityReport, check_parity
from cl_train.measure.statistics import seconds_to_decide
from cl_train.measure.timed_step import Workload, input_shape
from cl_train.memory_format.convert import CONTIGUOUS, LAYOUTS, Layout
from cl_train.models import sources as models
from cl_train.step.precision import resolve_precision
from cl_train.step.train_step import StepSettings
from cl_train.system.distributed import choose_device
from cl_train.system.failures import explain_failure
from cl_train.system.files import write_json
from cl_train.system.machine import document_of
from cl_train.system.processes import with_threads

LONGEST_ADVISED_S = 3600.0
NAMES = ("model", "mode", "precision", "batch_size", "compile", "cuda_graph")


@dataclass(frozen=True)
class Combination:
    """A model, and how it is measured."""

    settings: BenchmarkSettings
    described: dict[str, Any]
    workload: Workload

    def result(self) -> dict[str, Any]:
        """The content of the JSON file: with `error` instead of speeds if it failed. A model may
        raise any exception, which must not lose the results of the others.
        """
        try:
            return {**self.described, **self._measured()}
        except Exception as error:
            why = explain_failure(error)
            return {**self.described, "error": why, "text": f"  failed: {why}", "pairs": []}

    def _measured(self) -> dict[str, Any]:
        """Parity, then speed. Layouts that compute different results are not comparable."""
        torch.manual_seed(0)
        workload, settings = self.workload, self.settings
        size = workload.input_shape[-1]
        model = models.build_model(self.described["model"], num_classes=1000, image_size=size)
        layouts = [LAYOUTS[layout] for layout in settings.layouts]
        checked = [layout for layout in layouts if settings.parity and layout is not CONTIGUOUS]
        parity = {layout.name: self._parity(model, layout) for layout in checked}
        stop = Stop(settings.target_ci, settings.time_limit_s)
        done = benchmark_layouts(model, workload, layouts, stop=stop)
        differing = [name for name, report in parity.items() if report.passed is False]
        speeds = [
            replace(speed, verdict="not_comparable") if speed.layout in differing else speed
            for speed in done.speeds
        ]
        done = replace(done, speeds=tuple(speeds))

        lines = [str(done), *(f"  {report}" for report in parity.values() if not report.passed)]
        if to_decide := self._to_decide(done):
            lines.append(f"  to decide it, {to_decide}")
        return {
            **done.to_dict(),
            "to_decide": to_decide,
            "parity": {name: report.to_dict() for name, report in parity.items()},
            "text": "\n".join(lines),
        }

    def _parity(self, model: nn.Module, layout: Layout) -> ParityReport:
        workload = self.workload
        return check_parity(
            model,
            conversion=layout.conversion,
            mode="infer" if workload.mode == "infer" else "both",
            image_size=workload.input_shape,
            precision=workload.precision.name,
            device=workload.device,
            compile=workload.settings.compile,
        )

    def _to_decide(self, done: Comparison) -> str | None:
        """The command that probably decides it; None if it is decided, or no hour decides it."""
        seconds = max(seconds_to_decide(speed.ratio, done.seconds) for speed in done.speeds[1:])
        is_undecided = any(speed.verdict == "inconclusive" for speed in done.speeds)
        if not is_undecided or seconds > LONGEST_ADVISED_S:
            return None
        values = {name: value for name, value in self.described.items() if value}
        values |= {"data.image_size": values.pop("image_size"), "time_limit_s": round(seconds)}
        for name in ("layouts", "optimizer", "device"):
            if getattr(self.settings, name) != getattr(BenchmarkSettings(), name):
                values[name] = getattr(self.settings, name)
        words = [f"{name}={show(value).strip('[]')}" for name, value in values.items()]
        return with_threads(f"cl-train benchmark {shlex.join(words)}")


def run_suite(settings: BenchmarkSettings) -> dict[str, Any]:
    """Measure every combination; prints each result and writes it to `out` as it is ready.

    Raises ConfigError: unknown models, or fewer than two layouts.
    """
    combinations = combinations_of(settings)
    document = document_of(settings, choose_device(settings.device), complete=False, results=[])

    for one in combinations:
        result = one.result()
        described = ", ".join(f"{key} {value}" for key, value in one.described.items())
        print(f"{described}\n{result['text']}", flush=True)
        document["results"].append(result)
        if settings.out:
            write_json(Path(settings.out), document)
    return document | {"complete": True}


def combinations_of(settings: BenchmarkSettings) -> list[Combination]:
    """All combinations of the settings. Raises ConfigError as `run_suite`."""
    if empty := [name for name in NAMES if not getattr(settings, name)]:
        raise ConfigError([f"{name}= is empty: name at least one" for name in empty])
    for model in settings.model:
        models.check_model(model)
    if len(settings.layouts) < 2:
        raise ConfigError("layouts: a comparison needs two or more")
    device = choose_device(settings.device)
    combinations = []
    for values in itertools.product(*(getattr(settings, name) for name in NAMES)):
        described = dict(zip(NAMES, values, strict=True))
        shape = input_shape(described["model"], settings.image_size, settings.frames)
        described["image_size"] = shape[-1]
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
        workload = Workload(described["batch_size"], shape, step, device, described["mode"])
        combinations.append(Combination(settings, described, workload))
    return combinations
