"""The time of every operator of a step in both layouts, forward, backward and update.

Operators are timed below autograd. A GPU times them by events, and sleeps before each operator
until the host has launched it. The time between two operators counts as `python` of the module that
runs, less the usual time, which is the recorder's own. Calls are paired by module, operator and
order.
"""

import gc
import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from cl_train.measure.alternate import Block, Stop, alternate
from cl_train.measure.time_recorder import Key, ThreadClock, TimeRecorder
from cl_train.measure.timed_step import TimedStep, Workload, measurement_state
from cl_train.measure.times_report import LAYOUTS, OperatorTimes, TimedCall, Times
from cl_train.memory_format.convert import CHANNELS_LAST, CONTIGUOUS, layout_of
from cl_train.system.distributed import as_current
from cl_train.system.machine import wait_for

_MIN_ROUNDS, _MAX_ROUNDS = 4, 40


def time_operators(model: nn.Module, workload: Workload, time_limit_s: float) -> OperatorTimes:
    """Times the contiguous step, and the step in the model's own layout or, if that is contiguous,
    in channels_last. The model is unchanged.
    """
    device, own = workload.device, layout_of(model)
    layout = own if own.is_channels_last else CHANNELS_LAST
    gc.collect()
    gc.disable()  # it would fall on some operator
    try:
        # Events and sleeps go to the current device.
        with as_current(device), measurement_state(workload.settings, device):
            plain = TimedStep(model, CONTIGUOUS, workload)
            steps = (plain, TimedStep(model, layout, workload, plain.facts))
            return _operator_times(steps, device, time_limit_s)
    finally:
        gc.enable()


def _operator_times(
    steps: Sequence[TimedStep], device: torch.device, time_limit_s: float
) -> OperatorTimes:
    clock = ThreadClock(device)
    calls: dict[Key, TimedCall] = {}
    # Not in inference mode, where composite operators arrive whole.
    runs = [step.step if step.parts else torch.no_grad()(step.forward) for step in steps]
    seconds: list[list[dict[Key, float]]] = [[] for _ in steps]  # of the calls, block by block

    def block(index: int) -> Block:
        torch.manual_seed(0)  # the same choices in both layouts
        wait_for(device)
        start = clock.mark()
        runs[index]()
        stop = clock.mark()
        clock.wait(stop)
        torch.manual_seed(0)
        recorder = TimeRecorder(LAYOUTS[index], device.type == "cuda", clock, calls)
        with recorder.watching():
            runs[index]()
        seconds[index].append(recorder.seconds())
        return Block(clock.seconds(start, stop))

    blocks = [partial(block, index) for index in range(len(steps))]
    for warm_up in blocks:
        warm_up()
    done = alternate(blocks, Stop(math.inf, time_limit_s, _MAX_ROUNDS, _MIN_ROUNDS))
    for key, call in calls.items():
        # A block may lack a call that other random numbers have chosen.
        call.ms = _ms_of_rounds([[of.get(key, 0.0) for of in side[1:]] for side in seconds])
    step_ms = _ms_of_rounds([done.times_s(index) for index in range(len(steps))])
    return OperatorTimes(list(calls.values()), step_ms)


def _ms_of_rounds(seconds: Sequence[Sequence[float]]) -> Times:
    """Returns the mean of the two blocks that each layout has in a round."""
    return 1000 * np.array(seconds).reshape(len(LAYOUTS), -1, 2).mean(2).T
