"""How fast a network can train on a machine, from the sizes of its layers: bytes, operations, images per second.

    python -c "from torchvision.models import *; from benchmarks.roofline import *; print(roofline(resnet50(), H200))"

A training step is a chain of kernels that each read and write whole activations. Per image, with the weights shared by
the batch, a kernel takes at least max(operations / peak, bytes / bandwidth); a step takes at least the sum over its
kernels. Assumed: every operand crosses the memory bus once per kernel, and nothing stays in a cache.

| pattern | BatchNorm, ReLU and addition |
|---------|------------------------------|
| eager   | each a kernel of its own, forward and backward |
| fused   | one pass for the statistics, one that normalises, adds and rectifies; two passes backward |
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

PATTERNS = ("eager", "fused")
_ADD = ("add", "add_", "iadd")
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU)


@dataclass(frozen=True)
class Kernel:
    """One pass over memory, per image."""

    name: str  # "layer1.0.conv1 conv forward"
    kind: str
    bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Machine:
    """What a device can do: from its data sheet, or measured."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Roofline:
    """What one training step costs per image, and the speed at 100 % of both peaks."""

    megabytes: float
    gigaflops: float
    images_per_s: float
    megabytes_by_kind: dict[str, float]


H200 = Machine(989e12, 4.8e12)  # dense fp16 and HBM3e, by the data sheet


def roofline(
    model: nn.Module, machine: Machine, *, pattern: str = "eager", image_size: int = 224, element_bytes: int = 2
) -> Roofline:
    """The cost of training `model` with activations of `element_bytes`, per image.

    Raises:
        ValueError: torch.fx cannot trace the model.
    """
    kernels = training_kernels(model, pattern, image_size=image_size, element_bytes=element_bytes)
    by_kind: Counter[str] = Counter()
    for kernel in kernels:
        by_kind[kernel.kind] += kernel.bytes / 1e6  # type: ignore[assignment]
    seconds = sum(max(k.flops / machine.flops_per_s, k.bytes / machine.bytes_per_s) for k in kernels)
    return Roofline(sum(by_kind.values()), sum(k.flops for k in kernels) / 1e9, 1 / seconds, dict(by_kind))


def training_kernels(model: nn.Module, pattern: str, *, image_size: int = 224, element_bytes: int = 2) -> list[Kernel]:
    """The kernels of a training step: convolutions, BatchNorm, activations, additions, max-pools, sums of gradients.

    Left out: linear layers, which move weights that the batch shares; concatenations and average pools, a few percent.
    """
    assert pattern in PATTERNS, pattern
    network = _Network(model, image_size)
    return [
        Kernel(f"{node.target} {kind}", kind, elements * element_bytes, flops)
        for node in network.nodes
        for kind, elements, flops in network.kernels(node, pattern == "fused")
    ]


class _Network:
    """A traced model, and the passes over memory that each of its nodes stands for."""

    def __init__(self, model: nn.Module, image_size: int) -> None:
        shapes_only = copy.deepcopy(model).to("meta").eval()  # eval: no auxiliary classifiers, no dropout
        try:
            graph = fx.symbolic_trace(shapes_only)
            ShapeProp(graph).propagate(torch.empty(1, 3, image_size, image_size, device="meta"))
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"torch.fx cannot trace {type(model).__name__}: {error}") from error
        self.nodes = list(graph.graph.nodes)
        self._modules = dict(graph.named_modules())

    def kernels(self, node: fx.Node, fused: bool) -> Iterator[tuple[str, float, float]]:
        """(kind, elements moved, operations) of each kernel."""
        out, module = _elements(node), self._module(node)
        if isinstance(module, nn.Conv2d):
            yield from _convolution(module, node, out)
        elif isinstance(module, nn.BatchNorm2d):
            # Of two BatchNorms that are added, the first one's pass applies the second one too, and reads both.
            applied = 0 if self._is_added_shortcut(node) else 2 * out
            yield "batchnorm forward", out + applied if fused else 3 * out, 0
            yield "batchnorm backward", 5 * out, 0
        elif self._is_activation(node):
            if not (fused and self._follows_batchnorm(node)):
                yield "relu forward", 2 * out, 0
                yield "relu backward", 3 * out, 0
        elif _is_add(node):
            # Fused: BatchNorm's pass reads the shortcut, and both its backward passes read the mask of the ReLU.
            yield "add forward", out if fused else 3 * out, 0
            if fused:
                yield "add backward", 2 * out, 0
        elif isinstance(module, nn.MaxPool2d):
            source = _elements(_source(node))
            yield "pool", source + out, 0
            yield "pool", source + 2 * out, 0  # reads the gradient and the index
        readers = [user for user in node.users if not (user.op == "call_method" and user.target in ("size", "dim"))]
        if len(readers) > 1 and node.op != "placeholder" and out:  # the gradients of two branches are added
            yield "gradient sum", (2 if fused else 3) * out * (len(readers) - 1), 0

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self._modules.get(str(node.target)) if node.op == "call_module" else None

    def _is_activation(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self._module(node), _ACTIVATIONS)
        return node.op in ("call_function", "call_method") and "relu" in _name(node)

    def _is_batchnorm(self, node: object) -> bool:
        return isinstance(node, fx.Node) and isinstance(self._module(node), nn.BatchNorm2d)

    def _follows_batchnorm(self, node: fx.Node) -> bool:
        """Directly, or through the addition at a block's end."""
        return self._is_batchnorm(_source(node)) or _is_add(_source(node))

    def _is_added_shortcut(self, node: fx.Node) -> bool:
        additions = [user for user in node.users if _is_add(user)]
        return any(self._is_batchnorm(user.args[0]) and user.args[1] is node for user in additions)


def _convolution(conv: nn.Conv2d, node: fx.Node, out: int) -> Iterator[tuple[str, float, float]]:
    source = _source(node)
    strided_pointwise = conv.kernel_size == (1, 1)  # which reads only every second row and column at stride 2
    read = _elements(source) / (conv.stride[0] * conv.stride[1] if strided_pointwise else 1)
    flops = 2.0 * out * conv.in_channels // conv.groups * conv.kernel_size[0] * conv.kernel_size[1]
    yield "conv forward", read + out, flops
    yield "conv weight gradient", out + read, flops
    if source.op != "placeholder":  # the images need no gradient
        yield "conv input gradient", out + _elements(source), flops


def _elements(node: fx.Node) -> int:
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    return int(shape.numel()) if shape is not None else 0


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _is_add(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and _name(node) in _ADD and _elements(node) > 0


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source
