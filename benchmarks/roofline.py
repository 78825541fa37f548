"""Upper limit of a network's training speed on a machine, from layer sizes: bytes, operations, images per second.

    python -c "from torchvision.models import *; from benchmarks.roofline import *; print(roofline(resnet50(), H200))"

Per image a kernel takes at least max(operations / peak, bytes / bandwidth), and a step the sum over its kernels. Every
operand crosses the memory bus once per kernel; the batch shares the weights. docs/performance.md has the table.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU)


class Machine(NamedTuple):
    """Peak rates of a device: from its data sheet, or measured."""

    flops_per_s: float
    bytes_per_s: float


class Roofline(NamedTuple):
    """The cost of one training step per image, and the speed at 100 % of both peaks."""

    megabytes: float
    gigaflops: float
    images_per_s: float


H200 = Machine(989e12, 4.8e12)  # dense fp16 and HBM3e, from the data sheet


def roofline(
    model: nn.Module, machine: Machine, *, fused: bool = False, image_size: int = 224, element_bytes: int = 2
) -> Roofline:
    """The cost of training `model`, per image.

    Args:
        fused: BatchNorm, ReLU and addition share passes, as in compiled code; otherwise each has its own kernels.

    Raises:
        ValueError: torch.fx cannot trace the model.
    """
    shapes_only = copy.deepcopy(model).to("meta").eval()  # eval: no auxiliary classifiers, no dropout
    try:
        traced = fx.symbolic_trace(shapes_only)
        ShapeProp(traced).propagate(torch.empty(1, 3, image_size, image_size, device="meta"))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"torch.fx cannot trace {type(model).__name__}: {error}") from error
    modules = dict(traced.named_modules())
    kernels = [kernel for node in traced.graph.nodes for kernel in training_kernels(node, modules, fused=fused)]
    moved = [elements * element_bytes for elements, _ in kernels]
    flops = [operations for _, operations in kernels]
    seconds = sum(max(f / machine.flops_per_s, b / machine.bytes_per_s) for f, b in zip(flops, moved, strict=True))
    return Roofline(sum(moved) / 1e6, sum(flops) / 1e9, 1 / seconds)


def training_kernels(node: fx.Node, modules: dict[str, nn.Module], *, fused: bool) -> Iterator[tuple[float, float]]:
    """(elements moved, operations) of each kernel of a layer, forward and backward.

    Left out: linear layers, which move weights that the batch shares; concatenations and average pools, a few percent.
    """
    out, module = _elements(node), _module(node, modules)
    if isinstance(module, nn.Conv2d):
        source, pointwise = _elements(_source(node)), module.kernel_size == (1, 1)
        read = source / (
            module.stride[0] * module.stride[1] if pointwise else 1
        )  # strided: every second row and column
        flops = 2.0 * out * module.in_channels // module.groups * module.kernel_size[0] * module.kernel_size[1]
        yield read + out, flops
        yield out + read, flops  # gradient of the weights
        if _source(node).op != "placeholder":  # the images need no gradient
            yield out + source, flops
    elif isinstance(module, nn.BatchNorm2d):
        additions = [user for user in node.users if _is_add(user)]
        is_shortcut = any(_is_batchnorm(user.args[0], modules) and user.args[1] is node for user in additions)
        # Fused: if the outputs of two BatchNorms are added, one pass applies both.
        yield (out if is_shortcut else 3 * out) if fused else 3 * out, 0
        yield 5 * out, 0
    elif isinstance(module, _ACTIVATIONS) or (node.op != "call_module" and "relu" in _name(node)):
        if not (fused and (_is_batchnorm(_source(node), modules) or _is_add(_source(node)))):
            yield 2 * out, 0
            yield 3 * out, 0
    elif _is_add(node):
        # Fused: BatchNorm's pass reads the shortcut, and both its backward passes read the mask of the ReLU.
        yield 3 * out, 0
    elif isinstance(module, nn.MaxPool2d):
        yield 2 * _elements(_source(node)) + 3 * out, 0  # backward reads the gradient and the index
    readers = [user for user in node.users if user.target not in ("size", "dim")]
    if len(readers) > 1 and node.op != "placeholder":  # the gradients of two branches are added
        yield (2 if fused else 3) * out * (len(readers) - 1), 0


def _module(node: fx.Node, modules: dict[str, nn.Module]) -> nn.Module | None:
    return modules.get(str(node.target)) if node.op == "call_module" else None


def _is_batchnorm(node: object, modules: dict[str, nn.Module]) -> bool:
    return isinstance(node, fx.Node) and isinstance(_module(node, modules), nn.BatchNorm2d)


def _elements(node: fx.Node) -> int:
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    return int(shape.numel()) if shape is not None else 0


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _is_add(node: fx.Node) -> bool:
    return node.op != "call_module" and _name(node) in ("add", "add_", "iadd") and _elements(node) > 0


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source
