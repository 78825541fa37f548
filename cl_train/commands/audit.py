"""Audit a model: which operators keep channels_last, which lose it, where in the model, and what it
costs.

    cl-train audit model=shufflenet_v2_x1_0                every loss with its module and line
    cl-train audit model=mobilenet_v2 time=true            every operator in both: why is it faster?
    cl-train audit model=mobilenet_v2 time=true repro=slow.py         a program of the worst call
    cl-train audit model=my_package.my_model:build max_lost=0         for CI: exit code 1 beyond it
    cl-train audit model=my_package.my_model:segment output_entry=mask    an output that is a dict
    cl-train audit model=resnext50_32x4d compile=true      also: graphs that inductor converts
    cl-train audit operators=true precision=bf16           what each operator does on this machine
    cl-train audit operators=true against=fake,decompose   where torch's compiler predicts otherwise
    cl-train audit operators=true against=compile select=*roll* repro=bug.py    and a program of it

Exit codes: 0 done, 1 more than max_lost calls lost the format, or more than max_differences differ,
2 wrong usage or a model that does not run.
"""

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cl_train.commands import print_result
from cl_train.config import schema
from cl_train.config.schema import ConfigError, setting
from cl_train.system.files import output_file


@dataclass
class AuditSettings:
    """The model, its input, and what is measured."""

    model: str = setting("resnet18", schema.MODEL_HELP)
    weights: str | None = setting(None, "pretrained weights by name, or a file of weights")
    channels_last: bool = setting(True, "convert the model to channels_last")
    conversion: str = setting(
        "full", "which tensors to convert", choices=(*schema.CONVERSIONS, "none")
    )
    select: list[str] = setting(
        [],
        "shell patterns: of modules to convert with conversion=select, of operators to examine "
        "with operators=true",
    )
    input_channels_last: bool = setting(True, "false: use contiguous input images")
    batch_size: int = setting(2, "images per batch", minimum=1)
    image_size: int = setting(
        224, "height and width of the images, pixels", minimum=8, key="data.image_size"
    )
    frames: int = setting(0, "above 0: video [N,C,D,H,W] with that many frames", minimum=0)
    input_channels: int = setting(3, "channels of the images", minimum=1)
    num_classes: int = setting(1000, "number of classes", minimum=2)
    output_entry: str | None = setting(
        None, "entry of the model's output: a dict's key, an attribute or an index"
    )
    precision: str = setting("auto", schema.PRECISION_HELP, choices=schema.PRECISIONS)
    device: str = setting("auto", "cuda if available, else cpu", choices=schema.DEVICES)
    backward: bool = setting(True, "false: forward only, in eval mode")
    measure: bool = setting(True, "time the step, and the copies by their bytes")
    time: bool = setting(False, "also time every operator of a training step in both layouts")
    time_limit_s: float = setting(
        30.0, "time=true: for all rounds; at least four are measured", above=0
    )
    repro: str | None = setting(
        None,
        "file for a program of torch alone: with time=true of the worst operator, with against= of "
        "the first difference",
    )
    chart: str | None = setting(
        None, "time=true: file (.png, .svg) for a bar chart of both layouts"
    )
    max_lost: int | None = setting(None, "exit with 1 if more calls lose channels_last", minimum=0)
    operators: bool = setting(
        False, "instead of a model: which of torch's operators keep channels_last here"
    )
    against: list[str] = setting(
        [],
        "operators=true: also as fake tensors, as decompositions, compiled (takes minutes)",
        choices=("fake", "decompose", "compile"),
    )
    max_differences: int | None = setting(
        None, "against=: exit with 1 if more outputs and gradients differ", minimum=0
    )
    compile: bool = setting(
        False, "also report which compiled graphs inductor lays out channels_last"
    )
    out: str | None = setting(None, "file for the report as JSON")
    overwrite: bool = setting(False, schema.OVERWRITE_HELP)
    json: bool = setting(False, "print the report as JSON")


SETTINGS = {"settings": AuditSettings}


def main(words: list[str]) -> int:
    return int(print_result(AuditSettings, words, measure).get("exceeded", False))


