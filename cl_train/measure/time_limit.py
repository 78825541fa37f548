"""What fits into a time limit: images per step, and steps of warm-up."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from cl_train.measure.alternate import Stop
from cl_train.measure.timed_step import TimedStep, Workload, measurement_state
from cl_train.memory_format.convert import CONTIGUOUS
from cl_train.system.failures import failure_explained
from cl_train.system.machine import available_bytes, timed_s

SLOW_S = 2.0  # of the first steps of all sides; from here on a line tells how long the rest takes
PROBED_IMAGES = 4  # of the step from which the time and memory of larger ones are estimated
LEAST_IMAGES = 8  # of a batch, even if they take longer
SHARE_OF_MEMORY = 0.8  # of what is free


def scaled_to_time(
    model: nn.Module, workload: Workload, limit_s: float, least_steps: int
) -> Workload:
    """Returns the workload, with a smaller step if `least_steps` of it do not end within `limit_s`
    or do not fit into memory: first the batch is halved, down to `LEAST_IMAGES`, then the number of
    micro-steps.

    A compiled step, which cannot be tried cheaply, keeps its batch, as does one on a GPU.
    """
    settings = workload.settings
    is_eager_cpu = workload.device.type == "cpu" and not settings.compile
    if not is_eager_cpu or workload.batch is not None or workload.images_per_step <= LEAST_IMAGES:
        return workload
    probed = min(PROBED_IMAGES, workload.batch_size)
    small = replace(settings, accumulate_steps=1, cuda_graph=False)
    remedy = "if it takes another input, give image_size"
    explained = failure_explained("the model cannot be measured", remedy)
    with explained, measurement_state(small, workload.device):
        probe = TimedStep(model, CONTIGUOUS, replace(workload, settings=small, batch_size=probed))
        probe.first_step()
        probe.peak_step()
        assert probe.peak_gib is not None
        image_s = probe.block_times_s(1)[0] / probed
        image_bytes = (probe.peak_gib * 2**30 - probe.held_bytes()) / probed
        held_bytes = 2 * probe.held_bytes()
    available = available_bytes(workload.device)

    def fits(batch_size: int, micro_steps: int) -> bool:
        is_quick = least_steps * batch_size * micro_steps * image_s <= limit_s
        needed = held_bytes + batch_size * image_bytes
        return is_quick and (available is None or needed <= SHARE_OF_MEMORY * available)

    batch_size, micro_steps = workload.batch_size, settings.accumulate_steps
    while not fits(batch_size, micro_steps) and batch_size > LEAST_IMAGES:
        batch_size = max(LEAST_IMAGES, batch_size // 2)
    while not fits(batch_size, micro_steps) and micro_steps > 1:
        micro_steps //= 2
    settings = replace(settings, accumulate_steps=micro_steps)
    return replace(workload, batch_size=batch_size, settings=settings)


def warmed_up(timed: Sequence[TimedStep], stop: Stop) -> tuple[list[float], float]:
    """Runs eager steps of all sides in turns, fewer if rounds would not fit in after them.

    Returns the seconds of the last step of each side, and the seconds that are left.
    """
    workload = timed[0].workload
    ends_at = time.perf_counter() + stop.time_limit_s
    step_s, left_s = [], math.inf
    for work in (TimedStep.first_step, TimedStep.peak_step, TimedStep.warm_up):
        step_s = [timed_s(partial(work, step), workload.device) for step in timed]
        if workload.settings.compile and work is TimedStep.first_step:
            stop.tell(f"compiled: about {stop.time_limit_s:.0f} s to go")
            ends_at = time.perf_counter() + stop.time_limit_s  # compilation is not counted
            continue
        left_s = ends_at - time.perf_counter()
        pass_s = sum(step_s)
        if work is TimedStep.first_step and pass_s >= SLOW_S:
            rest_s = max(left_s, pass_s)
            stop.tell(f"the first step took {max(step_s):.1f} s: about {rest_s:.0f} s to go")
        # A round is two passes. Go on if two rounds fit in after another pass, or none fits anyway.
        can_go_on = 5 * pass_s <= left_s or pass_s <= left_s < 2 * pass_s
        if not can_go_on:
            break
    return step_s, left_s
