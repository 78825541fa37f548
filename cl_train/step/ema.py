"""An exponential moving average of a model's weights (Polyak averaging), evaluated beside the model."""

from __future__ import annotations

import copy

import torch
from torch import nn

from cl_train.step.precision import MasterWeights


class WeightAverage:
    """A float32 copy of `model` whose weights and BatchNorm statistics follow the model's with `decay`.

    torch's own AveragedModel cannot follow fp16 weights by their fp32 masters, which `fp16_o2` needs: in fp16 a change
    of (1 - decay) of a weight is below the last bit.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.module = copy.deepcopy(model).float().requires_grad_(False)
        self.module.eval()

    @torch.no_grad()
    def update(self, model: nn.Module, masters: MasterWeights | None = None) -> None:
        """Move the average towards the model: average += (1 - decay) * (weights - average). Integers are copied."""
        source = dict(model.state_dict())
        if masters is not None:
            source.update({name: master.detach() for name, master in masters.masters.items()})
        averages, values = [], []
        for name, average in self.module.state_dict().items():
            if average.is_floating_point():
                averages.append(average)
                values.append(source[name].to(average.dtype))
            else:
                average.copy_(source[name])
        torch._foreach_lerp_(averages, values, 1 - self.decay)
