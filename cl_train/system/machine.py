"""The machine: versions and hardware, memory, and the time that a device needs."""

import ctypes
import gc
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch.profiler import ProfilerActivity, profile

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of mallopt(3)
GPU_LOOK_S = 10.0
_SLOWED = 0x8 | 0x20 | 0x40 | 0x80  # NVML: hardware slowdown, software and hardware heat, brake
# Parts of messages, in lower case, of errors that have no type of their own.
_OUT_OF_MEMORY = (
    "out of memory",  # CUDA, NCCL
    "can't allocate memory",  # the CPU's allocator
    "not enough memory",  # the same on other systems
    "_alloc_failed",  # cuBLAS, cuSOLVER, cuDNN
    "allocation_failed",  # cuDNN 9
    "unable to find an engine to execute",  # cuDNN: no algorithm's workspace could be allocated
)


def describe_environment(device: torch.device) -> dict[str, str | None]:
    """Versions and hardware; None for hardware that this machine does not have."""
    is_cuda = device.type == "cuda"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    cudnn = torch.backends.cudnn.version() if is_cuda else None
    return {
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if is_cuda else None,
        "cudnn": str(cudnn) if cudnn else None,
        "cpu": cpu_name(),
        "driver": _output_of(query) if is_cuda else None,
    }


def document_of(settings: Any, device: torch.device, **results: Any) -> dict[str, Any]:
    """The content of a file of measurements."""
    return {
        "schema_version": 1,
        "command": shlex.join(sys.argv),
        "settings": asdict(settings),
        "device_name": device_name(device),
        "environment": describe_environment(device),
        "git": git_state(),
        **results,
    }


def device_name(device: torch.device) -> str:
    """`NVIDIA H200` or the processor's name and the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{cpu_name()} ({threads} thread{'s' * (threads > 1)})"


def cpu_name() -> str:
    with suppress(OSError, IndexError):  # processors other than x86 have no "model name"
        names = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("model name", 1)
        return names[1].partition("\n")[0].lstrip("\t :")
    return platform.processor() or platform.machine()


def git_state() -> dict[str, str | bool | None]:
    """The commit of this package's checkout, and whether tracked files differ."""
    git = ["git", "-C", str(Path(__file__).resolve().parents[2])]
    commit = _output_of([*git, "rev-parse", "HEAD"])
    changes = _output_of([*git, "status", "--porcelain", "-uno"])
    return {"commit": commit, "dirty": bool(changes) if commit else None}


def _output_of(command: list[str]) -> str | None:
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return output.stdout.strip()


class GpuWatch:
    """Finds the worst state of a GPU while it works: an idle one has neither heat nor power."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._next_at = device, 0.0
        self._queries: list[subprocess.Popen[str]] = []  # under way
        self._states: list[dict[str, Any]] = []

    def look(self) -> None:
        """Call it beside the steps: it starts nvidia-smi, every `GPU_LOOK_S` at most."""
        if self._device.type != "cuda" or time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + GPU_LOOK_S
        self._read()
        gpu = f"--id=GPU-{getattr(torch.cuda.get_device_properties(self._device), 'uuid', None)}"
        names = "clocks.sm,clocks.max.sm,temperature.gpu,power.draw,clocks_throttle_reasons.active"
        with suppress(OSError):  # there is no nvidia-smi
            for query in (f"--query-gpu={names}", "--query-compute-apps=pid"):
                command = ["nvidia-smi", gpu, query, "--format=csv,noheader,nounits"]
                pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
                self._queries.append(subprocess.Popen(command, text=True, **pipes))

    def worst(self) -> dict[str, Any] | None:
        """None: a CPU, or nvidia-smi cannot tell, as for a part of a GPU (MIG)."""
        self._read()
        order = itemgetter("other_processes", "is_slowed")
        return max(reversed(self._states), key=order, default=None)

    def _read(self) -> None:
        outputs = []
        for query in self._queries:
            try:
                outputs.append(query.communicate(timeout=10)[0].strip())
            except subprocess.TimeoutExpired:
                query.kill()
        self._queries = []
        if len(outputs) == 2 and (state := _gpu_state(*outputs)):
            self._states.append(state)


def _gpu_state(state: str, pids: str) -> dict[str, Any] | None:
    try:
        *numbers, reasons = state.split(", ")
        clock_mhz, max_clock_mhz, temperature_c, power_w = map(float, numbers)
        is_slowed = bool(int(reasons, 16) & _SLOWED)
    except ValueError:
        return None
    return {
        "clock_mhz": clock_mhz,
        "max_clock_mhz": max_clock_mhz,
        "temperature_c": temperature_c,
        "power_w": power_w,
        "is_slowed": is_slowed,
        # In a container its own process has another number, or is not listed.
        "other_processes": max(0, len(pids.split()) - 1),
    }


def problem_of_gpu(state: Mapping[str, Any] | None) -> str | None:
    """Why a speed measured on a GPU in this state cannot be compared."""
    if state and state["other_processes"]:
        return f"{state['other_processes']} other processes used the GPU"
    if state and state["is_slowed"]:
        return f"heat or a power brake slowed the GPU to {state['clock_mhz']:.0f} MHz"
    return None


def available_bytes(device: torch.device) -> int | None:
    """Returns the free memory: of a GPU with torch's reserve; of a CPU without swapping, or what
    its container allows.
    """
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = None
    with suppress(OSError, ValueError, IndexError):  # not Linux; no limit ("max")
        meminfo = Path("/proc/meminfo").read_text()
        free = 1024 * int(meminfo.partition("MemAvailable:")[2].split(maxsplit=1)[0])
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        lines = (group / "memory.stat").read_text().splitlines()
        stat = dict(line.split() for line in lines)
        cache = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
        free = max(0, min(free, limit - used + cache))
    return free


def peak_memory_of_step_gib(
    step: Callable[[], object], held_bytes: int, device: torch.device
) -> float:
    """Returns the peak memory of a process with only this step, after warm-up: `held_bytes`, its
    memory between steps, plus the peak of torch's allocations within a step. On a CPU these lack
    oneDNN's scratch memory.
    """
    if device.type == "cuda":
        wait_for(device)
        torch.cuda.reset_peak_memory_stats(device)
        between_steps = torch.cuda.memory_allocated(device)
        step()
        wait_for(device)
        growth = torch.cuda.max_memory_allocated(device) - between_steps
        return (held_bytes + growth) / 2**30
    # Without acc_events torch 2.11 warns that it forgets earlier cycles.
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    allocated = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return (held_bytes + peak) / 2**30


def peak_memory_gib(device: torch.device) -> float:
    """Returns the peak so far: of torch's allocations on a GPU, of resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    with suppress(OSError, IndexError):  # KiB; unlike ru_maxrss, it can be reset
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:")[1].split()[0]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # bytes, on macOS


