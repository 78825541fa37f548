"""Records every operator call of a step, forward and backward, with the memory formats of its inputs and outputs."""

import linecache
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cl_train.memory_format.audit_report import Call, Outcome, grouped
from cl_train.memory_format.layout import Layout, classify
from cl_train.memory_format.model_call import short_path

_TORCH = f"{Path(torch.__file__).parent}/"
_COPIES = {"aten::clone", "aten::copy_", "aten::copy", "aten::_to_copy", "aten::_reshape_copy", "aten::view_copy"}

Images = list[tuple[torch.Tensor, Layout]]


@dataclass(frozen=True)
class _Origin:
    """The location of a call; a backward call has that of the forward call whose autograd node it belongs to."""

    direction: Literal["forward", "backward"]
    module: str = ""
    module_type: str = ""
    source: str = ""
    line: str = ""


class OperatorRecorder(TorchDispatchMode):
    """Intercepts operators below autograd and autocast; records those with inputs or outputs of `rank` dimensions."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.step_bytes = 0
        self._model = model
        self._rank = rank
        self._modules: list[tuple[str, str]] = []  # those running, outermost first
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._origins: dict[int, _Origin] = {}  # by sequence number of the autograd node
        self._last_node = torch._C._autograd._get_sequence_nr() - 1
        self._image_formats: dict[int, Layout] = {}  # by storage: the format of the image stored in it
        self._copies: dict[int, Call] = {}  # by storage: the permuting copy that filled it
        self._undecided: dict[int, Call] = {}  # those copies that may later count as a loss
        self._channels_last_shapes: set[tuple[int, ...]] = set()

    @contextmanager
    def module_hooks(self) -> Iterator[None]:
        """Track the running module with hooks, which are removed at the end. ScriptModules do not support hooks."""
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                entry = (name, type(module).__name__)
                enter = module.register_forward_pre_hook(lambda *_, entry=entry: self._modules.append(entry))
                leave = module.register_forward_hook(lambda *_: (self._modules.pop(), None)[1], always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            yield

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = _strided_tensors((args, kwargs))
        # classified before the call, because an in-place operator changes its arguments
        images = [(tensor, classify(tensor)) for tensor in inputs if tensor.dim() == self._rank]
        result = function(*args, **(kwargs or {}))
        outputs = _strided_tensors(result)
        origin = self._origin(torch._C._current_autograd_node(), images)
        if _is_view(function):
            self._follow_view(images, outputs)
        elif "empty" not in function._schema.name:  # the call that writes into the allocation is recorded instead
            self.step_bytes += sum(map(_bytes, (*inputs, *outputs)))
            self._record(function, origin, inputs, images, outputs)
        return result

    def _origin(self, node: Any, images: Images) -> _Origin:
        source, line = _calling_line(sys._getframe(2))
        if node is not None:
            parameter = getattr(node, "variable", None)
            if parameter is not None:  # an AccumulateGrad node
                name = self._parameters.get(id(parameter), "")
                return _Origin("backward", name, "Parameter", "accumulating gradients")
            origin = replace(self._origins.get(node._sequence_nr(), _Origin("backward")), direction="backward")
            return replace(origin, source=source, line=line) if source else origin  # a custom function's own backward
        self._channels_last_shapes |= {tuple(image.shape) for image, layout in images if layout == "channels_last"}
        origin = _Origin("forward", *(self._modules[-1] if self._modules else ("", "")), source, line)
        # Autograd created this call's node just before dispatching it. A call without its own node (inside a custom
        # autograd function) belongs to the previous node.
        newest = torch._C._autograd._get_sequence_nr() - 1
        self._origins.update(dict.fromkeys(range(self._last_node + 1, newest + 1), origin))
        self._last_node = max(self._last_node, newest)
        return origin

    def _record(
        self, function: Any, origin: _Origin, inputs: list[torch.Tensor], images: Images, outputs: list[torch.Tensor]
    ) -> None:
        for tensor in outputs:
            for known in (self._image_formats, self._copies, self._undecided):
                known.pop(_storage(tensor), None)
        produced = [tensor for tensor in outputs if tensor.dim() == self._rank]
        if not produced:
            self._record_regrouping_copy(function, origin, inputs, outputs)
            return
        self._image_formats.update((_storage(tensor), classify(tensor)) for tensor in produced)
        outcome = _outcome(images, produced, self._channels_last_shapes if origin.direction == "backward" else set())
        if outcome is None:
            return
        call = _call(function, origin, outcome, images, produced[0])
        permuted = {"lost": "channels_last", "restored": "contiguous"}.get(outcome)
        call.moved_bytes = sum(2 * _bytes(tensor) for tensor, layout in images if layout == permuted)
        if call.moved_bytes:
            is_pointwise = torch.Tag.pointwise in function.tags
            call.copy = "explicit" if function._schema.name in _COPIES else "strided" if is_pointwise else "hidden"
        if call.copy == "explicit":
            self._copies[_storage(produced[0])] = call
        self.calls.append(call)

    # Window partitioning and channel shuffles view an image in more dimensions, permute these and copy. The copy of a
    # channels_last image into contiguous memory is a loss; a copy of other memory (windows after attention) is one only
    # once it is viewed as a contiguous image whose shape was channels_last before.

    def _record_regrouping_copy(
        self, function: Any, origin: _Origin, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        if function._schema.name not in _COPIES or not inputs or not outputs:
            return
        source, copied = inputs[-1], outputs[0]
        known = self._image_formats.get(_storage(source))
        if source.is_contiguous() or not copied.is_contiguous() or known not in ("channels_last", None):
            return
        call = _call(function, origin, "lost", [(source, known or "other")], copied)
        call.copy, call.moved_bytes = "explicit", 2 * _bytes(source)
        self._copies[_storage(copied)] = call
        if known == "channels_last":
            self.calls.append(call)
        else:
            self._undecided[_storage(copied)] = call

    def _follow_view(self, images: Images, outputs: list[torch.Tensor]) -> None:
        for tensor, layout in images:
            self._image_formats[_storage(tensor)] = layout
        for tensor in outputs:
            storage, shape = _storage(tensor), tuple(tensor.shape)
            if storage in self._copies:
                self._copies[storage].viewed_as = shape
            if storage in self._undecided and classify(tensor) == "contiguous" and shape in self._channels_last_shapes:
                self.calls.append(self._undecided.pop(storage))

    def merged_calls(self) -> list[Call]:
        """Equal calls merged and counted, in the order of their first occurrence."""
        same = ("operator", "direction", "outcome", "module", "source", "shape", "dtype", "inputs")
        return [replace(group[0], count=len(group)) for group in grouped(self.calls, *same)]


def _outcome(images: Images, outputs: list[torch.Tensor], activations: set[tuple[int, ...]]) -> Outcome | None:
    """`activations`: in backward, the shapes that were channels_last in forward."""
    before = {layout for _, layout in images}
    after = {classify(tensor) for tensor in outputs}
    if "contiguous" in after:
        is_known_image = any(tuple(t.shape) in activations for t in outputs if classify(t) == "contiguous")
        if "channels_last" in before or (is_known_image and "contiguous" not in before):
            return "lost"
        return "ambiguous" if before == {"ambiguous"} else "contiguous"
    if "channels_last" in after:
        return "restored" if "contiguous" in before else "kept"
    if "ambiguous" in after:
        return "ambiguous" if before & {"channels_last", "ambiguous"} else "contiguous"
    return None


def _call(function: Any, origin: _Origin, outcome: Outcome, images: Images, shown: torch.Tensor) -> Call:
    return Call(
        operator=str(function),
        outcome=outcome,
        **vars(origin),
        shape=tuple(shown.shape),
        dtype=_dtype(shown),
        inputs=tuple(f"{layout} {_dtype(tensor)} {list(tensor.shape)}" for tensor, layout in images),
    )


def _is_view(function: Any) -> bool:
    """Whether the result shares memory with an argument that is not written to; `_unsafe_view` does not declare it."""
    if function._schema.name == "aten::_unsafe_view":
        return True
    aliases = [returned.alias_info for returned in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _strided_tensors(tree: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _calling_line(frame: FrameType | None) -> tuple[str, str]:
    """file:line and text of the innermost frame outside PyTorch; empty where this package called PyTorch itself."""
    package = str(Path(__file__).parent)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(package):
            return "", ""
        if not path.startswith(_TORCH):
            return f"{short_path(path)}:{frame.f_lineno}", linecache.getline(path, frame.f_lineno).strip()
        frame = frame.f_back
    return "", ""
