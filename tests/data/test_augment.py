"""Augmentations against their sources."""

import random

import numpy as np
import pytest
import torch
from timm.data.auto_augment import rand_augment_transform
from timm.data.mixup import mixup_target
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from cl_train.config.schema import AugmentConfig, ConfigError
from cl_train.data.transforms import image_augment, label_mix, seeded, seeded_everywhere
from cl_train.system.distributed import Dist

MEAN = [0.485, 0.456, 0.406]
IMAGE = torch.randint(0, 256, (3, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("policy", "source"),
    [
        ("autoaugment", v2.AutoAugment()),
        ("augmix", v2.AugMix()),
        ("trivialaugment", v2.TrivialAugmentWide()),
        ("randaugment", v2.RandAugment(2, 9)),
    ],
)
def test_policies_are_torchvisions(policy: str, source: v2.Transform) -> None:
    augment = image_augment(AugmentConfig(policy=policy), MEAN)
    assert augment is not None
    for seed in range(5):
        with seeded(seed):
            expected = source(IMAGE)
        assert torch.equal(augment(IMAGE.clone(), seed), expected)


def test_timms_policy_is_timms() -> None:
    name = "rand-m7-mstd0.5-inc1"
    augment = image_augment(AugmentConfig(policy="timm", timm_policy=name), MEAN)
    theirs = rand_augment_transform(name, {"translate_const": int(48 * 0.45), "img_mean": (124, 116, 104)})
    assert augment is not None
    for seed in range(8):
        with seeded_everywhere(seed, 0, 0):
            expected = F.pil_to_tensor(theirs(F.to_pil_image(IMAGE)))
        assert torch.equal(augment(IMAGE.clone(), seed), expected)
    with pytest.raises(ConfigError, match="nonsense"):
        image_augment(AugmentConfig(policy="timm", timm_policy="nonsense-m9"), MEAN)


def test_three_augment_turns_a_third_of_the_images_grey() -> None:
    augment = image_augment(AugmentConfig(policy="three_augment"), MEAN)
    assert augment is not None
    results = [augment(IMAGE.clone(), seed) for seed in range(60)]
    grey = sum(torch.equal(result[0], result[1]) and torch.equal(result[0], result[2]) for result in results)
    smooth = sum(float(result.float().diff(dim=2).abs().mean()) < 40 for result in results)
    assert 10 < grey < 30 and smooth > 5


def test_mixup_is_timms() -> None:
    """Two images: torchvision's neighbour is timm's mirrored place."""
    mix = label_mix(AugmentConfig(mixup=0.8), 4, 0, Dist(0, 1, torch.device("cpu")))
    images, labels = torch.randn(2, 3, 8, 8), torch.tensor([1, 3])
    assert mix is not None
    mixed, targets = mix(images, labels, 0, 0)
    share = float(targets[0, 1])
    assert 0 < share < 1
    torch.testing.assert_close(targets, mixup_target(labels, 4, lam=share))
    torch.testing.assert_close(mixed, share * images + (1 - share) * images.flip(0))


def test_all_generators_are_restored() -> None:
    before = (random.getstate(), np.random.get_state()[2], torch.get_rng_state())
    with seeded_everywhere(3, 1, 2):
        first = (random.random(), np.random.rand(), torch.rand(()).item())
    with seeded_everywhere(3, 1, 2):
        assert first == (random.random(), np.random.rand(), torch.rand(()).item())
    assert random.getstate() == before[0] and np.random.get_state()[2] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
