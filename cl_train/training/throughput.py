"""Throughput in windows between log lines, without pauses, and which rank is slow.

`images_per_s` in a summary keeps three speeds apart: `end_to_end` (real loader; what this meter measures), `compute`
(one fixed batch on the device: data=synthetic) and `loader` (no model: always null, see cl-train loader_benchmark).
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from cl_train.system.distributed import Dist


class ThroughputMeter:
    """Counts images between calls of `window`. Before each, the caller waits for the device.

    Args:
        warmup_steps: windows that begin within this many first steps, or first steps with another image size (which
            select other kernels or compile), are marked as warm-up.
        clock: seconds, monotonic.
    """

    def __init__(self, warmup_steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._warmup_steps = warmup_steps
        self._steps_before = self._image_size = 0
        self.start(0)

    def start(self, image_size: int) -> None:
        """Begin a window where training starts or continues."""
        if image_size != self._image_size:
            self._image_size, self._steps_before = image_size, 0
        self._started_at = self._clock()
        self._paused_s = self._wait_s = 0.0
        self._steps = self._images = 0

    def tick(self, images: int, wait_s: float) -> None:
        """Count one optimizer step over `images` (of all ranks) that waited `wait_s` seconds for its batches."""
        self._steps += 1
        self._images += images
        self._wait_s += wait_s

    def data_wait_ms(self) -> float:
        """Mean wait for data per step of the open window, in this process."""
        return 1000 * self._wait_s / self._steps

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block, such as saving a checkpoint."""
        since = self._clock()
        yield
        self._paused_s += self._clock() - since

    def window(self) -> dict[str, Any]:
        """Close the window and begin the next. Returns this part of a training record:

        `image_size` in pixels, `images` and `images_per_s` of all ranks, `seconds` without pauses, `step_ms`,
        `data_wait_pct` (0-100, the share of the time in which this process waited for a batch), `warmup`.
        """
        assert self._steps > 0, "an empty window"
        seconds = max(self._clock() - self._started_at - self._paused_s, 1e-9)
        window = {
            "image_size": self._image_size,
            "images": self._images,
            "seconds": seconds,
            "images_per_s": self._images / seconds,
            "step_ms": 1000 * seconds / self._steps,
            "data_wait_pct": 100 * min(self._wait_s / seconds, 1.0),
            "warmup": self._steps_before < self._warmup_steps,
        }
        self._steps_before += self._steps
        self.start(self._image_size)
        return window


def without_warmup(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The training records after warm-up, or all if there are no others."""
    return [record for record in records if not record["warmup"]] or records


# --- the slowest rank -------------------------------------------------------------------------------------------------
# In every all-reduce the ranks wait for the slowest one, so all have the same step time; they differ in the time until
# they begin to wait.


def sample_compute_times(model: nn.Module, log_every: int) -> None:
    """Let DDP time the first ten steps and every `log_every`-th, after which the host waits for the device anyway."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model._set_ddp_runtime_logging_sample_rate(log_every)


def own_times(model: nn.Module, data_wait_ms: float, micro_steps: int, dist: Dist) -> torch.Tensor:
    """This rank's compute and data wait, ms per step, in its column; the sum over the ranks has those of all ranks.

    Compute is forward and backward of the last step that DDP timed, without the wait for other ranks. DDP times the
    last micro-step of a step, and with a CUDA graph only the steps before the recording.

    Returns:
        float64 [2, world_size] on the CPU.
    """
    times = torch.zeros(2, dist.world_size, dtype=torch.float64)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        assert model.logger is not None
        model.logger.set_runtime_stats_and_log()  # the host waits for the device; nothing if this step was not timed
        measured_ns = model._get_ddp_logging_data()
        compute_ns = measured_ns.get("forward_compute_time", 0) + measured_ns.get("backward_compute_time", 0)
        times[:, dist.rank] = torch.tensor([micro_steps * compute_ns / 1e6, data_wait_ms])
    return times


def slowest_rank(times: torch.Tensor, step_ms: float) -> dict[str, Any]:
    """The part of a window's record that names the slowest rank; empty for one process.

    Args:
        times: the sum of `own_times` over the ranks, on the CPU.
        step_ms: the step time of the window, equal on all ranks.
    """
    if times.shape[1] == 1:
        return {}
    own_ms = times.sum(0).tolist()
    slowest = own_ms.index(max(own_ms))
    return {
        "slowest_rank": slowest,
        "slowest_rank_ms": own_ms[slowest],
        "median_rank_ms": statistics.median(own_ms),
        "slowest_rank_data_wait_pct": 100 * min(times[1, slowest].item() / step_ms, 1.0),
    }
