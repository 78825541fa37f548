"""The graphs of a compiled model that inductor converts to channels_last, regardless of the layout of the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")


def compiled_graphs(
    model: nn.Module, step: Callable[[nn.Module], torch.Tensor], backward: bool = True
) -> list[dict[str, Any]]:
    """Trace `step(model)`, which returns a scalar, and ask inductor for its decision on each graph.

    The rows have `graph`, `direction` (forward, backward, or inference without gradients), `nodes`, `convolutions` and
    `channels_last`.

    The graphs run without code generation, so no compiler is needed. Inference has other rules than training.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import lowering  # noqa: F401  (its decompositions are registered on import)
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering

    found: list[dict[str, Any]] = []

    def compiler(direction: str) -> Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]:
        def compile_graph(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
            nodes = list(graph.graph.nodes)
            convolutions = sum(str(node.target) in CONVOLUTIONS for node in nodes)
            chosen = bool(GraphLowering.decide_layout_opt(graph, is_inference=direction == "inference"))
            row = {"graph": len(found), "direction": direction, "nodes": len(nodes), "convolutions": convolutions}
            found.append(row | {"channels_last": chosen})
            return make_boxed_func(graph.forward)

        return compile_graph

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
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
