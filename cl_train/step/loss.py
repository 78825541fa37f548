"""The loss of a classifier."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from cl_train.config.schema import LOSSES
from cl_train.config.validation import user_function

INCEPTION_AUX_WEIGHT = 0.4  # Szegedy et al. 2015 (v3), as in torchvision's references
GOOGLENET_AUX_WEIGHT = 0.3  # Szegedy et al. 2014, section 5
_AUX_WEIGHTS = {"aux_logits": INCEPTION_AUX_WEIGHT} | dict.fromkeys(
    ("aux_logits1", "aux_logits2"), GOOGLENET_AUX_WEIGHT
)


@dataclass(frozen=True)
class Loss:
    """Cross-entropy, binary cross-entropy of each class (Wightman et al., "ResNet strikes back", 2021), or `function`.

    bce_threshold: targets of the binary cross-entropy become 1 above it and 0 below; None = they are not changed.
    """

    name: str = "cross_entropy"  # or bce, or that of `function`
    label_smoothing: float = 0.0
    bce_threshold: float | None = None
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None  # of logits and targets

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean in float32. logits: [N, classes]. targets: int64 [N], or float [N, classes] (MixUp, CutMix)."""
        logits = logits.float()
        if self.function is not None:
            return self.function(logits, targets)
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


def build_loss(name: str, label_smoothing: float, bce_threshold: float | None) -> Loss:
    """Raises ConfigError: `name` is a function that cannot be imported."""
    return Loss(name, label_smoothing, bce_threshold, None if name in LOSSES else user_function("loss", name))


def loss_of(output: object, targets: torch.Tensor, loss: Loss = CROSS_ENTROPY) -> torch.Tensor:
    """The loss of a model's output (logits [N, classes]), with the auxiliary heads of Inception v3 and GoogLeNet.

    targets: int64 [N], or float [N, classes] (MixUp, CutMix).
    """
    total = loss(logits_of(output), targets)
    for name, weight in _AUX_WEIGHTS.items():
        if (logits := getattr(output, name, None)) is not None:
            total = total + weight * loss(logits, targets)
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
