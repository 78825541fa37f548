"""What torch itself does: which operators keep channels_last, by small probes; which graphs inductor converts to it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cl_train.memory_format.layout import classify

SHAPE = (2, 8, 8, 8)  # every dimension above 1, so that no probe is ambiguous


def _ones(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=x.dtype, device=x.device)


def _weight(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return _ones(x, *shape).to(memory_format=torch.channels_last)


def _called_with(name: str, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: getattr(F, name)(x, number)


_ELEMENTWISE = (
    "relu", "relu6", "leaky_relu", "elu", "gelu", "silu", "mish", "hardswish", "hardsigmoid", "hardtanh", "softplus",
    "logsigmoid", "softsign", "tanhshrink", "dropout", "dropout2d",
)  # fmt: skip
_METHODS = ("sigmoid", "tanh", "exp", "sin", "erf", "neg", "contiguous", "clone", "double")
_WITH_A_NUMBER = {
    "max_pool2d": 2, "avg_pool2d": 2, "adaptive_avg_pool2d": 3, "adaptive_max_pool2d": 3, "local_response_norm": 3,
    "glu": 1, "softmax": 1, "log_softmax": 1, "pixel_shuffle": 2, "pixel_unshuffle": 2, "channel_shuffle": 2,
}  # fmt: skip
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic")

PROBES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(F, name) for name in (*_ELEMENTWISE, "normalize", "instance_norm")},
    **{name: getattr(torch.Tensor, name) for name in _METHODS},
    **{name: _called_with(name, number) for name, number in _WITH_A_NUMBER.items()},
    **{f"pad, {mode}": partial(F.pad, pad=(1, 1, 1, 1), mode=mode) for mode in ("constant", "reflect", "replicate")},
    **{f"interpolate {mode}": partial(F.interpolate, scale_factor=2, mode=mode) for mode in _INTERPOLATIONS},
    "conv2d 3x3": lambda x: F.conv2d(x, _weight(x, 8, 8, 3, 3), padding=1),
    "conv2d 1x1": lambda x: F.conv2d(x, _weight(x, 8, 8, 1, 1)),
    "conv2d strided": lambda x: F.conv2d(x, _weight(x, 8, 8, 3, 3), stride=2),
    "conv2d dilated": lambda x: F.conv2d(x, _weight(x, 8, 8, 3, 3), padding=2, dilation=2),
    "conv2d grouped": lambda x: F.conv2d(x, _weight(x, 8, 2, 3, 3), padding=1, groups=4),
    "conv2d depthwise": lambda x: F.conv2d(x, _weight(x, 8, 1, 3, 3), padding=1, groups=8),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, _weight(x, 8, 8, 3, 3), stride=2),
    "batch_norm, training": lambda x: F.batch_norm(x, None, None, _ones(x, 8), _ones(x, 8), training=True),
    "batch_norm, evaluation": lambda x: F.batch_norm(x, _ones(x, 8), _ones(x, 8), _ones(x, 8), _ones(x, 8)),
    "group_norm": lambda x: F.group_norm(x, 2, _ones(x, 8), _ones(x, 8)),
    "layer_norm over channels": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2),
    "layer_norm over an image": lambda x: F.layer_norm(x, SHAPE[1:]),
    "lp_pool2d": lambda x: F.lp_pool2d(x.abs() + 1, 2, 2),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x, 2, output_size=4),
    "relu_": lambda x: F.relu_(x * 1),
    "prelu": lambda x: F.prelu(x, _ones(x, 8)),
    "add": lambda x: x + x.flip(0),
    "add_": lambda x: (x * 1).add_(x),
    "mul by a channel's scale": lambda x: x * _ones(x, 8).view(1, 8, 1, 1),
    "div": lambda x: x / (x.abs() + 1),
    "pow": lambda x: x.pow(2),
    "sqrt": lambda x: (x.abs() + 1).sqrt(),
    "clamp": lambda x: x.clamp(-1, 1),
    "where": lambda x: torch.where(x > 0, x, -x),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack, flattened": lambda x: torch.stack([x, x], 2).flatten(1, 2),
    "chunk": lambda x: x.chunk(2, 1)[0],
    "split and cat": lambda x: torch.cat(x.split(4, 1)[::-1], 1),
    "slice of the image": lambda x: x[:, :, 1:-1, 1:-1],
    "index_select": lambda x: x.index_select(1, torch.arange(4, device=x.device)),
    "flip": lambda x: x.flip(3),
    "roll": lambda x: x.roll(1, 2),
    "grid_sample": lambda x: F.grid_sample(x, _ones(x, 2, 8, 8, 2), align_corners=False),
    "reshape over five dimensions": lambda x: x.view(2, 2, 4, 8, 8).transpose(1, 2).reshape(SHAPE),
    "fold of unfold": lambda x: F.fold(F.unfold(x, 2, stride=2), (8, 8), 2, stride=2),
    "mean over the image, kept": lambda x: x - x.mean((2, 3), keepdim=True),
    "sum over channels, kept": lambda x: x - x.sum(1, keepdim=True),
    "cumsum": lambda x: x.cumsum(2),
    "empty_like, filled": lambda x: torch.empty_like(x).copy_(x),
}


def operator_support(device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """One row per probe: the format of its output, and of its input's gradient when its output's is channels_last.

    "error": the operator does not support the dtype on the device, or has no backward pass.
    """
    rows = []
    for name, probe in PROBES.items():
        x = torch.randn(SHAPE, device=device).to(dtype, memory_format=torch.channels_last).requires_grad_()
        row = {"operator": name, "forward": "error", "backward": "error"}
        try:
            output = probe(x)
            row["forward"] = classify(output)
            gradient = torch.randn(output.shape, device=device).to(output.dtype, memory_format=torch.channels_last)
            # not .backward(), which gives a leaf's gradient the strides of the leaf
            row["backward"] = classify(torch.autograd.grad(output, x, gradient)[0])
        except RuntimeError:  # torch's "not implemented for"
            pass
        rows.append(row)
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
        found.append({**row, "channels_last": bool(is_laid_out)})
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
