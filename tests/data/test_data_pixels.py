"""Pixels against Pillow, layouts, and decoding less."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from cl_train.config.schema import AugmentConfig
from cl_train.data import crops
from cl_train.data.decode import Encoded
from cl_train.data.folder import read_folder
from cl_train.data.images import ImageForm, ImageReader, shrink_factor
from cl_train.data.order import sample_generator
from tests.data.image_folders import encoded, folder_data, noise, train_batches, write_folder

RANGE = crops.CropRange(0.08, 1.0, 3 / 4, 4 / 3)


def form(**changes):
    plain = {"size": 96, "val_resize": 110, "crop": RANGE, "flip": 0.5, "simple_decoder": True, "exact_decode": True}
    return ImageForm(**{**plain, "seed": 0, **changes})


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
    return Image.open(split.path(index).decode()).convert("RGB")


def test_training_pixels_are_pillows_antialiased_resize_within_one_level(folder):
    reader, ours = ImageReader(form()), row()
    flips = 0
    for index in range(len(folder.train)):
        for epoch in range(6):
            reader.train(ours, folder.train, index, epoch, numbers_of=index)
            image = pillow_image(folder.train, index)
            uniform = sample_generator(0, epoch, index).random(crops.RANDOM_NUMBERS).tolist()
            box = crops.random_resized_crop(image.height, image.width, RANGE, uniform[1:])
            image = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
            image = image.resize((96, 96), Image.Resampling.BILINEAR)
            expected = np.asarray(image, dtype=float)
            if uniform[0] < 0.5:
                flips += 1
                expected = expected[:, ::-1]
            difference = np.abs(ours.permute(1, 2, 0).numpy() - expected)
            assert difference.mean() < 0.5 and difference.max() <= 2
    assert 0 < flips < 36


def test_evaluation_pixels_are_torchvisions_within_one_level(folder):
    reader, ours = ImageReader(form()), row()
    reference = transforms.Compose([transforms.Resize(110), transforms.CenterCrop(96)])
    for index in range(len(folder.val)):
        reader.validation(ours, folder.val, index)
        expected = np.asarray(reference(pillow_image(folder.val, index)), dtype=float)
        assert np.abs(ours.permute(1, 2, 0).numpy() - expected).mean() < 0.5


def test_the_pillow_decoder_gives_the_same_pixels_within_one_level(folder):
    fast, slow = row(), row()
    for index in range(len(folder.train)):
        ImageReader(form()).train(fast, folder.train, index, 0, numbers_of=index)
        ImageReader(form(simple_decoder=False)).train(slow, folder.train, index, 0, numbers_of=index)
        assert (fast.float() - slow.float()).abs().mean() < 1


@pytest.mark.parametrize("decoder", [True, False])
def test_decoding_less_stays_near_the_exact_pixels(folder, decoder):
    """Where the decoder shrank: 2 of 255 levels over all images, 4 in the worst one. Equal where it did not shrink."""
    exact, less = row(), row()
    differences = []
    for index in range(len(folder.train)):
        for epoch in range(6):
            image = pillow_image(folder.train, index)
            uniform = sample_generator(0, epoch, index).random(crops.RANDOM_NUMBERS).tolist()
            box = crops.random_resized_crop(image.height, image.width, RANGE, uniform[1:])
            ImageReader(form(simple_decoder=decoder)).train(exact, folder.train, index, epoch, numbers_of=index)
            reader = ImageReader(form(simple_decoder=decoder, exact_decode=False))
            reader.train(less, folder.train, index, epoch, numbers_of=index)
            difference = (exact.float() - less.float()).abs().mean()
            if shrink_factor(box, 96) == 1:
                assert difference == 0
            else:
                differences.append(float(difference))
    assert len(differences) > 5
    assert np.mean(differences) < 2 and max(differences) < 4


def test_shrinking_leaves_at_least_the_target():
    for side in (10, 96, 191, 192, 500, 768, 5000):
        factor = shrink_factor(crops.Box(0, 0, side, side + 3), 96)
        assert factor == 1 or side // factor >= 96
    assert shrink_factor(crops.Box(0, 0, 192, 300), 96) == 2
    assert shrink_factor(crops.Box(0, 0, 191, 300), 96) == 1


def test_exif_orientation_is_ignored():
    turned = Image.Exif()
    turned[0x0112] = 6
    plain, rotated = encoded(noise(30, 40)), encoded(noise(30, 40), exif=turned)
    assert Encoded(rotated).decode().shape == (30, 40, 3)
    assert np.array_equal(Encoded(plain).decode(), Encoded(rotated).decode())


def test_batches_are_channels_last_and_contiguous_batches_hold_the_same(tmp_path):
    root = write_folder(tmp_path, train=9, val=5)
    nhwc = train_batches(folder_data(root))
    for images, targets in nhwc:
        assert images.dtype == torch.uint8 and targets.dtype == torch.int64
        assert images.shape == (4, 3, 32, 32) and images.stride() == (32 * 32 * 3, 1, 32 * 3, 3)
        assert images.is_contiguous(memory_format=torch.channels_last)
    nchw = train_batches(folder_data(root, memory_format="contiguous"))
    for (first, _), (second, _) in zip(nhwc, nchw, strict=True):
        assert second.stride() == (3 * 32 * 32, 32 * 32, 32, 1)
        assert torch.equal(first, second)


def test_no_augmentation_but_the_crop_with_flip_off(tmp_path):
    root = write_folder(tmp_path, train=4, val=2)
    whole = AugmentConfig(crop_scale_min=1.0, crop_ratio_min=0.5, crop_ratio_max=2.0, flip=0.0)
    flipped = AugmentConfig(crop_scale_min=1.0, crop_ratio_min=0.5, crop_ratio_max=2.0, flip=1.0)
    straight, mirrored = (train_batches(folder_data(root, augment=augment))[0][0] for augment in (whole, flipped))
    assert torch.equal(straight.flip(3), mirrored)
