"""The audit: one forward and backward step of a model, and the operators in it that lose channels_last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from cl_train.config.schema import ConfigError
from cl_train.memory_format.audit_report import Call, LayoutReport
from cl_train.memory_format.layout import CHANNELS_LAST, classify, model_memory_format
from cl_train.memory_format.model_call import call_model, explain_failure, output_tensors
from cl_train.memory_format.operator_recorder import OperatorRecorder
from cl_train.step.precision import Precision, autocast

LossFunction = Callable[[Any], torch.Tensor]

_TIMED_REPEATS = 3


def audit(
    model: nn.Module,
    batch: Any,
    *,
    precision: Precision | None = None,
    loss: LossFunction | None = None,
    output: str | int | None = None,
    backward: bool = True,
    measure: bool = False,
    name: str | None = None,
) -> LayoutReport:
    """Run one step of `model` on `batch` and report which operator calls kept, lost and restored channels_last.

    Weights, buffers, gradients and the random state are restored afterwards.

    Args:
        model: any module, in the mode (train or eval) and the memory format to be judged.
        batch: the model's input, or a tuple or list of its inputs, or a dict of its keyword arguments. The first tensor
            of 4 ([N,C,H,W]) or 5 dimensions ([N,C,D,H,W]) decides how many dimensions an image has.
        precision: of the step; None: fp32 (the tensors' own dtypes, no autocast).
        loss: a function of the model's output that returns a scalar; None: the mean square of all its floating-point
            tensors, or of those of `output`.
        output: without `loss`, the entry of the output to use: a dict's key, an attribute, or a tuple's index.
        backward: False: forward only, without gradients.
        measure: also time the step, and each permuting copy on its own, in milliseconds.
        name: of the model, for the report.

    Raises:
        ConfigError: the batch holds no image; the model is lazy, or failed on the batch; no scalar loss.
    """
    precision = precision or Precision("fp32")
    image = _first_image(model, batch)

    def step() -> None:
        with autocast(precision, image.device), nullcontext() if backward else torch.no_grad():
            result = call_model(model, batch)
            scalar = None
            if loss is not None:
                scalar = loss(result)
            elif backward:
                scalar = mean_square(output_tensors(result, output))
        if scalar is not None and (not isinstance(scalar, torch.Tensor) or scalar.numel() != 1):
            raise ConfigError("the loss must be a scalar tensor; reduce it with .mean() or .sum()")
        if backward and scalar is not None and scalar.requires_grad:  # False if all parameters are frozen
            scalar.backward()

    recorder = OperatorRecorder(model, image.dim())
    step_ms = None
    with _state_restored(model, image.device):
        try:
            with recorder.module_hooks(), recorder:
                step()
            if measure:
                step_ms = _step_ms(step, image.device)
        except ConfigError:
            raise
        except Exception as error:  # the model is the user's code
            raise ConfigError(f"the model failed on {describe(image)}: {explain_failure(error)}") from error
    report = LayoutReport(
        name or type(model).__name__,
        model_memory_format(model),
        describe(image),
        precision.name,
        str(image.device),
        torch.__version__,
        recorder.merged_calls(),
        recorder.step_bytes,
        step_ms,
    )
    if measure:
        _time_copies(report, image.device)
    return report


def describe(tensor: torch.Tensor) -> str:
    """For instance "channels_last float32 [8, 3, 224, 224]"."""
    return f"{classify(tensor)} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def mean_square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A loss whose gradient has the output's strides; the gradient of a plain mean is expanded (stride 0)."""
    return torch.stack([tensor.abs().float().square().sum() / max(tensor.numel(), 1) for tensor in tensors]).sum()


def _first_image(model: nn.Module, batch: Any) -> torch.Tensor:
    lazy = [
        name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if nn.parameter.is_lazy(tensor)
    ]
    if lazy:
        raise ConfigError(f"{lazy[0]} is lazy and has no shape yet: run one batch through the model, then audit it")
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor) and tensor.dim() in CHANNELS_LAST:
            return tensor
    raise ConfigError("the batch holds no tensor of 4 or 5 dimensions, [N,C,H,W] or [N,C,D,H,W]")


@contextmanager
def _state_restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore gradients, buffers and the random state at the end."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    is_strided = buffer.layout == torch.strided
                    if not buffer.is_meta and not (is_strided and torch.equal(buffer, value)):
                        buffer.copy_(value)


def _step_ms(step: Callable[[], None], device: torch.device) -> float:
    """Median of a few steps after one for warm-up."""
    times = [_elapsed_ms(step, device) for _ in range(1 + _TIMED_REPEATS)]
    return sorted(times[1:])[_TIMED_REPEATS // 2]


def _time_copies(report: LayoutReport, device: torch.device) -> None:
    """Time one permuting copy for each kind of tensor that was moved, and note it with the calls."""
    known: dict[tuple[str, tuple[int, ...], int], float] = {}
    for call in report.calls:
        if call.moved_bytes and len(call.shape) in CHANNELS_LAST:
            key = (call.dtype, call.shape, call.moved_bytes)
            if key not in known:
                known[key] = _copy_ms(call, device)
            call.copy_ms = known[key]


def _copy_ms(call: Call, device: torch.device) -> float:
    """Minimum of a few copies, scaled by bytes: the tensors that moved may differ from the one shown (a weight)."""
    memory_format = CHANNELS_LAST[len(call.shape)]
    tensor = torch.empty(call.shape, dtype=getattr(torch, call.dtype), device=device, memory_format=memory_format)
    copies = [lambda: tensor.clone(memory_format=torch.contiguous_format)] * _TIMED_REPEATS
    fastest = min(_elapsed_ms(copy, device) for copy in copies)
    return fastest * call.moved_bytes / (2 * tensor.numel() * tensor.element_size())


def _elapsed_ms(work: Callable[[], object], device: torch.device) -> float:
    """The host waits for the device before and after `work`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - start)
