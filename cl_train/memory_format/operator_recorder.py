"""Records every operator call of a step with the memory formats of its inputs and outputs; a guard on top of it."""

import linecache
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from sys import _getframe
from types import FrameType
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cl_train.config.schema import ConfigError
from cl_train.memory_format.audit_report import Call, Origin, Outcome
from cl_train.memory_format.layout import StrideOrder, classify
from cl_train.memory_format.model_call import TORCH, short_path

COPIES = {"aten::clone", "aten::copy_", "aten::copy", "aten::_to_copy", "aten::_reshape_copy", "aten::view_copy"}

Images = list[tuple[torch.Tensor, StrideOrder]]


class OriginRecorder(TorchDispatchMode):
    """Knows for each operator, below autograd and autocast, the module and the line of code that it comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.running = [("", "")]  # name and type of the modules that run, outermost first
        self._names: dict[int, tuple[str, str]] = {}
        self._parameters: dict[int, str] = {}
        self._origins: dict[int, Origin] = {}  # by sequence number of the autograd node
        self._last_node = torch._C._autograd._get_sequence_nr() - 1

    def __enter__(self) -> Self:
        entering = register_module_forward_pre_hook(self.enter)
        self._hooks = (entering, register_module_forward_hook(self.leave, always_call=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def enter(self, module: nn.Module, inputs: Any) -> None:
        if len(self.running) == 1 and id(module) not in self._names:
            self._names |= {id(child): (name, type(child).__name__) for name, child in module.named_modules()}
            self._parameters |= {id(parameter): name for name, parameter in module.named_parameters()}
        self.running.append(self._names.get(id(module), ("", type(module).__name__)))

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if len(self.running) > 1:
            self.running.pop()

    def origin(self, frame: FrameType) -> Origin:
        """The origin of the operator that is about to run, called from `frame`."""
        source, line = _calling_line(frame)
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            parameter = getattr(node, "variable", None)
            if parameter is not None:  # an AccumulateGrad node
                name = self._parameters.get(id(parameter), "")
                return Origin("backward", name, "Parameter", "accumulating gradients")
            origin = replace(self._origins.get(node._sequence_nr(), Origin("backward")), direction="backward")
            return replace(origin, source=source, line=line) if source else origin  # a custom function's own backward
        origin = Origin("forward", *self.running[-1], source, line)
        # Autograd created this call's node just before dispatching it. A call without its own node (inside a custom
        # autograd function) belongs to the previous node.
        newest = torch._C._autograd._get_sequence_nr() - 1
        self._origins.update(dict.fromkeys(range(self._last_node + 1, newest + 1), origin))
        self._last_node = max(self._last_node, newest)
        return origin


class OperatorRecorder(OriginRecorder):
    """Gives `on_call` the calls with images of `rank` dimensions; None: that of the first channels_last tensor."""

    def __init__(self, on_call: Callable[[Call], None], rank: int | None = None) -> None:
        super().__init__()
        self.step_bytes = 0
        self._on_call, self._rank = on_call, rank
        self._viewed: dict[int, StrideOrder] = {}  # by storage: the format of the image that was viewed last
        self._activations: set[tuple[int, ...]] = set()  # shapes that were channels_last in forward

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled():  # there composite operators, such as contiguous, arrive whole
            with self:
                result = function.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        inputs = _strided((args, kwargs))
        if self._rank is None:
            self._rank = next((tensor.dim() for tensor in inputs if classify(tensor) == "channels_last"), None)
        # classified before the call, because an in-place operator changes its arguments
        images = [(tensor, classify(tensor)) for tensor in inputs if tensor.dim() == self._rank]
        result = function(*args, **(kwargs or {}))
        outputs = _strided(result)
        origin = self.origin(_getframe(1))
        if origin.direction == "forward":
            self._activations |= {tuple(image.shape) for image, layout in images if layout == "channels_last"}
        name, aliases = function._schema.name, [returned.alias_info for returned in function._schema.returns]
        if name == "aten::_unsafe_view" or any(alias and not alias.is_write for alias in aliases):  # not declared there
            self._viewed |= {_storage(tensor): layout for tensor, layout in images}
        elif "empty" not in name:  # instead of an allocation, the call that writes into it is recorded
            self.step_bytes += sum(tensor.nbytes for tensor in (*inputs, *outputs))
            self._record(function, origin, inputs, images, outputs)
            for tensor in outputs:  # a new tensor may have the address of a freed one
                self._viewed.pop(_storage(tensor), None)
        return result

    def _record(
        self, function: Any, origin: Origin, inputs: list[torch.Tensor], images: Images, outputs: list[torch.Tensor]
    ) -> None:
        is_copy = function._schema.name in COPIES
        produced = [tensor for tensor in outputs if tensor.dim() == self._rank]
        outcome: Outcome | None = None
        if produced:
            outcome = _outcome(images, produced, self._activations if origin.direction == "backward" else set())
        elif is_copy and outputs and inputs and outputs[0].is_contiguous() and not inputs[-1].is_contiguous():
            # Window partitioning and channel shuffles view an image in more dimensions, permute these and copy.
            produced = outputs
            if self._viewed.get(_storage(inputs[-1])) == "channels_last":
                images, outcome = [(inputs[-1], "channels_last")], "lost"
        if outcome is None:
            return
        permuted = {"lost": "channels_last", "restored": "contiguous"}.get(outcome)
        moved_bytes = sum(2 * tensor.nbytes for tensor, layout in images if layout == permuted)
        copy = "explicit" if is_copy else "strided" if torch.Tag.pointwise in function.tags else "hidden"
        call = Call(
            operator=str(function),
            outcome="created" if outcome == "lost" and not moved_bytes else outcome,
            **vars(origin),
            shape=tuple(produced[0].shape),
            strides=produced[0].stride(),
            dtype=_dtype(produced[0]),
            inputs=tuple(f"{layout} {_dtype(tensor)} {list(tensor.shape)}" for tensor, layout in images),
            copy=copy if moved_bytes else "",
            moved_bytes=moved_bytes,
        )
        self._on_call(call)


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


def _strided(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _calling_line(frame: FrameType | None) -> tuple[str, str]:
    """file:line and text of the innermost frame outside PyTorch; empty for calls of autograd and of this package."""
    package = str(Path(__file__).parent)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        path = frame.f_code.co_filename
        if path.startswith(package):
            return "", ""
        if not path.startswith(TORCH):
            return f"{short_path(path)}:{frame.f_lineno}", linecache.getline(path, frame.f_lineno).strip()
        frame = frame.f_back
    return "", ""


# --- the guard -------------------------------------------------------------------------------------------------------


class LayoutLost(RuntimeError):
    """An operator returned contiguous although its input was channels_last."""


@contextmanager
def layout_guard(on_loss: Literal["raise", "warn"] = "raise", allow: Sequence[str] = ()) -> Iterator[None]:
    """Watch every operator of the block, forward and backward, in any training loop; costs as much as a debugger.

    Convert the model and its input first: what never was channels_last cannot be lost. Gradients that a kernel creates
    contiguous without moving a byte do not count.

    Args:
        on_loss: "raise" `LayoutLost` with the operator, line, module, shapes and strides, or "warn" about each loss.
        allow: shell patterns of operators, modules, types of modules, or lines ("model.py:12") that may lose it.
    """
    if on_loss not in ("raise", "warn"):
        raise ConfigError(f"on_loss={on_loss}: must be raise or warn")
    allowed = [allow] if isinstance(allow, str) else allow
    warned: dict[str | tuple[str, type[Warning], int], int] = {}  # each loss is shown once

    def check(call: Call) -> None:
        file_and_line = call.source.rpartition("/")[2]
        described = (call.name, call.operator, call.module, call.module_type, call.source, file_and_line, call.line)
        if call.outcome != "lost" or any(fnmatch(text, pattern) for text in described for pattern in allowed):
            return
        where = f"{call.source} `{call.line}`" if call.source else "no line of Python"
        message = (
            f"{call.name} lost channels_last in {call.direction}: {', '.join(call.inputs)} became contiguous "
            f"{list(call.shape)} with strides {list(call.strides)}, at {where}, in module {call.module or '(top)'} "
            f"({call.module_type or 'no module'}). {call.advice()}"
        )
        if on_loss == "raise":
            raise LayoutLost(message)
        file, _, line = call.source.rpartition(":")
        warnings.warn_explicit(message, UserWarning, file or __file__, int(line or 1), registry=warned)

    with OperatorRecorder(on_call=check):
        yield
