"""The audit of a step with the time of its operators: `cl_train.audit`."""

from functools import partial
from typing import Any

from torch import nn

from cl_train.measure.operator_times import time_operators
from cl_train.memory_format import audit as layout
from cl_train.memory_format.audit_report import LayoutReport
from cl_train.step.precision import Precision


def audit(
    model: nn.Module,
    batch: Any,
    *,
    precision: Precision | str = "fp32",
    loss: layout.LossFunction | None = None,
    output: str | int | None = None,
    backward: bool = True,
    measure: bool = False,
    time: bool = False,
    time_limit_s: float = 30.0,
    name: str | None = None,
) -> LayoutReport:
    """Run one step of `model` on `batch` and report which operator calls kept, lost and restored
    channels_last.

    Weights, buffers, gradients and the random state are restored afterwards.

    Args:
        model: any module, in the mode (train or eval) and the memory format to audit.
        batch: as in `compare_layouts`, or a list of images [C,H,W] (detection). The first tensor of
            4 ([N,C,H,W]) or 5 dimensions ([N,C,D,H,W]) tells how many an image has.
        precision: as in `compare_layouts`; fp32: the tensors' own dtypes, no autocast.
        loss, output: as in `compare_layouts`; default: the mean square of the output.
        backward: False: forward only, without gradients.
        measure: also time the step, and one permuting copy, from which each call's milliseconds
            follow by its bytes.
        time: also time every operator of the step, with an SGD update, of copies in both layouts.
        time_limit_s: of all rounds of `time`; at least four are measured.
        name: of the model, for the report.

    Raises:
        ConfigError: the batch holds no image; the model is lazy, failed or crashed on the batch; no
            scalar loss.
    """
    report = layout.audit(
        model,
        batch,
        precision=precision,
        loss=loss,
        output=output,
        backward=backward,
        measure=measure,
        time_operators=partial(time_operators, time_limit_s=time_limit_s) if time else None,
        name=name,
    )
    if report.times:
        report.times.charge(report.inherited())
    return report
