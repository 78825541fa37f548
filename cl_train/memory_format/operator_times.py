"""The time of every operator of a step in both layouts, forward, backward and update, measured in turns A B B A.

Operators are timed below autograd, with `perf_counter` on a CPU and events on a GPU (one wait per step). The time
between two operators belongs to the module that runs, as `python`, as far as it is longer than usual, because the
recorder itself takes time there; what it takes inside an operator's time is that of an operator without work.
Calls of the two layouts are paired by module, operator and order.
"""

import gc
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from sys import _getframe
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from cl_train.config.schema import ConfigError, OptimConfig
from cl_train.memory_format.audit_report import markdown_table, short_name
from cl_train.memory_format.convert import borders
from cl_train.memory_format.layout import CHANNELS_LAST, images_in, model_memory_format
from cl_train.memory_format.model_call import tensors_in
from cl_train.memory_format.operator_recorder import COPIES, OriginRecorder
from cl_train.step.optim import build_optimizer
from cl_train.step.precision import Fp32Weights, Precision, kernel_selection
from cl_train.step.train_step import StepParts, update_weights
from cl_train.step.utilisation import describe, flops_of, utilisation
from cl_train.system.machine import keep_freed_memory, timed_s, wait_for

LAYOUTS = ("contiguous", "channels_last")
PYTHON = "python"
COPY_KIND = "layout copies"
_MIN_ROUNDS, _MAX_ROUNDS = 4, 40
_SHOWN = 12  # rows of a table
_USUAL = 0.75  # quantile of the times between two events that counts as the recorder's own: few modules compute there
_KINDS = {
    "convolution": "convolutions", "batch_norm": "batch norm", "norm": "normalisation", "pool": "pooling",
    "mm": "matrix products", "softmax": "softmax", "cat": "concatenation",
}  # fmt: skip

Times = np.ndarray[Any, Any]  # milliseconds, [rounds, layouts]
Data = dict[torch.Tensor, torch.Tensor]  # of the model's tensors
Key = tuple[str, str, str, int]  # phase, module, operator and which of equal calls
Forward = Callable[[Any], torch.Tensor | None]  # returns a batch's scalar loss, or None without a backward pass


@dataclass(eq=False)
class TimedCall:
    """One operator call in both layouts. If one of them lacks it, its time there is 0, and it has no arguments."""

    operator: str  # such as aten.convolution.default, or `python`
    direction: str  # forward, backward or update
    module: str
    kind: str
    source: str = ""
    arguments: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # by layout; tensors are on the meta device
    ms: Times = field(default_factory=lambda: np.zeros((0, 2)))

    @property
    def convolution(self) -> str:
        """What determines the kernel of a convolution, its weight first; empty for other operators."""
        arguments = next(iter(self.arguments.values()), ())
        if "convolution" not in self.operator or len(arguments) < 9:
            return ""
        image, weight, _, stride, _, _, is_transposed, _, groups = arguments["backward" in self.operator :][:9]
        kernel, size, strides = ("x".join(map(str, numbers)) for numbers in (weight.shape[2:], image.shape, stride))
        channels, out = image.shape[1], weight.shape[1] * groups if is_transposed else weight.shape[0]
        grouped = "depthwise " if 1 < groups == channels else f"{groups} groups, " * (groups > 1)
        dtype = str(image.dtype).removeprefix("torch.")
        return f"{grouped}{kernel}, {channels} to {out} channels; images {size}, stride {strides}, {dtype}"

    def __str__(self) -> str:
        shape = f" ({self.convolution.partition(';')[0]})" if self.convolution else ""
        return f"{short_name(self.operator)} {self.direction} of `{self.module or '(top)'}`{shape}"

    def remedy(self) -> str:
        if self.kind == COPY_KIND:
            return f"remove the copy at {self.source or 'the operator before it'}, or keep four dimensions"
        if self.operator == PYTHON:
            return "this is the module's own Python code, not an operator"
        change = "try another batch_size=, precision= or torch" if self.convolution else "replace it if it matters"
        return f"{change}, or send the program of repro=FILE to PyTorch"


