"""A batch on the device, and its format there."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceFormat:
    """Device, dtype and memory format of the model's input."""

    device: torch.device
    dtype: torch.dtype
    memory_format: torch.memory_format


@dataclass(frozen=True)
class Batch:
    """Images and their labels, on the device.

    images: float [N, 3, H, W], normalised, in the requested dtype and memory format.
    targets: int64 [N], or float [N, num_classes] after MixUp or CutMix.
    """

    images: Tensor
    targets: Tensor
