"""The time of every operator of a step in both layouts, forward, backward and update, measured in turns A B B A.

Operators are timed below autograd, with `perf_counter` on a CPU and events on a GPU (one wait per step). The time
between two operators belongs to the module that runs, as `python`, as far as it is longer than usual, because the
recorder itself takes time there; what it takes inside an operator's time is that of an operator without work.
Calls of the two layouts are paired by module, operator and order.
"""

import gc
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from math import comb
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
from cl_train.memory_format.convert import has_borders
from cl_train.memory_format.layout import images_in, model_memory_format, named_tensors
from cl_train.memory_format.model_call import tensors_in
from cl_train.memory_format.operator_recorder import COPIES, OriginRecorder
from cl_train.step.optim import build_optimizer
from cl_train.step.precision import MasterWeights, Precision, kernel_selection
from cl_train.step.train_step import StepParts, update_weights
from cl_train.step.utilisation import describe, flops_of, utilisation
from cl_train.system.machine import keep_freed_memory, timed_s, wait_for

LAYOUTS = ("contiguous", "channels_last")
PYTHON = "python"
COPY_KIND = "layout copies"
_MIN_ROUNDS, _MAX_ROUNDS = 4, 40
_EXPLAINED_PCT = 90
_SHOWN = 12  # rows of a table
_USUAL = 0.75  # quantile of the times between two events that counts as the recorder's own: few modules compute there
_KINDS = {
    "convolution": "convolutions", "batch_norm": "batch norm", "norm": "normalisation", "pool": "pooling",
    "mm": "matrix products", "softmax": "softmax", "cat": "concatenation",
}  # fmt: skip

Times = np.ndarray[Any, Any]  # milliseconds, [rounds, layouts]
Weights = list[tuple[torch.Tensor, torch.Tensor]]  # each with its data
Key = tuple[str, str, str, int]  # phase, module, operator and which of equal calls


@dataclass(eq=False)
class TimedCall:
    """One operator call, in both layouts; absent from one, its time there is 0 and it has no arguments."""

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
        what = f"{f'{groups} groups, ' * (groups > 1)}{kernel}, {channels} to {out} channels"
        if 1 < groups == channels:
            what = f"depthwise {kernel}, {channels} channels"
        return f"{what}; images {size}, stride {strides}, {str(image.dtype).removeprefix('torch.')}"

    def __str__(self) -> str:
        direction = "" if self.direction == "update" else f" {self.direction}"
        shape = f" ({self.convolution.partition(';')[0]})" if self.convolution else ""
        return f"{short_name(self.operator)}{direction} of `{self.module or '(top)'}`{shape}"

    def remedy(self) -> str:
        if self.kind == COPY_KIND:
            place = self.source or "the operator before it"
            return f"remove the copy at {place}, or keep four dimensions where it reshapes"
        if self.operator == PYTHON:
            return "this is the module's own Python code, not an operator"
        other = (
            "try another batch_size=, precision= or torch" if self.convolution else "replace it if its share matters"
        )
        return f"{other}, or send the program of repro=FILE to PyTorch"


class Row:
    """The calls of a kind, a module or a shape. `difference_ms`: what channels_last costs more, median over rounds."""

    def __init__(self, name: str, calls: Sequence[TimedCall]) -> None:
        self.name, self.calls = name, calls
        ms: Times = np.sum([call.ms for call in calls], axis=0)
        self.contiguous_ms, self.channels_last_ms = np.median(ms, axis=0).tolist()
        ordered = np.sort(ms[:, 1] - ms[:, 0]).tolist()
        self.difference_ms: float = median(ordered)
        # 95 % interval of the median difference, by ranks; with fewer than six rounds their whole range
        count = len(ordered)
        outside = max(sum(ways <= 0.025 * 2**count for ways in accumulate(comb(count, i) for i in range(count))), 1)
        self.interval_ms: tuple[float, float] = ordered[outside - 1], ordered[-outside]
        self.is_loss = self.interval_ms[0] > 0
        self.is_significant = self.is_loss or self.interval_ms[1] < 0

    def to_dict(self) -> dict[str, Any]:
        names = ("contiguous_ms", "channels_last_ms", "difference_ms", "interval_ms")
        return {"name": self.name, "calls": len(self.calls), **{name: getattr(self, name) for name in names}}


