"""Photographs that lie on their side, and files with other pixels than three times eight bits."""

import functools
import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from cl_train.config.command_line import check_command_line
from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data import user_dataset
from cl_train.data.build import images_of_folder
from cl_train.data.decode import BadImage, EncodedImage
from cl_train.data.prepare.folders import verify
from cl_train.data.prepare.resize import resize_folder
from cl_train.data.transforms import ImageTransform
from cl_train.models.card import ModelCard, Preprocessing
from cl_train.models.sources import follow_published_preprocessing, log_preprocessing
from cl_train.system.distributed import Dist
from tests.data.image_folders import (
    CPU,
    FLOAT_CHANNELS_LAST,
    all_pixels,
    data_of,
    encoded,
    folder_data,
    noise,
    same,
    train_batches,
)

PHOTO = noise(60, 84)
ORIENTATIONS = range(1, 9)


def turned(orientation, kind="JPEG", photo=PHOTO, **options):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(photo, kind, exif=exif, **options)


def upright(data):
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


TURNED = {
    "JPEG": turned,
    "JPEG after a comment": functools.partial(turned, comment=b"c" * 300),
    "JPEG CMYK": functools.partial(turned, photo=PHOTO.convert("CMYK")),
    "PNG": functools.partial(turned, kind="PNG"),
    "WebP": functools.partial(turned, kind="WEBP", lossless=True),
    "TIFF": functools.partial(turned, kind="TIFF"),
    "JPEG without EXIF": lambda _: encoded(PHOTO),
}


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("decoder", ["simplejpeg", "pillow"])
def test_pixels_are_as_pillow_turns_them(name, decoder):
    for orientation in ORIENTATIONS:
        data = TURNED[name](orientation)
        image = EncodedImage(data, decoder, ("JPEG", "PNG", "WEBP", "TIFF"), upright=True)
        pixels, expected = image.decode().astype(int), np.asarray(upright(data))
        assert pixels.shape == expected.shape and abs(pixels - expected).max() <= 1
        assert image.needs_pillow or image.size == expected.shape[:2]
        assert image.needs_pillow == (decoder == "pillow" or "CMYK" in name or name[0] != "J")
    if name == "JPEG":
        assert EncodedImage(turned(6)).decode().shape == (60, 84, 3)


def test_exif_that_cannot_be_read_is_no_reason_against_an_image():
    exif = b"Exif\0\0II*\0\x08\0\0\0\x09\0\x31\x31"
    for kind in ("JPEG", "PNG"):
        assert EncodedImage(encoded(PHOTO, kind, exif=exif), upright=True).decode().shape[0] == 60