class Row:
    """The calls of a kind, a module or a shape. `difference_ms`: what channels_last costs more, median over rounds."""

    def __init__(self, name: str, calls: list[TimedCall], step_ms: float = math.inf) -> None:
        self.name, self.calls = name, calls
        ms: Times = np.sum([call.ms for call in calls], axis=0)
        self.contiguous_ms, self.channels_last_ms = np.median(ms, axis=0).tolist()
        self.share_pct = 100 * self.channels_last_ms / step_ms  # of the step in channels_last
        ordered = np.sort(ms[:, 1] - ms[:, 0]).tolist()
        self.difference_ms: float = median(ordered)
        # 95 % interval of the median difference, by ranks; with fewer than six rounds their whole range
        count = len(ordered)
        outside = max(sum(np.cumsum([math.comb(count, i) for i in range(count)]) <= 0.025 * 2**count), 1)
        self.interval_ms: tuple[float, float] = ordered[outside - 1], ordered[-outside]
        self.is_loss, self.is_gain = self.interval_ms[0] > 0, self.interval_ms[1] < 0

    def to_dict(self) -> dict[str, Any]:
        names = ("contiguous_ms", "channels_last_ms", "difference_ms", "interval_ms", "share_pct")
        return {"name": self.name, "calls": len(self.calls), **{name: getattr(self, name) for name in names}}


@dataclass
class OperatorTimes:
    """The calls of a step, and the whole step (`step_ms`) without the recorder, measured in the same rounds."""

    calls: list[TimedCall]
    step_ms: Times
    copy_ms_per_byte: float  # that a copy into the other layout reads or writes
    utilisation: dict[str, Any]  # of the faster layout, see `step.utilisation`

    def __post_init__(self) -> None:
        self.speed_ratio = float(np.median(self.step_ms[:, 0] / self.step_ms[:, 1]))
        rows_ms = np.sum([call.ms for call in self.calls], axis=0)
        self.explained_pct = float(np.median(100 * rows_ms / self.step_ms, axis=0).min())  # of the worse layout
        self.tables = {
            "kinds": self.rows(lambda call: f"{call.kind} {call.direction}"),
            "modules": self.rows(lambda call: call.module or "(top)"),
            "operators": self.rows(lambda call: call),
            "convolutions": self.rows(lambda call: call.convolution and f"{call.direction}: {call.convolution}"),
        }
        self.tables["kinds"].sort(key=lambda row: -max(row.contiguous_ms, row.channels_last_ms))

    def rows(self, key: Callable[[TimedCall], object]) -> list[Row]:
        """Calls grouped by `key`, but those without one: differences beyond noise first, the largest at the top."""
        groups: dict[object, list[TimedCall]] = defaultdict(list)
        for call in self.calls:
            groups[key(call)].append(call)
        step_ms = float(np.median(self.step_ms[:, 1]))
        rows = [Row(str(name), calls, step_ms) for name, calls in groups.items() if name]
        return sorted(rows, key=lambda row: (not row.is_loss | row.is_gain, -abs(row.difference_ms)))

    def worst(self) -> Row:
        """The operator call by which channels_last loses most; if it loses none, the call that differs most."""
        rows = [row for row in self.tables["operators"] if row.calls[0].operator != PYTHON]
        return next((row for row in rows if row.is_loss), rows[0])

    def better_contiguous(self) -> list[str]:
        """Modules whose convolution loses more in channels_last than copies of its images and gradients would cost."""
        found = []
        for row in self.tables["modules"]:
            calls = [call for call in row.calls if call.convolution]
            backward = [call for call in calls if call.direction == "backward"]  # names its gradient, then its image
            given = [next(iter(call.arguments.values())) for call in backward or calls]
            copied = sum(one.nbytes for tensors in given for one in tensors[: 1 + bool(backward)])
            if row.is_loss and row.calls[0].module and 0 < 4 * self.copy_ms_per_byte * copied < row.difference_ms:
                found.append(row.name)
        return found

    def summary(self) -> list[str]:
        """Three lines: where channels_last saves and loses time, the step's time, how much of it the rows explain."""
        kinds = self.rows(lambda call: call.kind)
        saves = [row for row in kinds if row.is_gain][:2]
        loses = [row for row in self.tables["operators"] if row.is_loss and row.calls[0].kind != COPY_KIND][:2]
        loses += [row for row in kinds if row.is_loss and row.name == COPY_KIND]
        words = [[f"{abs(row.difference_ms):.2g} ms in {row.name}" for row in rows] for rows in (saves, loses)]
        gained, lost = (" and ".join(rows) or "nothing" for rows in words)
        contiguous_ms, channels_last_ms = np.median(self.step_ms, axis=0)
        step = f"the step takes {contiguous_ms:.4g} ms contiguous and {channels_last_ms:.4g} ms in channels_last"
        explained = f"the rows explain {self.explained_pct:.0f} % of the step ({len(self.step_ms)} rounds)"
        if self.explained_pct < 90:
            explained += ", less than 90 %: do not trust them"
        elif self.explained_pct > 110:
            explained += ", more than all of it: the recorder leaves cold caches; trust differences, not sums"
        return [f"channels_last saves {gained}, and loses {lost}", f"{step}: {self.speed_ratio:.2f}x", explained]

    def advice(self) -> list[str]:
        """What to do about the calls by which channels_last loses most, one line each."""
        losses = [row for row in self.tables["operators"] if row.is_loss]
        lines = [f"{row.name}: {row.calls[0].remedy()}" for row in losses[:3]]
        if names := self.better_contiguous():
            lines.append(f"try both layouts in one model: conversion=mixed select=[{','.join(names)}]")
        return lines

    def to_dict(self) -> dict[str, Any]:
        return {
            "rounds": len(self.step_ms),
            "step_ms": dict(zip(LAYOUTS, np.median(self.step_ms, axis=0).tolist(), strict=True)),
            "speed_ratio": self.speed_ratio,
            "explained_pct": self.explained_pct,
            "advice": self.advice(),
            "better_contiguous": self.better_contiguous(),
            "utilisation": self.utilisation,
            **{name: [row.to_dict() for row in rows] for name, rows in self.tables.items()},
        }

    def __str__(self) -> str:
        parts = [*self.summary(), describe(self.utilisation), *(f"- {line}" for line in self.advice())]
        for name, rows in self.tables.items():
            parts += ["", f"{name}:", "", markdown_table([row.to_dict() for row in rows[:_SHOWN]])] if rows else []
        return "\n".join(parts)


