"""The share of a device's arithmetic that a model uses: its FLOPs per image against the peak."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cl_train.step.precision import Precision, kernel_selection
from cl_train.system.machine import is_out_of_memory, matrix_product, timed_s

# TFLOP/s of data sheets, dense: fp16 and bf16 (tensor cores, fp32 sums), TF32, fp32. A GPU's is the
# first whose words are all in its name.
_DATA_SHEETS = {
    "GB300": (2500.0, 1250.0, 80.0), "GB200": (2500.0, 1250.0, 80.0), "GH200": (989.5, 494.7, 66.9),
    "B300": (2250.0, 1100.0, 75.0), "B200": (2250.0, 1100.0, 75.0),
    "H200 NVL": (835.5, 417.5, 60.0), "H200": (989.5, 494.7, 66.9),
    "H100 NVL": (835.5, 417.5, 60.0), "H100 PCIe": (756.5, 378.0, 51.2),
    "H100": (989.5, 494.7, 66.9), "A100": (312.0, 156.0, 19.5), "A30": (165.0, 82.0, 10.3),
    "L40S": (362.0, 183.0, 91.6), "A10": (125.0, 62.5, 31.2), "A10G": (70.0, 35.0, 35.0),
    "L4": (121.0, 60.5, 30.3), "T4": (65.0, None, 8.1),
    "V100 PCIE": (112.0, None, 14.0), "V100": (125.0, None, 15.7),
}  # fmt: skip
_MATMUL = {"cuda": 8192, "cpu": 512}  # rows and columns
_IMAGES = {"cuda": 256, "cpu": 8}  # of 14 px with 256 channels
_REPEATS = 15


def flop_counter() -> FlopCounterMode:
    """Counts the FLOPs of convolutions and matrix products: two per multiply-add."""
    formulas = {torch.ops.aten.convolution_backward: _convolution_backward_flops}
    return FlopCounterMode(display=False, custom_mapping=formulas)


def flops_of(work: Callable[[], object], *, gradients: bool = False) -> int:
    """Returns those of `work`; gradients: it runs a backward pass, too."""
    with flop_counter() as counter, nullcontext() if gradients else torch.no_grad():
        work()
    return counter.get_total_flops()


def _convolution_backward_flops(
    gradient: Sequence[int],
    image: Sequence[int],
    weight: Sequence[int],
    *rest: Any,
    **named: object,
) -> int:
    """The gradients of image and weight cost a forward pass each; torch's count ignores groups."""
    *_, is_transposed, _, _, output_mask = rest
    pixels = math.prod(image[2:] if is_transposed else gradient[2:])
    return 2 * image[0] * pixels * math.prod(weight) * sum(output_mask[:2])


def utilisation(
    gflop_per_image: float,
    step_gflop_per_image: float,
    images_per_s: float,
    precision: Precision,
    device: torch.device,
) -> dict[str, Any] | None:
    """TFLOP/s of `images_per_s` on one device, and its percentage of the published peak (or None)
    and of the measured one: the faster of a matrix product and a 3x3 convolution in channels_last.

    GFLOP: of a forward pass, and of all passes of a step. None: no memory is left to measure in,
    0.8 GiB on a GPU.
    """
    try:
        peaks = measured_tflop_per_s(precision, device)
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
    """The published peak of a whole GPU; None for a part of one (MIG), a CPU, an unknown GPU."""
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


def measured_tflop_per_s(precision: Precision, device: torch.device) -> dict[str, float]:
    """The rates of a product of square matrices and of a 3x3 convolution in channels_last, in the
    dtype of the model's convolutions.
    """
    dtype, channels, pixels = precision.input_dtype, 256, 14
    size, images = _MATMUL.get(device.type, 1024), _IMAGES.get(device.type, 64)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device).to(dtype, memory_format=torch.channels_last)

    image, weight = random(images, channels, pixels, pixels), random(channels, channels, 3, 3)

    def fastest_s(work: Callable[[], object]) -> float:
        with kernel_selection(tf32=precision.tf32, autotune=False), torch.no_grad():
            return min(timed_s(work, device) for _ in range(_REPEATS))

    matmul_s = fastest_s(matrix_product(size, dtype, device))
    convolution_s = fastest_s(lambda: nn.functional.conv2d(image, weight, padding=1))
    return {
        "matrix product": 2 * size**3 / matmul_s / 1e12,
        "3x3 convolution": 2 * image.numel() * channels * 9 / convolution_s / 1e12,
    }
