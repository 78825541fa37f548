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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import median
from sys import _getframe
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cl_train.config.schema import OptimConfig
from cl_train.memory_format.audit_report import markdown_table, short_name
from cl_train.memory_format.layout import model_memory_format, named_tensors, to_memory_format
from cl_train.memory_format.operator_recorder import COPIES, OriginRecorder, strided_tensors
from cl_train.step.optim import build_optimizer
from cl_train.step.precision import MasterWeights, Precision, build_scaler, kernel_selection, trainable_parameters
from cl_train.step.train_step import StepParts, update_weights
from cl_train.step.utilisation import describe, flops_of, utilisation
from cl_train.system.machine import timed_s, wait_for

LAYOUTS = ("contiguous", "channels_last")
PYTHON = "python"
_MIN_ROUNDS, _MAX_ROUNDS = 4, 40
_EXPLAINED_PCT = 90
_SHOWN = 12  # rows of a table
_USUAL = 0.75  # quantile of the times between two events that counts as the recorder's own

Times = np.ndarray[Any, Any]  # milliseconds, [rounds, layouts]


@dataclass(frozen=True)
class Argument:
    """The shape of a tensor argument, in place of its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str


@dataclass
class TimedCall:
    """One operator call, in both layouts; absent from one, its time there is 0 and it has no arguments."""

    operator: str  # such as aten.convolution.default, or `python`
    direction: str  # forward, backward or update
    module: str
    module_type: str
    kind: str
    source: str
    arguments: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # by layout, tensors as Argument
    ms: Times = field(default_factory=lambda: np.zeros((0, 2)))

    @property
    def shape(self) -> dict[str, Any]:
        """Of a convolution: what determines its kernel."""
        arguments = next(iter(self.arguments.values()), ())
        if "convolution" not in self.operator or len(arguments) < 9:
            return {}
        first = 1 if "backward" in self.operator else 0
        image, weight, stride, groups = (arguments[first + index] for index in (0, 1, 3, 8))
        shape = {"input": "x".join(map(str, image.shape)), "out": weight.shape[0], "kernel": weight.shape[2:]}
        if arguments[first + 6]:
            shape["out"] = weight.shape[1] * groups
        shape["kernel"] = "x".join(map(str, weight.shape[2:]))
        return {**shape, "stride": "x".join(map(str, stride)), "groups": groups, "dtype": image.dtype}


@dataclass(frozen=True)
class Row:
    """The calls of a kind, a module or a shape. `difference_ms`: what channels_last costs more, median over rounds."""

    name: str
    calls: Sequence[TimedCall]

    @cached_property
    def ms(self) -> Times:
        return np.sum([call.ms for call in self.calls], axis=0)

    @property
    def contiguous_ms(self) -> float:
        return float(np.median(self.ms[:, 0]))

    @property
    def channels_last_ms(self) -> float:
        return float(np.median(self.ms[:, 1]))

    @property
    def difference_ms(self) -> float:
        return float(np.median(self.ms[:, 1] - self.ms[:, 0]))

    @cached_property
    def interval_ms(self) -> tuple[float, float]:
        """95 % interval of the median difference, by ranks; with fewer than six rounds their whole range."""
        ordered = sorted(self.ms[:, 1] - self.ms[:, 0])
        count = len(ordered)
        outside = sum(p <= 0.025 for p in accumulate(math.comb(count, i) / 2**count for i in range(count)))
        return float(ordered[max(outside, 1) - 1]), float(ordered[-max(outside, 1)])

    @property
    def is_significant(self) -> bool:
        low, high = self.interval_ms
        return low > 0 or high < 0

    def to_dict(self) -> dict[str, Any]:
        names = ("contiguous_ms", "channels_last_ms", "difference_ms", "interval_ms")
        return {"name": self.name, "calls": len(self.calls), **{name: getattr(self, name) for name in names}}

    def cells(self, step_ms: float) -> dict[str, Any]:
        """For a table, in milliseconds."""
        low, high = self.interval_ms
        return {
            "calls": len(self.calls),
            "contiguous": self.contiguous_ms,
            "channels_last": self.channels_last_ms,
            "difference": f"{self.difference_ms:+.3g} [{low:.3g}, {high:.3g}]",
            "% of step": 100 * self.contiguous_ms / step_ms,
        }


@dataclass
class OperatorTimes:
    """The calls of a step, and the whole step (`step_ms`) without the recorder, measured in the same rounds."""

    calls: list[TimedCall]
    step_ms: Times
    recorder_ms: float  # by which recording lengthens a step; not in the rows
    copy_ms_per_byte: float  # of a copy into the other layout
    utilisation: dict[str, Any]  # of the faster layout, see `step.utilisation`

    def rows(self, key: Callable[[TimedCall], str]) -> list[Row]:
        """Calls grouped by `key`, what channels_last costs or gains most first."""
        groups: dict[str, list[TimedCall]] = defaultdict(list)
        for call in self.calls:
            groups[key(call)].append(call)
        return _by_difference([Row(name, calls) for name, calls in groups.items()])

    def kinds(self) -> list[Row]:
        """Those that take most of the step first."""
        rows = self.rows(lambda call: f"{call.kind} {call.direction}" if call.direction != "update" else call.kind)
        return sorted(rows, key=lambda row: -max(row.contiguous_ms, row.channels_last_ms))

    def modules(self) -> list[Row]:
        return self.rows(lambda call: call.module or "(top)")

    def operators(self) -> list[Row]:
        """One row for each call."""
        return _by_difference([Row(_described(call), [call]) for call in self.calls])

    def convolutions(self) -> list[dict[str, Any]]:
        """Per shape: the milliseconds of one call, forward and backward, in both layouts."""
        found = []
        for row in self.rows(lambda call: str(call.shape)):
            if not row.calls[0].shape:
                continue
            shown = {**row.calls[0].shape, "calls": sum(call.direction == "forward" for call in row.calls)}
            for direction in ("forward", "backward"):
                of_direction = [call for call in row.calls if call.direction == direction]
                one = Row("", of_direction) if of_direction else None
                for side, layout in enumerate(LAYOUTS):
                    each = float(np.median(one.ms[:, side])) / len(of_direction) if one else None
                    shown[f"{direction}, {layout}"] = each
            found.append({**shown, "difference of all": row.difference_ms})
        return found

    @property
    def speed_ratio(self) -> float:
        return float(np.median(self.step_ms[:, 0] / self.step_ms[:, 1]))

    @property
    def explained_pct(self) -> float:
        """The sum of all rows as a share of the step, of the layout that is explained worse."""
        rows = np.sum([call.ms for call in self.calls], axis=0)
        return min(float(value) for value in 100 * np.median(rows / self.step_ms, axis=0))

    def worst(self) -> Row:
        """The operator call by which channels_last loses most; if it loses none, the call that differs most."""
        operators = [row for row in self.operators() if row.calls[0].operator != PYTHON]
        losing = [row for row in operators if row.difference_ms > 0 and row.is_significant]
        return (losing or operators)[0]

    def better_contiguous(self) -> list[str]:
        """Modules whose convolution loses more in channels_last than copies of its images and gradients would cost."""
        losing = [row for row in self.modules() if row.is_significant and row.difference_ms > 0]
        return [row.name for row in losing if 0 < self._border_ms(row) < row.difference_ms]

    def _border_ms(self, row: Row) -> float:
        """Of copying its images and their gradients, as the backward pass names them; 0 without a convolution."""
        calls = [call for call in row.calls if call.shape]
        backward = [call for call in calls if call.direction == "backward"]
        images = [image for call in backward or calls for image in call.arguments[LAYOUTS[1]][: 1 + bool(backward)]]
        return (
            2 * self.copy_ms_per_byte * sum(math.prod(one.shape) * getattr(torch, one.dtype).itemsize for one in images)
        )

    def summary(self) -> list[str]:
        """Three lines: where channels_last saves and loses time, the step's time, how much of it the rows explain."""
        kinds = [row for row in self.rows(lambda call: call.kind) if row.is_significant]
        gains = [f"{-row.difference_ms:.2g} ms in {row.name}" for row in kinds if row.difference_ms < 0]
        losing = [row for row in self.operators() if row.is_significant and row.difference_ms > 0]
        losing = [row for row in losing if row.calls[0].kind != "layout copies"]
        losses = [f"{row.difference_ms:.2g} ms in {row.name}" for row in losing[:2]]
        losses += [f"{row.difference_ms:.2g} ms in {row.name}" for row in kinds if row.name == "layout copies"]
        contiguous_ms, channels_last_ms = np.median(self.step_ms, axis=0)
        explained = f"the rows explain {self.explained_pct:.0f} % of the step"
        if self.explained_pct < _EXPLAINED_PCT:
            explained += f", less than {_EXPLAINED_PCT} %: do not trust them"
        elif self.explained_pct > 200 - _EXPLAINED_PCT:
            explained += ", more than all of it: the recorder leaves cold caches; trust differences, not sums"
        saves, loses = (" and ".join(found) or "nothing" for found in (gains[:2], losses))
        return [
            f"channels_last saves {saves}, and loses {loses}",
            f"the step takes {contiguous_ms:.4g} ms contiguous and {channels_last_ms:.4g} ms in channels_last: "
            f"{self.speed_ratio:.2f}x",
            f"{explained} ({len(self.step_ms)} rounds; recording adds {self.recorder_ms:.2g} ms, left out)",
        ]

    def advice(self) -> list[str]:
        """What to do about the calls by which channels_last loses most, one line each."""
        losing = [row for row in self.operators() if row.is_significant and row.difference_ms > 0]
        lines = [f"{row.name}: {_remedy(row.calls[0])}" for row in losing[:3]]
        if names := self.better_contiguous():
            lines.append(f"try both layouts in one model: conversion=mixed select=[{','.join(names)}]")
        return lines

    def to_dict(self) -> dict[str, Any]:
        tables = {"kinds": self.kinds(), "modules": self.modules(), "operators": self.operators()}
        return {
            "rounds": len(self.step_ms),
            "step_ms": dict(zip(LAYOUTS, np.median(self.step_ms, axis=0).tolist(), strict=True)),
            "speed_ratio": self.speed_ratio,
            "explained_pct": self.explained_pct,
            "recorder_ms": self.recorder_ms,
            "advice": self.advice(),
            "better_contiguous": self.better_contiguous(),
            "utilisation": self.utilisation,
            **{name: [row.to_dict() for row in rows] for name, rows in tables.items()},
            "convolutions": self.convolutions(),
        }

    def __str__(self) -> str:
        step_ms = float(np.median(self.step_ms[:, 0]))
        parts = [*self.summary(), describe(self.utilisation), *(f"- {line}" for line in self.advice())]
        for title, rows in (("operators", self.kinds()), ("module", self.modules()), ("call", self.operators())):
            parts += ["", markdown_table([{f"{title} (ms)": row.name, **row.cells(step_ms)} for row in rows[:_SHOWN]])]
        return "\n".join([*parts, "", markdown_table(self.convolutions()[:_SHOWN])])


