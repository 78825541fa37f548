"""The audit: one step of a model, and the operators in it that lose channels_last."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from cl_train.config.schema import ConfigError
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
    dtype = str(images.dtype).removeprefix("torch.")
    described = f"{classify(images)} {dtype} {list(images.shape)}"
    report = LayoutReport(
        name or type(model).__name__,
        model_memory_format(model),
        described,
        precision.name,
        str(device),
        torch.__version__,
    )

    def step() -> None:
        if (scalar := forward(model, batch)) is not None:
            scalar.backward()

    remedy = "check the shape, dtype and device of the batch"
    explained = failure_explained(f"the model failed on {described}", remedy)
    is_contiguous = classify(images) == model_memory_format(model) == "contiguous"
    with explained, state_restored(model, device):
        if backward and (time_operators is not None or not is_contiguous):
            refuse_known_crash(model, lambda: forward(model, batch))
        with recording(report):
            step()
        if measure:
            warm_up_and_steps_s = [timed_s(step, device) for _ in range(4)]
            report.step_ms = 1000 * median(warm_up_and_steps_s[1:])
            ms_per_byte = copy_ms_per_byte(device)
            for call in report.calls:
                call.copy_ms = ms_per_byte * call.moved_bytes
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
        raise ConfigError(
            "the batch holds no images: no tensor of 4 or 5 dimensions, [N,C,H,W], nor of 3, "
            "[C,H,W]"
        )
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
    # On a GPU 0.3 GB: copies of which take longer than their launch.
    image = torch.zeros(256 if device.type == "cuda" else 2, 64, 64, 64, device=device)
    copies_s = step_times_s(lambda: image.clone(memory_format=torch.channels_last), 9, device)
    return 1000 * median(copies_s) / (2 * image.nbytes)


def compiled_graphs(
    model: nn.Module, step: Callable[[nn.Module], torch.Tensor], backward: bool = True
) -> list[dict[str, Any]]:
    """Trace `step(model)`, which returns a scalar, and ask inductor for its decision on each graph.

    Graphs run without code generation, so no compiler is needed. Inference without gradients is a
    direction beside forward and backward, with rules of its own.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import lowering  # noqa: F401  (its decompositions are registered on import)
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering

    graphs: list[dict[str, Any]] = []

    def traced(direction: str, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        is_laid_out = GraphLowering.decide_layout_opt(graph, is_inference=direction == "inference")
        nodes = [str(node.target) for node in graph.graph.nodes]
        row = {
            "graph": len(graphs),
            "direction": direction,
            "nodes": len(nodes),
            "convolutions": sum(node.startswith("aten.convolution") for node in nodes),
            "channels_last": bool(is_laid_out),
        }
        graphs.append(row)
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
    return graphs
