"""What `cl-train benchmark` measures: every combination of its settings, in one process."""

import itertools
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cl_train.config.schema import BenchmarkSettings, OptimConfig
from cl_train.config.validation import show
from cl_train.errors import ConfigError
from cl_train.measure.alternate import Stop
from cl_train.measure.paired import Comparison, benchmark_layouts
from cl_train.measure.parity import ParityReport, check_parity
from cl_train.measure.statistics import seconds_to_decide
from cl_train.measure.timed_step import Workload, input_shape
from cl_train.memory_format.convert import CONTIGUOUS, LAYOUTS
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


@dataclass
class Combination:
    """A model and how it is measured, and its result."""

    settings: BenchmarkSettings
    described: dict[str, Any]
    workload: Workload
    comparison: Comparison | None = None
    parity: dict[str, ParityReport] = field(default_factory=dict)  # by layout
    error: str | None = None

    def measure(self) -> None:
        """A model may raise any exception, which must not lose the results of the others."""
        try:
            self.comparison = self._compared()
        except Exception as error:
            self.error = explain_failure(error)

    def _compared(self) -> Comparison:
        """Parity, then speed. Layouts that compute different results are not comparable."""
        torch.manual_seed(0)
        workload, name = self.workload, self.described["model"]
        size = workload.input_shape[-1]
        model = models.build_model(name, num_classes=1000, image_size=size)
        layouts = [LAYOUTS[layout] for layout in self.settings.layouts]
        if self.settings.parity:
            self.parity = {
                layout.name: check_parity(
                    model,
                    conversion=layout.conversion,
                    mode="infer" if workload.mode == "infer" else "both",
                    image_size=workload.input_shape,
                    precision=workload.precision.name,
                    device=workload.device,
                )
                for layout in layouts
                if layout is not CONTIGUOUS
            }
        stop = Stop(self.settings.target_ci, self.settings.time_limit_s)
        done = benchmark_layouts(model, workload, layouts, stop=stop)
        speeds = [
            replace(speed, verdict="not_comparable")
            if speed.layout in self.parity and self.parity[speed.layout].passed is False
            else speed
            for speed in done.speeds
        ]
        return replace(done, speeds=tuple(speeds))

    def to_dict(self) -> dict[str, Any]:
        """The content of the JSON file: with `error` instead of speeds if it failed."""
        if self.comparison is None:
            text = f"  failed: {self.error}"
            return {**self.described, "error": self.error, "text": text, "pairs": []}
        lines = [str(self.comparison)]
        lines += [f"  {report}" for report in self.parity.values() if not report.passed]
        to_decide = self._to_decide(self.comparison)
        if to_decide:
            lines.append(f"  to decide it, {to_decide}")
        return {
            **self.described,
            **self.comparison.to_dict(),
            "to_decide": to_decide,
            "parity": {layout: report.to_dict() for layout, report in self.parity.items()},
            "text": "\n".join(lines),
        }

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
        one.measure()
        result = one.to_dict()
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
