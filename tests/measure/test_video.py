"""Videos, [N, C, D, H, W]: a wrong kernel of one layout is found, with its module."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cl_train.measure.parity import check_parity
from tests.networks import UNet3d

conv3d = F.conv3d


def wrong_conv3d(*arguments: Any) -> torch.Tensor:
    """As torch has had it for bf16 in channels_last: other values."""
    output = conv3d(*arguments)
    is_converted = output.is_contiguous(memory_format=torch.channels_last_3d)
    if output.dtype == torch.bfloat16 and is_converted:
        output = output * torch.linspace(0.5, 1.5, output.shape[-1], dtype=output.dtype)
    return output


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_wrong_convolution_is_found(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_wrong:
        monkeypatch.setattr(F, "conv3d", wrong_conv3d)
    torch.manual_seed(0)
    report = check_parity(UNet3d(10), image_size=(3, 4, 8, 8), batch_size=2, precision="bf16")
    assert report.passed is not is_wrong
    assert not is_wrong or "first in down.0 (Conv3d)" in str(report)
