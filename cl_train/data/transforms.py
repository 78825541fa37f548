"""From an encoded image to a row of a batch: crop, resize, flip, augmentation; MixUp and CutMix of
a whole batch. Random numbers depend on the seed, the epoch and the image or batch alone.

Crops are plain arithmetic: torchvision draws with tensor operations, about 60 us per image.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torchvision.transforms import v2

from cl_train.config.groups import POLICIES
from cl_train.config.schema import IMAGE_FORMATS, AugmentConfig, DataConfig
from cl_train.config.validation import optional_module
from cl_train.data.decode import EncodedImage, Pixels
from cl_train.data.device import MixLabels
from cl_train.data.images import Split
from cl_train.data.order import BATCHES, RandomNumbers
from cl_train.errors import ConfigError
from cl_train.system.distributed import Dist

_ATTEMPTS = 10
_RATIOS = (3 / 4, 4 / 3)  # width / height of a crop
_SCRATCH_PIXELS = 1_000_000  # images up to this size are decoded into a buffer that is kept
RANDOM_NUMBERS = 1 + 2 * _ATTEMPTS + 2  # flip, (area, ratio) of each attempt, position


def random_resized_crop(
    height: int, width: int, augment: AugmentConfig, uniform: Sequence[float]
) -> tuple[int, ...]:
    """Returns top, left, height and width of a crop as in torchvision's RandomResizedCrop (Szegedy
    et al., "Going deeper with convolutions", 2014), by `2 * _ATTEMPTS + 2` numbers in [0, 1).
    """
    area, least = height * width, augment.crop_scale_min
    if least == 1:  # the whole image, whatever its shape
        return 0, 0, height, width
    log_min, log_max = map(math.log, _RATIOS)
    for attempt in range(_ATTEMPTS):
        target = area * (least + (1 - least) * uniform[2 * attempt])
        ratio = math.exp(log_min + (log_max - log_min) * uniform[2 * attempt + 1])
        crop_width = round(math.sqrt(target * ratio))
        crop_height = round(math.sqrt(target / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(uniform[-2] * (height - crop_height + 1))
            left = int(uniform[-1] * (width - crop_width + 1))
            return top, left, crop_height, crop_width
    # a very long image: the largest central crop with an allowed ratio
    crop_height, crop_width = height, width
    if width / height < _RATIOS[0]:
        crop_height = round(width / _RATIOS[0])
    elif width / height > _RATIOS[1]:
        crop_width = round(height * _RATIOS[1])
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def default_val_resize(image_size: int) -> int:
    """The short side before the centre crop: 256 for 224, in proportion for other sizes."""
    return round(image_size * 256 / 224)


class WorkerTimes(NamedTuple):
    """Seconds that workers spent on each part of loading."""

    read_s: float = 0.0
    decode_s: float = 0.0
    resize_s: float = 0.0
    images: float = 0
    dataset_s: float = 0.0  # in the user's Dataset

    def plus(self, other: "WorkerTimes") -> "WorkerTimes":
        return WorkerTimes(*map(sum, zip(self, other, strict=True)))


class Reader(Protocol):
    """Reads the samples of one split; each worker has a copy."""

    dtype: torch.dtype

    def __len__(self) -> int: ...

    def name(self, index: int) -> str: ...

    def read(
        self, row: Tensor, index: int, epoch: int, random_index: int
    ) -> tuple[int, WorkerTimes]:
        """Writes sample `index` into `row`, [3, size, size]; returns its label and the seconds.

        It gets the random numbers of `random_index`: not `index` for a repeated image, or one in
        the place of a bad one. Raises BadImage.
        """


class ImageReader:
    """Reads the images of a split into rows of a batch: decodes, crops, resizes, flips."""

    dtype = torch.uint8

    def __init__(self, split: Split, transform: "ImageTransform") -> None:
        self._split, self._transform = split, transform

    def __len__(self) -> int:
        return len(self._split)

    def name(self, index: int) -> str:
        return self._split.name(index)

    def read(
        self, row: Tensor, index: int, epoch: int, random_index: int
    ) -> tuple[int, WorkerTimes]:
        begin = perf_counter()
        data = self._split.read(index)
        read = perf_counter()
        decode_s = self._transform.write_encoded(row, data, epoch, random_index)
        resize_s = perf_counter() - read - decode_s
        times = WorkerTimes(read - begin, decode_s, resize_s, images=1)
        return int(self._split.labels[index]), times


class ImageTransform:
    """Crops and resizes pixels into a row, uint8 [3, size, size] in channels_last, of any size."""

    def __init__(
        self, cfg: DataConfig, augment: AugmentConfig, seed: int, *, training: bool
    ) -> None:
        self._cfg, self._augment, self.seed, self.training = cfg, augment, seed, training
        self._operations = image_augment(augment, cfg) if training else None
        self._random_numbers = RandomNumbers()
        formats = dict.fromkeys(IMAGE_FORMATS[extension.lower()] for extension in cfg.extensions)
        self._decoder, self.upright = (cfg.decoder, tuple(formats)), cfg.exif == "apply"
        self._scratch: Pixels = np.empty(_SCRATCH_PIXELS * 3, dtype=np.uint8)

    def write_encoded(self, row: Tensor, data: bytes, epoch: int, random_index: int) -> float:
        """Writes the transformed image of an encoded file; returns the seconds of decoding.

        Raises BadImage.
        """
        begin = perf_counter()
        image = EncodedImage(data, *self._decoder, upright=self.upright)
        reduction = self._reduction(image.size, row.shape[-1], epoch, random_index)
        pixels = image.decode(self._scratch, reduction)
        decode_s = perf_counter() - begin
        self(row, pixels, epoch, random_index)
        return decode_s

    def _reduction(self, size: Sequence[int], side: int, epoch: int, random_index: int) -> int:
        """Returns the largest of 1, 2, 4 and 8 by which an image of `size` can be decoded smaller:
        its crop still has at least 2 x `side` pixels.
        """
        if not self.training:
            side = self._short_side(side)
        if self._cfg.decode_scale == "whole" or min(size) < 4 * side:
            return 1
        if self.training:  # the crop of the smaller image is the same, within a pixel
            generator = self._random_numbers.of(self.seed, epoch, random_index)
            uniform = generator.random(RANDOM_NUMBERS).tolist()
            height, width = size
            size = random_resized_crop(height, width, self._augment, uniform[1:])[2:]
        return next((n for n in (8, 4, 2) if min(size) >= 2 * n * side), 1)

    def __call__(self, row: Tensor, pixels: Pixels, epoch: int, random_index: int) -> None:
        """Writes the transformed `pixels` into `row`; training draws the random numbers of sample
        `random_index` in `epoch`.
        """
        if not self.training:
            self._centre_crop(row, pixels)
            return
        height, width, _ = pixels.shape
        generator = self._random_numbers.of(self.seed, epoch, random_index)
        uniform = generator.random(RANDOM_NUMBERS).tolist()
        top, left, height, width = random_resized_crop(height, width, self._augment, uniform[1:])
        # in NumPy: a tenth of the time of slicing a tensor
        crop = pixels[top : top + height, left : left + width]
        image = resized(crop, row.shape[1:], self._cfg.interpolation)
        if uniform[0] < self._augment.flip:
            image = image.flip(2)
        row.copy_(image)
        if self._operations is not None:
            row.copy_(self._operations(row, int(generator.integers(2**63))))

    def _short_side(self, side: int) -> int:
        return self._cfg.val_resize or default_val_resize(side)

    def _centre_crop(self, row: Tensor, pixels: Pixels) -> None:
        """Does what torchvision's Resize and CenterCrop do."""
        height, width, _ = pixels.shape
        side = row.shape[-1]
        short = self._short_side(side)
        size = (short, int(short * width / height))
        if height > width:
            size = (int(short * height / width), short)
        image = resized(pixels, size, self._cfg.val_interpolation)
        top, left = (round((length - side) / 2.0) for length in size)
        row.copy_(image[:, top : top + side, left : left + side])


