"""The time of every operator of a step in both layouts, forward, backward and update, measured in
turns A B B A.

Operators are timed below autograd, with `perf_counter` on a CPU and events on a GPU (one wait per
step), which sleeps before each of them until the host has launched it. The time between two
operators belongs to the module that runs, as `python`, as far as it is longer than usual, because
the recorder itself takes time there; what it takes inside an operator's time is that of an operator
without work. Calls of the two layouts are paired by module, operator and order.
"""

import gc
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from cl_train.config.schema import OptimConfig
from cl_train.measure.time_recorder import Key, LineRecorder, TimeRecorder, processor_clock
from cl_train.measure.times_report import LAYOUTS, PYTHON, OperatorTimes, TimedCall, Times
from cl_train.memory_format.layout import CHANNELS_LAST, images_in, model_memory_format
from cl_train.memory_format.model_call import tensors_in
from cl_train.step.optim import build_optimizer
from cl_train.step.precision import Fp32Weights, Precision, kernel_selection
from cl_train.step.train_step import StepParts, update_weights
from cl_train.step.utilisation import flops_of, utilisation
from cl_train.system.distributed import as_current
from cl_train.system.machine import keep_freed_memory, wait_for

_MIN_ROUNDS, _MAX_ROUNDS = 4, 40

Data = dict[torch.Tensor, torch.Tensor]  # of the model's tensors
Forward = Callable[
    [Any], torch.Tensor | None
]  # returns a batch's scalar loss, or None without a backward pass


class _Step:
    """The training step in one layout, with data of the model's tensors, a batch and an optimizer
    of its own.
    """

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
    model: nn.Module,
    batch: Any,
    forward: Forward,
    precision: Precision,
    device: torch.device,
    time_limit_s: float,
) -> OperatorTimes:
    """Time the step in both layouts: contiguous, and the model's own, or channels_last if it is
    contiguous.
    """
    keep_freed_memory(device)
    tensors = [
        *model.parameters(),
        *(buffer for buffer in model.buffers() if buffer.dim() in CHANNELS_LAST),
    ]
    before = {tensor: tensor.data for tensor in tensors if tensor.layout == torch.strided}
    other = torch.channels_last if model_memory_format(model) == "contiguous" else None
    gc.collect()
    gc.disable()  # it would fall on some operator
    try:
        with (
            as_current(device),  # of events and sleeps
            kernel_selection(
                tf32=precision.tf32, autotune=not torch.are_deterministic_algorithms_enabled()
            ),
        ):
            steps = []
            for memory_format in (torch.contiguous_format, other):
                copied = tree_map_only(
                    torch.Tensor, lambda tensor: tensor.detach().clone(), (batch, before)
                )
                placed_batch, data = (
                    images_in(memory_format, copied) if memory_format else copied
                )  # keeps the strides
                steps.append(_Step(model, placed_batch, data, precision))
            calls, step_ms = _measured(steps, forward, device, time_limit_s)
            tensors = [
                tensor for tensor in tensors_in(batch) if tensor.dim() > 2
            ]  # [N,...], or images [C,H,W]
            images = (
                len(tensors[0])
                if tensors[0].dim() > 3
                else sum(tensor.dim() == 3 for tensor in tensors)
            )
            gflop = flops_of(lambda: forward(steps[1].batch)) / images / 1e9
            images_per_s = 1000 * images / np.median(step_ms, axis=0).min()
            step = partial(steps[1].run, forward, lambda phase: None)
            step_gflop = flops_of(step, gradients=True) / images / 1e9
            used = utilisation(gflop, step_gflop, images_per_s, precision, device)
            return OperatorTimes(calls, step_ms, used)
    finally:
        gc.enable()
        for tensor, data in before.items():
            tensor.data = data


def _measured(
    steps: list[_Step], forward: Forward, device: torch.device, time_limit_s: float
) -> tuple[list[TimedCall], Times]:
    """The calls with their times, and the milliseconds of the step without the recorder, [rounds,
    layouts].
    """
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

    def name_lines(calls: dict[Key, TimedCall]) -> None:
        """Names the line of each module's Python whose time differs most between the layouts."""
        difference_s = defaultdict[tuple[str, str, str], float](float)
        for index, sign in ((0, -1), (1, 1)):
            steps[index].apply()
            with LineRecorder(LAYOUTS[index], False, clock, {}) as recorder:
                steps[index].run(forward, recorder.start)
            for place, seconds in recorder.seconds_of_lines.items():
                difference_s[place] += sign * seconds
        for phase, module, line in sorted(difference_s, key=lambda place: abs(difference_s[place])):
            call = calls.get((phase, module, PYTHON, 0))
            if call and line:
                call.source = line

    def ms_of(key: object) -> Times:
        """The mean of both blocks of a layout; a block may lack a call, which other random numbers
        have chosen.
        """
        seconds = np.array([[block.get(key, 0.0) for block in blocks] for blocks in rounds])
        return 500 * (seconds[:, :2] + seconds[:, :1:-1])

    with processor_clock() as clock:
        block(0)
        block(1)
        rounds: list[list[dict[Any, float]]] = []
        started_at = time.perf_counter()
        while len(rounds) < _MAX_ROUNDS:
            rounds.append([block(index) for index in (0, 1, 1, 0)])
            count = len(rounds)
            if (
                count >= _MIN_ROUNDS
                and (time.perf_counter() - started_at) * (count + 1) / count > time_limit_s
            ):
                break
        if device.type == "cpu":
            name_lines(calls)
    for key, call in calls.items():
        call.ms = ms_of(key)
    return list(calls.values()), ms_of("step")
