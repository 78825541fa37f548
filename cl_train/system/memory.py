"""The memory available to this process, and the memory that a step needs."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from cl_train.system.timing import wait_for

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU plus torch's reserved memory; on a CPU the memory that Linux can provide without swapping.

    Page cache counts as available, and a container's limit applies. None if unknown.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no limit ("max"), or another layout of the control groups
        return free
    cache = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
    return max(0, min(free, limit - used + cache))


def peak_memory_of_step_gib(
    step: Callable[[], object], own_bytes: int, other_bytes: int, device: torch.device
) -> float:
    """Peak memory in GiB of a process with only this step. Call it after warm-up to exclude autotuning's workspace.

    On a GPU the allocator's peak less `other_bytes`, the memory of other models. On a CPU `own_bytes`, the memory of
    this model between steps, plus the peak of torch's allocations within a step (without oneDNN's scratch memory).
    """
    if device.type == "cuda":
        wait_for(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        wait_for(device)
        return (torch.cuda.max_memory_allocated(device) - other_bytes) / 2**30
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return (own_bytes + peak) / 2**30