class OfPictures:
    """The pictures of a folder, as a Dataset of the user has them."""

    classes = ("a",)

    def __init__(self, folder):
        self.files = sorted(folder.glob("a/*"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return Image.open(self.files[index]), 0


def all_batches(data):
    validation = [(host.images.clone(), host.targets.clone()) for host in data.val_loader.batches()]
    return [*train_batches(data), *validation]


@pytest.fixture
def photos(tmp_path):
    """Turned photographs, and the same upright without EXIF."""
    for orientation in ORIENTATIONS:
        data = turned(orientation, quality=90)
        for split in ("train", "val"):
            for folder, content in (("turned", data), ("upright", encoded(upright(data), "PNG"))):
                path = tmp_path / folder / split / "a" / f"{orientation}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    return tmp_path


def test_training_validation_prediction_and_datasets_see_photographs_upright(photos, monkeypatch):
    root = photos / "turned"
    expected = all_batches(folder_data(photos / "upright"))
    same(all_batches(folder_data(root)), expected)
    lying = all_batches(folder_data(root, exif="ignore"))
    assert not torch.equal(all_pixels(lying), all_pixels(expected))
    build = Mock(return_value=lambda split, _: OfPictures(root / split))
    monkeypatch.setattr(user_dataset, "user_function", build)
    same(all_batches(data_of(name="dataset", dataset="any:function", image_size=32)), expected)
    cfg = DataConfig(name="folder", root=str(root), image_size=32, workers=0)
    predicted = images_of_folder(cfg, ("a",), 4, Dist(0, 1, CPU))
    wanted = folder_data(photos / "upright").validation(FLOAT_CHANNELS_LAST)
    for ours, theirs in zip(predicted.validation(FLOAT_CHANNELS_LAST), wanted, strict=True):
        assert ours.images.equal(theirs.images)


class Table(list):
    """Rows as Hugging Face's `datasets` gives them, which need not be installed."""

    @property
    def features(self):
        return {"label": SimpleNamespace(names=["a"])}

    def cast_column(self, name, feature):
        assert (name, feature) == ("image", {"decode": False})
        return self


def test_the_documented_program_reads_a_table_of_the_hub_as_encoded_bytes(photos, monkeypatch):
    def load_dataset(name, split):
        files = sorted((photos / "turned" / {"validation": "val"}.get(split, split)).glob("a/*"))
        return Table({"image": {"bytes": file.read_bytes()}, "label": 0} for file in files)

    stand_in = Mock(Image=dict, load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    (program,) = re.findall(r"```python\n(from datasets.*?)```", page, re.DOTALL)
    exec(program, names := {})
    monkeypatch.setattr(user_dataset, "user_function", lambda *_: names["Rows"])
    ours = all_batches(data_of(name="dataset", dataset="my_package.data:Rows", image_size=32))
    same(ours, all_batches(folder_data(photos / "upright")))


def test_a_model_knows_whether_its_photographs_were_upright():
    card = ModelCard(preprocessing=Preprocessing.of(DataConfig(image_size=32, exif="ignore")))
    assert ModelCard.read(card.to_dict()) == card
    before = {key: value for key, value in card.to_dict().items() if key != "exif"}
    assert ModelCard.read(before).preprocessing == replace(card.preprocessing, exif=None)
    image = Image.open(io.BytesIO(turned(6)))
    applied = Preprocessing.of(DataConfig(image_size=32))
    assert applied(image).equal(applied(ImageOps.exif_transpose(image)))
    assert card.preprocessing(image).equal(applied(Image.fromarray(np.asarray(image))))


@pytest.mark.parametrize("name", ["folder", "imagenet", "shards"])
def test_published_data_sets_are_read_as_published_accuracies_were_measured(name):
    data = check_command_line([f"data={name}", "data.root=D"])[0].data
    expected = ("apply", "auto") if name == "folder" else ("ignore", "whole")
    assert (data.exif, data.decode_scale) == expected
    # of published weights nobody knows it: the data decides; a run's is followed
    assert follow_published_preprocessing(data, "resnet18", "DEFAULT", ()).exif == data.exif
    assert not log_preprocessing(data, "resnet18", "DEFAULT", names=("exif",))


def test_a_smaller_copy_keeps_the_orientation(photos, tmp_path):
    resize_folder(photos / "turned", tmp_path / "copy", max_side=42, workers=1)
    for orientation in ORIENTATIONS:
        copy = (tmp_path / f"copy/train/a/{orientation}.jpg").read_bytes()
        original = Image.fromarray(np.asarray(upright(turned(orientation))))
        difference = np.asarray(original.resize(upright(copy).size), int) - np.asarray(
            upright(copy)
        )
        assert abs(difference).mean() < 8


LARGE = turned(6, photo=noise(603, 801), quality=92)  # 801 x 603 pixels when it is upright


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("side", "least"), [(16, 4), (40, 2), (100, 1), (224, 1)])
def test_large_photographs_are_decoded_at_a_size_that_is_still_twice_what_is_needed(
    training, side, least, monkeypatch
):
    decode, sizes = EncodedImage.decode, []

    def recorded(self, *arguments):
        pixels = decode(self, *arguments)
        sizes.append(pixels.shape[:2])
        return pixels

    monkeypatch.setattr(EncodedImage, "decode", recorded)
    augment = AugmentConfig(crop_scale_min=0.3)
    for index in range(8):
        rows = []
        for scale in ("whole", "auto"):
            cfg = DataConfig(decode_scale=scale, val_resize=side)
            transform = ImageTransform(cfg, augment, 0, training=training)
            rows.append(torch.empty(side, side, 3, dtype=torch.uint8).permute(2, 0, 1))
            transform.write_encoded(rows[-1], LARGE, 0, index)
        whole, scaled = sizes[-2:]
        n = round(whole[0] / scaled[0])
        assert whole == (801, 603) and scaled == (-(-801 // n), -(-603 // n)) and n >= least
        assert n == 1 or 603 / n >= 2 * side
        difference = abs(rows[0].float() - rows[1].float())
        # a crop of the smaller image may begin half a pixel of it beside
        assert difference.mean() < (5 if training else 1.5)
        assert bool(difference.any()) == (n > 1)


def grey(values, dtype):
    return Image.fromarray(np.resize(np.array(values, dtype), (40, 60)))


def palette_with_hidden_red():
    image = Image.new("P", (60, 40), 1)
    image.putpalette([255, 0, 0, 100, 120, 140])
    image.paste(0, (0, 0, 60, 20))
    return encoded(image, "PNG", transparency=0)


def frames(kind):
    second = Image.new("RGB", PHOTO.size)
    return encoded(PHOTO, kind, save_all=True, append_images=[second], lossless=True)


GREY_ALPHA = Image.merge("LA", [Image.new("L", (60, 40), 0), Image.new("L", (60, 40), 51)])
# A file, and its pixels at the upper left and the lower right, or the reason against it.
ODD = {
    "16 bits": (encoded(grey([0x8000, 0xFFFF], np.uint16), "PNG"), (128, 255)),
    "12 bits in 16": (encoded(grey([4095], np.uint16), "PNG"), "16 bits per pixel, and none above"),
    "palette, transparent": (palette_with_hidden_red(), ((255, 255, 255), (100, 120, 140))),
    "grey, alpha": (encoded(GREY_ALPHA, "PNG"), (204, 204)),
    "CMYK": (encoded(Image.new("CMYK", (60, 40), (255, 0, 0, 0)), "TIFF"), ((0, 255, 255),) * 2),
    "animated WebP": (frames("WEBP"), (PHOTO.getpixel((0, 0)), PHOTO.getpixel((83, 59)))),
    "float TIFF": (encoded(grey([0.5], np.float32), "TIFF"), "32 bits per pixel .mode F."),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_pixels_are_right_or_refused_never_black(name):
    data, expected = ODD[name]
    image = EncodedImage(data, formats=("PNG", "WEBP", "TIFF"), upright=True)
    if isinstance(expected, str):
        with pytest.raises(BadImage, match=expected):
            image.decode()
    else:
        pixels = image.decode()
        for pixel, wanted in zip((pixels[0, 0], pixels[-1, -1]), expected, strict=True):
            assert pixel.tolist() == np.broadcast_to(wanted, 3).tolist()


def test_training_prediction_and_the_check_of_a_folder_refuse_the_same_images(tmp_path):
    data, reason = ODD["12 bits in 16"]
    (tmp_path / "train/a").mkdir(parents=True)
    for number in range(4):
        (tmp_path / f"train/a/{number}.png").write_bytes(data)
    (tmp_path / "val").symlink_to("train")
    skip = {"on_bad_image": "skip", "image_size": 32}
    cfg = DataConfig(root=str(tmp_path), workers=0, **skip)
    for seen in images_of_folder(cfg, ("a",), 4, Dist(0, 1, CPU)), folder_data(tmp_path, **skip):
        list(seen.val_loader.batches())
        assert len(seen.bad_images.reasons) == 4
    problems = verify(tmp_path, deep=True, expect="any", workers=1)[1]
    assert sum(reason in problem for problem in problems) == 2