def _remedy(call: TimedCall) -> str:
    if call.kind == "layout copies":
        return (
            f"remove the copy at {call.source or 'the operator before it'}, or keep four dimensions where it reshapes"
        )
    if call.operator == PYTHON:
        return "this is the module's own Python code, not an operator"
    if call.shape:
        return "try another batch_size=, precision= or torch, and send the program of repro=FILE to PyTorch"
    return "replace it if its share matters, or send the program of repro=FILE to PyTorch"


def _by_difference(rows: list[Row]) -> list[Row]:
    """Differences beyond noise first, the largest of them at the top."""
    return sorted(rows, key=lambda row: (not row.is_significant, -abs(row.difference_ms)))


def _described(call: TimedCall) -> str:
    shape = call.shape
    what = ""
    if shape:
        kernel, channels = shape["kernel"], shape["input"].split("x")[1]
        grouping = f"{shape['groups']} groups, " if shape["groups"] > 1 else ""
        what = f" (depthwise {kernel}, {channels} channels)" if str(shape["groups"]) == channels else ""
        what = what or f" ({grouping}{kernel}, {channels} to {shape['out']} channels)"
    direction = "" if call.direction == "update" else f" {call.direction}"
    return f"{short_name(call.operator)}{direction} of `{call.module or '(top)'}`{what}"


