"""Losses against timm's."""

import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

from cl_train.step.loss import Loss

LOGITS = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 3
LABELS = torch.tensor([0, 1, 2, 3, 4, 4])


def mixed(smoothing: float = 0.0) -> torch.Tensor:
    return mixup_target(LABELS, 5, lam=0.7, smoothing=smoothing)


@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_is_timms(smoothing: float, threshold: float | None) -> None:
    ours = Loss("bce", label_smoothing=smoothing, bce_threshold=threshold)
    theirs = BinaryCrossEntropy(smoothing, target_threshold=threshold)
    torch.testing.assert_close(ours(LOGITS, LABELS), theirs(LOGITS, LABELS))
    torch.testing.assert_close(ours(LOGITS, mixed()), theirs(LOGITS, mixed(smoothing)))  # timm's MixUp smooths


def test_cross_entropy_is_timms() -> None:
    ours = Loss(label_smoothing=0.1)
    torch.testing.assert_close(ours(LOGITS, LABELS), LabelSmoothingCrossEntropy(0.1)(LOGITS, LABELS))
    torch.testing.assert_close(ours(LOGITS, mixed()), SoftTargetCrossEntropy()(LOGITS, mixed(0.1)))


def test_the_loss_is_float32_for_half_precision_logits() -> None:
    for loss in (Loss(), Loss("bce")):
        assert loss(LOGITS.bfloat16(), LABELS).dtype == loss(LOGITS.bfloat16(), mixed()).dtype == torch.float32
