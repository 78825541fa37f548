"""Times the operators of a step, what runs between them, and the lines of code of that."""

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from cl_train.measure.times_report import COPY_KIND, PYTHON, TimedCall
from cl_train.memory_format.layout import have_other_strides
from cl_train.memory_format.operator_recorder import COPIES, OriginRecorder, name_of
from cl_train.system.failures import TORCH, short_path
from cl_train.system.tensors import map_tensors, tensors_in

_PACKAGE = str(Path(__file__).parents[1])
# This quantile of the times between two events is the recorder's own: few modules compute there.
_USUAL = 0.75
# 0.2 to 0.3 ms of a GPU: the host needs less to launch an operator and the event after it.
_SLEEP_CYCLES = 400_000
_KINDS = {
    "convolution": "convolutions", "batch_norm": "batch norm", "norm": "normalisation",
    "pool": "pooling",
    "mm": "matrix products", "softmax": "softmax", "cat": "concatenation",
}  # fmt: skip


Key = tuple[str, str, str, int]  # phase, module, operator and which of equal calls


@contextmanager
def processor_clock() -> Iterator[Callable[[], float]]:
    """`perf_counter`, on Linux less the time in which this thread waited for a core."""
    path = Path("/proc/thread-self/schedstat")  # nanoseconds running, nanoseconds waiting, slices
    if not path.exists():
        yield time.perf_counter
        return
    with path.open("rb", buffering=0) as file:
        yield lambda: time.perf_counter() - 1e-9 * int(os.pread(file.fileno(), 64, 0).split()[1])