# --- recording --------------------------------------------------------------------------------------------------------


class _Clock:
    """`perf_counter`, less the time in which this thread was ready to run and other processes had the core (Linux)."""

    def __init__(self) -> None:
        path = Path("/proc/thread-self/schedstat")  # nanoseconds running, nanoseconds waiting, slices
        self._file = path.open("rb", buffering=0) if path.exists() else None

    def __call__(self) -> float:
        now = time.perf_counter()
        return now if self._file is None else now - 1e-9 * int(os.pread(self._file.fileno(), 64, 0).split()[1])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def seconds_of(self, work: Callable[[], object], device: torch.device) -> float:
        """The host waits for the device before and after."""
        wait_for(device)
        started_at = self()
        work()
        wait_for(device)
        return self() - started_at


class TimeRecorder(OriginRecorder):
    """Times the operators, and on a CPU what runs between them. `phase`: the part of the step, set by its caller."""

    def __init__(self, device: torch.device, clock: _Clock) -> None:
        super().__init__()
        self._clock = clock
        self.phase = "forward"
        self.calls: dict[tuple[Any, ...], TimedCall] = {}
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[tuple[Any, ...], Any, Any]] = []
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._in_backward = ("", "")  # the module whose backward pass runs
        self._gaps: dict[tuple[str, str], list[tuple[Any, float]]] = defaultdict(list)
        self._last = self._clock()

    def start(self, phase: str) -> None:
        self._close("operator")
        self.phase = phase
        self._last = self._clock()
        self._in_backward = ("", "")

    def seconds(self) -> dict[tuple[Any, ...], float]:
        """Seconds of each call, less what recording it takes. Waits for the device."""
        found: dict[tuple[Any, ...], float] = defaultdict(float)
        if self._on_gpu:
            self._spans[-1][2].synchronize()
            return {key: start.elapsed_time(stop) / 1000 for key, start, stop in self._spans}
        idle = [stop - start for key, start, stop in self._spans if "aten.detach.default" in key]  # these do no work
        for key, start, stop in self._spans:
            found[key] = max(0.0, stop - start - (median(idle) if idle else 0.0))
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
        entry = self.running[-1] if self.running else ("", "")
        super().leave(module, inputs, output)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._enter_backward(entry))
        self._last = self._clock()

    def _enter_backward(self, entry: tuple[str, str]) -> None:
        """The gradient of a module's output is complete: the module's backward pass begins."""
        self._close("enter")
        self._in_backward = entry
        self._last = self._clock()

    def _close(self, event: str) -> None:
        """The time since the last event belongs to the module that runs."""
        now = self._clock()
        if self._on_gpu:
            return
        current = self._in_backward if self.phase == "backward" else (self.running or [("", "")])[-1]
        key = (self.phase, current[0], PYTHON, 0)
        if key not in self.calls:
            self.calls[key] = TimedCall(PYTHON, self.phase, *current, "Python", "")
        self._gaps[self.phase, event].append((key, now - self._last))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._close("operator")
        origin = self.origin(_getframe(1))
        module = (origin.module, origin.module_type)
        if origin.module_type == "Parameter":  # accumulates its gradient
            module = (origin.module.rpartition(".")[0], "")
        if self.phase == "backward":
            self._in_backward = module
        same = (self.phase, module[0], str(function))
        self._seen[same] += 1
        key = (*same, self._seen[same])
        before = strided_tensors(args)[-1:] if function._schema.name in COPIES else []
        strides = [tensor.stride() for tensor in before]
        if key not in self.calls:
            arguments = tree_map_only(torch.Tensor, _argument, (args, kwargs or {}))
            call = TimedCall(str(function), self.phase, *module, "", origin.source)
            call.arguments = {"": (*arguments[0], arguments[1])}
            self.calls[key] = call
        start = self._now()
        result = function(*args, **(kwargs or {}))
        stop = self._now()
        call = self.calls[key]
        if not call.kind:
            is_permuting = any(
                isinstance(result, torch.Tensor) and result.shape == tensor.shape and _permutes(tensor, stride, result)
                for tensor, stride in zip(before, strides, strict=True)
            )
            call.kind = "layout copies" if is_permuting else _kind(function, self.phase)
        self._spans.append((key, start, stop))
        self._last = self._clock()
        return result

    def _now(self) -> Any:
        if not self._on_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _permutes(source: torch.Tensor, strides: tuple[int, ...], copy: torch.Tensor) -> bool:
    return any(size > 1 and one != other for size, one, other in zip(source.shape, strides, copy.stride(), strict=True))