# --- recording --------------------------------------------------------------------------------------------------------


@contextmanager
def _clock() -> Iterator[Callable[[], float]]:
    """`perf_counter`, less the time in which this thread was ready to run and other processes had the core (Linux)."""
    path = Path("/proc/thread-self/schedstat")  # nanoseconds running, nanoseconds waiting, slices
    if not path.exists():
        yield time.perf_counter
        return
    with path.open("rb", buffering=0) as file:
        yield lambda: time.perf_counter() - 1e-9 * int(os.pread(file.fileno(), 64, 0).split()[1])


class TimeRecorder(OriginRecorder):
    """Times the operators of a step, and on a CPU what runs between them; `calls` gets those new in `layout`."""

    def __init__(self, layout: str, is_gpu: bool, clock: Callable[[], float], calls: dict[Key, TimedCall]) -> None:
        super().__init__()
        self._layout, self._is_gpu, self._clock, self._calls = layout, is_gpu, clock, calls
        self._phase, self._module = "forward", ""  # what runs
        self._spans: list[tuple[Key, Any, Any]] = []
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._gaps: dict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)  # by phase and event at the end
        self._last = clock()

    def seconds(self) -> dict[Key, float]:
        """Seconds of each call, less what recording it takes. Waits for the device."""
        if self._is_gpu:
            self._spans[-1][2].synchronize()
            return {key: start.elapsed_time(stop) / 1000 for key, start, stop in self._spans}
        idle = [stop - start for key, start, stop in self._spans if "aten.detach.default" in key]  # these do no work
        recording_s = median(idle) if idle else 0.0
        found = defaultdict(float, {key: max(0.0, stop - start - recording_s) for key, start, stop in self._spans})
        for (phase, _), gaps in self._gaps.items():
            usual = float(np.quantile([seconds for _, seconds in gaps], _USUAL))
            for module, seconds in gaps:
                key = (phase, module, PYTHON, 0)
                self._calls.setdefault(key, TimedCall(PYTHON, phase, module, "Python"))
                found[key] += max(0.0, seconds - usual)
        return found

    def _close(self, event: str) -> None:
        """The time since the last event belongs to the module that runs."""
        if not self._is_gpu:
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

        def enter_backward(gradient: torch.Tensor) -> None:  # complete: the module's backward pass begins
            self._close("enter")
            self._go_on(name)

        super().leave(module, inputs, output)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(enter_backward)
        self._go_on(self.running[-1][0])

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._close("operator")
        origin = self.origin(_getframe(1))
        # a parameter accumulates its gradient
        module = origin.module.rpartition(".")[0] if origin.module_type == "Parameter" else origin.module
        same = (self._phase, module, str(function))
        self._seen[same] += 1
        key = (*same, self._seen[same])
        call = self._calls.get(key)
        if is_new := call is None or self._layout not in call.arguments:  # describing takes more time than recording
            call = call or TimedCall(str(function), self._phase, module, _kind(function, self._phase), origin.source)
            positional, options = tree_map_only(torch.Tensor, _on_meta, (args, kwargs or {}))
            call.arguments[self._layout] = (*positional, options)
            self._calls[key] = call
        start = self._now()
        result = function(*args, **(kwargs or {}))
        stop = self._now()
        if is_new and function._schema.name in COPIES:
            copied = [value for value in positional if isinstance(value, torch.Tensor)][-1]
            strides = zip(result.shape, copied.stride(), result.stride(), strict=False)
            if copied.shape == result.shape and any(size > 1 and old != new for size, old, new in strides):
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


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """The shape, strides and dtype of an argument."""
    strides = tensor.stride() if tensor.layout == torch.strided else torch.empty(tensor.shape, device="meta").stride()
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")


