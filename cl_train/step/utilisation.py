"""The share of a device's arithmetic that a model uses: its FLOPs per image against the peak."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cl_train.step.precision import Precision, kernel_selection
from cl_train.system.machine import is_out_of_memory, timed_s

# Data sheets, TFLOP/s, dense: fp16 and bf16 (tensor cores, fp32 sums), TF32, fp32. The first line
# whose words are all in the GPU's name is its own.
_DATA_SHEETS = {
    "GB300": (2500.0, 1250.0, 80.0), "GB200": (2500.0, 1250.0, 80.0), "GH200": (989.5, 494.7, 66.9),
    "B300": (2250.0, 1100.0, 75.0), "B200": (2250.0, 1100.0, 75.0),
    "H200 NVL": (835.5, 417.5, 60.0),
    "H200": (989.5, 494.7, 66.9), "H100 NVL": (835.5, 417.5, 60.0),
    "H100 PCIe": (756.5, 378.0, 51.2),
    "H100": (989.5, 494.7, 66.9), "A100": (312.0, 156.0, 19.5), "A30": (165.0, 82.0, 10.3),
    "L40S": (362.0, 183.0, 91.6), "A10": (125.0, 62.5, 31.2), "A10G": (70.0, 35.0, 35.0),
    "L4": (121.0, 60.5, 30.3), "V100 PCIE": (112.0, None, 14.0), "V100": (125.0, None, 15.7),
    "T4": (65.0, None, 8.1),
}  # fmt: skip
_MATMUL = {"cuda": 8192, "cpu": 512}  # rows and columns
_REPEATS = 15
_CONVOLUTION = {"cuda": 256, "cpu": 8}  # images of 14 px with 256 channels


def flops_of(work: Callable[[], object], *, gradients: bool = False) -> int:
    """Returns the FLOPs of the convolutions and matrix products of `work`.

    A multiply-add counts as two. gradients: `work` runs a backward pass, too; of it what really
    runs counts, which is less where layers are frozen.
    """
    mapping = {torch.ops.aten.convolution_backward: _convolution_backward_flops}
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with counter, nullcontext() if gradients else torch.no_grad():
        work()
    return counter.get_total_flops()


def _convolution_backward_flops(
    gradient: Sequence[int],
    image: Sequence[int],
    weight: Sequence[int],
    bias: object,
    stride: object,
    padding: object,
    dilation: object,
    transposed: bool,
    output_padding: object,
    groups: int,
    output_mask: Sequence[bool],
    **_: object,
) -> int:
    """Each of the gradients of image and weight costs as much as the forward pass; torch's own
    count ignores groups.
    """
    pixels = math.prod(image[2:] if transposed else gradient[2:])
    return 2 * image[0] * pixels * math.prod(weight) * sum(output_mask[:2])


def utilisation(
    gflop_per_image: float,
    step_gflop_per_image: float,
    images_per_s: float,
    precision: Precision,
    device: torch.device,
) -> dict[str, Any] | None:
    """TFLOP/s of `images_per_s` on one device, and shares of the published peak (or None) and of
    the measured one: the faster of a matrix product and a 3x3 convolution in channels_last.

    `gflop_per_image` is that of a forward pass, `step_gflop_per_image` that of all passes. None:
    there is no memory left for the measurement, 0.8 GiB on a GPU.
    """
    try:
        peaks = {
            "matrix product": matmul_tflop_per_s(precision, device),
            "3x3 convolution": convolution_tflop_per_s(precision, device),
        }
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None
    fastest = max(peaks, key=lambda name: peaks[name])
    published = data_sheet_tflop_per_s(precision, device)
    tflop_per_s = step_gflop_per_image * images_per_s / 1000
    return {
        "gflop_per_image": round(gflop_per_image, 4),
        "step_gflop_per_image": round(step_gflop_per_image, 4),
        "tflop_per_s": round(tflop_per_s, 4),
        "matmul_tflop_per_s": round(peaks["matrix product"], 3),
        "convolution_tflop_per_s": round(peaks["3x3 convolution"], 3),
        "peak": fastest,
        "peak_pct": round(100 * tflop_per_s / peaks[fastest], 2),
        "data_sheet_tflop_per_s": published,
        "data_sheet_pct": round(100 * tflop_per_s / published, 2) if published else None,
    }


def data_sheet_tflop_per_s(precision: Precision, device: torch.device) -> float | None:
    """The published peak of the whole GPU; None for a part of one (MIG), a CPU, an unknown GPU."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    column = 0 if precision.input_dtype != torch.float32 else 1 if precision.tf32 else 2
    peaks = (row for name, row in _DATA_SHEETS.items() if {*name.split()} <= {*words})
    return None if "MIG" in words else next(peaks, (None,) * 3)[column]


def describe(used: dict[str, Any]) -> str:
    """A result of `utilisation` in one line."""
    slower = min(used["matmul_tflop_per_s"], used["convolution_tflop_per_s"])
    faster = max(used["matmul_tflop_per_s"], used["convolution_tflop_per_s"])
    other = "matrix product" if used["peak"] == "3x3 convolution" else "3x3 convolution"
    line = (
        f"{used['gflop_per_image']:.3g} GFLOP per image, {used['tflop_per_s']:.3g} TFLOP/s: "
        f"{used['peak_pct']:.0f} % of a {used['peak']}'s ({faster:.3g}; a {other}'s: {slower:.3g})"
    )
    if used["peak_pct"] > 100:
        line += ", which was measured in another moment and is not this machine's peak"
    if used["data_sheet_pct"]:
        line += f", {used['data_sheet_pct']:.0f} % of the data sheet's peak"
    return line


def matmul_tflop_per_s(precision: Precision, device: torch.device) -> float:
    """Returns the rate of a product of square matrices, in the dtype of the convolutions."""
    size = _MATMUL.get(device.type, 1024)
    a, b = (torch.rand(size, size, device=device).to(precision.input_dtype) for _ in range(2))
    return 2 * size**3 / _fastest_s(lambda: a @ b, precision, device) / 1e12


def convolution_tflop_per_s(precision: Precision, device: torch.device) -> float:
    """Returns the rate of a 3x3 convolution in channels_last, in the dtype of the convolutions."""
    count, channels, size = _CONVOLUTION.get(device.type, 64), 256, 14
    shapes = ((count, channels, size, size), (channels, channels, 3, 3))
    images, weight = (
        torch.rand(shape, device=device).to(
            precision.input_dtype, memory_format=torch.channels_last
        )
        for shape in shapes
    )
    seconds = _fastest_s(lambda: nn.functional.conv2d(images, weight, padding=1), precision, device)
    return 2 * images.numel() * channels * 9 / seconds / 1e12


def _fastest_s(work: Callable[[], object], precision: Precision, device: torch.device) -> float:
    with kernel_selection(tf32=precision.tf32, autotune=False), torch.no_grad():
        return min(timed_s(work, device) for _ in range(_REPEATS))
