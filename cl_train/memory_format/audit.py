"""The audit: one step of a model, and the operators in it that lose channels_last."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from cl_train.errors import ConfigError
from cl_train.memory_format.audit_report import Call, LayoutReport, grouped
from cl_train.memory_format.crashes import refuse_known_crash
from cl_train.memory_format.layout import classify, model_memory_format, refuse_lazy
from cl_train.memory_format.layout_recorder import LayoutRecorder
from cl_train.memory_format.model_call import call_model, mean_square, output_tensors, tensors_in
from cl_train.step.backup import state_restored
from cl_train.step.precision import Precision, autocast, resolve_precision
from cl_train.system.failures import failure_explained
from cl_train.system.machine import step_times_s, timed_s

LossFunction = Callable[[Any], torch.Tensor]

_SAME_CALL = (
    "operator", "direction", "outcome", "module", "source", "shape", "dtype", "inputs", "cause",
)  # fmt: skip


def audit(
    model: nn.Module,
    batch: Any,
    *,
    precision: Precision | str = "fp32",
    loss: LossFunction | None = None,
    output: str | int | None = None,
    backward: bool = True,
    measure: bool = False,
    time_operators: Callable[..., Any] | None = None,
    name: str | None = None,
) -> LayoutReport:
    """As `cl_train.audit`, which explains them; `time_operators` is called with the step."""
    refuse_lazy(model)
    images = _first_images(batch)
    device = images.device
    if isinstance(precision, str):
        precision = resolve_precision(precision, device)
    scalar_loss = loss or (lambda result: mean_square(output_tensors(result, output)))
    forward = partial(_forward, precision, device, scalar_loss if backward else None)
    order, memory_format = classify(images), model_memory_format(model)
    described = f"{order} {str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
    facts = (memory_format, described, precision.name, str(device), torch.__version__)
    report = LayoutReport(name or type(model).__name__, *facts)

    def step() -> None:
        if (scalar := forward(model, batch)) is not None:
            scalar.backward()

    remedy = "check the shape, dtype and device of the batch"
    explained = failure_explained(f"the model failed on {described}", remedy)
    with explained, state_restored(model, device):
        is_contiguous = order == memory_format == "contiguous"
        if backward and (time_operators is not None or not is_contiguous):
            refuse_known_crash(model, lambda: forward(model, batch))
        with recording(report):
            step()
        if measure:
            steps_s = [timed_s(step, device) for _ in range(4)]
            report.step_ms = 1000 * median(steps_s[1:])  # after the warm-up
            report.copy_ms_per_byte = copy_ms_per_byte(device)
        model.zero_grad(set_to_none=True)
        if time_operators:
            report.times = time_operators(model, batch, forward, precision, device)
    return report


@contextmanager
def recording(report: LayoutReport) -> Iterator[None]:
    """Adds the calls of one step, which the block runs, to `report`."""
    calls: list[Call] = []
    with LayoutRecorder(calls.append) as recorder:
        yield
    report.calls = [replace(group[0], count=len(group)) for group in grouped(calls, *_SAME_CALL)]
    report.step_bytes = recorder.step_bytes


def _first_images(batch: Any) -> torch.Tensor:
    """The first tensor of 4 or 5 dimensions of a model's input; else the first image [C,H,W]."""
    tensors = sorted(tensors_in(batch), key=lambda tensor: tensor.dim() == 3)
    images = next((tensor for tensor in tensors if tensor.dim() in (3, 4, 5)), None)
    if images is None:
        what = "no tensor of 4 or 5 dimensions, [N,C,H,W], nor of 3, [C,H,W]"
        raise ConfigError(f"the batch holds no images: {what}")
    return images


def _forward(
    precision: Precision,
    device: torch.device,
    loss: LossFunction | None,
    model: nn.Module,
    batch: Any,
) -> torch.Tensor | None:
    """The scalar loss; None without `loss` (and gradients), or if all parameters are frozen."""
    with autocast(precision, device), nullcontext() if loss else torch.no_grad():
        result = call_model(model, batch)
        if loss is None:
            return None
        scalar = loss(result)
    if not isinstance(scalar, torch.Tensor) or scalar.numel() != 1:
        raise ConfigError("the loss must be a scalar tensor; reduce it with .mean() or .sum()")
    return scalar if scalar.requires_grad else None


def copy_ms_per_byte(device: torch.device) -> float:
    """Milliseconds for each byte that a copy into the other layout reads or writes."""
    # On a GPU 0.3 GB, because copying them takes longer than the launch.
    image = torch.zeros(256 if device.type == "cuda" else 2, 64, 64, 64, device=device)
    copies_s = step_times_s(lambda: image.clone(memory_format=torch.channels_last), 9, device)
    return 1000 * median(copies_s) / (2 * image.nbytes)