@dataclass
class OperatorTimes:
    """The calls of a step, and the whole step (`step_ms`) without the recorder, measured in the same rounds."""

    calls: list[TimedCall]
    step_ms: Times
    recorder_ms: float  # by which recording lengthens a step; not in the rows
    copy_ms_per_byte: float  # of a copy into the other layout
    utilisation: dict[str, Any]  # of the faster layout, see `step.utilisation`

    def rows(self, key: Callable[[TimedCall], object]) -> list[Row]:
        """Calls grouped by `key`, but those without one: differences beyond noise first, the largest at the top."""
        groups: dict[object, list[TimedCall]] = defaultdict(list)
        for call in self.calls:
            groups[key(call)].append(call)
        rows = [Row(str(name), calls) for name, calls in groups.items() if name]
        return sorted(rows, key=lambda row: (not row.is_significant, -abs(row.difference_ms)))

    def kinds(self) -> list[Row]:
        """Those that take most of the step first."""
        rows = self.rows(lambda call: call.kind if call.direction == "update" else f"{call.kind} {call.direction}")
        return sorted(rows, key=lambda row: -max(row.contiguous_ms, row.channels_last_ms))

    def modules(self) -> list[Row]:
        return self.rows(lambda call: call.module or "(top)")

    def operators(self) -> list[Row]:
        """One row for each call."""
        return self.rows(lambda call: call)

    def convolutions(self) -> list[Row]:
        """By shape, forward and backward apart."""
        return self.rows(lambda call: call.convolution and f"{call.direction}: {call.convolution}")

    @property
    def speed_ratio(self) -> float:
        return float(np.median(self.step_ms[:, 0] / self.step_ms[:, 1]))

    @property
    def explained_pct(self) -> float:
        """The sum of all rows as a share of the step, of the layout that is explained worse."""
        rows = np.sum([call.ms for call in self.calls], axis=0)
        return float(np.median(100 * rows / self.step_ms, axis=0).min())

    def worst(self) -> Row:
        """The operator call by which channels_last loses most; if it loses none, the call that differs most."""
        rows = [row for row in self.operators() if row.calls[0].operator != PYTHON]
        return next((row for row in rows if row.is_loss), rows[0])

    def better_contiguous(self) -> list[str]:
        """Modules whose convolution loses more in channels_last than copies of its images and gradients would cost."""
        found = []
        for row in self.modules():
            calls = [call for call in row.calls if call.convolution]
            backward = [call for call in calls if call.direction == "backward"]  # names its gradient, then its image
            given = [call.arguments.get(LAYOUTS[1]) or call.arguments[LAYOUTS[0]] for call in backward or calls]
            copied = sum(one.nbytes for tensors in given for one in tensors[: 1 + bool(backward)])
            if row.is_loss and row.calls[0].module and 0 < 2 * self.copy_ms_per_byte * copied < row.difference_ms:
                found.append(row.name)
        return found

    def summary(self) -> list[str]:
        """Three lines: where channels_last saves and loses time, the step's time, how much of it the rows explain."""
        kinds = [row for row in self.rows(lambda call: call.kind) if row.is_significant]
        gains = [row for row in kinds if not row.is_loss][:2]
        losses = [row for row in self.operators() if row.is_loss and row.calls[0].kind != COPY_KIND][:2]
        losses += [row for row in kinds if row.is_loss and row.name == COPY_KIND]
        saves, loses = (
            " and ".join(f"{abs(row.difference_ms):.2g} ms in {row.name}" for row in rows) or "nothing"
            for rows in (gains, losses)
        )
        contiguous_ms, channels_last_ms = np.median(self.step_ms, axis=0)
        explained = f"the rows explain {self.explained_pct:.0f} % of the step"
        if self.explained_pct < _EXPLAINED_PCT:
            explained += f", less than {_EXPLAINED_PCT} %: do not trust them"
        elif self.explained_pct > 200 - _EXPLAINED_PCT:
            explained += ", more than all of it: the recorder leaves cold caches; trust differences, not sums"
        return [
            f"channels_last saves {saves}, and loses {loses}",
            f"the step takes {contiguous_ms:.4g} ms contiguous and {channels_last_ms:.4g} ms in channels_last: "
            f"{self.speed_ratio:.2f}x",
            f"{explained} ({len(self.step_ms)} rounds; recording adds {self.recorder_ms:.2g} ms, left out)",
        ]

    def advice(self) -> list[str]:
        """What to do about the calls by which channels_last loses most, one line each."""
        losses = [row for row in self.operators() if row.is_loss]
        lines = [f"{row.name}: {row.calls[0].remedy()}" for row in losses[:3]]
        if names := self.better_contiguous():
            lines.append(f"try both layouts in one model: conversion=mixed select=[{','.join(names)}]")
        return lines

    def _tables(self) -> dict[str, list[Row]]:
        return {name: getattr(self, name)() for name in ("kinds", "modules", "operators", "convolutions")}

    def to_dict(self) -> dict[str, Any]:
        return {
            "rounds": len(self.step_ms),
            "step_ms": dict(zip(LAYOUTS, np.median(self.step_ms, axis=0).tolist(), strict=True)),
            "speed_ratio": self.speed_ratio,
            "explained_pct": self.explained_pct,
            "recorder_ms": self.recorder_ms,
            "advice": self.advice(),
            "better_contiguous": self.better_contiguous(),
            "utilisation": self.utilisation,
            **{name: [row.to_dict() for row in rows] for name, rows in self._tables().items()},
        }

    def __str__(self) -> str:
        parts = [*self.summary(), describe(self.utilisation), *(f"- {line}" for line in self.advice())]
        for name, rows in self._tables().items():
            shown = [{**row.to_dict(), "interval_ms": "[{:.3g}, {:.3g}]".format(*row.interval_ms)} for row in rows]
            parts += ["", f"{name}:", "", markdown_table(shown[:_SHOWN])] if rows else []
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
    """Times the operators of a step, and on a CPU what runs between them.

    `calls` gets those that are not described yet in `layout`: describing takes more time than recording.
    """

    def __init__(
        self, layout: str, device: torch.device, clock: Callable[[], float], calls: dict[Key, TimedCall]
    ) -> None:
        super().__init__()
        self._layout, self._clock, self._calls, self._on_gpu = layout, clock, calls, device.type == "cuda"
        self.phase = "forward"
        self._spans: list[tuple[Key, Any, Any]] = []
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._in_backward = ""  # the module whose backward pass runs
        self._gaps: dict[tuple[str, str], list[tuple[Key, float]]] = defaultdict(list)
        self._last = self._clock()

    def start(self, phase: str) -> None:
        """A part of the step begins: forward, backward or update."""
        self._close("operator")
        self.phase, self._in_backward = phase, ""
        self._last = self._clock()

    def seconds(self) -> dict[Key, float]:
        """Seconds of each call, less what recording it takes. Waits for the device."""
        if self._on_gpu:
            self._spans[-1][2].synchronize()
            return {key: start.elapsed_time(stop) / 1000 for key, start, stop in self._spans}
        idle = [stop - start for key, start, stop in self._spans if "aten.detach.default" in key]  # these do no work
        recording_s = median(idle) if idle else 0.0
        found = defaultdict(float, {key: max(0.0, stop - start - recording_s) for key, start, stop in self._spans})
        for gaps in self._gaps.values():
            usual = float(np.quantile([seconds for _, seconds in gaps], _USUAL))
            for key, seconds in gaps:
                found[key] += max(0.0, seconds - usual)
        return found

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self._close("enter")
        super().enter(module, inputs)
        self._last = self._clock()

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._close("leave")
        name = self.running[-1][0] if self.running else ""

        def enter_backward(gradient: torch.Tensor) -> None:  # complete: the module's backward pass begins
            self._close("enter")
            self._in_backward = name
            self._last = self._clock()

        super().leave(module, inputs, output)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(enter_backward)
        self._last = self._clock()

    def _close(self, event: str) -> None:
        """The time since the last event belongs to the module that runs."""
        now = self._clock()
        if self._on_gpu:
            return
        running = self.running[-1][0] if self.running else ""
        module = self._in_backward if self.phase == "backward" else running
        key = (self.phase, module, PYTHON, 0)
        if key not in self._calls:
            self._calls[key] = TimedCall(PYTHON, self.phase, module, "Python")
        self._gaps[self.phase, event].append((key, now - self._last))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._close("operator")
        origin = self.origin(_getframe(1))
        # a parameter accumulates its gradient
        module = origin.module.rpartition(".")[0] if origin.module_type == "Parameter" else origin.module
        if self.phase == "backward":
            self._in_backward = module
        same = (self.phase, module, str(function))
        self._seen[same] += 1
        key = (*same, self._seen[same])
        call = self._calls.get(key)
        if is_new := call is None or self._layout not in call.arguments:
            call = call or TimedCall(str(function), self.phase, module, _kind(function, self.phase), origin.source)
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
        self._last = self._clock()
        return result

    def _now(self) -> Any:
        if not self._on_gpu:
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


