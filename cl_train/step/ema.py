"""Exponential moving average (EMA) of a model's weights, also known as Polyak averaging."""

import copy

import torch
from torch import nn

from cl_train.step.precision import MasterWeights, full_precision_state


class EMA:
    """A float32 copy of `model`, `module`, with moving averages of the model's weights and BatchNorm statistics.

    torch's AveragedModel cannot average fp32 master weights, which fp16_o2 needs: a change of a weight by a share of
    (1 - decay) is below the resolution of fp16.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.module = copy.deepcopy(model).float().requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, model: nn.Module, masters: MasterWeights | None = None) -> None:
        """ema += (1 - decay) * (weights - ema). Integer buffers are copied. The host does not wait for the device."""
        source = full_precision_state(model, masters)
        averages, weights, integers, new_integers = [], [], [], []
        for name, average in self.module.state_dict().items():
            if not isinstance(average, torch.Tensor):  # a module's extra state
                continue
            if average.is_floating_point():
                averages.append(average)
                weights.append(source[name].detach().to(average.dtype))
            else:
                integers.append(average)
                new_integers.append(source[name])
        if integers:  # one launch instead of one per BatchNorm
            torch._foreach_copy_(integers, new_integers)
        torch._foreach_lerp_(averages, weights, 1 - self.decay)
