"""Where an operator call comes from: the module that runs and the line of its code."""

import linecache
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from sys import _getframe
from types import FrameType
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.fx.operator_schemas import get_signature_for_torch_op
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from cl_train.memory_format.audit_report import PRODUCTS, Origin
from cl_train.system.failures import TORCH, short_path

COPIES = ("clone", "copy_", "copy", "_to_copy", "_reshape_copy", "view_copy")
UNDECLARED_VIEWS = ("_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes")
# Words in the names of operators whose dimension 1 is channels and whose later ones are pixels.
_OF_IMAGES = ("conv", "pool", "im2col", "col2im")

_OWN = f"{Path(__file__).parents[1]}/"
_PYTHON = f"{Path(os.__file__).parent}/"
_LIBRARIES = ("torch", "cl_train", "python")  # their lines belong to no model


def name_of(function: Any) -> str:
    """Returns an operator's name: `add` for torch's; others have a namespace, as `vision::nms`."""
    name: str = function.name()
    return name.partition(".")[0].removeprefix("aten::")


def schema_of(function: Any) -> Any:
    """Returns an operator's schema; None: Python has no name for an argument, such as a stream."""
    try:
        _, schemas = get_signature_for_torch_op(function, return_schemas=True)
    except Exception:  # torch evaluates its types
        return None
    return schemas[0] if schemas else None


class Traits(NamedTuple):
    name: str
    is_view: bool
    is_copy: bool
    is_product: bool
    is_of_images: bool
    is_in_place: bool
    arguments: tuple[str, ...]  # their names


@cache
def traits_of(function: Any) -> Traits:
    name, schema = name_of(function), schema_of(function)
    aliases = [returned.alias_info for returned in schema.returns] if schema else []
    return Traits(
        name=name,
        is_view=name in UNDECLARED_VIEWS or function.is_view,
        is_copy=name in COPIES,
        is_product=name in PRODUCTS,
        is_of_images="convert" not in name and any(word in name for word in _OF_IMAGES),
        is_in_place=any(alias is not None and alias.is_write for alias in aliases),
        arguments=tuple(argument.name for argument in schema.arguments) if schema else (),
    )


class OriginRecorder(TorchDispatchMode):
    """Knows for each operator, below autograd and autocast, its module and its line of code.

    Subclasses override `call`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = [("", "")]  # name and type of the modules that run, outermost first
        self._names: dict[int, tuple[str, str]] = {}
        self._parameters: dict[int, str] = {}
        self._origins: dict[int, Origin] = {}  # by sequence number of the autograd node
        self._last_node = torch.autograd._get_sequence_nr() - 1

    @contextmanager
    def watching(self) -> Iterator[Self]:
        entering = register_module_forward_pre_hook(self.enter)
        leaving = register_module_forward_hook(self.leave, always_call=True)
        try:
            with self:
                yield self
        finally:
            entering.remove()
            leaving.remove()

    def enter(self, module: nn.Module, inputs: Any) -> None:
        if len(self.running) == 1 and id(module) not in self._names:
            for name, child in module.named_modules():
                self._names[id(child)] = name, type(child).__name__
            for name, parameter in module.named_parameters():
                self._parameters[id(parameter)] = name
        self.running.append(self._names.get(id(module), ("", type(module).__name__)))

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if len(self.running) > 1:
            self.running.pop()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            # In this mode composite operators, such as contiguous, arrive whole.
            with self:
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.call(function, args, kwargs)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator."""
        raise NotImplementedError

    def origin(self, function: Any) -> Origin:
        """Returns the origin of `function`, an operator about to run, or that has just run."""
        source, line = _calling_line(_getframe(2))
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            parameter = getattr(node, "variable", None)
            if parameter is not None:  # an AccumulateGrad node
                name = self._parameters.get(id(parameter), "")
                return Origin("backward", name, "Parameter", "accumulating gradients")
            origin = self._origins.get(node._sequence_nr(), Origin("backward"))
            # A custom function has its own line.
            return replace(origin, source=source, line=line) if source else origin
        origin = Origin("forward", *self.running[-1], source, line)
        # Autograd created this call's node just before dispatching it. A call without its own node
        # (inside a custom autograd function) belongs to the previous node.
        newest = torch.autograd._get_sequence_nr() - 1
        of_nodes = replace(origin, direction="backward", backward_of=name_of(function))
        self._origins.update(dict.fromkeys(range(self._last_node + 1, newest + 1), of_nodes))
        self._last_node = max(self._last_node, newest)
        return origin


def _calling_line(frame: FrameType | None) -> tuple[str, str]:
    """Returns file:line and text of the model's code; empty for calls of autograd and this package.

    It is the innermost line in the package that PyTorch called: in a model that uses einops, the
    model's own.
    """
    lines: dict[str, tuple[str, int]] = {}  # the innermost of each package
    called = ""
    while frame is not None:
        package = _package_of(frame.f_code.co_filename)
        is_autograd = frame.f_code.co_name == "_engine_run_backward"
        is_mode = frame.f_code.co_name == "__torch_dispatch__"  # between the code and the operator
        is_end = (package == "cl_train" and not is_mode) or (package == "torch" and lines)
        if is_autograd or is_end:
            break
        if package not in _LIBRARIES:
            called = package
            lines.setdefault(package, (frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    if not lines:
        return "", ""
    path, line = lines[called]
    return f"{short_path(path)}:{line}", linecache.getline(path, line).strip()


@cache
def _package_of(path: str) -> str:
    """Returns the package of a file; "python": its library, "": code that is not installed."""
    if path.startswith(TORCH):
        return "torch"
    if path.startswith(_OWN):
        return "cl_train"
    _, is_installed, tail = path.rpartition("site-packages/")
    if is_installed:
        return tail.partition("/")[0]
    return "python" if path.startswith(_PYTHON) else ""
