"""What a file says of its model besides the weights, with the same keys in files of every kind."""

import contextlib
import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image

from cl_train.config.schema import IMAGE_FORMATS, AugmentConfig, DataConfig
from cl_train.config.validation import from_mapping
from cl_train.data.decode import Pixels, rgb
from cl_train.data.device import DeviceFormat, Normalise
from cl_train.data.transforms import ImageTransform, default_val_resize
from cl_train.errors import ConfigError

_TEXTS = ("memory_format", "model", "precision")
_LISTS = ("classes", "extensions")
# By key of a card: the settings of `data` that have another name.
_SETTINGS = {"crop": "image_size", "resize": "val_resize", "interpolation": "val_interpolation"}
_PREPROCESSING = (*_SETTINGS, "mean", "std", "exif")
KEYS = (*_TEXTS, *_LISTS, *_PREPROCESSING)


@dataclass(frozen=True)
class Preprocessing:
    """From an image to the input of a model: resize of the short side, centre crop, normalise."""

    resize: int  # pixels
    crop: int
    interpolation: str  # bilinear or bicubic, antialiased
    mean: tuple[float, ...]  # per channel, of values from 0 to 1
    std: tuple[float, ...]
    exif: str | None = None  # published weights and older files leave it to the data

    @classmethod
    def of(cls, data: DataConfig) -> "Preprocessing":
        """Returns the preprocessing of an evaluation with the settings `data`."""
        crop = data.eval_size
        resize = data.val_resize or default_val_resize(crop)
        mean, std = tuple(data.mean), tuple(data.std)
        return cls(resize, crop, data.val_interpolation, mean, std, data.exif)

    def settings(self) -> dict[str, Any]:
        card = self.to_dict()
        names = [name for name in _PREPROCESSING if name in card]
        return {_SETTINGS.get(name, name): card[name] for name in names}

    def to_dict(self) -> dict[str, Any]:
        lists = {"mean": list(self.mean), "std": list(self.std)}
        facts = {"input_size": [3, self.crop, self.crop], **vars(self), **lists}
        return {name: value for name, value in facts.items() if value is not None}

    def __call__(self, image: Image.Image | Pixels) -> torch.Tensor:
        """Turns a PIL image or uint8 [H, W, 3] into float32 [3, crop, crop], as evaluations do."""
        upright = self.exif != "ignore"
        pixels = rgb(image, upright=upright) if isinstance(image, Image.Image) else image
        rows = torch.empty(1, self.crop, self.crop, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
        settings = DataConfig(**self.settings())
        transform = ImageTransform(settings, AugmentConfig(), 0, training=False)
        transform(rows[0], pixels, 0, 0)
        form = DeviceFormat(torch.device("cpu"), torch.float32, torch.channels_last)
        return Normalise(self.mean, self.std, form)(rows)[0]


@dataclass(frozen=True)
class ModelCard:
    """What a file says of its model; None, or empty, is unknown."""

    memory_format: str | None = None  # of the model when it is loaded
    model: str | None = None
    precision: str | None = None  # of the run's evaluation
    classes: tuple[str, ...] = ()
    preprocessing: Preprocessing | None = None
    extensions: tuple[str, ...] = ()  # of the image files that it was trained with

    @property
    def image_size(self) -> int | None:
        return self.preprocessing.crop if self.preprocessing else None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values without the unknown ones."""
        values = {name: getattr(self, name) for name in _TEXTS}
        values |= {name: list(getattr(self, name)) for name in _LISTS}
        facts = {name: value for name, value in values.items() if value}
        return facts | (self.preprocessing.to_dict() if self.preprocessing else {})

    def to_texts(self) -> dict[str, str]:
        """Returns `to_dict` for metadata that holds text only, with lists and numbers as JSON."""
        values = self.to_dict().items()
        return {
            key: value if isinstance(value, str) else json.dumps(value) for key, value in values
        }

    @classmethod
    def read(cls, metadata: object) -> "ModelCard":
        """Reads `metadata`; an entry that is not as `to_dict` writes it counts as unknown."""
        entries = metadata if isinstance(metadata, dict) else {}
        values = {key: _parsed(entries.get(key)) for key in KEYS}
        texts = {name: values[name] or None for name in _TEXTS if isinstance(values[name], str)}
        classes, extensions = (
            tuple(map(str, values[name])) if isinstance(values[name], list) else ()
            for name in _LISTS
        )
        readable = tuple(name for name in extensions if name.lower() in IMAGE_FORMATS)
        preprocessing = None
        with contextlib.suppress(ConfigError):
            exif = values["exif"] or None
            names = _PREPROCESSING if exif else _PREPROCESSING[:-1]
            data = {_SETTINGS.get(name, name): values[name] for name in names}
            read = replace(Preprocessing.of(from_mapping(DataConfig, data)), exif=exif)
            has_three_channels = len(read.mean) == len(read.std) == 3
            if has_three_channels and min(read.std) > 0 and read.resize >= read.crop:
                preprocessing = read
        return cls(classes=classes, preprocessing=preprocessing, extensions=readable, **texts)


def _parsed(value: object) -> Any:
    value = value.decode(errors="replace") if isinstance(value, bytes) else value
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
