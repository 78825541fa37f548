"""The share of a device's arithmetic that a model uses: its FLOPs per image against a matrix product."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from cl_train.step.precision import Precision, kernel_selection
from cl_train.system.machine import timed_s

_MATMUL = {"cuda": 8192, "cpu": 512}  # rows and columns


def flops_of(forward: Callable[[], object]) -> int:
    """Those of convolutions and matrix products, a multiply-add as two (in a backward pass torch ignores groups)."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        forward()
    return counter.get_total_flops()


def utilisation(
    gflop_per_image: float, images_per_s: float, precision: Precision, device: torch.device, *, training: bool
) -> dict[str, Any]:
    """What `images_per_s` on one device means: TFLOP/s, and its share of the fastest of some products of matrices.

    `gflop_per_image`: of a forward pass; a backward pass computes two products for each of its own.
    """
    size = _MATMUL.get(device.type, 1024)
    a, b = (torch.rand(size, size, device=device).to(precision.input_dtype) for _ in range(2))
    with kernel_selection(tf32=precision.tf32, autotune=False), torch.no_grad():
        measured = 2 * size**3 / min(timed_s(lambda: a @ b, device) for _ in range(21)) / 1e12
    tflop_per_s = gflop_per_image * images_per_s * (3 if training else 1) / 1000
    return {
        "gflop_per_image": round(gflop_per_image, 4),
        "tflop_per_s": round(tflop_per_s, 4),
        "matmul_tflop_per_s": round(measured, 3),
        "matmul_pct": round(100 * tflop_per_s / measured, 2),
    }


def describe(used: dict[str, Any]) -> str:
    """A result of `utilisation` in one line."""
    rates = f"{used['gflop_per_image']:.3g} GFLOP per image, {used['tflop_per_s']:.3g} TFLOP/s"
    return f"{rates}: {used['matmul_pct']:.0f} % of a matrix product's"
