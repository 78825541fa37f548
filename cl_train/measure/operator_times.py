"""The time of every operator of a step in both layouts, forward, backward and update.

Operators are timed below autograd, with `perf_counter` on a CPU and events on a GPU (one wait per
step), which sleeps before each of them until the host has launched it. The time between two
operators belongs to the module that runs, as `python`, as far as it is longer than usual, which is
the recorder's own. Calls of the two layouts are paired by module, operator and order.
"""

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from cl_train.measure.alternate import Block, Stop, alternate
from cl_train.measure.time_recorder import Key, LineRecorder, TimeRecorder, processor_clock
from cl_train.measure.timed_step import measurement_state
from cl_train.measure.times_report import LAYOUTS, PYTHON, OperatorTimes, TimedCall, Times
from cl_train.memory_format.convert import CONTIGUOUS, convert
from cl_train.memory_format.layout import images_in, model_memory_format
from cl_train.models.sources import copy_model
from cl_train.step.precision import Precision
from cl_train.step.train_step import StepSettings, make_step, update_weights
from cl_train.step.utilisation import flops_of, utilisation
from cl_train.system.distributed import as_current
from cl_train.system.machine import wait_for
from cl_train.system.tensors import map_tensors, tensors_in

_MIN_ROUNDS, _MAX_ROUNDS = 4, 40

# The loss of a model and a batch, or None without a backward pass.
Forward = Callable[[nn.Module, Any], torch.Tensor | None]


def time_operators(
    model: nn.Module,
    batch: Any,
    forward: Forward,
    precision: Precision,
    device: torch.device,
    time_limit_s: float,
) -> OperatorTimes:
    """Time the step of copies of `model`: contiguous, and in its own layout, or channels_last if
    that is contiguous.
    """
    settings = StepSettings(precision)
    plain, converted = (copy_model(model, device) for _ in range(2))
    batches = [images_in(torch.contiguous_format, _copied(batch)), _copied(batch)]
    if model_memory_format(model) == "contiguous":
        convert(converted)
        batches[1] = images_in(torch.channels_last, batches[1])
    convert(plain, CONTIGUOUS)
    gc.collect()
    gc.disable()  # it would fall on some operator
    try:
        # The current device is that of events and sleeps.
        with as_current(device), measurement_state(settings, device):
            models = zip((plain, converted), batches, strict=True)
            steps = [_Step(*one, forward, settings, device) for one in models]
            calls, step_ms = _timed_calls(steps, device, time_limit_s)
            return OperatorTimes(calls, step_ms, _utilisation(steps[1], step_ms, precision, device))
    finally:
        gc.enable()


def _copied(batch: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach().clone(), batch)


class _Step:
    """The training step of a model in its layout, with a batch and an optimizer."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        forward: Forward,
        settings: StepSettings,
        device: torch.device,
    ) -> None:
        self.batch, self.forward = batch, partial(forward, model, batch)
        trains = any(parameter.requires_grad for parameter in model.parameters())
        self._parts = make_step(model, settings, device) if trains else None

    def run(self, start: Callable[[str], None] = lambda phase: None) -> None:
        """`start` is told the phase that begins."""
        torch.manual_seed(0)  # the same choices in both layouts
        start("forward")
        loss = self.forward()
        if loss is not None and self._parts is not None:
            start("backward")
            self._parts.scaler.scale(loss).backward()
            start("update")
            update_weights(self._parts)


def _timed_calls(
    steps: Sequence[_Step], device: torch.device, time_limit_s: float
) -> tuple[list[TimedCall], Times]:
    """The calls with their times, and those of the step without the recorder."""
    calls: dict[Key, TimedCall] = {}
    seconds: list[list[dict[Key, float]]] = [[] for _ in steps]  # of the calls, in each block

    def block(index: int) -> Block:
        wait_for(device)
        started_at = clock()
        steps[index].run()
        wait_for(device)
        step_s = clock() - started_at
        recorder = TimeRecorder(LAYOUTS[index], device.type == "cuda", clock, calls)
        with recorder.watching():
            steps[index].run(recorder.start)
        seconds[index].append(recorder.seconds())
        return Block(step_s)

    with processor_clock() as clock:
        for index in range(len(steps)):  # the warm-up
            block(index)
            seconds[index].clear()
        stop = Stop(math.inf, time_limit_s, _MAX_ROUNDS, _MIN_ROUNDS)
        done = alternate([partial(block, index) for index in range(len(steps))], stop)
        if device.type == "cpu":
            _name_lines(steps, clock, calls)
    for key, call in calls.items():
        # A block may lack a call, which other random numbers have chosen.
        call.ms = _ms_of_rounds([[block.get(key, 0.0) for block in blocks] for blocks in seconds])
    return list(calls.values()), _ms_of_rounds([done.times_s(index) for index in range(len(steps))])


def _ms_of_rounds(seconds: Sequence[Sequence[float]]) -> Times:
    """The mean of the two blocks that each layout has in a round."""
    return 1000 * np.array(seconds).reshape(len(LAYOUTS), -1, 2).mean(2).T


def _name_lines(
    steps: Sequence[_Step], clock: Callable[[], float], calls: dict[Key, TimedCall]
) -> None:
    """Name the line of each module's Python whose time differs most between the layouts."""
    difference_s = defaultdict[tuple[str, str, str], float](float)
    for step, layout, sign in zip(steps, LAYOUTS, (-1, 1), strict=True):
        with LineRecorder(layout, False, clock, {}).watching() as recorder:
            step.run(recorder.start)
        for place, seconds in recorder.seconds_of_lines.items():
            difference_s[place] += sign * seconds
    for phase, module, line in sorted(difference_s, key=lambda place: abs(difference_s[place])):
        call = calls.get((phase, module, PYTHON, 0))
        if call and line:
            call.source = line


def _utilisation(
    step: _Step, step_ms: Times, precision: Precision, device: torch.device
) -> dict[str, Any] | None:
    """See `step.utilisation`, of the faster layout."""
    tensors = [tensor for tensor in tensors_in(step.batch) if tensor.dim() > 2]
    is_batch = tensors[0].dim() > 3  # [N,...]; else images [C,H,W]
    images = len(tensors[0]) if is_batch else sum(tensor.dim() == 3 for tensor in tensors)
    gflop = flops_of(step.forward) / images / 1e9
    step_gflop = flops_of(step.run, gradients=True) / images / 1e9
    images_per_s = 1000 * images / np.median(step_ms, axis=0).min()
    return utilisation(gflop, step_gflop, images_per_s, precision, device)
