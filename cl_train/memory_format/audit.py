"""The audit: one step of a model, and the operators in it that lose channels_last; probes of torch's operators."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.memory_format.audit_report import Call, LayoutReport, grouped
from cl_train.memory_format.crashes import crash_safe
from cl_train.memory_format.layout import classify, model_memory_format, refuse_lazy
from cl_train.memory_format.model_call import (
    call_model,
    failure_explained,
    mean_square,
    output_tensors,
    state_restored,
    tensors_in,
)
from cl_train.memory_format.operator_recorder import OperatorRecorder
from cl_train.memory_format.operator_times import copy_ms_per_byte, time_operators
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

    Args:
        model: any module, in the mode (train or eval) and the memory format to audit.
        batch: the model's input; a tuple, list or dict of its inputs; or a list of images [C,H,W] (detection). The
            first tensor of 4 ([N,C,H,W]) or 5 dimensions ([N,C,D,H,W]) tells how many dimensions an image has.
        precision: of the step; None: fp32 (the tensors' own dtypes, no autocast).
        loss: returns a scalar from the model's output; None: mean square of its floating-point tensors, or of `output`.
        output: without `loss`, the entry of the output to use: a dict's key, an attribute, or a tuple's index.
        backward: False: forward only, without gradients.
        measure: also time the step, and one permuting copy, from which each call's milliseconds follow by its bytes.
        time: also time every operator of the step, with an SGD update, in both layouts, for about `time_limit_s`.
        name: of the model, for the report.

    Weights, buffers, gradients and the random state are restored afterwards.
    Raises ConfigError: the batch holds no image; the model is lazy, failed or crashed on the batch; no scalar loss.
    """
    precision = precision or Precision("fp32")
    refuse_lazy(model)
    images = _first_images(batch)
    device = images.device
    scalar_loss = loss or (lambda result: mean_square(output_tensors(result, output)))
    forward = partial(_forward, model, precision, device, scalar_loss if backward else None)
    described = f"{classify(images)} {str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
    where = (precision.name, str(device), torch.__version__)
    report = LayoutReport(name or type(model).__name__, model_memory_format(model), described, *where)
    calls: list[Call] = []
    recorder = OperatorRecorder(calls.append, max(images.dim(), 4))

    def step() -> None:
        if (scalar := forward(batch)) is not None:
            scalar.backward()

    explained = failure_explained(f"the model failed on {described}", "check the shape, dtype and device of the batch")
    with explained, state_restored(model, device):
        with recorder:
            step()
        if measure:
            report.step_ms = 1000 * median([timed_s(step, device) for _ in range(4)][1:])  # the first warms up
            ms_per_byte = copy_ms_per_byte(device)
            calls = [replace(call, copy_ms=ms_per_byte * call.moved_bytes) for call in calls]
        model.zero_grad(set_to_none=True)
        if time:
            report.times = time_operators(model, batch, forward, precision, device, time_limit_s)
    report.calls = [replace(group[0], count=len(group)) for group in grouped(calls, *_SAME_CALL)]
    report.step_bytes = recorder.step_bytes
    return report


def _first_images(batch: Any) -> torch.Tensor:
    """The first tensor of 4 or 5 dimensions of a model's input; else the first image [C,H,W]."""
    tensors = sorted(tensors_in(batch), key=lambda tensor: tensor.dim() == 3)
    images = next((tensor for tensor in tensors if tensor.dim() in (3, 4, 5)), None)
    if images is None:
        raise ConfigError("the batch holds no images: no tensor of 4 or 5 dimensions, [N,C,H,W], nor of 3, [C,H,W]")
    return images


def _forward(
    model: nn.Module, precision: Precision, device: torch.device, loss: LossFunction | None, batch: Any
) -> torch.Tensor | None:
    """The scalar loss of a batch; None without a loss (and then without gradients), or if all parameters are frozen."""
    with autocast(precision, device), nullcontext() if loss else torch.no_grad():
        result = call_model(model, batch)
        if loss is None:
            return None
        scalar = loss(result)
    if not isinstance(scalar, torch.Tensor) or scalar.numel() != 1:
        raise ConfigError("the loss must be a scalar tensor; reduce it with .mean() or .sum()")
    return scalar if scalar.requires_grad else None