def resized(pixels: Pixels, size: Sequence[int], interpolation: str = "bilinear") -> Tensor:
    """Resizes `pixels` (uint8 [H, W, 3]) with antialiasing to uint8 [3, h, w] in channels_last."""
    if pixels.strides[0] < 0 or pixels.strides[1] != 3:  # a turned view
        pixels = np.ascontiguousarray(pixels)
    # In this order torch sees that it is channels_last: else the kernel takes 1.7 times as long.
    image = torch.from_numpy(pixels).unsqueeze(0).permute(0, 3, 1, 2)
    return functional.interpolate(image, size, mode=interpolation, antialias=True)[0]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's global CPU generator, from which torchvision draws, for the block."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reset the GPU's generators
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def seeded_everywhere(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Seeds the global generators of torch, numpy and Python by the arguments, for the block."""
    word = int(RandomNumbers().of(seed, epoch, index).integers(2**32))
    numpy_state, python_state = np.random.get_state(), random.getstate()
    np.random.seed(word)
    random.seed(word)
    try:
        with seeded(word):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def image_augment(cfg: AugmentConfig, data: DataConfig) -> Callable[[Tensor, int], Tensor] | None:
    """Returns a function of (image, seed) that applies the policy and random erasing to an image,
    uint8 [3, H, W]; None if there is neither.

    Rotations and shears interpolate as in the reference scripts: torchvision's policies bilinearly,
    timm's like the crop. Erased pixels take the data's mean colour. Raises ConfigError: timm is
    missing, or its policy fails.
    """
    fill = [round(255 * mean) for mean in data.mean]
    bilinear = {"interpolation": v2.InterpolationMode.BILINEAR}
    policies: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        "randaugment": lambda: v2.RandAugment(**bilinear),
        "trivialaugment": lambda: v2.TrivialAugmentWide(**bilinear),
        "autoaugment": lambda: v2.AutoAugment(**bilinear),
        "augmix": v2.AugMix,
    }
    is_timms = cfg.policy not in POLICIES
    steps = [policies[cfg.policy]()] if cfg.policy in policies else []
    if is_timms:
        steps.append(_timm_policy(cfg.policy, fill, data.interpolation))
    if cfg.erase > 0:
        steps.append(v2.RandomErasing(cfg.erase, value=list(map(float, fill))))
    if not steps:
        return None

    def augment(image: Tensor, seed: int) -> Tensor:
        # timm draws from the generators of Python and numpy.
        with seeded_everywhere(seed, 0, 0) if is_timms else seeded(seed):
            for step in steps:
                image = step(image)
        return image

    return augment


def _timm_policy(name: str, fill: list[int], interpolation: str) -> Callable[[Tensor], Tensor]:
    """Returns timm's policy of this name, with the arguments of `timm.data.create_transform`."""
    timm = optional_module("timm.data.auto_augment", f"augment.policy={name}")
    makers = {"rand": timm.rand_augment_transform, "augm": timm.augment_and_mix_transform}
    make = makers.get(name[:4], timm.auto_augment_transform)
    settings = {"img_mean": tuple(fill), "interpolation": Image.Resampling[interpolation.upper()]}

    def posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
        # timm asks for 0 bits at full strength: black until Pillow 12, then an error
        return timm.posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)

    for operation in ("Posterize", "PosterizeIncreasing", "PosterizeOriginal"):
        timm.NAME_TO_OP[operation] = posterize

    @cache
    def transform(image_size: int) -> Any:
        return make(name, {"translate_const": int(image_size * 0.45), **settings})

    def augment(image: Tensor) -> Tensor:
        augmented = transform(image.shape[-1])(v2.functional.to_pil_image(image))
        return v2.functional.pil_to_tensor(augmented)

    try:
        for seed in range(100):  # 0.03 s
            with seeded_everywhere(seed, 0, 0):
                augment(torch.full((3, 32, 32), 128, dtype=torch.uint8))
    except Exception as error:
        what = f"augment.policy={name}: timm cannot read it, or fails on some images"
        raise ConfigError(f"{what} ({error}): choose another") from error
    return augment


def label_mix(cfg: AugmentConfig, num_classes: int, seed: int, dist: Dist) -> MixLabels | None:
    """Returns a function that mixes normalised images on the device by MixUp or CutMix; of both,
    one at random per batch. None: neither is set.
    """
    kinds = ((v2.MixUp, cfg.mixup), (v2.CutMix, cfg.cutmix))
    mixes = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha > 0]
    if not mixes:
        return None
    random_numbers = RandomNumbers()

    def mix(images: Tensor, targets: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
        generator = random_numbers.of(seed, epoch, batch * dist.world_size + dist.rank, BATCHES)
        chosen = mixes[int(generator.integers(len(mixes)))]
        with seeded(int(generator.integers(2**63))):
            mixed, soft = chosen(images, targets)
        if mixed.stride() != images.stride():  # torchvision's roll may lose the layout
            mixed = torch.empty_like(images).copy_(mixed)
        return mixed, soft

    return mix
