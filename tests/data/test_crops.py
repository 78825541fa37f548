"""Crops have torchvision's distribution and arithmetic."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchvision.transforms import RandomResizedCrop, v2
from torchvision.transforms.v2 import functional

from cl_train.config.schema import AugmentConfig
from cl_train.data import transforms as crops
from cl_train.data.order import sample_generator

RANGE = AugmentConfig(crop_scale_min=0.08)
DRAWS = 6000


def our_boxes(height, width):
    for index in range(DRAWS):
        uniform = sample_generator(0, 0, index).random(crops.RANDOM_NUMBERS).tolist()
        yield crops.random_resized_crop(height, width, RANGE, uniform[1:])


def torchvision_boxes(height, width):
    image = torch.empty(3, height, width, dtype=torch.uint8)
    torch.manual_seed(0)
    for _ in range(DRAWS):
        yield crops.Box(*RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]))


def kolmogorov_smirnov(first, second):
    """The largest difference between the two samples' cumulative distributions."""
    points = np.concatenate([first, second])
    below = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (first, second)]
    return np.abs(below[0] - below[1]).max()


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 375), (120, 400)])
def test_area_ratio_and_position_have_torchvisions_distribution(height, width):
    """Two-sample Kolmogorov-Smirnov, critical value at p = 0.001: 1.95 * sqrt(2 / n) = 0.0356 for n = 6000."""
    ours, theirs = (np.array(list(boxes(height, width)), dtype=float) for boxes in (our_boxes, torchvision_boxes))
    for name, of in {
        "area": lambda b: b[:, 2] * b[:, 3],
        "ratio": lambda b: b[:, 3] / b[:, 2],
        "top": lambda b: b[:, 0] / np.maximum(1, height - b[:, 2]),
        "left": lambda b: b[:, 1] / np.maximum(1, width - b[:, 3]),
    }.items():
        assert kolmogorov_smirnov(of(ours), of(theirs)) < 1.95 * np.sqrt(2 / DRAWS), name


def test_the_statistic_notices_another_distribution():
    ours = np.array(list(our_boxes(375, 500)), dtype=float)
    other = np.array(
        [
            crops.random_resized_crop(
                375, 500, replace(RANGE, crop_scale_min=0.12), sample_generator(1, 0, i).random(22).tolist()
            )
            for i in range(DRAWS)
        ],
        dtype=float,
    )
    assert kolmogorov_smirnov(ours[:, 2] * ours[:, 3], other[:, 2] * other[:, 3]) > 1.95 * np.sqrt(2 / DRAWS)


@pytest.mark.parametrize(("height", "width"), [(1, 500), (500, 1), (33, 500), (500, 33)])
def test_long_images_take_torchvisions_central_crop(height, width):
    image = torch.empty(3, height, width, dtype=torch.uint8)
    expected = RandomResizedCrop.get_params(image, [0.99, 1.0], [3 / 4, 4 / 3])
    uniform = sample_generator(0, 0, 0).random(22).tolist()
    assert tuple(crops.random_resized_crop(height, width, replace(RANGE, crop_scale_min=0.99), uniform)) == expected


def test_every_box_lies_in_its_image():
    for height, width in ((1, 1), (2, 3), (7, 500), (375, 500), (5000, 4000)):
        for index in range(300):
            box = crops.random_resized_crop(height, width, RANGE, sample_generator(0, 0, index).random(22).tolist())
            assert box.height >= 1 and box.width >= 1 and box.top >= 0 and box.left >= 0
            assert box.top + box.height <= height and box.left + box.width <= width


@pytest.mark.parametrize("size", [(375, 500), (500, 375), (500, 333), (257, 256), (1, 500), (2592, 3888), (33, 500)])
def test_evaluation_has_torchvisions_sizes_and_centre(size):
    """Every pixel holds its own place, so equal crops are equal tensors."""
    height, width = crops.resized_size(*size, 64)
    assert v2.Resize(64)(torch.empty(3, *size, dtype=torch.uint8)).shape[1:] == (height, width)
    places = torch.arange(height * width).view(1, height, width)
    box = crops.centre(height, width, 56)
    ours = places[:, box.top : box.top + box.height, box.left : box.left + box.width]
    assert torch.equal(functional.center_crop(places, [56, 56]), ours)
