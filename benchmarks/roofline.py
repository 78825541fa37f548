"""How fast a network can train on a machine, from its layers' sizes alone: bytes moved, operations, images per second.

A convolutional network's step is a chain of kernels that each read and write whole activations. Per image and with the
weights amortised over the batch, a kernel takes at least max(operations / peak, bytes / bandwidth); the sum over the
kernels is the shortest step. Assumed: every operand crosses the memory bus once per kernel, nothing stays in cache.

Three ways to run the same network, by what is a kernel of its own:

| pattern | convolutions | BatchNorm, ReLU, addition |
|---------|--------------|---------------------------|
| eager   | one kernel each way | each a kernel of its own, forward and backward |
| fused   | same | statistics pass; one pass applies BatchNorm, adds and rectifies; two passes backward |
| in_conv | also take sums, apply the BatchNorm before them, and rectify | passes remain at the ends of blocks only |
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

PATTERNS = ("eager", "fused", "in_conv")
HALF = 2  # bytes of an fp16 or bf16 activation
_ADD = ("add", "add_", "iadd")
_RELU_MODULES = (nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU)


@dataclass(frozen=True)
class Kernel:
    """One pass over memory, per image."""

    what: str  # "layer1.0.conv1 forward"
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
    """What one training step costs per image."""

    megabytes: float
    gigaflops: float
    images_per_s: float  # at 100 % of both peaks
    megabytes_by_kind: dict[str, float]


H200 = Machine(989e12, 4.8e12)  # dense fp16 and HBM3e, by the data sheet


def roofline(
    model: nn.Module, machine: Machine, *, pattern: str = "eager", image_size: int = 224, element_bytes: int = HALF
) -> Roofline:
    """The cost of training `model`, per image.

    Raises:
        ValueError: torch.fx cannot follow the model.
    """
    kernels = training_kernels(model, pattern, image_size=image_size, element_bytes=element_bytes)
    by_kind: dict[str, float] = {}
    for kernel in kernels:
        by_kind[kernel.kind] = by_kind.get(kernel.kind, 0.0) + kernel.bytes / 1e6
    seconds = sum(max(k.flops / machine.flops_per_s, k.bytes / machine.bytes_per_s) for k in kernels)
    return Roofline(
        megabytes=sum(by_kind.values()),
        gigaflops=sum(kernel.flops for kernel in kernels) / 1e9,
        images_per_s=1 / seconds,
        megabytes_by_kind=by_kind,
    )


def training_kernels(
    model: nn.Module, pattern: str, *, image_size: int = 224, element_bytes: int = HALF
) -> list[Kernel]:
    """The kernels of one training step of a network of convolutions, BatchNorm, activations, additions and max-pools.

    Linear layers are left out: what they move is weights, which a batch shares. So is what no kernel of the list does
    (concatenation, average pools), a few percent of the networks here.
    """
    assert pattern in PATTERNS, pattern
    graph = _traced(model, image_size)
    modules = dict(graph.named_modules())
    kernels: list[Kernel] = []
    for node in graph.graph.nodes:
        layer = _Layer(node, modules.get(str(node.target)) if node.op == "call_module" else None, modules)
        for kind, elements, flops in layer.kernels(pattern):
            kernels.append(Kernel(f"{node.target} {kind}", kind, elements * element_bytes, flops))
    return kernels


def _traced(model: nn.Module, image_size: int) -> fx.GraphModule:
    shapes_only = copy.deepcopy(model).to("meta").eval()  # eval: auxiliary classifiers and dropout are left out
    try:
        graph = fx.symbolic_trace(shapes_only)
        ShapeProp(graph).propagate(torch.empty(1, 3, image_size, image_size, device="meta"))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"torch.fx cannot follow {type(model).__name__}: {error}") from error
    return graph


def _elements(node: fx.Node) -> int:
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    return int(shape.numel()) if shape is not None else 0


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


class _Layer:
    """A node of the traced network, and the passes over memory that it stands for."""

    def __init__(self, node: fx.Node, module: nn.Module | None, modules: dict[str, nn.Module]) -> None:
        self.node, self.module, self._modules = node, module, modules
        self.out = _elements(node)

    def kernels(self, pattern: str) -> Iterator[tuple[str, float, float]]:
        """(kind, elements moved, operations)."""
        if isinstance(self.module, nn.Conv2d):
            yield from self._convolution(self.module, pattern)
        elif isinstance(self.module, nn.BatchNorm2d):
            yield from self._batchnorm(pattern)
        elif self._is_relu(self.node):
            if pattern == "eager" or not self._comes_from_batchnorm():
                yield "relu forward", 2 * self.out, 0
                yield "relu backward", 3 * self.out, 0
        elif self._is_add(self.node):
            yield from self._addition(pattern)
        elif isinstance(self.module, nn.MaxPool2d):
            taken = _elements(self._source())
            yield "pool", taken + self.out, 0
            yield "pool", taken + 2 * self.out, 0  # reads gradient and index, writes the input's gradient
        users = len(self.node.users)
        # With BatchNorm in the convolutions, so is this sum: the pass at the block's end reads both gradients.
        if (
            pattern != "in_conv"
            and users > 1
            and self.node.op != "placeholder"
            and self.out
            and not self._is_shape_user()
        ):
            # A tensor that two branches read gets two gradients, which are added.
            yield "gradient sum", (3 if pattern == "eager" else 2) * self.out * (users - 1), 0

    def _convolution(self, conv: nn.Conv2d, pattern: str) -> Iterator[tuple[str, float, float]]:
        source = self._source()
        taken = _elements(source)
        skips = conv.stride[0] * conv.stride[1] if conv.kernel_size == (1, 1) else 1
        read = taken / skips  # a strided 1x1 convolution reads a quarter of its input
        flops = 2.0 * self.out * conv.in_channels // conv.groups * conv.kernel_size[0] * conv.kernel_size[1]
        yield "conv forward", read + self.out, flops
        yield "conv weight gradient", self.out + read, flops
        if source.op != "placeholder":  # the images need no gradient
            inner = pattern == "in_conv" and self._is_relu(source) and self._follows_batchnorm(source)
            # Rectifying the gradient in the epilogue takes the values before BatchNorm.
            yield "conv input gradient", self.out + taken + (taken if inner else 0), flops

    def _batchnorm(self, pattern: str) -> Iterator[tuple[str, float, float]]:
        joins = self._ends_block()
        if pattern == "eager":
            yield "batchnorm forward", 3 * self.out, 0
            yield "batchnorm backward", 5 * self.out, 0
        elif pattern == "fused":
            # The second BatchNorm of an addition is applied in the pass of the first, which reads both.
            yield "batchnorm forward", self.out + (0 if joins == "shortcut" else 2 * self.out), 0
            yield "batchnorm backward", 5 * self.out, 0
        else:
            if not joins and not self._feeds_convolutions_only():
                yield "batchnorm forward", 2 * self.out, 0
            yield "batchnorm backward", 3 * self.out, 0

    def _addition(self, pattern: str) -> Iterator[tuple[str, float, float]]:
        if pattern == "eager":
            yield "add forward", 3 * self.out, 0
        elif pattern == "fused":
            yield "add forward", self.out, 0  # the shortcut is read in BatchNorm's pass
            yield "add backward", 2 * self.out, 0  # the ReLU's mask, in both passes of BatchNorm's backward
        else:
            yield "add forward", (3 + 1 / 16) * self.out, 0  # and one bit of mask per element
            yield "add backward", 3 * self.out, 0

    def _source(self) -> fx.Node:
        source = self.node.args[0]
        assert isinstance(source, fx.Node)
        return source

    def _is_relu(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self._modules[str(node.target)], _RELU_MODULES)
        return node.op in ("call_function", "call_method") and "relu" in _name(node)

    def _is_add(self, node: fx.Node) -> bool:
        return node.op in ("call_function", "call_method") and _name(node) in _ADD and _elements(node) > 0

    def _comes_from_batchnorm(self) -> bool:
        """Directly, or through the addition at a block's end."""
        return self._follows_batchnorm(self.node) or self._is_add(self._source())

    def _follows_batchnorm(self, relu: fx.Node) -> bool:
        source = relu.args[0]
        assert isinstance(source, fx.Node)
        return source.op == "call_module" and isinstance(self._modules[str(source.target)], nn.BatchNorm2d)

    def _ends_block(self) -> str:
        """'main' or 'shortcut' where this BatchNorm's output is added to another tensor, else ''.

        Where both tensors come from a BatchNorm, the second argument of the addition is the shortcut.
        """
        for user in self.node.users:
            if self._is_add(user):
                first = user.args[0]
                both = all(
                    isinstance(arg, fx.Node)
                    and arg.op == "call_module"
                    and isinstance(self._modules[str(arg.target)], nn.BatchNorm2d)
                    for arg in user.args[:2]
                )
                return "shortcut" if both and first is not self.node else "main"
        return ""

    def _feeds_convolutions_only(self) -> bool:
        """So that a convolution's mainloop can apply it."""
        users = list(self.node.users)
        if len(users) == 1 and self._is_relu(users[0]):
            users = list(users[0].users)
        return all(
            user.op == "call_module" and isinstance(self._modules[str(user.target)], nn.Conv2d) for user in users
        )

    def _is_shape_user(self) -> bool:
        """Nodes that only look at a size are no second reader."""
        return any(user.op == "call_method" and user.target in ("size", "dim") for user in self.node.users)
