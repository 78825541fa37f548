"""The audit: one forward and backward step of a model, and the operators in it that lose channels_last."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.memory_format.audit_report import Call, LayoutReport, grouped
from cl_train.memory_format.crashes import crash_safe
from cl_train.memory_format.layout import CHANNELS_LAST, classify, model_memory_format, refuse_lazy, to_memory_format
from cl_train.memory_format.model_call import (
    call_model,
    failure_explained,
    mean_square,
    output_tensors,
    state_restored,
    tensors_in,
)
from cl_train.memory_format.operator_recorder import OperatorRecorder
from cl_train.memory_format.operator_times import time_operators
from cl_train.step.precision import Precision, autocast
from cl_train.system.machine import timed_s

LossFunction = Callable[[Any], torch.Tensor]

_SAME_CALL = ("operator", "direction", "outcome", "module", "source", "shape", "dtype", "inputs")


@crash_safe
def audit(
    model: nn.Module,
    batch: Any,
    *,
    precision: Precision | None = None,
    loss: LossFunction | None = None,
    output: str | int | None = None,
    backward: bool = True,
    measure: bool = False,
    time: bool = False,
    time_limit_s: float = 30.0,
    name: str | None = None,
) -> LayoutReport:
    """Run one step of `model` on `batch` and report which operator calls kept, lost and restored channels_last.

    Weights, buffers, gradients and the random state are restored afterwards.

    Args:
        model: any module, in the mode (train or eval) and the memory format to audit.
        batch: the model's input; a tuple, list or dict of its inputs; or a list of images [C,H,W] (detection). The
            first tensor of 4 ([N,C,H,W]) or 5 dimensions ([N,C,D,H,W]) tells how many dimensions an image has.
        precision: of the step; None: fp32 (the tensors' own dtypes, no autocast).
        loss: returns a scalar from the model's output; None: mean square of its floating-point tensors, or of `output`.
        output: without `loss`, the entry of the output to use: a dict's key, an attribute, or a tuple's index.
        backward: False: forward only, without gradients.
        measure: also time the step, and each permuting copy separately, in milliseconds.
        time: also time every operator of the step, with an SGD update, in both layouts (`operator_times`).
        time_limit_s: for `time`, without warm-up.
        name: of the model, for the report.

    Raises ConfigError: the batch holds no image; the model is lazy, failed or crashed on the batch; no scalar loss.
    """
    precision = precision or Precision("fp32")
    refuse_lazy(model)
    images = _first_images(batch)
    device = images.device
    own_loss = loss or (lambda result: mean_square(output_tensors(result, output)))
    forward = partial(_forward, model, precision, device, own_loss if backward else None)
    described = f"{classify(images)} {str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
    remedy = "check the shape, dtype and device of the batch"
    calls: list[Call] = []
    recorder = OperatorRecorder(calls.append, max(images.dim(), 4))
    step = partial(_step, forward, batch)
    where = (precision.name, str(device), torch.__version__)
    report = LayoutReport(name or type(model).__name__, model_memory_format(model), described, *where)
    with failure_explained(f"the model failed on {described}", remedy), state_restored(model, device):
        with recorder:
            step()
        if measure:
            report.step_ms = _median_ms(step, device)
        model.zero_grad(set_to_none=True)
        if time:
            report.times = time_operators(
                model, batch, forward, precision=precision, device=device, time_limit_s=time_limit_s
            )
    report.calls = [replace(group[0], count=len(group)) for group in grouped(calls, *_SAME_CALL)]
    report.step_bytes = recorder.step_bytes
    if measure:
        _time_copies(report.calls, device)
    return report


def _first_images(batch: Any) -> torch.Tensor:
    """The first tensor of 4 or 5 dimensions of a model's input; else the first image [C,H,W]."""
    for dimensions in ((4, 5), (3,)):
        for tensor in tensors_in(batch):
            if tensor.dim() in dimensions:
                return tensor
    raise ConfigError("the batch holds no tensor of 4 or 5 dimensions, [N,C,H,W] or [N,C,D,H,W], nor images [C,H,W]")


def _forward(
    model: nn.Module, precision: Precision, device: torch.device, loss: LossFunction | None, batch: Any
) -> torch.Tensor | None:
    """The scalar loss of a batch; None without a loss, and then without gradients."""
    with autocast(precision, device), nullcontext() if loss else torch.no_grad():
        result = call_model(model, batch)
        if loss is None:
            return None
        scalar = loss(result)
    if not isinstance(scalar, torch.Tensor) or scalar.numel() != 1:
        raise ConfigError("the loss must be a scalar tensor; reduce it with .mean() or .sum()")
    return scalar


def _step(forward: Callable[[Any], torch.Tensor | None], batch: Any) -> None:
    scalar = forward(batch)
    if scalar is not None and scalar.requires_grad:  # False if all parameters are frozen
        scalar.backward()


def _time_copies(calls: list[Call], device: torch.device) -> None:
    """Time one permuting copy per shape, scaled by bytes, because a weight may have been copied instead."""
    ms_per_byte: dict[tuple[str, tuple[int, ...]], float] = {}
    for call in calls:
        key = (call.dtype, call.shape)
        if not call.moved_bytes or len(call.shape) not in CHANNELS_LAST:
            continue
        if key not in ms_per_byte:
            image = torch.empty(call.shape, dtype=getattr(torch, call.dtype), device=device)
            copy = partial(to_memory_format(image, torch.channels_last).clone, memory_format=torch.contiguous_format)
            ms_per_byte[key] = _median_ms(copy, device) / (2 * image.nbytes)
        call.copy_ms = ms_per_byte[key] * call.moved_bytes


def _median_ms(work: Callable[[], object], device: torch.device) -> float:
    """Median of three runs after one for warm-up. The host waits for the device before and after each."""
    return 1000 * median([timed_s(work, device) for _ in range(4)][1:])