def _kind(function: Any, phase: str) -> str:
    """What a table sums up: the operator and its backward pass together."""
    if phase == "update":
        return "optimizer"
    name = function._schema.name.removeprefix("aten::")
    is_pointwise = torch.Tag.pointwise in function.tags or "threshold" in name
    other = "element-wise" if is_pointwise else name.removesuffix("_backward")
    return next((kind for word, kind in _KINDS.items() if word in name), other)


# --- measuring --------------------------------------------------------------------------------------------------------


class _Step:
    """The training step in one layout, with data of the model's tensors, a batch and an optimizer of its own."""

    def __init__(self, model: nn.Module, batch: Any, data: Data, precision: Precision) -> None:
        self.batch, self._data = batch, data
        self.apply()
        weights = Fp32Weights(model, precision)
        self.parts: StepParts | None = None
        if parameters := weights.trainable():
            device = next(iter(parameters.values())).device
            optimizer = build_optimizer(OptimConfig(), model, parameters, lr=1e-4)
            scaler = torch.amp.GradScaler(device.type, enabled=precision.scales_loss)
            self.parts = StepParts(model, weights, optimizer, scaler, precision, device)

    def apply(self) -> None:
        for tensor, data in self._data.items():
            tensor.data = data

    def run(self, forward: Forward, start: Callable[[str], None]) -> None:
        torch.manual_seed(0)  # the same choices in both layouts
        start("forward")
        loss = forward(self.batch)
        if loss is not None and self.parts:
            start("backward")
            self.parts.scaler.scale(loss).backward()
            start("update")
            update_weights(self.parts)


def time_operators(
    model: nn.Module, batch: Any, forward: Forward, precision: Precision, device: torch.device, time_limit_s: float
) -> OperatorTimes:
    """Time the step in both layouts: contiguous, and the model's own, or channels_last if it is contiguous."""
    if borders(model):
        raise ConfigError("time=true compares with a contiguous model: leave out conversion=mixed")
    keep_freed_memory(device)
    tensors = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.dim() in CHANNELS_LAST)]
    before = {tensor: tensor.data for tensor in tensors if tensor.layout == torch.strided}
    other = torch.channels_last if model_memory_format(model) == "contiguous" else None
    gc.collect()
    gc.disable()  # it would fall on some operator
    try:
        with kernel_selection(tf32=precision.tf32, autotune=not torch.are_deterministic_algorithms_enabled()):
            steps = []
            for memory_format in (torch.contiguous_format, other):
                copied = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), (batch, before))
                placed_batch, data = images_in(memory_format, copied) if memory_format else copied  # keeps the strides
                steps.append(_Step(model, placed_batch, data, precision))
            calls, step_ms = _measured(steps, forward, device, time_limit_s)
            tensors = [tensor for tensor in tensors_in(batch) if tensor.dim() > 2]  # [N,...], or images [C,H,W]
            images = len(tensors[0]) if tensors[0].dim() > 3 else sum(tensor.dim() == 3 for tensor in tensors)
            gflop = flops_of(lambda: forward(steps[1].batch)) / images / 1e9
            images_per_s = 1000 * images / np.median(step_ms, axis=0).min()
            is_training = any(call.direction == "backward" for call in calls)
            used = utilisation(gflop, images_per_s, precision, device, training=is_training)
            return OperatorTimes(calls, step_ms, copy_ms_per_byte(device), used)
    finally:
        gc.enable()
        for tensor, data in before.items():
            tensor.data = data


