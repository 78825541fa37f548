"""Times the operators of a step, and what runs between them."""

import os
import weakref
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from cl_train.measure.times_report import COPY_KIND, PYTHON, TimedCall
from cl_train.memory_format.layout import classify
from cl_train.memory_format.operator_recorder import (
    COPIES,
    OriginRecorder,
    name_of,
)
from cl_train.system.machine import DeviceClock
from cl_train.system.processes import ran_and_waited_s
from cl_train.system.tensors import strided_tensors_in, tensors_in

# This quantile of the times between two events is the recorder's own, as few modules compute there.
_USUAL = 0.75
# 0.2 to 0.3 ms of a GPU; the host launches an operator and the event after it in less.
_SLEEP_CYCLES = 400_000
_SHOWN_INPUTS = 3  # a gradient, an image and a weight
_FAMILIES = ("convolution", "batch_norm", "norm", "pool", "mm", "softmax")

Key = tuple[str, str, str, int]  # phase, module, operator and which of equal calls


class ThreadClock(DeviceClock):
    """Leaves out, on a CPU of Linux, the time in which this thread waited for a core."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        path = Path("/proc/thread-self/schedstat")
        self._waiting = None
        if device.type == "cpu" and path.exists():
            self._waiting = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._waiting)

    def mark(self) -> Any:
        if self._waiting is None:
            return super().mark()
        _, waited_s = ran_and_waited_s(os.pread(self._waiting, 64, 0))
        return super().mark() - waited_s


class TimeRecorder(OriginRecorder):
    """Times the operators of a step, and on a CPU what runs between them, into `calls`."""

    def __init__(
        self, layout: str, is_gpu: bool, clock: DeviceClock, calls: dict[Key, TimedCall]
    ) -> None:
        super().__init__()
        self._layout, self._is_gpu, self._clock, self._calls = layout, is_gpu, clock, calls
        self._phase, self._module = "forward", ""  # what runs
        self._last = clock.mark()
        self._spans: dict[Key, tuple[Any, Any]] = {}
        self._seen = Counter[tuple[str, str, str]]()
        self._watched: set[Any] = set()  # autograd nodes of the modules' outputs
        # By phase and closing event: the module that ran, and the seconds since the last event
        self._gaps = defaultdict[tuple[str, str], list[tuple[str, float]]](list)

    def seconds(self) -> dict[Key, float]:
        """Returns the seconds of each call, less what recording it takes. Waits for the device."""
        self._clock.wait(self._last)
        spans_s = {key: self._clock.seconds(*marks) for key, marks in self._spans.items()}
        idle_s = [span_s for key, span_s in spans_s.items() if "aten.detach.default" in key]
        recording_s = median(idle_s or [0.0])  # that call does no work
        seconds_of = defaultdict[Key, float](float)
        for key, span_s in spans_s.items():
            seconds_of[key] = max(0.0, span_s - recording_s)
        for (phase, _), gaps in self._gaps.items():
            usual_s = float(np.quantile([gap_s for _, gap_s in gaps], _USUAL))
            for module, gap_s in gaps:
                key = (phase, module, PYTHON, 0)
                if key not in self._calls:
                    self._calls[key] = TimedCall(PYTHON, phase, module, "Python")
                seconds_of[key] += max(0.0, gap_s - usual_s)
        return seconds_of

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self._close("enter")
        super().enter(module, inputs)
        self._go_on(self.running[-1][0])

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._close("leave")
        for tensor in tensors_in(output):
            # A container returns the output of its last child, to which its backward pass belongs.
            if tensor.grad_fn is not None and tensor.grad_fn not in self._watched:
                self._watched.add(tensor.grad_fn)
                tensor.register_hook(partial(self._enter_backward, self.running[-1][0]))
        super().leave(module, inputs, output)
        self._go_on(self.running[-1][0])

    def _enter_backward(self, module: str, gradient: torch.Tensor) -> None:
        self._close("enter")
        self._go_on(module)

    def _close(self, event: str) -> None:
        """Charges the time since the last event to the module that runs; in the update to none."""
        phase = "forward"
        if torch._C._current_autograd_node() is not None:
            phase = "backward"
        elif self._phase != phase and len(self.running) == 1:
            phase = "update"
        if phase != self._phase:
            self._phase, self._module = phase, ""
        if not self._is_gpu and phase != "update":
            gap_s = self._clock.mark() - self._last
            self._gaps[phase, event].append((self._module, gap_s))

    def _go_on(self, module: str) -> None:
        self._module = module
        if not self._is_gpu:
            self._last = self._clock.mark()

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._close("operator")
        origin, phase = self.origin(function), self._phase
        module = origin.module
        if origin.module_type == "Parameter":  # it accumulates its gradient
            module = module.rpartition(".")[0]
        same = (phase, module, str(function))
        self._seen[same] += 1
        key = (*same, self._seen[same])
        if (call := self._calls.get(key)) is None:
            call = TimedCall(str(function), phase, module, _kind(function, phase))
            call.source = "" if phase == "update" else origin.source
            self._calls[key] = call

        if self._is_gpu:  # else the time from event to event would be the host's
            # The optimizer's operators take lists of tensors, up to ten times as long to launch.
            count = len(args[0]) if args and isinstance(args[0], list | tuple) else 1
            torch.cuda._sleep(_SLEEP_CYCLES * max(1, min(10, count)))
        start = self._clock.mark()
        result = function(*args, **kwargs)
        self._last = self._clock.mark()
        self._spans[key] = start, self._last
        if self._layout not in call.inputs:  # describing takes more time than recording
            self._describe(call, function, strided_tensors_in((args, kwargs)), result)
        self._go_on(module)
        return result

    def _describe(
        self, call: TimedCall, function: Any, inputs: list[torch.Tensor], result: Any
    ) -> None:
        call.inputs[self._layout] = [_described(tensor) for tensor in inputs[:_SHOWN_INPUTS]]
        if call.direction != "update":
            call.shapes = ", ".join("x".join(map(str, tensor.shape)) for tensor in inputs[:2])
        if self._layout == "channels_last":
            call.gets_contiguous = any(classify(tensor) == "contiguous" for tensor in inputs)
        if inputs and name_of(function) in COPIES and _have_other_strides(inputs[-1], result):
            call.kind = COPY_KIND


def _have_other_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.stride() != other.stride()


def _described(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}, strides {list(tensor.stride())}"


def _kind(function: Any, phase: str) -> str:
    """Returns the kind of operator that a table sums up, with its backward pass."""
    if phase == "update":
        return "optimizer"
    name = name_of(function)
    if torch.Tag.pointwise in function.tags or "threshold" in name:
        return "element-wise"
    return next((word for word in _FAMILIES if word in name), name.removesuffix("_backward"))
