"""Crops, pixels and augmentations against torchvision, Pillow and timm."""

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import RandAugment
from timm.data.mixup import mixup_target
from torchvision.transforms import RandomResizedCrop, v2
from torchvision.transforms.v2 import functional as F

from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data import transforms
from cl_train.data.images import list_folder
from cl_train.data.order import RandomNumbers
from cl_train.data.transforms import (
    ImageReader,
    ImageTransform,
    image_augment,
    random_resized_crop,
    seeded,
)
from cl_train.system.distributed import Dist
from tests.data.image_folders import encoded, noise

IMAGE = torch.randint(
    0, 256, (3, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
)
AUGMENT = AugmentConfig(crop_scale_min=0.08, flip=0.5)
DRAWS = 3000


def timm_augment(name, **data):
    return image_augment(AugmentConfig(policy=name), DataConfig(**data))


def boxes(height, width, augment=AUGMENT, count=DRAWS):
    numbers = (RandomNumbers().of(0, 0, index).random(22).tolist() for index in range(count))
    return np.array(
        [random_resized_crop(height, width, augment, uniform) for uniform in numbers], dtype=float
    )


def torchvisions(height, width, least=0.08, count=DRAWS):
    image = torch.empty(3, height, width, dtype=torch.uint8)
    torch.manual_seed(0)
    drawn = [
        RandomResizedCrop.get_params(image, [least, 1.0], [3 / 4, 4 / 3]) for _ in range(count)
    ]
    return np.array(drawn, dtype=float)


def are_alike(first, second):
    """Two-sample Kolmogorov-Smirnov at p = 0.001: 1.95 * sqrt(2 / n) = 0.0503 for n = 3000."""
    points = np.concatenate([first, second])
    below = [
        np.searchsorted(np.sort(sample), points, side="right") / len(sample)
        for sample in (first, second)
    ]
    return np.abs(below[0] - below[1]).max() < 1.95 * np.sqrt(2 / DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize(("height", "width"), [(375, 500), (120, 400)])
def test_area_ratio_and_position_have_torchvisions_distribution(height, width):
    ours, theirs = boxes(height, width), torchvisions(height, width)
    for name, of in {
        "area": lambda b: b[:, 2] * b[:, 3],
        "ratio": lambda b: b[:, 3] / b[:, 2],
        "top": lambda b: b[:, 0] / np.maximum(1, height - b[:, 2]),
        "left": lambda b: b[:, 1] / np.maximum(1, width - b[:, 3]),
    }.items():
        assert are_alike(of(ours), of(theirs)), name
    other = boxes(height, width, AugmentConfig(crop_scale_min=0.2))
    assert not are_alike(ours[:, 2] * ours[:, 3], other[:, 2] * other[:, 3])


@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (1, 500), (500, 1), (33, 500), (500, 33), (5000, 4000)]
)
def test_boxes_lie_in_their_image_and_long_images_take_torchvisions_central_crop(height, width):
    for top, left, box_height, box_width in boxes(height, width, count=100):
        assert 0 <= top <= height - box_height < height and 0 <= left <= width - box_width < width
    whole = boxes(height, width, AugmentConfig(crop_scale_min=1.0), count=1)
    assert whole.tolist() == [[0, 0, height, width]]
    if not 1 / 2 < width / height < 2:
        ours = boxes(height, width, AugmentConfig(crop_scale_min=0.99), count=1)
        assert ours.tolist() == torchvisions(height, width, 0.99, 1).tolist()


@pytest.mark.parametrize(
    "size", [(375, 500), (500, 375), (500, 333), (257, 256), (1, 500), (1944, 2592), (33, 500)]
)
def test_evaluation_is_torchvisions_resize_and_centre_crop(size):
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    row = torch.empty(56, 56, 3, dtype=torch.uint8).permute(2, 0, 1)
    ImageTransform(DataConfig(val_resize=64), AUGMENT, 0, training=False)(row, pixels, 0, 0)
    expected = v2.CenterCrop(56)(v2.Resize(64)(torch.from_numpy(pixels).permute(2, 0, 1)))
    assert torch.equal(row, expected)
    assert transforms.resized(pixels, (6, 5)).stride() == (1, 15, 3)  # else it takes twice as long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("pixels")
    for split in ("train", "val"):
        (root / split / "a").mkdir(parents=True)
        for number, (height, width) in enumerate([(375, 500), (97, 61), (150, 600), (900, 1200)]):
            (root / split / "a" / f"{number}.jpg").write_bytes(
                encoded(noise(height, width, number), quality=92)
            )
    return list_folder(root)


