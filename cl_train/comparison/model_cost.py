"""What a step costs: floating point operations, memory, and time by kind of layer."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

# Words in an operator's name that tell its kind; the first that is found counts.
_KINDS = {
    "convolution": ("conv",),
    "normalisation": ("norm",),
    "linear": ("addmm", "::mm", "bmm", "linear", "attention"),
    "pooling": ("pool",),
    "activation": ("relu", "threshold", "clamp", "hardtanh", "hardswish", "silu", "sigmoid", "gelu"),
    "optimizer": ("fused_sgd", "fused_adam", "foreach"),
    "copies": ("copy", "clone", "contiguous", "::cat", "_to_copy"),
    "elementwise": ("add", "mul", "div", "sub", "mean", "sum"),
    "fused": ("triton", "graph_", "compiled", "inductor", "cpp_fused"),
}

_shortest_matmul_s: dict[tuple[torch.device, torch.dtype, bool], float] = {}


def flops_per_image(model: nn.Module, image_size: int, channels: int, mode: str) -> int | None:
    """Floating point operations (a multiplication and an addition are two) per image, counted on shapes alone.

    Training is taken for three forward passes, as is usual: the counter's own backward ignores groups, and would give a
    depthwise convolution hundreds of times its work. None for a model that the meta device cannot run.
    """
    shapes_only = copy.deepcopy(model).to("meta").eval()
    dtype = next(shapes_only.parameters()).dtype
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.no_grad():
            shapes_only(torch.empty(1, channels, image_size, image_size, device="meta", dtype=dtype))
    except (RuntimeError, NotImplementedError):
        return None
    return int(counter.get_total_flops()) * (3 if mode == "train" else 1)


def matmul_tflops(device: torch.device, dtype: torch.dtype, tf32: bool) -> float:
    """Tera floating point operations per second of this device's best large square matmul, measured for half a second.

    It stands in for the peak of the data sheet, which a CPU does not have and a power-limited GPU does not reach. The
    best of all calls in this process counts: on a shared machine one half second may be a slow one. `tf32` only tells
    those calls apart: the caller sets it.
    """
    size = 8192 if device.type == "cuda" else 2048
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = _shortest_matmul_s.get((device, dtype, tf32), float("inf"))
    started_at, tries = time.perf_counter(), 0
    while time.perf_counter() - started_at < 0.5 or tries < 2:
        begun_at, tries = time.perf_counter(), tries + 1
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # waits: one matmul at a time is timed
        best = min(best, time.perf_counter() - begun_at)
    _shortest_matmul_s[device, dtype, tf32] = best
    return 2 * size**3 / best / 1e12


def peak_memory_of_step_gib(step: Callable[[], None], own_bytes: int, other_bytes: int, device: torch.device) -> float:
    """Most memory that a process with this step alone would hold, GiB.

    On a GPU the allocator's peak less `other_bytes`, what its other models hold. On a CPU `own_bytes`, what this model
    holds between steps, and the peak of torch's allocations within a step (oneDNN's own scratch memory is not seen).
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
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


def time_by_kind(step: Callable[[], None], device: torch.device, steps: int = 3) -> dict[str, dict[str, float]]:
    """Milliseconds per step by kind of layer, {"convolution": {"forward": 1.2, "backward": 3.4, "optimizer": 0}, ...}.

    Device time on a GPU, else CPU time of the operators themselves. Compiled code appears as "fused".
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    table: dict[str, dict[str, float]] = {}
    for event in profiler.events():
        if device.type == "cuda":
            spent_us = event.self_device_time_total if event.device_type == torch.autograd.DeviceType.CPU else 0.0
        else:
            spent_us = event.self_cpu_time_total
        if spent_us <= 0:
            continue
        kind = _kind(event)
        phases = table.setdefault(kind, {"forward": 0.0, "backward": 0.0, "optimizer": 0.0})
        phases["optimizer" if kind == "optimizer" else _phase(event)] += spent_us / 1000 / steps
    return dict(sorted(table.items(), key=lambda item: -sum(item[1].values())))


def _kind(event: torch.autograd.profiler_util.FunctionEvent) -> str:
    name = event.name.lower()
    return next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), "other")


def _phase(event: torch.autograd.profiler_util.FunctionEvent) -> str:
    """Backward runs under autograd's engine, on a thread of its own on a GPU; the optimizer under its own name."""
    ancestor: torch.autograd.profiler_util.FunctionEvent | None = event
    while ancestor is not None:
        if ancestor.name.startswith("autograd::engine::evaluate_function"):
            return "backward"
        if ancestor.name.startswith("Optimizer."):
            return "optimizer"
        ancestor = ancestor.cpu_parent
    return "forward"
