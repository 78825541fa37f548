"""The measured matmul rate of a device: the upper limit of its arithmetic throughput."""

from __future__ import annotations

import torch

from cl_train.step.precision import kernel_selection
from cl_train.system.timing import timed_s


def matmul_tflops(device: torch.device, dtype: torch.dtype, tf32: bool) -> float:
    """Tera floating point operations per second of the device's fastest large square matmul, measured for 0.5 s.

    Used instead of the data sheet's peak, which CPUs lack and a power-limited GPU does not reach.
    """
    size = 8192 if device.type == "cuda" else 2048
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times: list[float] = []
    with kernel_selection(tf32=tf32, autotune=False):
        while len(times) < 2 or sum(times) < 0.5:
            times.append(timed_s(lambda: left @ right, device))
    return 2 * size**3 / min(times) / 1e12
