"""The graphs of a compiled model that inductor converts to channels_last, regardless of the layout of the input."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")


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

    def traced(direction: str, graph: torch.fx.GraphModule) -> Callable[..., Any]:
        nodes = graph.graph.nodes
        row = {
            "graph": len(found),
            "direction": direction,
            "nodes": len(nodes),
            "convolutions": sum(str(node.target) in _CONVOLUTIONS for node in nodes),
            "channels_last": bool(GraphLowering.decide_layout_opt(graph, is_inference=direction == "inference")),
        }
        found.append(row)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: traced("forward", graph),
        bw_compiler=lambda graph, _: traced("backward", graph),
        inference_compiler=lambda graph, _: traced("inference", graph),
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
