"""Activation checkpointing: a block keeps its input alone; its inside is computed again in backward (Chen et al. 2016).

torch's `checkpoint` would update BatchNorm's running statistics twice; here the second pass leaves them alone, so a run
with checkpointing has the statistics, gradients and losses of one without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cl_train.config.schema import ConfigError

_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
)  # exactly these: a subclass (torchvision's Conv2dNormActivation) is a layer


def checkpoint_blocks(model: nn.Module, name: str) -> list[str]:
    """Make every block of `model` recompute its inside in the backward pass, in place; returns the blocks' names.

    A block is a module with children that stands in a plain Sequential or ModuleList (ResNet's Bottleneck, MobileNet's
    InvertedResidual, a transformer's layer). Where there is none, the model's own children with children are taken.

    Raises:
        ConfigError: the model has no blocks (AlexNet, VGG).
    """
    blocks = dict(_blocks(model)) or {
        path: child for path, child in model.named_children() if _has_children(child) and type(child) not in _CONTAINERS
    }
    if not blocks:
        raise ConfigError(f"activation_checkpointing=true: {name} is not made of blocks that could be recomputed")
    for block in blocks.values():
        # A wrapper would change the names in checkpoints; the class alone changes.
        block.__class__ = type(type(block).__name__, (_Recomputed, type(block)), {})
    return list(blocks)


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost blocks."""
    for name, child in module.named_children():
        is_block = type(module) in _CONTAINERS and type(child) not in _CONTAINERS and _has_children(child)
        if is_block:
            yield prefix + name, child
        else:
            yield from _blocks(child, f"{prefix}{name}.")


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


class _Recomputed(nn.Module):
    """Mixed into a block's class."""

    def forward(self, *inputs: Any) -> Any:
        inside = super().forward
        if not (self.training and torch.is_grad_enabled()):
            return inside(*inputs)
        return checkpoint(inside, *inputs, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_untouched(self)


@contextmanager
def _statistics_untouched(block: nn.Module) -> Iterator[None]:
    """BatchNorm must get its statistics all the same: the two passes have to save the same number of tensors."""
    norms = [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