SHAPE = (2, 8, 8, 8)  # every dimension above 1, so that no probe is ambiguous
# Expressions of x, with torch, its functional `F`, ones(*shape), and weight(*shape) in channels_last.
PROBES = (
    "F.conv2d(x, weight(8, 8, 3, 3), padding=1)", "F.conv2d(x, weight(8, 8, 1, 1))",
    "F.conv2d(x, weight(8, 8, 3, 3), stride=2)", "F.conv2d(x, weight(8, 8, 3, 3), padding=2, dilation=2)",
    "F.conv2d(x, weight(8, 2, 3, 3), padding=1, groups=4)", "F.conv2d(x, weight(8, 1, 3, 3), padding=1, groups=8)",
    "F.conv_transpose2d(x, weight(8, 8, 3, 3), stride=2)",
    "F.batch_norm(x, None, None, ones(8), ones(8), training=True)", "F.batch_norm(x, *(ones(8),) * 4)",
    "F.group_norm(x, 2, ones(8), ones(8))", "F.layer_norm(x, x.shape[1:])", "F.local_response_norm(x, 3)",
    "F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2)", "F.relu_(x * 1)", "F.prelu(x, ones(8))",
    "F.instance_norm(x)", "F.normalize(x)", "F.relu(x)", "F.leaky_relu(x)", "F.elu(x)", "F.gelu(x)", "F.silu(x)",
    "F.mish(x)", "F.hardswish(x)", "F.hardsigmoid(x)", "F.hardtanh(x)", "F.softplus(x)", "F.dropout(x)",
    "F.dropout2d(x)", "F.glu(x, 1)", "F.softmax(x, 1)", "F.log_softmax(x, 1)", "x.sigmoid()", "x.clamp(-1, 1)",
    "x + x.flip(0)", "(x * 1).add_(x)", "x * ones(8).view(1, 8, 1, 1)", "torch.where(x > 0, x, -x)",
    "x - x.mean((2, 3), keepdim=True)", "x - x.sum(1, keepdim=True)", "x.cumsum(2)",
    "F.max_pool2d(x, 2)", "F.avg_pool2d(x, 2)", "F.lp_pool2d(x.abs() + 1, 2, 2)", "F.adaptive_avg_pool2d(x, 3)",
    "F.adaptive_max_pool2d(x, 3)", "F.fractional_max_pool2d(x, 2, output_size=4)",
    "F.pad(x, (1, 1, 1, 1))", "F.pad(x, (1, 1, 1, 1), mode='reflect')", "F.pad(x, (1, 1, 1, 1), mode='replicate')",
    "F.interpolate(x, scale_factor=2)", "F.interpolate(x, scale_factor=2, mode='bilinear')",
    "F.interpolate(x, scale_factor=2, mode='bicubic')", "F.grid_sample(x, ones(2, 8, 8, 2), align_corners=False)",
    "F.pixel_shuffle(x, 2)", "F.pixel_unshuffle(x, 2)", "F.channel_shuffle(x, 2)",
    "x.contiguous()", "x.clone()", "x.double()", "torch.empty_like(x).copy_(x)", "torch.cat([x, x], 1)",
    "torch.stack([x, x], 2).flatten(1, 2)", "x.chunk(2, 1)[0]", "torch.cat(x.split(4, 1)[::-1], 1)",
    "x[:, :, 1:-1, 1:-1]", "x.index_select(1, torch.arange(4, device=x.device))", "x.flip(3)", "x.roll(1, 2)",
    "x.view(2, 2, 4, 8, 8).transpose(1, 2).reshape(x.shape)",
)  # fmt: skip


def probe(expression: str, x: torch.Tensor) -> torch.Tensor:
    ones = partial(torch.ones, dtype=x.dtype, device=x.device)
    names = {"x": x, "F": F, "torch": torch, "ones": ones}
    return eval(expression, {**names, "weight": lambda *shape: ones(*shape).to(memory_format=torch.channels_last)})


def operator_support(device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """One row per probe: the format of its output, and of its input's gradient when its output's is channels_last.

    "error": the operator does not support the dtype on the device, or has no backward pass.
    """
    rows = []
    for expression in PROBES:
        x = torch.randn(SHAPE, device=device).to(dtype, memory_format=torch.channels_last).requires_grad_()
        rows.append(row := {"operator": expression, "forward": "error", "backward": "error"})
        with suppress(RuntimeError):  # torch's "not implemented for"
            output = probe(expression, x)
            row["forward"] = classify(output)
            gradient = torch.randn(output.shape, device=device).to(output.dtype, memory_format=torch.channels_last)
            # not .backward(), which gives a leaf's gradient the strides of the leaf
            row["backward"] = classify(torch.autograd.grad(output, x, gradient)[0])
    return rows


def compiled_graphs(
    model: nn.Module, step: Callable[[nn.Module], torch.Tensor], backward: bool = True
) -> list[dict[str, Any]]:
    """Trace `step(model)`, which returns a scalar, and ask inductor for its decision on each graph.

    Graphs run without code generation, so no compiler is needed. The rows have `graph`, `direction` (forward, backward,
    or inference without gradients, which has rules of its own), `nodes`, `convolutions` and `channels_last`.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import lowering  # noqa: F401  (its decompositions are registered on import)
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering

    found: list[dict[str, Any]] = []

    def traced(direction: str, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        is_laid_out = GraphLowering.decide_layout_opt(graph, is_inference=direction == "inference")
        nodes = [str(node.target) for node in graph.graph.nodes]
        convolutions = sum(node.startswith("aten.convolution") for node in nodes)
        row = {"graph": len(found), "direction": direction, "nodes": len(nodes), "convolutions": convolutions}
        found.append(row | {"channels_last": bool(is_laid_out)})
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=partial(traced, "forward"),
        bw_compiler=partial(traced, "backward"),
        inference_compiler=partial(traced, "inference"),
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    try:
        with torch.set_grad_enabled(backward):
            scalar = step(torch.compile(model, backend=backend))  # type: ignore[arg-type]
            if backward:
                scalar.backward()
    finally:
        torch._dynamo.reset()
    return found
