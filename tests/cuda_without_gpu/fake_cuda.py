"""Fake CUDA for tests: tensors without data on cuda:0, streams, events and graphs without a device.

Streams and events keep torch's own race detector informed (`torch.cuda._sanitizer`, vector clocks
in Python), and the allocator's rule for `record_stream` is checked when memory is freed.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda._sanitizer import EventHandler, zip_arguments
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cl_train.data import device as data_device
from cl_train.step import cuda_graph

CUDA = torch.device("cuda", 0)


@cache
def kernels_without_meta() -> torch.library.Library:
    """torch 2.15 cannot run these on tensors without data; they update in place and return nothing
    that is used.
    """
    library = torch.library.Library("aten", "IMPL")
    for name in (
        "_fused_sgd_",
        "_fused_sgd_.tensor_lr",
        "_fused_adamw_",
        "_fused_adamw_.tensor_lr",
    ):
        with suppress(RuntimeError):  # a later torch has it
            library.impl(name, lambda *arguments, **words: None, "Meta")
    library.impl("_amp_update_scale_", lambda scale, *arguments, **words: scale, "Meta")
    return library


def replace_tensors(
    module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> Any:
    """As `nn.Module._apply`, which swaps the content of tensors: torch refuses that for tensors
    without data.
    """
    for tensors in [
        tensors for part in module.modules() for tensors in (part._parameters, part._buffers)
    ]:
        for name, old in tensors.items():
            if old is not None:
                new = function(old.detach())
                tensors[name] = (
                    nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                )
    return module


@contextmanager
def without_data() -> Iterator[None]:
    """Tensors made in the block have no data: reading a value (`.item()`, `if tensor:`) raises."""
    kernels_without_meta()
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(nn.Module, "_apply", replace_tensors)
        patch.setattr(torch.Tensor, "__deepcopy__", lambda tensor, memo: tensor.detach().clone())
        yield


class Device:
    """Streams of one device, its errors so far, and the live memory blocks by storage."""

    def __init__(self) -> None:
        self.handler, self.errors = EventHandler(), set[str]()
        self.stream_ids, self.event_ids = (
            itertools.count(),
            itertools.count(10**6),
        )  # the default stream has 0
        self.streams = [Stream(self)]  # the last is current
        self.blocks: dict[int, dict[str, Any]] = {}
        self.capturing: Graph | None = None
        self.captures: list[tuple[Any, ...]] = []  # the pool, stream and mode of each
        self.synchronized = 0  # how often the host waited for the whole device
        self.copied: dict[
            int, tuple[int, int]
        ] = {}  # host memory: the stream and number of the last copy from it

    @property
    def current(self) -> "Stream":
        return self.streams[-1]

    @contextmanager
    def use(self, stream: "Stream") -> Iterator["Stream"]:
        depth = len(self.streams)
        self.streams.append(stream)
        try:
            yield stream
        finally:
            del self.streams[depth:]

    def record_stream(self, tensor: torch.Tensor, stream: "Stream") -> None:
        self.blocks[tensor.untyped_storage()._cdata]["recorded"].add(stream.cuda_stream)

    def synchronize(self, device: object = None) -> None:
        self.synchronized += 1
        self.handler._handle_device_synchronization()

    @contextmanager
    def capture(
        self, graph: "Graph", pool: object, stream: "Stream", capture_error_mode: str
    ) -> Iterator[None]:
        """The kernels of the block do not run; `graph.replay` runs them on the current stream."""
        self.synchronize()
        self.captures.append((pool, stream, capture_error_mode))
        self.capturing = graph
        self.streams.append(stream)
        try:
            yield
            self.streams.pop()  # not after an error, as before torch 2.15
        finally:
            self.capturing = None

    def launch(self, name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Report a kernel on the current stream to the race detector."""
        if self.capturing is not None:
            self.capturing.kernels.append(partial(self.launch, name, read, written))
            return
        stream = self.current.cuda_stream
        reads, writes = (
            {self.touch(tensor, name) for tensor in tensors} for tensors in (read, written)
        )
        names = {key: [name] for key in reads | writes}
        for error in self.handler._handle_kernel_launch(
            stream, reads - writes, writes, set(), name, names
        ):
            now, before = error.current_access, error.previous_access
            self.errors.add(
                f"race: {now.operator} on stream {now.stream}, {before.operator} on {before.stream}"
            )

    def touch(self, tensor: torch.Tensor, operator: str) -> int:
        """Note the use of a tensor's memory on the current stream; its key for the race
        detector.
        """
        storage, stream = tensor.untyped_storage(), self.current.cuda_stream
        key = int(storage._cdata)
        if key not in self.blocks:
            self.blocks[key] = {"home": stream, "used": {}, "recorded": set(), "operator": operator}
            weakref.finalize(storage, self.free, key)
        self.blocks[key]["used"][stream] = self.handler.seq_num + 1
        return key

    def write_on_host(self, tensor: torch.Tensor) -> None:
        """The host writes memory that the device may still read."""
        stream, number = self.copied.get(tensor.untyped_storage()._cdata, (0, 0))
        if self.handler.syncs.host_sync_state.get(stream, 0) < number:
            self.errors.add("host memory was released while it is copied")

    def free(self, key: int) -> None:
        """The allocator reuses memory on the stream that allocated it as soon as no tensor refers
        to it.
        """
        block = self.blocks.pop(key)
        for stream, number in block["used"].items():
            is_safe = stream == block["home"] or stream in block["recorded"]
            if not is_safe and not self.handler.syncs.is_ordered_after(
                block["home"], number, stream
            ):
                self.errors.add(
                    f"freed without record_stream: made by {block['operator']}, used on stream"
                    f" {stream}"
                )
        if key in self.handler.tensors_accessed.accesses:
            self.handler.tensors_accessed.delete_tensor(key)


