"""Audit a model: which operators keep channels_last, which lose it, where in the model, and what it
costs.

    cl-train audit model=shufflenet_v2_x1_0                every loss with its module and line
    cl-train audit model=mobilenet_v2 time=true            every operator in both: why is it faster?
    cl-train audit model=my_package.my_model:build max_lost=0         for CI: exit code 1 beyond it
    cl-train audit model=my_package.my_model:segment output_entry=mask    an output that is a dict
    cl-train audit operators=true precision=bf16           what each operator does on this machine
    cl-train audit operators=true select=*pool* repro=bug.py    and a program of what is wrong

Exit codes: 0 done, 1 more than max_lost calls lost the format, or more than max_wrong operators are
wrong, 2 wrong usage or a model that does not run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cl_train.commands import Result, optional_file, print_result
from cl_train.config import schema
from cl_train.config.fields import Range
from cl_train.config.schema import JsonResult, ModelOfRun, setting
from cl_train.config.validation import optional_module
from cl_train.errors import ConfigError


@dataclass
class AuditSettings(ModelOfRun, JsonResult):
    """The model, its input, and what is measured."""

    model: str = setting("resnet18", schema.MODEL_HELP)
    weights: str | None = setting(None, "pretrained weights by name, or a file of weights")
    channels_last: bool = setting(True, "memory format of the model and its input")
    conversion: str = setting("full", "which tensors to convert", choices=schema.CONVERSIONS)
    select: list[str] = setting(
        [], "patterns: modules to convert, or with operators=true operators"
    )
    batch_size: int = setting(32, "images per batch, as benchmark has", Range(1))
    image_size: int = setting(224, "sides of the images, pixels", Range(8), key="data.image_size")
    num_classes: int = setting(1000, "number of classes", Range(2))
    output_entry: str | None = setting(None, "entry of the output: a key, an attribute, an index")
    precision: str = setting("auto", schema.PRECISION_HELP, choices=schema.PRECISIONS)
    backward: bool = setting(True, "false: forward only, in eval mode")
    time: bool = setting(False, "also time every operator of a training step in both layouts")
    time_limit_s: float = setting(30.0, "time=true: for all rounds, at least four", Range(above=0))
    repro: str | None = setting(None, "operators=true: file for a program of a wrong one")
    chart: str | None = setting(None, "time=true: file (.png, .svg) for a bar chart")
    max_lost: int | None = setting(None, "exit with 1 if more calls lose channels_last", Range(0))
    operators: bool = setting(False, "instead of a model: what torch's operators do")
    max_wrong: int | None = setting(None, "operators=true: exit with 1 if more are wrong", Range(0))


SETTINGS = {"settings": AuditSettings}


def main(words: list[str]) -> int:
    return int(print_result(AuditSettings, words, measure).get("exceeded", False))


def measure(settings: AuditSettings) -> Result:
    has_times = settings.time and not settings.operators
    problems = []
    if settings.max_wrong is not None and not settings.operators:
        problems.append("max_wrong= needs operators=true")
    if settings.repro and not settings.operators:
        problems.append("repro= needs operators=true")
    if settings.chart and not has_times:
        problems.append("chart= needs time=true, of a model")
    if problems:
        raise ConfigError(problems)
    if settings.chart:
        optional_module("matplotlib", f"chart={settings.chart}")
    with optional_file(settings, "repro") as program, optional_file(settings, "chart") as chart:
        if settings.operators:
            return _operators(settings, program)
        return _model(settings, chart)


def _model(settings: AuditSettings, chart: Path | None) -> Result:
    from cl_train.measure.charts import write_times_chart

    report = _audited(settings)
    result, text = report.to_dict(), str(report)
    if chart:
        title = f"{report.model}, {report.precision} on {report.device}"
        write_times_chart(report.times, title, chart)
    lost, limit = report.totals["lost"], settings.max_lost
    exceeded = limit is not None and lost > limit
    if exceeded:
        text += f"\n{lost} calls lose channels_last, more than max_lost={limit}"
    return {**result, "exceeded": exceeded}, text


def _audited(settings: AuditSettings) -> Any:
    import torch

    from cl_train.measure.audit import audit
    from cl_train.memory_format.convert import convert
    from cl_train.models.sources import build_model
    from cl_train.step.precision import cast_model, resolve_precision
    from cl_train.system.distributed import choose_device
    from cl_train.system.failures import failure_explained

    device = choose_device(settings.device)
    precision = resolve_precision(settings.precision, device)
    if precision.reason:
        print(f"precision: {precision.name} ({precision.reason})")
    torch.manual_seed(0)
    size, classes = settings.image_size, settings.num_classes
    model = build_model(
        settings.model, num_classes=classes, weights=settings.weights, image_size=size
    )
    cast_model(model.to(device), precision).train(settings.backward)
    shape = (settings.batch_size, 3, *[settings.frames] * bool(settings.frames), size, size)
    with failure_explained(f"a batch of {list(shape)}", "see batch_size and data.image_size"):
        images = torch.randn(shape).to(device, precision.input_dtype)
    if settings.channels_last:
        print(convert(model, settings.conversion, settings.select))
        channels_last = torch.channels_last_3d if settings.frames else torch.channels_last
        images = images.to(memory_format=channels_last)
    return audit(
        model,
        images,
        precision=precision,
        output=settings.output_entry,
        name=settings.model,
        backward=settings.backward,
        time=settings.time,
        time_limit_s=settings.time_limit_s,
    )


def _operators(settings: AuditSettings, file: Path | None) -> Result:
    from cl_train.measure.atlas import atlas, program, tables
    from cl_train.step.precision import resolve_precision
    from cl_train.system.distributed import choose_device

    device = choose_device(settings.device)
    dtype = resolve_precision(settings.precision, device).input_dtype
    record = atlas(device, dtype, settings.select or ["*"])
    wrong = [row for row in record["operators"] if row["faults"]]
    if file and wrong:
        file.write_text(program(record, wrong[0]), encoding="utf-8")
    exceeded = settings.max_wrong is not None and len(wrong) > settings.max_wrong
    text = tables([record])
    if exceeded:
        text += f"\n{len(wrong)} operators are wrong, more than max_wrong={settings.max_wrong}"
    return {**record, "exceeded": exceeded}, text
