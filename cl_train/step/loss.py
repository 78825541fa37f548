"""The loss of a classifier."""

from dataclasses import dataclass

import torch
from torch import nn

INCEPTION_AUX_WEIGHT = 0.4  # Szegedy et al. 2015 (v3), as in torchvision's references
GOOGLENET_AUX_WEIGHT = 0.3  # Szegedy et al. 2014, section 5


@dataclass(frozen=True)
class Loss:
    """Cross-entropy, or binary cross-entropy of each class (Wightman et al., "ResNet strikes back", 2021).

    bce_threshold: targets of the binary cross-entropy become 1 above it and 0 below; None = they are not changed.
    """

    name: str = "cross_entropy"  # or bce
    label_smoothing: float = 0.0
    bce_threshold: float | None = None

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean in float32. logits: [N, classes]. targets: int64 [N], or float [N, classes] (MixUp, CutMix)."""
        logits = logits.float()
        if self.name == "cross_entropy":
            return nn.functional.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        assert self.name == "bce", self.name
        classes = logits.shape[1]
        if not targets.is_floating_point():
            targets = nn.functional.one_hot(targets, classes)
        targets = targets * (1 - self.label_smoothing) + self.label_smoothing / classes
        if self.bce_threshold is not None:
            targets = targets > self.bce_threshold
        return nn.functional.binary_cross_entropy_with_logits(logits, targets.float())


CROSS_ENTROPY = Loss()


def loss_of(output: object, targets: torch.Tensor, loss: Loss = CROSS_ENTROPY) -> torch.Tensor:
    """The loss of a model's output, with the auxiliary heads of Inception v3 and GoogLeNet.

    Args:
        output: logits [N, classes], or torchvision's InceptionOutputs or GoogLeNetOutputs.
        targets: int64 [N], or float [N, classes] (MixUp, CutMix).
    """
    total = loss(logits_of(output), targets)
    for name in ("aux_logits", "aux_logits1", "aux_logits2"):
        if getattr(output, name, None) is not None:
            weight = INCEPTION_AUX_WEIGHT if name == "aux_logits" else GOOGLENET_AUX_WEIGHT
            total = total + weight * loss(getattr(output, name), targets)
    return total


def logits_of(output: object) -> torch.Tensor:
    """The main head's logits [N, classes].

    Raises ValueError: the output is neither a tensor nor an object with a tensor `.logits`.
    """
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise ValueError(
            f"the model returned a {type(output).__name__}; training needs logits, a tensor [N, classes], or an object"
            " with the attribute `logits`: wrap the model in a module that returns them"
        )
    return logits
