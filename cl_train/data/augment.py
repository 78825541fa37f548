"""Augmentation policies of torchvision and timm, random erasing, MixUp, CutMix; seeded by epoch and image or batch."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from cl_train.config.schema import AugmentConfig, ConfigError
from cl_train.config.user_function import optional_module
from cl_train.data.device import MixLabels
from cl_train.data.order import batch_generator, sample_generator
from cl_train.system.distributed import Dist


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator, from which torchvision draws, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reset the GPU's generators
        yield


@contextmanager
def seeded_everywhere(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python by the arguments; restore their states afterwards."""
    word = int(sample_generator(seed, epoch, index).integers(2**32))
    numpy_state, python_state = np.random.get_state(), random.getstate()
    np.random.seed(word)
    random.seed(word)
    try:
        with seeded(word):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def image_augment(cfg: AugmentConfig, mean: list[float]) -> Callable[[Tensor, int], Tensor] | None:
    """(uint8 [3, H, W], seed) -> the same, after the policy and random erasing; None if both are off.

    Erased pixels take the data's mean colour, which normalises to zero, as in torchvision's reference. Raises
    ConfigError if timm is missing, or cannot read `timm_policy`.
    """
    fill = [round(255 * m) for m in mean]
    steps = [] if cfg.policy == "none" else [_policy(cfg, fill)]
    if cfg.erase > 0:
        steps.append(v2.RandomErasing(cfg.erase, value=list(map(float, fill))))
    if not steps:
        return None

    def augment(image: Tensor, seed: int) -> Tensor:
        # timm draws from the generators of Python and numpy.
        with seeded_everywhere(seed, 0, 0) if cfg.policy == "timm" else seeded(seed):
            for step in steps:
                image = step(image)
        return image

    return augment


def _policy(cfg: AugmentConfig, fill: list[int]) -> Callable[[Tensor], Tensor]:
    if cfg.policy == "timm":
        return _timm_policy(cfg.timm_policy, fill)
    policies: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        "randaugment": lambda: v2.RandAugment(cfg.randaugment_ops, cfg.randaugment_magnitude),
        "trivialaugment": v2.TrivialAugmentWide,
        "autoaugment": v2.AutoAugment,
        "augmix": v2.AugMix,
        "three_augment": _three_augment,
    }
    return policies[cfg.policy]()


def _three_augment() -> Callable[[Tensor], Tensor]:
    """Grayscale, solarization or blur, then colour jitter (Touvron et al., "DeiT III: revenge of the ViT", 2022)."""
    one_of_three = [v2.Grayscale(3), v2.RandomSolarize(128, p=1.0), v2.GaussianBlur(13, sigma=(0.1, 2.0))]
    jitter = v2.ColorJitter(brightness=0.3, contrast=0.3, saturation=0.3)
    composed: Callable[[Tensor], Tensor] = v2.Compose([v2.RandomChoice(one_of_three), jitter])
    return composed


def _timm_policy(name: str, fill: list[int]) -> Callable[[Tensor], Tensor]:
    """timm's policy by its name there; choice, fill and translation as in `timm.data.create_transform`."""
    timm = optional_module("timm.data.auto_augment", "augment.policy=timm")
    makers = {"rand": timm.rand_augment_transform, "augm": timm.augment_and_mix_transform}
    make = makers.get(name[:4], timm.auto_augment_transform)

    @cache
    def transform(image_size: int) -> Any:
        return make(name, {"translate_const": int(image_size * 0.45), "img_mean": tuple(fill)})

    try:
        transform(0)
    except Exception as error:
        raise ConfigError(f"augment.timm_policy={name}: timm cannot read it ({error})") from error
    to_pil, to_tensor = v2.functional.to_pil_image, v2.functional.pil_to_tensor
    return lambda image: to_tensor(transform(image.shape[-1])(to_pil(image)))


def label_mix(cfg: AugmentConfig, num_classes: int, seed: int, dist: Dist) -> MixLabels | None:
    """MixUp and CutMix (if both are on, one of them at random per batch) for normalised images on the device."""
    kinds = ((v2.MixUp, cfg.mixup), (v2.CutMix, cfg.cutmix))
    mixes = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha > 0]
    if not mixes:
        return None

    def mix(images: Tensor, targets: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        generator = batch_generator(seed, epoch, batch * dist.world_size + dist.rank)
        chosen = mixes[int(generator.integers(len(mixes)))]
        with seeded(int(generator.integers(2**63))):
            mixed, soft = chosen(images, targets)
        if mixed.stride() != images.stride():  # torchvision's roll may lose the layout
            mixed = torch.empty_like(images).copy_(mixed)
        return mixed, soft

    return mix
