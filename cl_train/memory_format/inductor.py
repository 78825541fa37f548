"""Which graphs of a compiled model inductor lays out channels_last by itself, and why not the others.

Inductor decides once per graph (`GraphLowering.decide_layout_opt`), whatever the layout of the user's tensors. The
model is traced and differentiated as `torch.compile` does it; the graphs are put to that decision, and run without code
generation, so this needs no compiler and takes seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

NO_CONVOLUTION = "it has no convolution"
MKLDNN = "on a CPU with oneDNN always"
CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")


@dataclass(frozen=True)
class CompiledGraph:
    """One graph of a compiled step."""

    graph: int
    direction: str  # forward or backward; "inference" without gradients
    nodes: int
    convolutions: int
    channels_last: bool
    reason: str


def compiled_graphs(
    model: nn.Module, step: Callable[[nn.Module], torch.Tensor], backward: bool = True
) -> list[CompiledGraph]:
    """Trace `step(model)`, a scalar, as torch.compile would, and ask inductor about the layout of each graph.

    Without `backward`, the graphs are those of inference, for which inductor has other rules.
    """
    found: list[CompiledGraph] = []

    def look_at(direction: str) -> Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]:
        def compiler(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
            found.append(_judge(graph, direction, len(found)))
            return make_boxed_func(graph.forward)

        return compiler

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import lowering  # noqa: F401  (its decompositions need it to be there)
    from torch._inductor.decomposition import select_decomp_table

    backend = aot_autograd(
        fw_compiler=look_at("forward"),
        bw_compiler=look_at("backward"),
        inference_compiler=look_at("inference"),
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    try:
        with torch.enable_grad() if backward else torch.no_grad():
            scalar = step(compiled)  # type: ignore[arg-type]
            if backward:
                scalar.backward()
    finally:
        torch._dynamo.reset()
    return found


class _Reasons(logging.Handler):
    """Collects what inductor says at debug level while it decides."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _judge(graph: torch.fx.GraphModule, direction: str, number: int) -> CompiledGraph:
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    nodes = list(graph.graph.nodes)
    convolutions = [node for node in nodes if str(node.target) in CONVOLUTIONS]
    log = logging.getLogger("torch._inductor.graph")
    level, propagate, reasons = log.level, log.propagate, _Reasons()
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(reasons)
    try:
        chosen = bool(GraphLowering.decide_layout_opt(graph, is_inference=direction == "inference"))
    finally:
        log.removeHandler(reasons)
        log.setLevel(level)
        log.propagate = propagate
    if not convolutions:
        reason = NO_CONVOLUTION
    elif not config.layout_optimization:
        reason = "TORCHINDUCTOR_LAYOUT_OPTIMIZATION=0"
    elif chosen:
        reason = MKLDNN if _onednn_decides(convolutions) else "no rule of inductor speaks against it"
    else:
        reason = reasons.said[-1] if reasons.said else "inductor gives no reason"
    return CompiledGraph(number, direction, len(nodes), len(convolutions), chosen, reason)


def _onednn_decides(convolutions: list[torch.fx.Node]) -> bool:
    first = convolutions[0].args[0]
    assert isinstance(first, torch.fx.Node)
    return bool(torch.backends.mkldnn.enabled) and first.meta["val"].device.type == "cpu"