class _Side:
    """The data of the model's tensors, its batch and an optimizer in one layout. The model itself is shared."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        weights: Weights,
        memory_format: torch.memory_format | None,
        precision: Precision,
        device: torch.device,
    ) -> None:
        def placed(tensor: torch.Tensor) -> torch.Tensor:
            copied = tensor.detach().clone()  # keeps the strides
            return images_in(memory_format, copied) if memory_format else copied

        self._weights = [(tensor, placed(data)) for tensor, data in weights]
        self.batch = tree_map_only(torch.Tensor, placed, batch)
        self.apply()
        masters = MasterWeights(model, precision)
        self.parts: StepParts | None = None
        if parameters := masters.trainable():
            optimizer = build_optimizer(OptimConfig(), model, parameters, lr=1e-4)
            scaler = torch.amp.GradScaler(device.type, enabled=precision.scales_loss)
            self.parts = StepParts(model, masters, optimizer, scaler, precision, device)

    def apply(self) -> None:
        for tensor, data in self._weights:
            tensor.data = data

    def step(self, forward: Callable[[Any], torch.Tensor | None], start: Callable[[str], None]) -> None:
        torch.manual_seed(0)  # the same choices in both layouts
        start("forward")
        loss = forward(self.batch)
        if loss is not None and loss.requires_grad and self.parts:
            start("backward")
            self.parts.scaler.scale(loss).backward()
            start("update")
            update_weights(self.parts)


def time_operators(
    model: nn.Module,
    batch: Any,
    forward: Callable[[Any], torch.Tensor | None],
    *,
    precision: Precision,
    device: torch.device,
    time_limit_s: float,
) -> OperatorTimes:
    """Time the step in both layouts: contiguous, and the model's own, or channels_last if it is contiguous.

    Args:
        forward: returns the scalar loss of a batch, or None without a backward pass.
        time_limit_s: for all rounds, of which there are at least 4 and at most 40.
    """
    if has_borders(model):
        raise ConfigError("time=true compares with a contiguous model: leave out conversion=mixed")
    keep_freed_memory(device)
    other_layout = torch.channels_last if model_memory_format(model) == "contiguous" else None
    selection = kernel_selection(tf32=precision.tf32, autotune=not torch.are_deterministic_algorithms_enabled())
    with _weights_restored(model) as weights, selection:
        sides = [_Side(model, batch, weights, to, precision, device) for to in (torch.contiguous_format, other_layout)]
        calls, ms = _rounds(sides, forward, device, time_limit_s)
        tensors = [tensor for tensor in tensors_in(batch) if tensor.dim() > 2]  # [N,...], or a list of images [C,H,W]
        images = len(tensors[0]) if tensors[0].dim() > 3 else sum(tensor.dim() == 3 for tensor in tensors)
        best_s = np.median(ms[:, :, 0], axis=0).min() / 1000
        gflop = flops_of(lambda: forward(sides[1].batch)) / images / 1e9
        used = utilisation(gflop, images / best_s, precision, device, training=sides[1].parts is not None)
        image = torch.zeros(2, 64, 64, 64, device=device)
        copies = [timed_s(lambda: image.clone(memory_format=torch.channels_last), device) for _ in range(9)]
    recorder_ms, copy_ms_per_byte = float(np.median(ms[:, :, 1].mean(axis=1))), 1000 * median(copies) / image.nbytes
    return OperatorTimes(calls, ms[:, :, 0], recorder_ms, copy_ms_per_byte, used)


def _rounds(
    sides: list[_Side], forward: Callable[[Any], torch.Tensor | None], device: torch.device, time_limit_s: float
) -> tuple[list[TimedCall], Times]:
    """The calls with their times, and the milliseconds of the step and of recording it, [rounds, layouts, 2]."""
    calls: dict[Key, TimedCall] = {}

    def seconds_of(index: int, start: Callable[[str], None]) -> float:
        wait_for(device)
        started_at = clock()
        sides[index].step(forward, start)
        wait_for(device)
        return clock() - started_at

    def block(index: int) -> tuple[float, float, dict[Key, float]]:
        sides[index].apply()
        plain_s = seconds_of(index, lambda phase: None)
        with TimeRecorder(LAYOUTS[index], device, clock, calls) as recorder:
            recorded_s = seconds_of(index, recorder.start)
        return plain_s, recorded_s - plain_s, recorder.seconds()

    with _clock() as clock:
        block(0)
        block(1)
        rounds: list[list[tuple[float, float, dict[Key, float]]]] = []
        started_at = time.perf_counter()
        while len(rounds) < _MAX_ROUNDS:
            rounds.append([block(index) for index in (0, 1, 1, 0)])
            count = len(rounds)
            if count >= _MIN_ROUNDS and (time.perf_counter() - started_at) * (count + 1) / count > time_limit_s:
                break
    # the calls are complete only now: Python's random numbers can choose others in each step
    rows = [[[*seconds, *(spent.get(key, 0.0) for key in calls)] for *seconds, spent in blocks] for blocks in rounds]
    ms = 500 * (np.array(rows)[:, :2] + np.array(rows)[:, :1:-1])  # the mean of both blocks of a layout
    for call, times in zip(calls.values(), ms.T[2:], strict=True):
        call.ms = times.T
    return list(calls.values()), ms[:, :, :2]


@contextmanager
def _weights_restored(model: nn.Module) -> Iterator[Weights]:
    """The parameters, each once, and the buffers that have a layout, with their data, which steps leave as they are.

    No garbage collection meanwhile, which would fall on some operator.
    """
    strided = [tensor for tensor in named_tensors(model).values() if tensor.layout == torch.strided]
    kept = [tensor for tensor in strided if isinstance(tensor, nn.Parameter) or tensor.dim() in (4, 5)]
    before = [(tensor, tensor.data) for tensor in {id(tensor): tensor for tensor in kept}.values()]
    gc.collect()
    gc.disable()
    try:
        yield before
    finally:
        gc.enable()
        for tensor, data in before:
            tensor.data = data
