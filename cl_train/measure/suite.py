"""What `cl-train benchmark` measures: every combination of its settings, in one process."""

import itertools
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cl_train.config.schema import (
    BenchmarkSettings,
    ConfigError,
    OptimConfig,
)
from cl_train.config.validation import show
from cl_train.measure.paired import Comparison, benchmark_layouts
from cl_train.measure.parity import ParityReport, check_parity
from cl_train.measure.statistics import seconds_to_decide
from cl_train.measure.timed_step import LAYOUTS, Workload
from cl_train.memory_format.layout import CONTIGUOUS
from cl_train.models import sources as models
from cl_train.step.make import StepSettings
from cl_train.step.precision import resolve_precision
from cl_train.system.distributed import choose_device
from cl_train.system.failures import explain_failure
from cl_train.system.machine import measured

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