def _argument(tensor: torch.Tensor) -> Argument:
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return Argument(tuple(tensor.shape), strides, str(tensor.dtype).removeprefix("torch."), tensor.device.type)


def _kind(function: Any, phase: str) -> str:
    """What a table sums up: the operator and its backward pass together."""
    name = function._schema.name.removeprefix("aten::")
    words = {
        "convolution": "convolutions", "batch_norm": "batch norm", "norm": "normalisation", "pool": "pooling",
        "mm": "matrix products", "softmax": "softmax", "cat": "concatenation",
    }  # fmt: skip
    if phase == "update":
        return "optimizer"
    for word, kind in words.items():
        if word in name:
            return kind
    is_pointwise = torch.Tag.pointwise in function.tags or "threshold" in name
    return "element-wise" if is_pointwise else name.removesuffix("_backward")


# --- measuring --------------------------------------------------------------------------------------------------------


class _Side:
    """The model's tensors, its batch and an optimizer in one layout. The model itself is shared."""

    def __init__(self, model: nn.Module, batch: Any, memory_format: torch.memory_format | None) -> None:
        def placed(tensor: torch.Tensor) -> torch.Tensor:
            copied = tensor.detach().clone()  # keeps the strides
            return to_memory_format(copied, memory_format) if memory_format and tensor.dim() in (4, 5) else copied

        self._weights = [(tensor, placed(tensor)) for tensor in _weights(model)]
        self.batch = tree_map_only(torch.Tensor, placed, batch)
        self.parts: StepParts | None = None

    def apply(self) -> None:
        for tensor, data in self._weights:
            tensor.data = data

    def build_optimizer(self, model: nn.Module, precision: Precision, device: torch.device) -> None:
        self.apply()
        masters = MasterWeights(model) if precision.master_weights else None
        if parameters := trainable_parameters(model, masters):
            optimizer = build_optimizer(OptimConfig(), model, parameters, lr=1e-4)
            self.parts = StepParts(
                model, optimizer, build_scaler(precision, device), precision, device, masters=masters
            )

    def step(self, forward: Callable[[Any], torch.Tensor | None], recorder: TimeRecorder | None = None) -> None:
        start = recorder.start if recorder else lambda phase: None
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
    own = torch.channels_last if model_memory_format(model) == "contiguous" else None
    autotune = not torch.are_deterministic_algorithms_enabled()
    selection = kernel_selection(tf32=precision.tf32, autotune=autotune)
    with _weights_restored(model), selection, closing(_Clock()) as clock:
        sides = [_Side(model, batch, memory_format) for memory_format in (torch.contiguous_format, own)]

        def block(side: _Side) -> tuple[float, float, TimeRecorder]:
            side.apply()
            plain_s = clock.seconds_of(lambda: side.step(forward), device)
            recorder = TimeRecorder(device, clock)
            with recorder.module_hooks(), recorder:
                recorded_s = clock.seconds_of(lambda: side.step(forward, recorder), device)
            return plain_s, recorded_s, recorder

        for side in sides:
            side.build_optimizer(model, precision, device)
            side.step(forward)
        paired = _Paired([block(side)[2].calls for side in sides])
        started_at, step_s, recording_s = time.perf_counter(), [], []
        while True:
            blocks = [block(sides[index]) for index in (0, 1, 1, 0)]
            paired.add([blocks[0][2], blocks[3][2]], [blocks[1][2], blocks[2][2]])
            plain_s = [block[0] for block in blocks]
            step_s.append([(plain_s[0] + plain_s[3]) / 2, (plain_s[1] + plain_s[2]) / 2])
            recording_s.append(sum(recorded_s - plain_s for plain_s, recorded_s, _ in blocks) / 4)
            seconds = time.perf_counter() - started_at
            count = len(step_s)
            if count >= _MAX_ROUNDS or (count >= _MIN_ROUNDS and seconds * (count + 1) / count > time_limit_s):
                break
        images, best_s = _batch_size(batch), float(np.median(step_s, axis=0).min())
        gflop = flops_of(lambda: forward(sides[1].batch)) / images / 1e9
        used = utilisation(gflop, images / best_s, precision, device, training=sides[1].parts is not None)
        image = torch.zeros(2, 64, 64, 64, device=device)
        copies = [timed_s(lambda: image.clone(memory_format=torch.channels_last), device) for _ in range(9)]
    return OperatorTimes(
        paired.calls(), 1000 * np.array(step_s), 1000 * median(recording_s), 1000 * median(copies) / image.nbytes, used
    )


