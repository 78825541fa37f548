"""Pixels against Pillow and torchvision; the layout of batches."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data import transforms as crops
from cl_train.data.folder import read_folder
from cl_train.data.order import sample_generator
from cl_train.data.transforms import ImageReader
from tests.data.image_folders import encoded, folder_data, noise, train_batches, write_folder

AUGMENT = AugmentConfig(crop_scale_min=0.08, flip=0.5)


def reader(split, *, training=True, decoder="simplejpeg", interpolation="bilinear"):
    cfg = DataConfig(decoder=decoder, interpolation=interpolation)
    return ImageReader(split, cfg, AUGMENT, seed=0, training=training)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("pixels")
    for split in ("train", "val"):
        (root / split / "a").mkdir(parents=True)
        for number, (height, width) in enumerate(
            [(375, 500), (500, 333), (97, 61), (480, 640), (150, 600), (900, 1200)]
        ):
            (root / split / "a" / f"{number}.jpg").write_bytes(encoded(noise(height, width, number), quality=92))
    return read_folder(root)


def row(size=96):
    return torch.empty(size, size, 3, dtype=torch.uint8).permute(2, 0, 1)


def pillow_image(split, index):
    return Image.open(split.name(index)).convert("RGB")


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_training_pixels_are_pillows_antialiased_resize_within_one_level(folder, interpolation):
    train, ours = reader(folder.train, interpolation=interpolation), row()
    flips = 0
    for index in range(len(folder.train)):
        for epoch in range(6):
            assert train.read(ours, index, epoch, random_index=index) == 0
            image = pillow_image(folder.train, index)
            uniform = sample_generator(0, epoch, index).random(crops.RANDOM_NUMBERS).tolist()
            box = crops.random_resized_crop(image.height, image.width, AUGMENT, uniform[1:])
            image = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
            image = image.resize((96, 96), Image.Resampling[interpolation.upper()])
            expected = np.asarray(image, dtype=float)
            if uniform[0] < 0.5:
                flips += 1
                expected = expected[:, ::-1]
            difference = np.abs(ours.permute(1, 2, 0).numpy() - expected)
            assert difference.mean() < 0.5 and difference.max() <= 2
    assert 0 < flips < 36


def test_evaluation_pixels_are_torchvisions_within_one_level(folder):
    val, ours = reader(folder.val, training=False), row()
    reference = transforms.Compose([transforms.Resize(110), transforms.CenterCrop(96)])
    for index in range(len(folder.val)):
        val.read(ours, index, 0, random_index=index)
        expected = np.asarray(reference(pillow_image(folder.val, index)), dtype=float)
        assert np.abs(ours.permute(1, 2, 0).numpy() - expected).mean() < 0.5


def test_the_pillow_decoder_gives_the_same_pixels_within_one_level(folder):
    fast, slow = row(), row()
    for index in range(len(folder.train)):
        reader(folder.train).read(fast, index, 0, index)
        reader(folder.train, decoder="pillow").read(slow, index, 0, index)
        assert (fast.float() - slow.float()).abs().mean() < 1


def test_batches_are_uint8_channels_last(tmp_path):
    root = write_folder(tmp_path, train=9, val=5)
    for images, targets in train_batches(folder_data(root)):
        assert images.dtype == torch.uint8 and targets.dtype == torch.int64
        assert images.shape == (4, 3, 32, 32) and images.stride() == (32 * 32 * 3, 1, 32 * 3, 3)


def test_no_augmentation_but_the_crop_with_flip_off(tmp_path):
    root = write_folder(tmp_path, train=4, val=2)
    whole = AugmentConfig(crop_scale_min=1.0, crop_ratio_min=0.5, crop_ratio_max=2.0, flip=0.0)
    flipped = AugmentConfig(crop_scale_min=1.0, crop_ratio_min=0.5, crop_ratio_max=2.0, flip=1.0)
    straight, mirrored = (train_batches(folder_data(root, augment=augment))[0][0] for augment in (whole, flipped))
    assert torch.equal(straight.flip(3), mirrored)
