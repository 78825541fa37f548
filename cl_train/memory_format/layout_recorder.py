"""Records the operator calls of a step that read or write images, and which keep channels_last."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from cl_train.memory_format.audit_report import (
    Call,
    LayoutReport,
    Origin,
    Outcome,
    grouped,
)
from cl_train.memory_format.image_axes import (
    CHANNEL,
    NO_IMAGE,
    PIXEL,
    Axes,
    Kinds,
    axes_of,
    image_kinds,
    is_shared_by_batch,
    kept_kinds,
    kinds_of,
    stride_order,
)
from cl_train.memory_format.layout import CHANNELS_LAST_BY_DIM, StrideOrder, classify
from cl_train.memory_format.operator_recorder import (
    OriginRecorder,
    Traits,
    traits_of,
)
from cl_train.system.tensors import strided_tensors_in

_SAME_CALL = attrgetter(
    "operator", "direction", "outcome", "module", "source", "shape", "dtype", "inputs", "cause"
)


@dataclass(slots=True)
class Memory:
    """What is known of memory that an operator of the step has allocated or written."""

    axes: Axes | None = None  # None: a tensor of 4 or 5 dimensions there is an image
    cause: Call | None = None  # the call that made the image there contiguous
    # Who wrote it last: backward, or a module's call that read nothing contiguous from outside.
    writer: Call | None = None
    reason: str = ""  # why it is contiguous, if no call is the cause


UNKNOWN = Memory(reason="a tensor from outside the step is contiguous")


class Operand(NamedTuple):
    tensor: torch.Tensor
    kinds: Kinds | None = None  # None: it is no image
    order: StrideOrder | None = None
    memory: Memory = UNKNOWN

    @property
    def is_image(self) -> bool:
        return self.kinds == image_kinds(self.tensor.dim())


class Executed(NamedTuple):
    function: Any
    traits: Traits
    origin: Origin
    operands: list[Operand]
    produced: list[Operand]

    @property
    def is_backward(self) -> bool:
        return self.origin.direction == "backward"

    @property
    def contiguous_inputs(self) -> list[Operand]:
        return [each for each in self.operands if each.order == "contiguous"]

    def call(self, outcome: Outcome, output: Operand, **more: Any) -> Call:
        tensor = output.tensor
        return Call(
            operator=str(self.function),
            outcome=outcome,
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
            dtype=_dtype(tensor),
            **vars(self.origin),
            **more,
        )


class LayoutRecorder(OriginRecorder):
    """Calls `on_call` with each call that reads or writes images, in any number of dimensions.

    A call is judged by the order in which it stores channels and pixels (see `image_axes`). A copy
    of tokens is judged when it is read: transposed keys, whose product with queries is no image,
    are no loss. A contiguous image that a convolution or a pooling reads, and that no loss
    explains, is a loss of the operator that wrote it.
    """

    def __init__(self, on_call: Callable[[Call], None]) -> None:
        super().__init__()
        self.step_bytes = 0
        self._on_call = on_call
        # As long as a weak reference lives, no other memory gets the same id.
        self._memory: dict[StorageWeakRef, Memory] = {}
        self._unread: dict[StorageWeakRef, Call] = {}  # copies of tokens
        self._from_outside: dict[StorageWeakRef, str] = {}  # weights and the batch
        self._activations: set[tuple[int, ...]] = set()  # shapes that were channels_last in forward
        self._has_channels_last = False  # until then there is nothing to lose or to follow

    @contextmanager
    def watching(self) -> Iterator[Self]:
        with super().watching():
            yield self
        for call in self._unread.values():
            self._on_call(call)

    def enter(self, module: nn.Module, inputs: Any) -> None:
        if len(self.running) == 1:
            weights = [each for each in module.parameters() if not is_lazy(each)]
            for name, tensors in {"the batch": inputs, "a weight": weights}.items():
                for each in strided_tensors_in(tensors):
                    self._from_outside[_storage(each)] = f"{name} is contiguous"
        super().enter(module, inputs)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        traits = traits_of(function)
        if traits.is_view:
            result = function(*args, **kwargs)
            self.origin(function)
            return result

        inputs = strided_tensors_in((args, kwargs))
        # They are described before the call, because an in-place operator changes its arguments.
        operands = [self._operand(tensor, traits) for tensor in _read(traits, inputs)]
        result = function(*args, **kwargs)
        outputs = strided_tensors_in(result)
        origin = self.origin(function)
        reduced = _dims(traits, args, kwargs)
        produced = [self._output(tensor, traits, origin, operands, reduced) for tensor in outputs]
        executed = Executed(function, traits, origin, operands, produced)

        call = None
        if "empty" not in traits.name:
            self.step_bytes += sum(tensor.nbytes for tensor in (*inputs, *outputs))
            self._settle_unread(executed)
            (self._note_backward if executed.is_backward else self._note_forward)(executed)
            call = self._judge(executed)
        self._remember(executed, call)
        if call and call.outcome == "lost" and traits.is_copy and not produced[0].is_image:
            self._unread[_storage(produced[0].tensor)] = call
        elif call:
            self._on_call(call)
        return result

    # --- what a tensor holds ---

    def _memory_of(self, tensor: torch.Tensor, *, is_new: bool = False) -> Memory:
        """Returns the known memory, or a new one, which is not kept for a part of unknown memory,
        such as of a bucket of DDP.
        """
        storage = _storage(tensor)
        if storage in self._memory:
            return self._memory[storage]
        memory = Memory()
        if is_new or tensor.nbytes >= tensor.untyped_storage().nbytes():
            if len(self._memory) % 4096 == 4095:  # forget what is freed
                entries = self._memory.items()
                self._memory = {each: m for each, m in entries if not each.expired()}
            self._memory[storage] = memory
        return memory

    def _operand(self, tensor: torch.Tensor, traits: Traits) -> Operand:
        memory = self._memory.get(_storage(tensor), UNKNOWN)
        axes = memory.axes
        if memory is UNKNOWN and not traits.is_of_images and is_shared_by_batch(tensor):
            return Operand(tensor)
        is_unknown = axes is None or (axes is NO_IMAGE and self._creator(tensor, memory))
        if tensor.dim() in CHANNELS_LAST_BY_DIM and (is_unknown or traits.is_of_images):
            order = classify(tensor)
            if order == "other" and memory.cause:
                order = "contiguous"  # and permuted
            self._has_channels_last |= order == "channels_last"
            return Operand(tensor, image_kinds(tensor.dim()), order, memory)
        if axes is None or axes is NO_IMAGE:
            return Operand(tensor, memory=memory)
        kinds = kinds_of(tensor, axes)
        if memory.cause and memory.cause.outcome == "contiguous":  # tokens, transposed for pairs
            return Operand(tensor, kinds, memory=memory)
        return Operand(tensor, kinds, stride_order(tensor, kinds), memory)

    def _output(
        self,
        tensor: torch.Tensor,
        traits: Traits,
        origin: Origin,
        operands: list[Operand],
        reduced: Sequence[int] | None,
    ) -> Operand:
        memory, rank = self._memory_of(tensor, is_new=not traits.is_in_place), tensor.dim()
        kinds: Kinds | None
        if traits.is_in_place and memory.axes and memory.axes is not NO_IMAGE:
            kinds = kinds_of(tensor, memory.axes)
        elif traits.is_of_images and rank > 2:
            kinds = image_kinds(rank)
        elif traits.is_product:
            left, right = operands[-2].kinds, operands[-1].kinds
            # A matrix that is no image, as weights are, maps channels to features or tokens to
            # tokens. Two images give pairs of pixels or of channels, which are no image.
            kinds = None if left and right else left or right
        else:
            # Beside an operand that is no image (an attention map), a parameter or scale is none.
            if any(each.memory.axes is NO_IMAGE for each in operands):
                known = [each for each in operands if each.memory is not UNKNOWN]
                operands = [each for each in known if each.order != "ambiguous"]
            kinds = kept_kinds(rank, [each.kinds for each in operands if each.kinds], reduced)
        is_activation = origin.direction == "backward" and tuple(tensor.shape) in self._activations
        if is_activation and not {CHANNEL, PIXEL} <= set(kinds or ()):
            kinds = image_kinds(rank)
        return Operand(tensor, kinds, stride_order(tensor, kinds) if kinds else None, memory)

    def _note_forward(self, executed: Executed) -> None:
        """Notes shapes of channels_last images, and reports a loss that only its reader shows."""
        operands = executed.operands
        for each in (*operands, *executed.produced):
            if each.order == "channels_last" and each.is_image:
                self._activations.add(tuple(each.tensor.shape))
        if not (operands and executed.traits.is_of_images and self._has_channels_last):
            return
        memory = operands[0].memory
        if operands[0].order == "contiguous" and memory.writer and not memory.cause:
            memory.cause = memory.writer
            self._on_call(memory.cause)

    def _creator(self, tensor: torch.Tensor, memory: Memory) -> Call | None:
        """Returns the backward call that wrote the gradient of a channels_last activation."""
        is_backward = memory.writer and memory.writer.direction == "backward"
        return memory.writer if is_backward and tuple(tensor.shape) in self._activations else None

    def _note_backward(self, executed: Executed) -> None:
        """Notes contiguous gradients that only their readers show, as a view made them images."""
        for each in executed.contiguous_inputs:
            creator = self._creator(each.tensor, each.memory)
            if creator and not each.memory.cause:
                each.memory.cause = creator
                self._on_call(creator)

    def _reason(self, operand: Operand) -> str:
        """Says why a contiguous operand is contiguous."""
        memory = operand.memory
        if call := memory.cause or memory.writer:
            return call.as_cause
        return self._from_outside.get(_storage(operand.tensor), memory.reason)

    def _remember(self, executed: Executed, call: Call | None) -> None:
        reason = next(map(self._reason, executed.contiguous_inputs), "")
        sources = [each.memory for each in executed.contiguous_inputs]
        cause = next((memory.cause for memory in sources if memory is not UNKNOWN), None)
        if call is not None and call.outcome in ("lost", "created"):
            cause = call
        is_outside = any(not (memory.cause or memory.writer) for memory in sources)
        is_written = executed.is_backward or (not is_outside and len(self.running) > 1)
        outcome: Outcome = "created" if executed.is_backward else "lost"
        for output in executed.produced:
            memory = output.memory
            if not executed.operands or not self._has_channels_last:
                memory.axes = None
            elif not (executed.traits.is_in_place and memory.axes):
                memory.axes = axes_of(output.tensor, output.kinds) if output.kinds else NO_IMAGE
            memory.cause = cause if output.order == "contiguous" else None
            memory.writer = executed.call(outcome, output) if is_written else None
            memory.reason = reason or f"what {executed.traits.name} writes is contiguous"

    # --- what a call does ---

    def _settle_unread(self, executed: Executed) -> None:
        """Reports copies of tokens that this call reads: losses, unless it makes pairs of them."""
        for operand in executed.operands if self._unread else ():
            call = self._unread.pop(_storage(operand.tensor), None)
            if call:
                if executed.traits.is_product and executed.produced[0].kinds is None:
                    call.outcome, call.copy, call.moved_bytes = "contiguous", "", 0
                self._on_call(call)

    def _judge(self, executed: Executed) -> Call | None:
        """Returns the call with its outcome; None: it has no images."""
        traits, is_backward = executed.traits, executed.is_backward
        images = [each for each in executed.operands if each.order]
        results = [each for each in executed.produced if each.order]
        is_gradient = is_backward and any(
            each.order == "contiguous" and tuple(each.tensor.shape) in self._activations
            for each in results
        )
        before, after = {each.order for each in images}, {each.order for each in results}
        outcome = _outcome(before, after, is_gradient=is_gradient)
        if outcome is None:
            return None

        causes = [each.memory.cause for each in executed.contiguous_inputs]
        permuted = {"lost": "channels_last", "restored": "contiguous"}.get(outcome)
        moved_bytes = sum(2 * each.tensor.nbytes for each in images if each.order == permuted)
        if outcome == "lost" and is_backward:
            if not moved_bytes or traits.is_product:
                outcome, moved_bytes = "created", 0
            elif causes and all(cause and cause.outcome == "created" for cause in causes):
                outcome = "inherited"
        return executed.call(
            outcome,
            results[0],
            inputs=tuple(
                f"{each.order} {_dtype(each.tensor)} {list(each.tensor.shape)}" for each in images
            ),
            copy="" if not moved_bytes else "explicit" if traits.is_copy else "hidden",
            moved_bytes=moved_bytes,
            cause=next((cause.place for cause in causes if cause), ""),
            contiguous=next(map(self._reason, executed.contiguous_inputs), ""),
        )


def _outcome(
    before: set[StrideOrder | None], after: set[StrideOrder | None], *, is_gradient: bool
) -> Outcome | None:
    """Returns the outcome, by the orders of images before and after a call; None: it has no image.

    `is_gradient`: a contiguous output is the gradient of a channels_last activation.
    """
    if "contiguous" in after:
        if "channels_last" in before or (is_gradient and "contiguous" not in before):
            return "lost"
        return "ambiguous" if before == {"ambiguous"} else "contiguous"
    if "channels_last" in after:
        return "restored" if "contiguous" in before else "kept"
    if "ambiguous" in after:
        return "ambiguous" if before & {"channels_last", "ambiguous"} else "contiguous"
    return None


def _read(traits: Traits, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the inputs whose values are read: not a copy's target, nor an example of a dtype."""
    if traits.name.startswith("new_"):
        return []
    return inputs[-1:] if traits.is_copy else inputs


def _dims(traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[int] | None:
    dim = {**dict(zip(traits.arguments, args, strict=False)), **kwargs}.get("dim")
    return [dim] if isinstance(dim, int) else dim


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextmanager
def recording(report: LayoutReport) -> Iterator[None]:
    """Adds the calls of one step, which the block runs, to `report`."""
    calls: list[Call] = []
    with LayoutRecorder(calls.append).watching() as recorder:
        yield
    report.calls = [replace(group[0], count=len(group)) for group in grouped(calls, _SAME_CALL)]
    report.step_bytes = recorder.step_bytes
