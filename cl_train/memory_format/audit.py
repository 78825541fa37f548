"""Where a model loses channels_last: one forward and backward step, watched operator by operator.

A `TorchDispatchMode` sees every operator call below autograd and autocast, in forward and backward alike, and looks at
the strides that go in and come out. Nothing is patched. A backward operator is attributed through the sequence number
of its autograd node, which is that of the forward call that made it.
"""

from __future__ import annotations

import linecache
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cl_train.memory_format.audit_report import GRADIENTS, Call, LayoutReport, Outcome
from cl_train.memory_format.convert import classify, model_memory_format
from cl_train.step.precision import Precision, autocast

LossFunction = Callable[[Any], torch.Tensor]

_FRAMEWORK = f"{Path(torch.__file__).parent}/"
_COPIES = {"aten::clone", "aten::copy_", "aten::copy", "aten::_to_copy", "aten::_reshape_copy", "aten::view_copy"}
_TIMED_REPEATS = 3


def audit(
    model: nn.Module,
    batch: Any,
    *,
    precision: Precision | None = None,
    loss: LossFunction | None = None,
    backward: bool = True,
    measure: bool = False,
    name: str | None = None,
) -> LayoutReport:
    """Run one step of `model` on `batch` and report what became of channels_last in each operator call.

    Weights, buffers, gradients and random state are afterwards what they were.

    Args:
        model: any module, in the mode (train or eval) and layout it is to be judged in.
        batch: the model's input, or a tuple of its inputs, or a dict of its keyword arguments; the number of
            dimensions of its first image tensor (4 or 5) is what is watched.
        precision: what the step runs under; None = as the tensors are.
        loss: scalar of the model's output; None = the mean square of its outputs.
        measure: also time the step without the audit, and each permuting copy on its own.
    """
    precision = precision or Precision("fp32")
    inputs = [tensor for tensor in tree_leaves(batch) if isinstance(tensor, torch.Tensor)]
    image = next((tensor for tensor in inputs if tensor.dim() in (4, 5)), None)
    if image is None:
        raise ValueError("audit: the batch holds no tensor of 4 or 5 dimensions, [N,C,H,W] or [N,C,D,H,W]")

    def step() -> None:
        with autocast(precision, image.device), nullcontext() if backward else torch.no_grad():
            output = _call(model, batch)
            scalar = loss(output) if loss is not None else _mean_square(output)
        if backward and scalar.requires_grad:  # not so where all parameters are frozen, or the output is a choice
            scalar.backward()

    watch = _Watch(model, image.dim())
    with _undone(model, image.device):
        with watch.modules(), watch:
            step()
        report = LayoutReport(
            name or type(model).__name__,
            model_memory_format(model),
            describe(image),
            precision.name,
            str(image.device),
            torch.__version__,
            watch.merged_calls(),
            watch.step_bytes,
        )
        if measure:
            report.step_ms = _step_ms(step, image.device)
    if measure:
        _measure_copies(report, image.device)
    return report


def describe(tensor: torch.Tensor) -> str:
    """For instance "channels_last float32 [8, 3, 224, 224]"."""
    return f"{classify(tensor)} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


# --- watching ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Origin:
    """Where a forward call stands, kept for the backward calls of its autograd node."""

    module: str
    module_type: str
    source: str
    line: str
    channels_last_shapes: frozenset[tuple[int, ...]]


