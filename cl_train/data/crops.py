"""The crop of an image: torchvision's RandomResizedCrop, Resize and CenterCrop, as plain arithmetic.

No tensors here: torchvision draws each number with a tensor operation, which costs about 60 us per image.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from cl_train.config.schema import AugmentConfig

ATTEMPTS = 10
RANDOM_NUMBERS = 1 + 2 * ATTEMPTS + 2  # flip, (area, ratio) of each attempt, position


class Box(NamedTuple):
    """A rectangle of an image, pixels."""

    top: int
    left: int
    height: int
    width: int


def random_resized_crop(height: int, width: int, augment: AugmentConfig, uniform: Sequence[float]) -> Box:
    """The crop of torchvision's RandomResizedCrop for `uniform`, `2 * ATTEMPTS + 2` numbers in [0, 1).

    Source: Szegedy et al., "Going deeper with convolutions", 2014; torchvision.transforms.v2.RandomResizedCrop.
    """
    area, least, most = height * width, augment.crop_scale_min, augment.crop_scale_max
    log_min, log_max = math.log(augment.crop_ratio_min), math.log(augment.crop_ratio_max)
    for attempt in range(ATTEMPTS):
        target = area * (least + (most - least) * uniform[2 * attempt])
        ratio = math.exp(log_min + (log_max - log_min) * uniform[2 * attempt + 1])
        crop_width = round(math.sqrt(target * ratio))
        crop_height = round(math.sqrt(target / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(uniform[-2] * (height - crop_height + 1))
            left = int(uniform[-1] * (width - crop_width + 1))
            return Box(top, left, crop_height, crop_width)
    return _widest_centre(height, width, augment)


def _widest_centre(height: int, width: int, augment: AugmentConfig) -> Box:
    """The central crop with an allowed ratio that torchvision falls back to for very long images."""
    crop_height, crop_width = height, width
    if width / height < augment.crop_ratio_min:
        crop_height = round(width / augment.crop_ratio_min)
    elif width / height > augment.crop_ratio_max:
        crop_width = round(height * augment.crop_ratio_max)
    return Box((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)


def resized_size(height: int, width: int, short_side: int) -> tuple[int, int]:
    """(height, width) after torchvision's `Resize(short_side)`."""
    if height <= width:
        return short_side, int(short_side * width / height)
    return int(short_side * height / width), short_side


def centre(height: int, width: int, side: int) -> Box:
    """The box of torchvision's `CenterCrop(side)`; the image is at least `side` in both directions."""
    return Box(round((height - side) / 2.0), round((width - side) / 2.0), side, side)


def default_val_resize(image_size: int) -> int:
    """The short side before the centre crop: 256 for 224, in proportion for other sizes."""
    return round(image_size * 256 / 224)
