"""The time of every operator of a step in both layouts, forward, backward and update.

Operators are timed below autograd, with `perf_counter` on a CPU and events on a GPU (one wait per
step), which sleeps before each of them until the host has launched it. The time between two
operators belongs to the module that runs, as `python`, as far as it is longer than usual, because
the recorder itself takes time there; what it takes inside an operator's time is that of an operator
without work. Calls of the two layouts are paired by module, operator and order.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from cl_train.measure.statistics import alternate
from cl_train.measure.time_recorder import Key, LineRecorder, TimeRecorder, processor_clock
from cl_train.measure.times_report import LAYOUTS, PYTHON, OperatorTimes, TimedCall, Times
from cl_train.memory_format.layout import CHANNELS_LAST, images_in, model_memory_format
from cl_train.memory_format.model_call import tensors_in
from cl_train.step.make import StepSettings, make_step
from cl_train.step.precision import Precision, kernel_selection
from cl_train.step.train_step import update_weights
from cl_train.step.utilisation import flops_of, utilisation
from cl_train.system.distributed import as_current
from cl_train.system.machine import keep_freed_memory, wait_for

_MIN_ROUNDS, _MAX_ROUNDS = 4, 40

Data = dict[torch.Tensor, torch.Tensor]  # of the model's tensors
Forward = Callable[[Any], torch.Tensor | None]  # a batch's loss, or None without a backward pass


def time_operators(
    model: nn.Module,
    batch: Any,
    forward: Forward,
    precision: Precision,
    device: torch.device,
    time_limit_s: float,
) -> OperatorTimes:
    """Time the step contiguous, and in the model's own layout, or channels_last if that is
    contiguous.
    """
    keep_freed_memory(device)
    buffers = [buffer for buffer in model.buffers() if buffer.dim() in CHANNELS_LAST]
    tensors = [t for t in (*model.parameters(), *buffers) if t.layout == torch.strided]
    before = {tensor: tensor.data for tensor in tensors}
    autotune = not torch.are_deterministic_algorithms_enabled()
    kernels = kernel_selection(tf32=precision.tf32, autotune=autotune)
    gc.collect()
    gc.disable()  # it would fall on some operator
    try:
        with as_current(device), kernels:  # the device of events and sleeps
            is_contiguous = model_memory_format(model) == "contiguous"
            converted = torch.channels_last if is_contiguous else None
            steps = [
                _Step(model, batch, before, memory_format, precision, device)
                for memory_format in (torch.contiguous_format, converted)
            ]
            calls, step_ms = _timed_calls(steps, forward, device, time_limit_s)
            used = _utilisation(steps[1], forward, step_ms, precision, device)
            return OperatorTimes(calls, step_ms, used)
    finally:
        gc.enable()
        for tensor, data in before.items():
            tensor.data = data


class _Step:
    """The training step in one layout, with a batch, data of the model's tensors and an optimizer.

    `memory_format` None keeps the strides of the batch and of `data`.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        data: Data,
        memory_format: torch.memory_format | None,
        precision: Precision,
        device: torch.device,
    ) -> None:
        copied = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), (batch, data))
        if memory_format is not None:
            copied = images_in(memory_format, copied)
        self.batch, self._data = copied
        self.apply()
        trains = any(parameter.requires_grad for parameter in model.parameters())
        self._parts = make_step(model, StepSettings(precision), device) if trains else None

    def apply(self) -> None:
        for tensor, data in self._data.items():
            tensor.data = data

    def run(self, forward: Forward, start: Callable[[str], None] = lambda phase: None) -> None:
        """`start` is told the phase that begins."""
        torch.manual_seed(0)  # the same choices in both layouts
        start("forward")
        loss = forward(self.batch)
        if loss is not None and self._parts is not None:
            start("backward")
            self._parts.scaler.scale(loss).backward()
            start("update")
            update_weights(self._parts)


def _timed_calls(
    steps: Sequence[_Step], forward: Forward, device: torch.device, time_limit_s: float
) -> tuple[list[TimedCall], Times]:
    """The calls with their times, and those of the step without the recorder."""
    calls: dict[Key, TimedCall] = {}
    seconds: list[list[dict[Key, float]]] = [[] for _ in steps]  # of the calls, in each block

    def block_s(index: int) -> float:
        steps[index].apply()
        wait_for(device)
        started_at = clock()
        steps[index].run(forward)
        wait_for(device)
        step_s = clock() - started_at
        with TimeRecorder(LAYOUTS[index], device.type == "cuda", clock, calls) as recorder:
            steps[index].run(forward, recorder.start)
        seconds[index].append(recorder.seconds())
        return step_s

    with processor_clock() as clock:
        for index in range(len(steps)):
            block_s(index)
            seconds[index].clear()  # it was the warm-up
        done = alternate(
            [partial(block_s, index) for index in range(len(steps))],
            target_ci=float("inf"),
            time_limit_s=time_limit_s,
            min_rounds=_MAX_ROUNDS,
            least_rounds=_MIN_ROUNDS,
        )
        if device.type == "cpu":
            _name_lines(steps, forward, clock, calls)
    for key, call in calls.items():
        # A block may lack a call, which other random numbers have chosen.
        call.ms = _ms_of_rounds([[block.get(key, 0.0) for block in blocks] for blocks in seconds])
    return list(calls.values()), _ms_of_rounds(done.blocks)


def _ms_of_rounds(seconds: Sequence[Sequence[float]]) -> Times:
    """The mean of the two blocks that each layout has in a round."""
    return 1000 * np.array(seconds).reshape(len(LAYOUTS), -1, 2).mean(2).T


def _name_lines(
    steps: Sequence[_Step],
    forward: Forward,
    clock: Callable[[], float],
    calls: dict[Key, TimedCall],
) -> None:
    """Name the line of each module's Python whose time differs most between the layouts."""
    difference_s = defaultdict[tuple[str, str, str], float](float)
    for step, layout, sign in zip(steps, LAYOUTS, (-1, 1), strict=True):
        step.apply()
        with LineRecorder(layout, False, clock, {}) as recorder:
            step.run(forward, recorder.start)
        for place, seconds in recorder.seconds_of_lines.items():
            difference_s[place] += sign * seconds
    for phase, module, line in sorted(difference_s, key=lambda place: abs(difference_s[place])):
        call = calls.get((phase, module, PYTHON, 0))
        if call and line:
            call.source = line


def _utilisation(
    step: _Step, forward: Forward, step_ms: Times, precision: Precision, device: torch.device
) -> dict[str, Any] | None:
    """See `step.utilisation`, of the faster layout."""
    tensors = [tensor for tensor in tensors_in(step.batch) if tensor.dim() > 2]
    is_batch = tensors[0].dim() > 3  # [N,...]; else images [C,H,W]
    images = len(tensors[0]) if is_batch else sum(tensor.dim() == 3 for tensor in tensors)
    gflop = flops_of(partial(forward, step.batch)) / images / 1e9
    step_gflop = flops_of(partial(step.run, forward), gradients=True) / images / 1e9
    images_per_s = 1000 * images / np.median(step_ms, axis=0).min()
    return utilisation(gflop, step_gflop, images_per_s, precision, device)
