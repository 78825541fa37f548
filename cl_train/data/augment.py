"""torchvision's automatic policies, random erasing, MixUp and CutMix, each seeded by (seed, epoch, index or batch)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torchvision.transforms import v2

from cl_train.config.schema import AugmentConfig
from cl_train.data.device import MixLabels
from cl_train.data.order import batch_generator


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator, from which torchvision draws, and restore its state afterwards.

    `torch.manual_seed` would also reset the GPU's generators.
    """
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def image_augment(cfg: AugmentConfig, mean: list[float]) -> Callable[[Tensor, int], Tensor] | None:
    """(uint8 [3, H, W], seed) -> the same, after the policy and random erasing; None if both are off.

    Erased pixels take the data's mean colour, which normalises to zero, as in torchvision's reference.
    """
    steps: list[Callable[[Tensor], Tensor]] = []
    if cfg.policy == "randaugment":
        steps.append(v2.RandAugment(cfg.randaugment_ops, cfg.randaugment_magnitude))
    elif cfg.policy == "trivialaugment":
        steps.append(v2.TrivialAugmentWide())
    if cfg.erase > 0:
        steps.append(v2.RandomErasing(cfg.erase, value=[float(round(255 * m)) for m in mean]))
    if not steps:
        return None

    def augment(image: Tensor, seed: int) -> Tensor:
        with seeded(seed):
            for step in steps:
                image = step(image)
        return image

    return augment


def label_mix(cfg: AugmentConfig, num_classes: int, seed: int) -> MixLabels | None:
    """MixUp and CutMix (if both are on, one of them at random per batch) for normalised images on the device."""
    mixes: list[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = []
    if cfg.mixup > 0:
        mixes.append(v2.MixUp(alpha=cfg.mixup, num_classes=num_classes))
    if cfg.cutmix > 0:
        mixes.append(v2.CutMix(alpha=cfg.cutmix, num_classes=num_classes))
    if not mixes:
        return None

    def mix(images: Tensor, targets: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        generator = batch_generator(seed, epoch, batch)
        chosen = mixes[int(generator.integers(len(mixes)))]
        with seeded(int(generator.integers(2**63))):
            mixed, soft = chosen(images, targets)
        return _like(mixed, images), soft

    return mix


def _like(mixed: Tensor, images: Tensor) -> Tensor:
    """Restore the layout, which torchvision's roll may lose; copies only if it did."""
    if mixed.stride() == images.stride():
        return mixed
    return torch.empty_like(images).copy_(mixed)
