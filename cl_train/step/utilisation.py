"""The share of a GPU's arithmetic that a model uses: its FLOPs per image against the data sheet."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from cl_train.step.precision import Precision

# TFLOP/s of data sheets, dense: fp16 and bf16 (tensor cores, fp32 sums), TF32, fp32. A GPU has the
# first row whose words are all in its name.
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


def flop_counter() -> FlopCounterMode:
    """Counts the FLOPs of convolutions and matrix products: two per multiply-add."""
    formulas = {torch.ops.aten.convolution_backward: _convolution_backward_flops}
    return FlopCounterMode(display=False, custom_mapping=formulas)


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
) -> dict[str, Any]:
    """Returns the TFLOP/s at `images_per_s` on one device and their percentage of the data sheet's
    peak. gflop_per_image: of a forward pass. step_gflop_per_image: of all passes of a step.
    """
    published = data_sheet_tflop_per_s(precision, device)
    tflop_per_s = step_gflop_per_image * images_per_s / 1000
    return {
        "gflop_per_image": round(gflop_per_image, 4),
        "step_gflop_per_image": round(step_gflop_per_image, 4),
        "tflop_per_s": round(tflop_per_s, 4),
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
    line = f"{used['gflop_per_image']:.3g} GFLOP per image, {used['tflop_per_s']:.3g} TFLOP/s"
    share = used["data_sheet_pct"]
    return line if share is None else f"{line}: {share:.0f} % of the data sheet's peak"
