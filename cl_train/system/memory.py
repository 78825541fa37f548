"""The memory available to this process, the memory that a step needs, and what follows when it runs out."""

import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from cl_train.system.timing import wait_for

_CGROUP = Path("/sys/fs/cgroup")
# Parts of messages, in lower case, of errors that have no type of their own.
_OUT_OF_MEMORY = (
    "out of memory",  # CUDA's runtime and driver, also when a CUDA graph is instantiated; NCCL
    "can't allocate memory",  # the CPU's allocator
    "not enough memory",  # the same on other systems
    "_alloc_failed",  # CUBLAS_STATUS_, CUSOLVER_STATUS_, CUDNN_STATUS_
    "allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ since cuDNN 9
    "unable to find an engine to execute",  # cuDNN: no algorithm's workspace could be allocated
)


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. Only torch's own allocators raise an exception of its own; libraries have messages."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error).lower() for part in _OUT_OF_MEMORY)


def describe_out_of_memory(error: BaseException) -> str:
    """The first line of an out-of-memory error, with the peak and the free memory of a GPU; no full stop at the end."""
    reason = (str(error).splitlines() or [type(error).__name__])[0].split(". GPU")[0].rstrip(".")
    if not torch.cuda.is_initialized() or isinstance(error, MemoryError) or "CPU" in reason:
        return f"out of memory: {reason}"
    free, total = torch.cuda.mem_get_info()
    return (
        f"out of memory on {torch.cuda.get_device_name()}: {reason}; the peak of this process was "
        f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free"
    )


def release_memory() -> None:
    """Free unreferenced memory on the device. Waits for the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