class Stream:
    def __init__(self, device: Device) -> None:
        self.device, self.cuda_stream = device, next(device.stream_ids)
        self.device_index = CUDA.index
        device.handler._handle_stream_creation(self.cuda_stream)

    def wait_event(self, event: "Event") -> None:
        self.device.handler._handle_event_wait(event.id, self.cuda_stream)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> "Event":
        event = Event(self.device)
        event.record(self)
        return event


class Event:
    """Is never done until the host waits for it."""

    def __init__(self, device: Device) -> None:
        self.device, self.id, self.is_done = device, next(device.event_ids), False
        device.handler._handle_event_creation(self.id)

    def record(self, stream: Stream | None = None) -> None:
        self.device.handler._handle_event_record(
            self.id, (stream or self.device.current).cuda_stream
        )

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True
        self.device.handler._handle_event_synchronization(self.id)


class _Watch(TorchDispatchMode):
    """Reports each kernel to the race detector."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), words: Any = None
    ) -> Any:
        words = words or {}
        result = function(*arguments, **words)
        schema, name = function._schema, str(function)
        if any(
            argument.alias_info is not None and not argument.alias_info.is_write
            for argument in schema.arguments
        ):
            return result  # a view
        read, written = [], list(tree_leaves(result))
        for argument, value in zip_arguments(schema, arguments, words):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (written if is_written else read).extend(tree_leaves(value))
        for source in read if name.startswith(("aten._to_copy", "aten.copy_")) else ():
            if isinstance(source, torch.Tensor) and source.device.type == "cpu":
                stream, number = self.device.current.cuda_stream, self.device.handler.seq_num + 1
                storage = source.untyped_storage()
                self.device.copied[storage._cdata] = (stream, number)
                # Memory that is freed may be another tensor's next.
                weakref.finalize(storage, self.device.copied.pop, storage._cdata, None)
        on_device = [
            [x for x in tensors if isinstance(x, torch.Tensor) and x.is_cuda]
            for tensors in (read, written)
        ]
        self.device.launch(name, *on_device)
        return result


class Graph:
    """Stands for `torch.cuda.CUDAGraph`; `alive` are those that hold kernels."""

    alive: ClassVar[weakref.WeakSet["Graph"]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.kernels: list[Callable[[], None]] = []
        Graph.alive.add(self)

    def replay(self) -> None:
        assert self in Graph.alive, "a replay after reset"
        for kernel in self.kernels:
            kernel()

    def pool(self) -> tuple[int, int]:
        return (id(self), 0)

    def reset(self) -> None:
        self.kernels.clear()
        Graph.alive.discard(self)


def select_conv_backend(input: torch.Tensor, weight: torch.Tensor, *more: Any, **words: Any) -> Any:
    """torch asks the GPU, which is not there, whether cuDNN takes bf16: as for fp16 since
    Ampere.
    """
    if input.dtype == torch.bfloat16:
        input, weight = input.half(), weight.half()
    return _select_conv_backend(input, weight, *more, **words)


_select_conv_backend = torch._C._select_conv_backend


@contextmanager
def fake_cuda(*, watched: bool = True) -> Iterator[Device]:
    """CUDA calls go to a `Device`, and with `watched` kernels too; tensors on cuda:0 have no
    data.
    """
    device = Device()
    patches: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", lambda *arguments: Stream(device)),
        (torch.cuda, "Event", lambda **words: Event(device)),
        (torch.cuda, "stream", device.use),
        (torch.cuda, "current_stream", lambda index=None: device.current),
        (torch.cuda, "synchronize", device.synchronize),
        (torch.cuda, "CUDAGraph", Graph),
        (torch.cuda, "graph", device.capture),
        (torch.cuda, "is_bf16_supported", lambda *arguments, **words: True),
        (torch._C, "_select_conv_backend", select_conv_backend),
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (
            torch.Tensor,
            "record_stream",
            lambda tensor, stream: device.record_stream(tensor, stream),
        ),
        (
            data_device,
            "_side_stream",
            cache(data_device._side_stream.__wrapped__),
        ),  # none of another device
        (cuda_graph, "_stream", cache(cuda_graph._stream.__wrapped__)),
    ]
    with pytest.MonkeyPatch.context() as patch, without_data():
        for owner, name, value in patches:
            patch.setattr(owner, name, value)
        with (
            _Watch(device) if watched else nullcontext(),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield device
