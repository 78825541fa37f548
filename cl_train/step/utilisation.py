"""The share of a device's arithmetic that a model uses: its FLOPs per image against the peak."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from cl_train.step.precision import Precision, kernel_selection
from cl_train.system.machine import timed_s

# Data sheets, TFLOP/s, dense, of the largest variant: fp16 and bf16 (tensor cores, fp32 sums), TF32, fp32.
_DATA_SHEETS = {
    "H200": (989.5, 494.7, 66.9), "H100": (989.5, 494.7, 66.9), "A100": (312.0, 156.0, 19.5),
    "L40S": (362.0, 183.0, 91.6), "A10": (125.0, 62.5, 31.2), "L4": (121.0, 60.5, 30.3),
    "V100": (125.0, None, 15.7), "T4": (65.0, None, 8.1),
}  # fmt: skip
_MATMUL = {"cuda": 8192, "cpu": 512}  # rows and columns


def flops_of(forward: Callable[[], object]) -> int:
    """Those of convolutions and matrix products, a multiply-add as two (in a backward pass torch ignores groups)."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        forward()
    return counter.get_total_flops()


def utilisation(
    gflop_per_image: float, images_per_s: float, precision: Precision, device: torch.device, *, training: bool
) -> dict[str, Any]:
    """What `images_per_s` on one device means: TFLOP/s, and shares of the measured and of the published peak (or None).
    `gflop_per_image`: of a forward pass; a backward pass computes two products for each of its own."""
    measured = matmul_tflop_per_s(precision, device)
    words = torch.cuda.get_device_name(device).replace("-", " ").split() if device.type == "cuda" else []
    column = 0 if precision.input_dtype != torch.float32 else 1 if precision.tf32 else 2
    published = next((peaks[column] for name, peaks in _DATA_SHEETS.items() if name in words), None)
    tflop_per_s = gflop_per_image * images_per_s * (3 if training else 1) / 1000
    return {
        "gflop_per_image": round(gflop_per_image, 4),
        "tflop_per_s": round(tflop_per_s, 4),
        "matmul_tflop_per_s": round(measured, 3),
        "matmul_pct": round(100 * tflop_per_s / measured, 2),
        "data_sheet_tflop_per_s": published,
        "data_sheet_pct": round(100 * tflop_per_s / published, 2) if published else None,
    }


def describe(used: dict[str, Any]) -> str:
    """A result of `utilisation` in one line."""
    published = f", {used['data_sheet_pct']:.0f} % of the data sheet's peak" if used["data_sheet_pct"] else ""
    return (
        f"{used['gflop_per_image']:.3g} GFLOP per image, {used['tflop_per_s']:.3g} TFLOP/s: {used['matmul_pct']:.0f} % "
        f"of a matrix product's{published}"
    )


def matmul_tflop_per_s(precision: Precision, device: torch.device) -> float:
    """The fastest of a few products of square matrices, in the dtype of the precision's convolutions."""
    size = _MATMUL.get(device.type, 1024)
    a, b = (torch.rand(size, size, device=device).to(precision.input_dtype) for _ in range(2))
    with kernel_selection(tf32=precision.tf32, autotune=False), torch.no_grad():
        seconds = min(timed_s(lambda: a @ b, device) for _ in range(21))
    return 2 * size**3 / seconds / 1e12
