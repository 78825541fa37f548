"""Which rank is slow. In every all-reduce the ranks wait for the slowest one, so all have the same step time; they
differ in the time until they begin to wait."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn

from cl_train.system.distributed import Dist


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