def _measured(
    steps: list[_Step], forward: Forward, device: torch.device, time_limit_s: float
) -> tuple[list[TimedCall], Times]:
    """The calls with their times, and the milliseconds of the step without the recorder, [rounds, layouts]."""
    calls: dict[Key, TimedCall] = {}

    def block(index: int) -> dict[Any, float]:
        """Seconds of the step without the recorder, and of each call."""
        steps[index].apply()
        wait_for(device)
        started_at = clock()
        steps[index].run(forward, lambda phase: None)
        wait_for(device)
        step_s = clock() - started_at
        with TimeRecorder(LAYOUTS[index], device.type == "cuda", clock, calls) as recorder:
            steps[index].run(forward, recorder.start)
        return {"step": step_s, **recorder.seconds()}

    def ms_of(key: object) -> Times:
        """The mean of both blocks of a layout; a block may lack a call, which other random numbers have chosen."""
        seconds = np.array([[block.get(key, 0.0) for block in blocks] for blocks in rounds])
        return 500 * (seconds[:, :2] + seconds[:, :1:-1])

    with _clock() as clock:
        block(0)
        block(1)
        rounds: list[list[dict[Any, float]]] = []
        started_at = time.perf_counter()
        while len(rounds) < _MAX_ROUNDS:
            rounds.append([block(index) for index in (0, 1, 1, 0)])
            count = len(rounds)
            if count >= _MIN_ROUNDS and (time.perf_counter() - started_at) * (count + 1) / count > time_limit_s:
                break
    for key, call in calls.items():
        call.ms = ms_of(key)
    return list(calls.values()), ms_of("step")


def copy_ms_per_byte(device: torch.device) -> float:
    """Milliseconds for each byte that a copy into the other layout reads or writes."""
    image = torch.zeros(2, 64, 64, 64, device=device)
    copies = [timed_s(lambda: image.clone(memory_format=torch.channels_last), device) for _ in range(9)]
    return 1000 * median(copies) / (2 * image.nbytes)


# --- the program of one call ------------------------------------------------------------------------------------------

_PROGRAM = '''"""{row.name}

In a step of {model}: {row.contiguous_ms:.3g} ms contiguous, {row.channels_last_ms:.3g} ms channels_last.
"""
import ctypes, platform, time, torch
from math import inf, nan
from torch import device

def tensor(shape, strides, dtype):
    size = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides))
    values = torch.rand(size) if shape and dtype.is_floating_point else torch.zeros(size)
    return values.to("{device}", dtype).as_strided(shape, strides)

torch.set_num_threads({threads})
if platform.libc_ver()[0] == "glibc":  # keep freed memory, or page faults are timed
    ctypes.CDLL(None).mallopt(-1, -1), ctypes.CDLL(None).mallopt(-4, 0)
scratch = torch.zeros(16 * 2**20, device="{device}")
wait = torch.cuda.synchronize if scratch.is_cuda else lambda: None
calls = {{  # arguments by position and by name
{arguments}
}}
times = {{layout: [] for layout in calls}}
for _ in range(20):
    for layout in [*calls, *reversed(calls)]:
        *arguments, options = calls[layout]
        scratch.add_(1)  # as in a step, the caches hold something else
        first = arguments[0]
        if isinstance(first, torch.Tensor) and first.is_floating_point() and 0 not in first.stride():
            first.mul_(1)  # but the operator before has just written the input
        wait()
        started_at = time.perf_counter()
        torch.ops.{call.operator}(*arguments, **options)
        wait()
        times[layout].append(1000 * (time.perf_counter() - started_at))
for layout, found in times.items():
    print(f"{{layout:14}} {call.direction:9} {{min(found):10.4f}} ms (fastest of {{len(found)}})")
print(f"torch {{torch.__version__}}, {{platform.platform()}}, {{torch.get_num_threads()}} threads")
'''


class _Source(str):
    """Python source that stands for itself in a repr."""

    __repr__ = str.__str__


def reproduction(row: Row, model: str, device: str) -> str:
    """A program of torch alone that times the one call of a row in both layouts, to be pasted into an issue."""
    (call,) = row.calls
    described = tree_map_only(
        torch.Tensor, lambda t: _Source(f"tensor({tuple(t.shape)}, {t.stride()}, {t.dtype})"), call.arguments
    )
    lines = "\n".join(f"    {layout!r}: {arguments!r}," for layout, arguments in described.items())
    kind, threads = device.partition(":")[0], torch.get_num_threads()
    return _PROGRAM.format(row=row, call=call, arguments=lines, model=model, device=kind, threads=threads)
