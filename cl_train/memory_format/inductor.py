"""Which graphs of a compiled model inductor lays out channels_last by itself.

Inductor decides once per graph (`GraphLowering.decide_layout_opt`), regardless of the format of the user's tensors. The
model is traced as `torch.compile` does it and the graphs run without code generation, so no compiler is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")


@dataclass(frozen=True)
class CompiledGraph:
    """One graph of a compiled step. `reason`: inductor's own log message, if it wrote one."""

    graph: int
    direction: str  # forward or backward; "inference" without gradients
    nodes: int
    convolutions: int
    channels_last: bool
    reason: str


def compiled_graphs(
    model: nn.Module, step: Callable[[nn.Module], torch.Tensor], backward: bool = True
) -> list[CompiledGraph]:
    """Trace `step(model)`, which returns a scalar, and ask inductor which graphs it would lay out channels_last.

    Without `backward`, the graphs are those of inference, for which inductor has other rules.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import lowering  # noqa: F401  (its decompositions are registered on import)
    from torch._inductor.decomposition import select_decomp_table

    found: list[CompiledGraph] = []

    def compiler(direction: str) -> Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]:
        def compile_graph(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
            found.append(_decide(graph, direction, len(found)))
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


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _decide(graph: torch.fx.GraphModule, direction: str, number: int) -> CompiledGraph:
    from torch._inductor.graph import GraphLowering

    nodes = list(graph.graph.nodes)
    convolutions = sum(str(node.target) in CONVOLUTIONS for node in nodes)
    log, messages = logging.getLogger("torch._inductor.graph"), _Messages()
    level, propagate = log.level, log.propagate
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(messages)
    try:
        chosen = bool(GraphLowering.decide_layout_opt(graph, is_inference=direction == "inference"))
    finally:
        log.removeHandler(messages)
        log.setLevel(level)
        log.propagate = propagate
    reason = messages.texts[-1] if messages.texts and not chosen else ""
    return CompiledGraph(number, direction, len(nodes), convolutions, chosen, reason)
