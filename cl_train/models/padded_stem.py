"""A stem convolution for images of four channels, the fourth zero, whose weight keeps its three.

Rows of three fp16 numbers are 6 bytes: no load of a tensor core's kernel is aligned to that, so cuDNN takes a slower
kernel or pads by itself, each step. Four channels are 8 bytes. The weight is padded with zeros inside the forward pass,
which costs microseconds (it has a few thousand numbers), so parameters, optimizer state and checkpoints are those of
the plain network, and so is the function.
"""

from __future__ import annotations

import torch
from torch import nn

from cl_train.config.schema import ConfigError

IMAGE_CHANNELS, PADDED_CHANNELS = 3, 4


class PaddedStem(nn.Conv2d):
    """A Conv2d of three input channels that also takes four: the fourth meets a weight of zeros."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """images: [N, 3, H, W], or [N, 4, H, W] whose last channel does not count."""
        if images.shape[1] == IMAGE_CHANNELS:
            return super().forward(images)
        weight = nn.functional.pad(self.weight, (0, 0, 0, 0, 0, PADDED_CHANNELS - IMAGE_CHANNELS))
        return self._conv_forward(images, weight, self.bias)


def pad_stem(model: nn.Module, name: str) -> str:
    """Let the one convolution of `model` that reads images take four channels, in place; returns its name.

    Args:
        name: of the model, for the message.

    Raises:
        ConfigError: no such convolution, several, or one of another kind than nn.Conv2d.
    """
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and module.in_channels == IMAGE_CHANNELS
    ]
    if len(found) != 1 or type(found[0][1]) is not nn.Conv2d or found[0][1].groups != 1:
        kinds = ", ".join(f"{path} ({type(module).__name__})" for path, module in found) or "none"
        raise ConfigError(
            f"pad_channels=true needs a model with one plain Conv2d on three channels; {name} has {kinds}"
        )
    path, stem = found[0]
    stem.__class__ = PaddedStem  # same parameters, buffers and hooks; a new module would lose all but the first
    return path