def pixels_of(split, index, epoch=0, *, training=True, **settings):
    row = torch.empty(96, 96, 3, dtype=torch.uint8).permute(2, 0, 1)
    cfg = DataConfig(decode_scale="whole", **settings)
    reader = ImageReader(split, ImageTransform(cfg, AUGMENT, 0, training=training))
    label, _ = reader.read(row, index, epoch, random_index=index)
    assert label == 0
    return row.permute(1, 2, 0).numpy().astype(float)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_training_pixels_are_pillows_antialiased_resize_within_one_level(folder, interpolation):
    flips = 0
    for index in range(len(folder.train)):
        for epoch in range(6):
            image = Image.open(folder.train.name(index)).convert("RGB")
            uniform = RandomNumbers().of(0, epoch, index).random(transforms.RANDOM_NUMBERS).tolist()
            top, left, height, width = random_resized_crop(
                image.height, image.width, AUGMENT, uniform[1:]
            )
            image = image.crop((left, top, left + width, top + height))
            expected = np.asarray(image.resize((96, 96), Image.Resampling[interpolation.upper()]))
            if uniform[0] < 0.5:
                flips += 1
                expected = expected[:, ::-1]
            pixels = pixels_of(folder.train, index, epoch, interpolation=interpolation)
            difference = np.abs(pixels - expected)
            assert difference.mean() < 0.5 and difference.max() <= 2
    assert 0 < flips < 24


POLICIES = {
    "autoaugment": v2.AutoAugment,
    "augmix": v2.AugMix,
    "trivialaugment": v2.TrivialAugmentWide,
    "randaugment": partial(v2.RandAugment, 2, 9),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_are_those_of_torchvisions_references(policy):
    augment = image_augment(AugmentConfig(policy=policy), DataConfig())
    theirs = POLICIES[policy](interpolation=v2.InterpolationMode.BILINEAR)
    for seed in range(20):
        with seeded(seed):
            expected = theirs(IMAGE)
        assert torch.equal(augment(IMAGE.clone(), seed), expected)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_timms_policy_is_that_of_its_create_transform(interpolation):
    name = "rand-m7-mstd0.5-inc1"
    augment = timm_augment(name, interpolation=interpolation)
    transform = create_transform(
        48, is_training=True, auto_augment=name, interpolation=interpolation
    )
    (theirs,) = (step for step in transform.transforms if isinstance(step, RandAugment))
    for seed in range(8):
        with transforms.seeded_everywhere(seed, 0, 0):
            expected = F.pil_to_tensor(theirs(F.to_pil_image(IMAGE)))
        assert torch.equal(augment(IMAGE.clone(), seed), expected)


@pytest.mark.parametrize("name", ["rand-m10-inc1", "v0", "augmix-m5-w4-d2"])
def test_timms_strongest_posterize_is_black_and_fails_with_no_pillow(name):
    augment = timm_augment(name)
    results = [augment(IMAGE.clone(), seed) for seed in range(300)]
    assert name != "rand-m10-inc1" or sum(not result.any() for result in results) > 3


def test_mixup_is_timms():
    """Two images: torchvision's neighbour is timm's mirrored place."""
    mix = transforms.label_mix(AugmentConfig(mixup=0.8), 4, 0, Dist(0, 1, torch.device("cpu")))
    images, labels = torch.randn(2, 3, 8, 8), torch.tensor([1, 3])
    mixed, targets = mix(images, labels, 0, 0)
    share = float(targets[0, 1])
    assert 0 < share < 1
    torch.testing.assert_close(targets, mixup_target(labels, 4, lam=share))
    torch.testing.assert_close(mixed, share * images + (1 - share) * images.flip(0))