class TimeRecorder(OriginRecorder):
    """Times the operators of a step, and on a CPU what runs between them, for `calls`."""

    def __init__(
        self, layout: str, is_gpu: bool, clock: Callable[[], float], calls: dict[Key, TimedCall]
    ) -> None:
        super().__init__()
        self._layout, self._is_gpu, self._clock, self._calls = layout, is_gpu, clock, calls
        self._phase, self._module = "forward", ""  # what runs
        self._spans: list[tuple[Key, Any, Any]] = []
        self._seen: Counter[tuple[str, str, str]] = Counter()
        # By phase and event at the end: modules and seconds.
        self._gaps = defaultdict[tuple[str, str], list[tuple[str, float]]](list)
        self._watched: set[Any] = set()  # autograd nodes of the modules' outputs
        self._last = clock()

    def seconds(self) -> dict[Key, float]:
        """Seconds of each call, less what recording it takes. Waits for the device."""
        if self._is_gpu:
            self._spans[-1][2].synchronize()
            spans_s = {key: start.elapsed_time(stop) / 1000 for key, start, stop in self._spans}
        else:
            spans_s = {key: stop - start for key, start, stop in self._spans}
        idle = [span_s for key, span_s in spans_s.items() if "aten.detach.default" in key]
        recording_s = median(idle) if idle else 0.0  # that call does no work
        seconds_of = defaultdict[Key, float](float)
        for key, span_s in spans_s.items():
            seconds_of[key] = max(0.0, span_s - recording_s)
        for (phase, _), gaps in self._gaps.items():
            usual = float(np.quantile([seconds for _, seconds in gaps], _USUAL))
            for module, seconds in gaps:
                key = (phase, module, PYTHON, 0)
                self._calls.setdefault(key, TimedCall(PYTHON, phase, module, "Python"))
                seconds_of[key] += max(0.0, seconds - usual)
        return seconds_of

    def _close(self, event: str) -> None:
        """The time since the last event belongs to the module that runs; in the update to none."""
        if not self._is_gpu and self._phase != "update":
            self._gaps[self._phase, event].append((self._module, self._clock() - self._last))

    def _go_on(self, module: str) -> None:
        self._module, self._last = module, self._clock()

    def start(self, phase: str) -> None:
        """A part of the step begins: forward, backward or update."""
        self._close("operator")
        self._phase = phase
        self._go_on("")

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self._close("enter")
        super().enter(module, inputs)
        self._go_on(self.running[-1][0])

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._close("leave")
        name, _ = self.running[-1]

        def enter_backward(gradient: torch.Tensor) -> None:
            """The gradient is complete: the module's backward pass begins."""
            self._close("enter")
            self._go_on(name)

        super().leave(module, inputs, output)
        for tensor in tensors_in(output):
            # A container returns the output of its last child, to which its backward pass belongs.
            if tensor.grad_fn is not None and tensor.grad_fn not in self._watched:
                self._watched.add(tensor.grad_fn)
                tensor.register_hook(enter_backward)
        self._go_on(self.running[-1][0])

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._close("operator")
        origin = self.origin()
        module = origin.module
        if origin.module_type == "Parameter":  # which accumulates its gradient
            module = module.rpartition(".")[0]
        same = (self._phase, module, str(function))
        self._seen[same] += 1
        key = (*same, self._seen[same])
        call = self._calls.get(key)
        is_new = call is None or self._layout not in call.arguments
        if call is None:
            source = "" if self._phase == "update" else origin.source
            kind = _kind(function, self._phase)
            call = self._calls[key] = TimedCall(str(function), self._phase, module, kind, source)
        if is_new:  # describing takes more time than recording
            positional, options = map_tensors(_on_meta, (args, kwargs))
            call.arguments[self._layout] = (*positional, options)

        if self._is_gpu:  # else the time from event to event would be the host's
            torch.cuda._sleep(_SLEEP_CYCLES)
        start = self._now()
        result = function(*args, **kwargs)
        stop = self._now()
        if is_new and name_of(function) in COPIES:
            copied = [value for value in positional if isinstance(value, torch.Tensor)][-1]
            if copied.shape == result.shape and have_other_strides(copied, result):
                call.kind = COPY_KIND
        self._spans.append((key, start, stop))
        self._go_on(module)
        return result

    def _now(self) -> Any:
        if not self._is_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class LineRecorder(TimeRecorder):
    """Attributes the time between operators to the lines of the model's code.

    Tracing each line takes time, so the times are for comparison only.
    """

    seconds_of_lines: defaultdict[tuple[str, str, str], float]  # by phase, module and line

    @contextmanager
    def watching(self) -> Iterator[Self]:
        self.seconds_of_lines = defaultdict(float)
        self._line = ""
        tracing_before = sys.gettrace()
        with super().watching():
            sys.settrace(self._trace)
            try:
                yield self
            finally:
                sys.settrace(tracing_before)

    def _close(self, event: str) -> None:
        place = (self._phase, self._module, self._line)
        self.seconds_of_lines[place] += self._clock() - self._last

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Called by Python for each function, and for each line of those of the model's code."""
        if not _is_models_code(frame.f_code.co_filename):
            return None
        self._close("line")
        self._line = _models_line(frame.f_back if event == "return" else frame)
        self._go_on(self._module)
        return self._trace


def _models_line(frame: FrameType | None) -> str:
    """file:line of the innermost frame of the model's code, above those of this package."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            break
        if _is_models_code(path):
            return f"{short_path(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@cache
def _is_models_code(path: str) -> bool:
    """Not that of torch, of this package, or of Python's library."""
    if path.startswith((TORCH, _PACKAGE, "<")):
        return False
    return "site-packages" in path or not path.startswith(str(Path(os.__file__).parent))


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """The shape, strides and dtype of an argument."""
    strided = tensor
    if tensor.layout != torch.strided:
        strided = torch.empty(tensor.shape, device="meta")
    strides = strided.stride()
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")


def _kind(function: Any, phase: str) -> str:
    """What a table sums up: the operator and its backward pass together."""
    if phase == "update":
        return "optimizer"
    name = name_of(function)
    is_pointwise = torch.Tag.pointwise in function.tags or "threshold" in name
    other = "element-wise" if is_pointwise else name.removesuffix("_backward")
    return next((kind for word, kind in _KINDS.items() if word in name), other)