def reset_peak_memory(device: torch.device) -> None:
    """Resets the peak, so that a run's is not that of measurements and trials."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        release_memory()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; only torch's own allocators have an exception for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in message for part in _OUT_OF_MEMORY)


def describe_out_of_memory(error: BaseException) -> str:
    """Returns the first line of the error; torch's is cut after the GPU's free memory."""
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    reason, is_free, _ = first_line.partition(" is free")
    return f"out of memory: {reason.rstrip('.')}{is_free}"


def release_memory() -> None:
    """Frees unreferenced memory, also what `keep_freed_memory` kept. Waits for the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)  # of glibc


def keep_freed_memory(device: torch.device) -> None:
    """Call before training steps on a CPU: what one step frees stays mapped for the next. glibc
    returns it to the kernel, and the page faults of the next step take up to a third of its time
    (docs/performance.md). Variables MALLOC_* of the user win.
    """
    has_users = any(name.startswith("MALLOC_") for name in os.environ)
    if device.type == "cpu" and sys.platform == "linux" and not has_users:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: None)
        mallopt(_M_TRIM_THRESHOLD, -1)  # never
        mallopt(_M_MMAP_MAX, 0)  # a tensor with a mapping of its own would lose it when it is freed


def wait_for(device: torch.device) -> None:
    """Blocks the host until `device` has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


MAX_STEPS_AHEAD = 2  # steps of the host ahead of the device: each holds a batch in memory


class DeviceClock:
    """Sets marks in the work of a device; a GPU reaches them later than the host sets them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        # blocking: a waiting host leaves its core free
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_reached(self, mark: Any) -> bool:
        """Whether a GPU has reached it, without waiting. False on a CPU, never behind the host."""
        return self._is_cuda and mark.query()

    def wait(self, mark: Any) -> None:
        if self._is_cuda:
            mark.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000 if self._is_cuda else end - start


def step_times_s(step: Callable[[], object], steps: int, device: torch.device) -> list[float]:
    """Seconds of each of `steps` consecutive calls; the host waits once, after the last one."""
    clock = DeviceClock(device)
    marks = [clock.mark()]
    for _ in range(steps):
        step()
        marks.append(clock.mark())
    clock.wait(marks[-1])
    return [clock.seconds(start, end) for start, end in pairwise(marks)]


def timed_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call. The host waits for the device before and after."""
    wait_for(device)
    return step_times_s(work, 1, device)[0]


def thread_s(work: Callable[[], object]) -> float:
    """Seconds that this thread computes in one call."""
    started_at = time.thread_time()
    work()
    return time.thread_time() - started_at