def _batch_size(batch: Any) -> int:
    """Images of the first tensor [N,...]; a list of images [C,H,W] has one each."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 2]
    return len(tensors[0]) if tensors[0].dim() > 3 else sum(tensor.dim() == 3 for tensor in tensors)


class _Paired:
    """The calls of both layouts by module, operator and order, and their seconds in each round."""

    def __init__(self, recorded: list[dict[tuple[Any, ...], TimedCall]]) -> None:
        self._calls = {key: call for calls in reversed(recorded) for key, call in calls.items()}
        for layout, calls in zip(LAYOUTS, recorded, strict=True):
            for key, call in calls.items():
                self._calls[key].arguments[layout] = call.arguments.pop("", ())
                if call.kind == "layout copies":
                    self._calls[key].kind = call.kind
        self._rounds: list[dict[tuple[Any, ...], list[float]]] = []

    def add(self, *sides: list[TimeRecorder]) -> None:
        """One round: the recorders of each layout."""
        seconds = [[recorder.seconds() for recorder in recorders] for recorders in sides]
        means = [
            [sum(block.get(key, 0.0) for block in blocks) / len(blocks) for blocks in seconds] for key in self._calls
        ]
        self._rounds.append(dict(zip(self._calls, means, strict=True)))

    def calls(self) -> list[TimedCall]:
        for key, call in self._calls.items():
            call.ms = 1000 * np.array([one[key] for one in self._rounds])
        return list(self._calls.values())


def _weights(model: nn.Module) -> list[torch.Tensor]:
    """The parameters, each once, and the buffers that have a layout."""
    named = named_tensors(model).values()
    strided = [tensor for tensor in named if tensor.layout == torch.strided]
    kept = [tensor for tensor in strided if isinstance(tensor, nn.Parameter) or tensor.dim() in (4, 5)]
    return list({id(tensor): tensor for tensor in kept}.values())


@contextmanager
def _weights_restored(model: nn.Module) -> Iterator[None]:
    """Steps change copies of the weights. No garbage collection meanwhile, which would fall on some operator."""
    before = [(tensor, tensor.data) for tensor in _weights(model)]
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        for tensor, data in before:
            tensor.data = data