def measure(settings: AuditSettings) -> tuple[dict[str, Any], str]:
    """Raises ConfigError: the model cannot be built or run, or not be traced for `compile`."""
    from cl_train.measure.times_repro import reproduction

    if settings.operators:
        return _operators(settings)
    if settings.against or settings.max_differences is not None:
        raise ConfigError("against= and max_differences= need operators=true")
    if not settings.time and (settings.repro or settings.chart):
        raise ConfigError("repro= and chart= need time=true")
    with ExitStack() as stack:
        program, chart = (
            (
                stack.enter_context(output_file(Path(name), overwrite=settings.overwrite, key=key))
                if name
                else None
            )
            for key, name in (("repro", settings.repro), ("chart", settings.chart))
        )
        report = _audit_model(settings)
        result, text = report.to_dict(), str(report)
        if program:
            worst = report.times.worst()
            program.write_text(reproduction(worst, report.model, report.device), encoding="utf-8")
            ran = subprocess.run([sys.executable, program], capture_output=True, text=True)
            result["alone"] = (ran.stdout or ran.stderr).splitlines()
            text += "\n".join([f"\n\n{worst.name} alone, outside a step:", *result["alone"]])
        if chart:
            from cl_train.measure.charts import write_times_chart

            if not write_times_chart(
                report.times, f"{report.model}, {report.precision} on {report.device}", chart
            ):
                raise ConfigError("chart= needs matplotlib: pip install cl-train[plot]")
    lost = report.totals["lost"]
    exceeded = settings.max_lost is not None and lost > settings.max_lost
    if exceeded:
        text += f"\n{lost} calls lose channels_last, more than max_lost={settings.max_lost}"
    return {**result, "exceeded": exceeded}, text


def _operators(settings: AuditSettings) -> tuple[dict[str, Any], str]:
    """The table of torch's operators, and of what differs under the compiler."""
    import torch

    from cl_train.memory_format.operators import (
        check_compiler,
        conformance,
        conformance_program,
        differs,
        operator_support,
        selected,
    )
    from cl_train.step.precision import resolve_precision
    from cl_train.system.distributed import choose_device
    from cl_train.system.tables import markdown_table

    if settings.repro and not settings.against:
        raise ConfigError("repro= needs against= with operators=true")
    device = choose_device(settings.device)
    dtype = resolve_precision(settings.precision, device).input_dtype
    where = {
        "torch": torch.__version__,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
    }
    probes = selected(settings.select or ["*"])
    if not settings.against:
        rows: list[dict[str, Any]] = operator_support(device, dtype, probes)
        text = f"{markdown_table(rows)}\n\n{', '.join(where.values())}"
        return {"schema_version": 1, **where, "operators": rows}, text
    if "compile" in settings.against:
        check_compiler(device)
    with ExitStack() as stack:
        path = settings.repro and Path(settings.repro)
        program = path and stack.enter_context(
            output_file(path, overwrite=settings.overwrite, key="repro")
        )
        compared = conformance(device, dtype, settings.against, probes)
        differing = [row for row in compared if differs(row)]
        if program and differing:
            text = conformance_program(differing[0], device, dtype)
            program.write_text(text, encoding="utf-8")
    result = {"schema_version": 1, **where, "differences": len(differing), "operators": compared}
    number = f"{len(differing)} of {len(compared)} outputs and gradients differ from eager mode"
    text = f"{number}: {', '.join(where.values())}\n\n{markdown_table(compared)}"
    limit = settings.max_differences
    return {**result, "exceeded": limit is not None and len(differing) > limit}, text


def _audit_model(settings: AuditSettings) -> Any:
    """The report of the model of the settings, which is built, converted and audited."""
    import torch

    from cl_train.measure.audit import audit
    from cl_train.memory_format.audit import compiled_graphs
    from cl_train.memory_format.convert import convert
    from cl_train.memory_format.model_call import mean_square, output_tensors
    from cl_train.models.sources import build_model
    from cl_train.step.precision import autocast, cast_model, resolve_precision
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
    if settings.channels_last:
        print(convert(model, settings.conversion, settings.select))
    sides = [settings.frames] * bool(settings.frames) + [size, size]
    images = torch.randn(settings.batch_size, settings.input_channels, *sides).to(
        device, precision.input_dtype
    )
    if settings.channels_last and settings.input_channels_last:
        images = images.to(
            memory_format=torch.channels_last_3d if settings.frames else torch.channels_last
        )
    options = {
        name: getattr(settings, name) for name in ("backward", "measure", "time", "time_limit_s")
    }
    report = audit(
        model,
        images,
        precision=precision,
        output=settings.output_entry,
        name=settings.model,
        **options,
    )

    def loss(compiled: torch.nn.Module) -> torch.Tensor:
        with autocast(precision, device):
            return mean_square(output_tensors(compiled(images), settings.output_entry))

    if settings.compile:
        with failure_explained(
            "the model cannot be traced", "leave out compile=true"
        ):  # not every model can
            report.compiled = compiled_graphs(model, loss, settings.backward)
    return report
