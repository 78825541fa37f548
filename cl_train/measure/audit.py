"""Audits one step of a model: which operators in it lose channels_last, and what that costs."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from cl_train.errors import ConfigError
from cl_train.measure.operator_times import time_operators
from cl_train.measure.timed_step import LossFunction, Workload
from cl_train.memory_format.audit_report import LayoutReport
from cl_train.memory_format.layout import classify, model_memory_format, refuse_lazy
from cl_train.memory_format.layout_recorder import recording
from cl_train.memory_format.model_call import call_model, mean_square, output_tensors
from cl_train.models.facts import image_count, refuse_known_crash
from cl_train.step.backup import state_restored
from cl_train.step.precision import Precision, autocast, resolve_precision
from cl_train.step.train_step import StepSettings
from cl_train.system.failures import failure_explained
from cl_train.system.tensors import map_tensors, tensors_in
from cl_train.system.torch_state import own_torch_state


@own_torch_state
def audit(
    model: nn.Module,
    batch: Any,
    *,
    precision: Precision | str = "fp32",
    loss: LossFunction | None = None,
    output: str | int | None = None,
    backward: bool = True,
    time: bool = False,
    time_limit_s: float = 30.0,
    name: str | None = None,
) -> LayoutReport:
    """Report which operator calls of a step kept, lost and restored channels_last.

    Weights, buffers, gradients and the random state are restored.

    Args:
        model: any module, in the mode (train or eval) and the memory format to audit.
        batch: as in `compare_layouts`, or a list of images [C,H,W] (detection). The first tensor of
            4 ([N,C,H,W]) or 5 dimensions ([N,C,D,H,W]) tells how many an image has.
        precision: as in `compare_layouts`; fp32 keeps the tensors' own dtypes, without autocast.
        loss, output: as in `compare_layouts`; default: the mean square of the output.
        backward: run the backward pass; False: forward only, without gradients.
        time: also time every operator, in copies in both layouts: of a training step or, without
            a backward pass, of inference.
        time_limit_s: the limit of all rounds of `time`; at least four rounds are measured.
        name: the model's name in the report.

    Raises:
        ConfigError: the batch has no image; the loss is no scalar; the model is lazy, fails on the
            batch, or is known to crash on it.
    """
    refuse_lazy(model)
    # What was made in inference mode cannot be saved for a backward pass.
    batch = map_tensors(lambda value: value.clone() if value.is_inference() else value, batch)
    images = _first_images(batch)
    device = images.device
    if isinstance(precision, str):
        precision = resolve_precision(precision, device)
    loss = loss or (lambda result: mean_square(output_tensors(result, output)))
    report = LayoutReport(
        name or type(model).__name__,
        model_memory_format(model),
        f"{classify(images)} {str(images.dtype).removeprefix('torch.')} {list(images.shape)}",
        precision.name,
        str(device),
        torch.__version__,
    )
    remedy = "check the shape, dtype and device of the batch"
    explained = failure_explained(f"the model failed on {report.input}", remedy)
    with explained, state_restored(model, device):
        is_contiguous = classify(images) == report.model_memory_format == "contiguous"
        if backward and (time or not is_contiguous):
            refuse_known_crash(model, batch)
        with recording(report):
            with autocast(precision, device), nullcontext() if backward else torch.no_grad():
                result = call_model(model, batch)
                scalar = loss(result) if backward else None
            if scalar is not None and _checked(scalar).requires_grad:  # not if all is frozen
                scalar.backward()
        is_trained = any(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad(set_to_none=True)
        if time:
            shape, mode = tuple(images.shape[1:]), "train" if is_trained else "infer"
            settings = StepSettings(precision)
            workload = Workload(image_count(batch), shape, settings, device, mode, batch, loss)
            report.times = time_operators(model, workload, time_limit_s)
            report.times.charge(report.inherited())
    return report


def _first_images(batch: Any) -> torch.Tensor:
    """Returns the first tensor of 4 or 5 dimensions, else the first image [C,H,W]."""
    tensors = sorted(tensors_in(batch), key=lambda tensor: tensor.dim() == 3)
    images = next((tensor for tensor in tensors if tensor.dim() in (3, 4, 5)), None)
    if images is None:
        raise ConfigError("the batch holds no images: no tensor of 3, 4 or 5 dimensions")
    return images


def _checked(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigError("the loss must be a scalar tensor; reduce it with .mean() or .sum()")
    return loss
