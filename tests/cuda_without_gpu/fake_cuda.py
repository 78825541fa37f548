"""Fake CUDA for tests: tensors without data on cuda:0, streams, events and graphs without a device.

Streams and events keep torch's own race detector informed (`torch.cuda._sanitizer`, vector clocks
in Python). The reuse of freed memory and the writes of the host are accesses, too.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from cl_train.step import cuda_graph, train_step

CUDA = torch.device("cuda", 0)
HOST = -1  # as if it were a stream


@cache
def kernels_without_meta() -> torch.library.Library:
    """torch 2.15 cannot run these, which update in place, on tensors without data."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("_fused_sgd_", "_fused_adamw_"):
        for overload in (name, f"{name}.tensor_lr"):
            with suppress(RuntimeError):  # a later torch has it
                library.impl(overload, lambda *arguments, **words: None, "Meta")
    library.impl("_amp_update_scale_", lambda scale, *arguments, **words: scale, "Meta")
    return library


def replace_tensors(
    module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """As `nn.Module._apply`, which swaps tensors: torch cannot swap those without data."""
    for part in module.modules():
        for name, old in part.named_parameters(recurse=False):
            part._parameters[name] = nn.Parameter(function(old.detach()), old.requires_grad)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = function(buffer)
    return module


@contextmanager
def without_data() -> Iterator[None]:
    """Tensors made in the block have no data: reading a value (`.item()`, `if tensor:`) raises."""
    kernels_without_meta()
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(nn.Module, "_apply", replace_tensors)
        patch.setattr(torch.Tensor, "__deepcopy__", lambda tensor, memo: tensor.detach().clone())
        patch.setattr(train_step, "make_dense", lambda model: None)  # it asks for addresses
        yield


class Device(TorchDispatchMode):
    """Streams of one device, its memory, its kernels, and its errors so far."""

    def __init__(self) -> None:
        super().__init__()
        self.handler = EventHandler()
        self.errors = set[str]()
        self.stream_ids = itertools.count()  # the default stream has 0
        self.event_ids = itertools.count()
        self.streams = [Stream(self)]  # the last is current
        self.homes: dict[int, int] = {}  # the stream of each block of memory
        self.recorded = set[int]()  # blocks
        self.capturing: Graph | None = None
        self.captures: list[tuple[Any, ...]] = []  # the pool, stream and mode of each
        self.synchronized = 0  # how often the host waited for the whole device

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

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), words: Any = None
    ) -> Any:
        words = words or {}
        result = function(*arguments, **words)
        name, read, written = str(function), [], list(tree_leaves(result))
        for argument, value in zip_arguments(function._schema, arguments, words):
            alias = argument.alias_info
            if alias is not None and not alias.is_write:
                return result  # a view
            (read if alias is None else written).extend(tree_leaves(value))
        read, written = (
            [x for x in values if isinstance(x, torch.Tensor)] for values in (read, written)
        )
        if any(tensor.is_cuda for tensor in written):
            self.launch(name, read, written)
        return result

    def launch(self, name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """A kernel on the current stream."""
        if self.capturing is not None:
            self.capturing.kernels.append(partial(self.launch, name, read, written))
            return
        writes = {self.key_of(tensor) for tensor in written}
        reads = {self.key_of(tensor) for tensor in read} - writes
        self.access(self.current.cuda_stream, name, reads, writes)

    def access(self, stream: int, name: str, reads: set[int], writes: set[int]) -> None:
        names = {key: [name] for key in reads | writes}
        accesses = (reads, writes, set[int]())
        for race in self.handler._handle_kernel_launch(stream, *accesses, name, names):
            before = race.previous_access
            earlier = f"{before.operator} on stream {before.stream}"
            self.errors.add(f"{name} on stream {stream} does not wait for {earlier}")

    def key_of(self, tensor: torch.Tensor) -> int:
        """Of the memory; the stream that uses it first has allocated it."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self.homes:
            self.homes[key] = self.current.cuda_stream if tensor.is_cuda else HOST
            weakref.finalize(storage, self.free, key)
        return key

    def record_stream(self, tensor: torch.Tensor, stream: "Stream") -> None:
        self.recorded.add(self.key_of(tensor))

    def free(self, key: int) -> None:
        """The allocator reuses the memory at once, on the stream that allocated it."""
        home = self.homes.pop(key)
        if home != HOST and key not in self.recorded:
            self.access(home, "reuse of memory", set(), {key})
        self.recorded.discard(key)
        self.handler.tensors_accessed.accesses.pop(key, None)

    def write_on_host(self, tensor: torch.Tensor) -> None:
        """The host writes memory that the device may still read."""
        syncs = self.handler.syncs
        syncs.current_sync_states[HOST] = syncs.host_sync_state.copy()
        self.access(HOST, "a write of the host", set(), {self.key_of(tensor)})
        syncs.all_streams_wait_for_stream(HOST)


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
        on = stream or self.device.current
        self.device.handler._handle_event_record(self.id, on.cuda_stream)

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True
        self.device.handler._handle_event_synchronization(self.id)


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


@contextmanager
def fake_cuda() -> Iterator[Device]:
    """CUDA calls and kernels go to a `Device`; tensors on cuda:0 have no data."""
    device = Device()
    patches: list[tuple[object, dict[str, Any]]] = [
        (torch.cuda, {"Stream": lambda *_: Stream(device), "Event": lambda **_: Event(device)}),
        (torch.cuda, {"stream": device.use, "current_stream": lambda index=None: device.current}),
        (torch.cuda, {"synchronize": device.synchronize}),
        (torch.cuda, {"CUDAGraph": Graph, "graph": device.capture}),
        (torch.cuda.amp.common, {"amp_definitely_not_available": lambda: False}),
        (torch.Tensor, {"record_stream": lambda *arguments: device.record_stream(*arguments)}),
        # Their streams are cached: those of another device must not be used.
        (data_device, {"_side_stream": cache(data_device._side_stream.__wrapped__)}),
        (cuda_graph, {"_stream": cache(cuda_graph._stream.__wrapped__)}),
    ]
    with pytest.MonkeyPatch.context() as patch, without_data():
        for owner, values in patches:
            for name, value in values.items():
                patch.setattr(owner, name, value)
        with device:
            yield device
