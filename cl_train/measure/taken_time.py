"""The time that other processes took from the steps of a block."""

from statistics import median

import torch

from cl_train.measure.alternate import MOST_TAKEN, Block
from cl_train.measure.timed_step import TimedStep
from cl_train.system.processes import thread_times


class TakenTime:
    """The time in which threads of this process were ready to run and others had the cores."""

    def __init__(self) -> None:
        self._waited_s: dict[int, float] = {}  # of threads that have ended, too
        self.is_known = bool(thread_times())

    def seconds(self) -> float:
        """So far, of all threads."""
        self._waited_s |= {thread: waited_s for thread, (_, waited_s) in thread_times().items()}
        return sum(self._waited_s.values())


def timed_block(step: TimedStep, steps: int, others: TakenTime) -> Block:
    """Time `steps` steps, on a CPU without those from which other processes took time.

    With one thread that time is subtracted instead; with several, what one of them waits for a
    core may or may not delay the others. A GPU does not wait for a core.
    """
    if step.workload.device.type != "cpu":
        times_s, host_s = step.block_and_host_times_s(steps)
        # The least: the host also waits where the device's queue is full.
        return Block(median(times_s), host_share=min(host_s) / median(times_s))
    all_s, shares = [], []
    for _ in range(steps):
        taken_before_s = others.seconds()
        [step_s] = step.block_times_s(1)
        taken_s = others.seconds() - taken_before_s
        if torch.get_num_threads() == 1:
            step_s = max(step_s - taken_s, 0.1 * step_s)
            taken_s = 0.0
        all_s.append(step_s)
        shares.append(taken_s / step_s)
    quiet_s = [s for s, share in zip(all_s, shares, strict=True) if share <= MOST_TAKEN]
    taken_share = 0.0 if quiet_s else median(shares)
    return Block(median(quiet_s or all_s), taken_share if others.is_known else None)
