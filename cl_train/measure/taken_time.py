"""The time that other processes took from the steps of a block."""

from pathlib import Path
from statistics import median

import torch

from cl_train.measure.alternate import MOST_TAKEN, Block
from cl_train.measure.timed_step import TimedStep


class TakenTime:
    """The time in which threads of this process were ready to run and others had the cores; known
    on Linux only.
    """

    def __init__(self) -> None:
        # Nanoseconds running, nanoseconds waiting, slices.
        self._files = list(Path("/proc/self/task").glob("*/schedstat"))
        self.is_known = bool(self._files)

    def seconds(self) -> float:
        """So far, of all threads that existed at the start."""
        return 1e-9 * sum(int(file.read_text().split()[1]) for file in self._files)


def timed_block(step: TimedStep, steps: int, others: TakenTime) -> Block:
    """Time `steps` steps, on a CPU without those from which other processes took time.

    With one thread that time is subtracted instead; with several, what one of them waits for a
    core may or may not delay the others. A GPU does not wait for a core.
    """
    if step.workload.device.type != "cpu":
        return Block(median(step.block_times_s(steps)))
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