class _Watch(TorchDispatchMode):
    """Judges each operator call on tensors of `rank` dimensions."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__()
        self._model = model
        self._rank = rank
        self._stack: list[tuple[str, str]] = []
        self._origins: dict[int, _Origin] = {}  # by the sequence number of the autograd node
        self._claimed = torch._C._autograd._get_sequence_nr() - 1
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._regrouped: dict[int, tuple[int, ...]] = {}  # address of a channels_last image seen as more dimensions
        self._pending: dict[int, tuple[Call, tuple[int, ...]]] = {}  # ... and the contiguous copy made of it
        self.calls: list[Call] = []
        self.step_bytes = 0

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Follow which module runs, by hooks on the model that are removed again."""
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                entry = (name, type(module).__name__)
                enter = module.register_forward_pre_hook(lambda *_, entry=entry: self._stack.append(entry))
                leave = module.register_forward_hook(lambda *_: (self._stack.pop(), None)[1], always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            yield

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = [classify(tensor) for tensor in inputs]  # in-place operators must not change what they were given
        described = tuple(describe(tensor) for tensor in inputs if tensor.dim() == self._rank)
        result = function(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        node = torch._C._current_autograd_node()
        origin = self._origin(node, inputs, before)
        if _is_view(function):
            self._follow_view(inputs, outputs)
            return result
        if "empty" in function._schema.name:  # an allocation: its strides are the next call's affair
            return result
        self.step_bytes += sum(_bytes(tensor) for tensor in (*inputs, *outputs))
        self._judge(function, node, origin, list(zip(inputs, before, strict=True)), outputs, described)
        return result

    def _origin(self, node: Any, inputs: list[torch.Tensor], layouts: Sequence[str]) -> _Origin:
        if node is not None:
            parameter = getattr(node, "variable", None)
            if parameter is not None:  # AccumulateGrad
                name = self._parameters.get(id(parameter), "")
                return _Origin(name, "Parameter", GRADIENTS, "", frozenset())
            origin = self._origins.get(node._sequence_nr(), _Origin("", "", "", "", frozenset()))
            source, line = _where(sys._getframe(2))  # found where the backward is Python: a custom autograd function
            return replace(origin, source=source, line=line) if source else origin
        module, module_type = self._stack[-1] if self._stack else ("", "")
        source, line = _where(sys._getframe(2))
        shapes = {tuple(t.shape) for t, layout in zip(inputs, layouts, strict=True) if layout == "channels_last"}
        origin = _Origin(module, module_type, source, line, frozenset(shapes))
        # Autograd made this call's node just before dispatching it, and nobody has claimed it yet. A call without a
        # node of its own (inside a custom autograd function) belongs to the node before.
        newest = torch._C._autograd._get_sequence_nr() - 1
        known = self._origins.get(newest)
        if known is not None and (known.module, known.source) == (module, source):
            self._origins[newest] = replace(known, channels_last_shapes=known.channels_last_shapes | shapes)
        for sequence in range(self._claimed + 1, newest + 1):
            self._origins[sequence] = origin
        self._claimed = max(self._claimed, newest)
        return origin

    def _judge(
        self,
        function: Any,
        node: Any,
        origin: _Origin,
        inputs: list[tuple[torch.Tensor, str]],
        outputs: list[torch.Tensor],
        described: tuple[str, ...],
    ) -> None:
        produced = [tensor for tensor in outputs if tensor.dim() == self._rank]
        judged = [(tensor, layout) for tensor, layout in inputs if tensor.dim() == self._rank]
        for tensor in outputs:
            self._regrouped.pop(_address(tensor), None)
            self._pending.pop(_address(tensor), None)
        if not produced:
            self._note_regrouping_copy(function, node, origin, inputs, outputs)
            return
        outcome = _outcome(judged, produced, origin.channels_last_shapes if node is not None else frozenset())
        if outcome is None:
            return
        call = _call_record(function, node, origin, outcome, produced[0], described)
        wrong = {"lost": "channels_last", "restored": "contiguous"}.get(outcome)
        call.moved_bytes = sum(2 * _bytes(tensor) for tensor, layout in judged if layout == wrong)
        call.copy = _kind_of_copy(function) if call.moved_bytes else ""
        self.calls.append(call)

    # A channels_last image seen as five dimensions and copied contiguous (a channel shuffle) is lost as well: but that
    # shows only when the copy is seen as an image again, of the same height and width.

    def _follow_view(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        for tensor in inputs:
            if classify(tensor) == "channels_last" and tensor.dim() == self._rank:
                self._regrouped[_address(tensor)] = tuple(tensor.shape)
        for tensor in outputs:
            pending = self._pending.get(_address(tensor))
            if pending is None or tensor.dim() != self._rank or classify(tensor) != "contiguous":
                continue
            call, image_shape = pending
            if tensor.shape[2:] == image_shape[2:]:
                call.shape = tuple(tensor.shape)
                self.calls.append(call)
                del self._pending[_address(tensor)]

    def _note_regrouping_copy(
        self,
        function: Any,
        node: Any,
        origin: _Origin,
        inputs: list[tuple[torch.Tensor, str]],
        outputs: list[torch.Tensor],
    ) -> None:
        if function._schema.name not in _COPIES or not inputs or not outputs:
            return
        source = inputs[-1][0]
        image_shape = self._regrouped.get(_address(source))
        if image_shape is None or source.is_contiguous() or not outputs[0].is_contiguous():
            return
        call = _call_record(function, node, origin, "lost", source, (f"channels_last {list(image_shape)} regrouped",))
        call.copy, call.moved_bytes = "explicit", 2 * _bytes(source)
        self._pending[_address(outputs[0])] = (call, image_shape)

    def merged_calls(self) -> list[Call]:
        """Equal calls counted, in the order of their first appearance."""
        merged: dict[tuple[object, ...], Call] = {}
        for call in self.calls:
            known = merged.setdefault(call.key(), call)
            if known is not call:
                known.count += call.count
        return list(merged.values())


def _outcome(
    inputs: list[tuple[torch.Tensor, str]], outputs: list[torch.Tensor], activation_shapes: frozenset[tuple[int, ...]]
) -> Outcome | None:
    """What became of the layout; `activation_shapes`: in backward, the channels_last inputs of the forward call."""
    before = [layout for _, layout in inputs]
    after = {classify(tensor) for tensor in outputs}
    if "contiguous" in after:
        if "channels_last" in before:
            return "lost"
        born = any(tuple(t.shape) in activation_shapes and classify(t) == "contiguous" for t in outputs)
        if born and "contiguous" not in before:
            return "lost"
        return "ambiguous" if before and set(before) == {"ambiguous"} else "contiguous"
    if "channels_last" in after:
        return "restored" if "contiguous" in before else "kept"
    if "ambiguous" in after:
        return "ambiguous" if "channels_last" in before or "ambiguous" in before else "contiguous"
    return None


def _call_record(
    function: Any, node: Any, origin: _Origin, outcome: Outcome, shown: torch.Tensor, described: tuple[str, ...]
) -> Call:
    return Call(
        operator=str(function),
        direction="forward" if node is None else "backward",
        outcome=outcome,
        module=origin.module,
        module_type=origin.module_type,
        source=origin.source,
        line=origin.line,
        shape=tuple(shown.shape),
        dtype=str(shown.dtype).removeprefix("torch."),
        inputs=described,
    )


def _kind_of_copy(function: Any) -> Any:
    if function._schema.name in _COPIES:
        return "explicit"
    return "strided" if torch.Tag.pointwise in function.tags else "hidden"


def _is_view(function: Any) -> bool:
    """The result shares memory with an argument that is not written to; `_unsafe_view` does so without saying it."""
    if function._schema.name == "aten::_unsafe_view":
        return True
    aliases = [returned.alias_info for returned in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _where(frame: FrameType | None) -> tuple[str, str]:
    """File:line and text of the innermost frame outside PyTorch and this file."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path == __file__:
            return "", ""
        if not path.startswith(_FRAMEWORK):
            return f"{_short_path(path)}:{frame.f_lineno}", linecache.getline(path, frame.f_lineno).strip()
        frame = frame.f_back
    return "", ""


def _short_path(path: str) -> str:
    _, found, tail = path.rpartition("site-packages/")
    if found:
        return tail
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


# --- running ----------------------------------------------------------------------------------------------------------


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _mean_square(output: Any) -> torch.Tensor:
    """A loss whose gradient has the output's layout: a plain mean's is a broadcast, which comes out contiguous."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.float().square().sum() / leaf.numel() for leaf in leaves] or [torch.zeros(())]).sum()


@contextmanager
def _undone(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back gradients, buffers and random state at the end."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _step_ms(step: Callable[[], None], device: torch.device) -> float:
    """Median of a few steps after one to warm up. The host waits for the device around each."""
    times = []
    for _ in range(1 + _TIMED_REPEATS):
        times.append(_ms(step, device))
    return sorted(times[1:])[_TIMED_REPEATS // 2]


def _measure_copies(report: LayoutReport, device: torch.device) -> None:
    """Time one permuting copy for each kind of tensor that was moved, alone, and note it with the calls."""
    known: dict[tuple[str, tuple[int, ...], int], float] = {}
    for call in report.calls:
        if not call.moved_bytes or len(call.shape) not in (4, 5):
            continue
        key = (call.dtype, call.shape, call.moved_bytes)
        if key not in known:
            known[key] = _copy_ms(call, device)
        call.copy_ms = known[key]


def _copy_ms(call: Call, device: torch.device) -> float:
    last = torch.channels_last if len(call.shape) == 4 else torch.channels_last_3d
    dtype = getattr(torch, call.dtype)
    tensor = torch.empty(call.shape, dtype=dtype, device=device, memory_format=last)
    times = [_ms(lambda: tensor.clone(memory_format=torch.contiguous_format), device) for _ in range(_TIMED_REPEATS)]
    # The tensors that moved may be other than the one shown (a chunk, a weight): scale by their bytes.
    return min(times) * call.moved_bytes / (2 * _bytes(tensor))


def _ms(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1000 * (time.perf_counter() - start)
