"""What a step costs: floating point operations, memory, and time by kind of layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from cl_train.models.copies import copy_model
from cl_train.system.timing import timed_s, wait_for

# Parts of an operator's name that identify its kind; the first match counts.
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

_fastest_matmul_s: dict[tuple[torch.device, torch.dtype, bool], float] = {}


def flops_per_image(model: nn.Module, input_shape: tuple[int, ...], mode: str) -> int | None:
    """Floating point operations per image (a multiply-add is two), counted on shapes alone.

    Training counts as three forward passes, as is usual: the counter's own backward ignores groups and would overstate
    a depthwise convolution hundreds of times. None for a model that does not run on the meta device.
    """
    counter = FlopCounterMode(display=False)
    try:
        shapes_only = copy_model(model, "meta").eval()
        dtype = next(shapes_only.parameters()).dtype
        with counter, torch.no_grad():
            shapes_only(torch.empty(1, *input_shape, device="meta", dtype=dtype))
    except Exception:  # whatever a model raises that reads values or has inputs of another kind
        return None
    return int(counter.get_total_flops()) * (3 if mode == "train" else 1)


def matmul_tflops(device: torch.device, dtype: torch.dtype, tf32: bool) -> float:
    """Tera floating point operations per second of this device's fastest large square matmul, measured.

    It replaces the peak of a data sheet, which CPUs lack and a power-limited GPU does not reach. The fastest of all
    calls in this process counts: a shared machine may be slow at one time. `tf32` only separates calls by the switch
    that the caller has set.
    """
    size = 8192 if device.type == "cuda" else 2048
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    fastest = _fastest_matmul_s.get((device, dtype, tf32), float("inf"))
    spent_s, calls = 0.0, 0
    while spent_s < 0.5 or calls < 2:
        seconds = timed_s(lambda: left @ right, device)
        fastest, spent_s, calls = min(fastest, seconds), spent_s + seconds, calls + 1
    _fastest_matmul_s[device, dtype, tf32] = fastest
    return 2 * size**3 / fastest / 1e12


def peak_memory_of_step_gib(step: Callable[[], None], own_bytes: int, other_bytes: int, device: torch.device) -> float:
    """Peak memory in GiB of a process with this step alone. Call it after warm-up: autotuning's workspace is left out.

    On a GPU the allocator's peak less `other_bytes`, what its other models hold. On a CPU `own_bytes`, what this model
    holds between steps, and the peak of torch's allocations within a step (without oneDNN's scratch memory).
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


def time_by_kind(step: Callable[[], object], device: torch.device, steps: int = 3) -> dict[str, dict[str, float]]:
    """Milliseconds per step by kind of layer, {"convolution": {"forward": 1.2, "backward": 3.4, "optimizer": 0}, ...}.

    Device time on a GPU, else CPU time of the operators themselves. Compiled code is listed as "fused". Call it under
    the same `kernel_selection` as the steps that are timed, or other kernels are profiled.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        wait_for(device)
    table: dict[str, dict[str, float]] = {}
    for event in profiler.events():
        if device.type == "cuda":
            spent_us = event.self_device_time_total if event.device_type == torch.autograd.DeviceType.CPU else 0.0
        else:
            spent_us = event.self_cpu_time_total
        if spent_us > 0:
            kind = _kind(event)
            phases = table.setdefault(kind, {"forward": 0.0, "backward": 0.0, "optimizer": 0.0})
            phases["optimizer" if kind == "optimizer" else _phase(event)] += spent_us / 1000 / steps
    return dict(sorted(table.items(), key=lambda item: -sum(item[1].values())))


def _kind(event: torch.autograd.profiler_util.FunctionEvent) -> str:
    name = event.name.lower()
    return next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), "other")


def _phase(event: torch.autograd.profiler_util.FunctionEvent) -> str:
    """By the enclosing event: autograd's engine, which on a GPU has a thread of its own, or the optimizer."""
    ancestor: torch.autograd.profiler_util.FunctionEvent | None = event
    while ancestor is not None:
        if ancestor.name.startswith("autograd::engine::evaluate_function"):
            return "backward"
        if ancestor.name.startswith("Optimizer."):
            return "optimizer"
        ancestor = ancestor.cpu_parent
    return "forward"
