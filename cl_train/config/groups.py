"""The groups of settings: `data.*`, `augment.*`, `optim.*` and so on."""

from dataclasses import dataclass

from cl_train.config.fields import Range, loss_setting, multirun_setting, neutral_setting, setting

_CLASSES = "train/<class>/* and val/<class>/* (no data? data=sample)"
# What data.root must hold; None: it may be left out
DATA_SETS = {
    "sample": None,
    "imagenet": _CLASSES,
    "folder": _CLASSES,
    "shards": "*-train-*.tar and *-val-*.tar, or a shell pattern of tar files",
    "csv": "the images that data.csv=FILE names",
    "dataset": None,
    "imagenette": "train/ and val/, as in github.com/fastai/imagenette",
    "synthetic": None,
}
OF_FILES = ("sample", "imagenet", "folder", "imagenette", "csv")
POLICIES = ("none", "randaugment", "trivialaugment", "autoaugment", "augmix")
TIMM_POLICIES = r"(rand|augmix)-|(v0|original)r?(-|$)|3a(-|$)"  # how their names begin


@dataclass(frozen=True)
class DataConfig:
    """Where images come from and how they are loaded."""

    name: str = setting("sample", "the data set", choices=DATA_SETS)
    root: str | None = setting(
        None, "folder of train/<class>/* and val/<class>/*, or what the data set expects"
    )
    csv: str | None = setting(
        None, "data=csv: file with the columns path, label, perhaps split; null = root/labels.csv"
    )
    val_csv: str | None = setting(None, "data=csv: the same, of the validation images")
    dataset: str | None = setting(
        None, "data=dataset: package.module:function, called with (split, size)"
    )
    val_split: str | None = setting(
        None, "folder, or split of a csv file, of the validation images; null = val, valid, ..."
    )
    val_fraction: float | None = setting(
        None, "share of the training images used for validation", Range(above=0, most=0.9)
    )
    extensions: list[str] = setting(
        [".jpg", ".jpeg", ".png"], "image file extensions; also: .jfif, .webp, .bmp, .tif, .tiff"
    )
    image_size: int = setting(
        224, "training crop, pixels; sample sets 48, imagenette 128", Range(8, 4096)
    )
    size_schedule: list[list[int]] = setting(
        [], "growing images: [[epoch,size],...]; linear in between, rounded to 32"
    )
    val_size: int | None = setting(
        None, "side of the validation crop; null = image_size", Range(8, 4096)
    )
    val_resize: int | None = setting(
        None, "validation: short side before the crop; null = val_size * 8/7", Range(8, 8192)
    )
    interpolation: str = setting(
        "bilinear", "of the resize in training, antialiased", choices=("bilinear", "bicubic")
    )
    val_interpolation: str = loss_setting(
        "bilinear", "of the validation's resize", choices=("bilinear", "bicubic")
    )
    workers: int | None = setting(
        None, "loader workers; null = cores / ranks, at most 32", Range(0, 256)
    )
    decoder: str = setting(
        "simplejpeg", "decoder of ordinary JPEGs", choices=("simplejpeg", "pillow")
    )
    exif: str = setting(
        "apply",
        "orientation in EXIF; imagenet, imagenette, shards ignore it, as published accuracies do",
        choices=("apply", "ignore"),
    )
    decode_scale: str = setting(
        "auto",
        "auto = decode JPEGs at 1/2 to 1/8 if that is twice the size needed; imagenet sets whole",
        choices=("auto", "whole"),
    )
    prefetch: int = setting(3, "batches prepared in advance by all workers together", Range(1, 64))
    worker_timeout_s: float = setting(
        60.0, "stop if no worker finishes an image for this many seconds", Range(above=0)
    )
    on_bad_image: str = neutral_setting(
        "error", "when an image cannot be decoded", choices=("error", "skip")
    )
    max_bad_images: str = neutral_setting(
        "100", "on_bad_image=skip: stop after more than this many, or this share, such as 10%"
    )
    mean: list[float] = setting(
        [0.485, 0.456, 0.406], "subtracted from each channel, on the 0-1 scale"
    )
    std: list[float] = setting(
        [0.229, 0.224, 0.225], "each channel is divided by it, on the 0-1 scale"
    )
    synthetic_images: int = setting(1280, "data=synthetic: images per epoch", Range(1))
    synthetic_classes: int = setting(1000, "data=synthetic: number of classes", Range(2, 1000000))

    @property
    def eval_size(self) -> int:  # of validation images, pixels
        return self.val_size or self.image_size


@dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of the training images; augment=imagenet has ImageNet's."""

    crop_scale_min: float = setting(
        0.35, "smallest area of the crop / of the image; 1 = the whole", Range(above=0, most=1)
    )
    flip: float = setting(0.0, "probability of a horizontal flip", Range(0, 1))
    policy: str = setting(
        "none", f"operations on each image: {', '.join(POLICIES)}, or timm's name of some (--aa)"
    )
    erase: float = setting(0.0, "probability of random erasing", Range(0, 1))
    mixup: float = setting(0.0, "alpha of MixUp; 0 = off", Range(0))
    cutmix: float = setting(0.0, "alpha of CutMix; 0 = off", Range(0))
    repeats: int = setting(
        1, "repeated augmentation: copies of an image per batch; same epoch length", Range(1)
    )


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer: torch's, or one of timm's with optim=timm optim.name=lamb."""

    library: str = setting("torch", "library of the optimizer", choices=("torch", "timm"))
    name: str = setting(
        "sgd", "optim=timm: the name of the optimizer, such as lamb, lion, muon, nadamw, rmsproptf"
    )
    lr: float = loss_setting(
        0.1,
        "learning rate for a global batch of `reference_batch_size`; optim=adamw: 0.00025, "
        "rmsprop: 0.016, timm: 0.005, not scaled",
        Range(above=0),
    )
    reference_batch_size: int = loss_setting(
        256, "lr is scaled by global batch size / this; 0 = not scaled", Range(0)
    )
    momentum: float = loss_setting(
        0.9, "SGD, RMSprop and timm's optimizers with momentum", Range(0, 1)
    )
    nesterov: bool = setting(False, "SGD: use Nesterov momentum")
    weight_decay: float = loss_setting(1e-4, "weight decay", Range(0))
    decay_norm_and_bias: bool = setting(
        True, "false: no weight decay on vectors: normalisation layers, biases, ..."
    )
    beta1: float | None = loss_setting(
        None, "decay of the first moment; null = default", Range(0, 0.999999)
    )
    beta2: float | None = loss_setting(
        None, "decay of the second moment; null = default", Range(0, 0.999999)
    )
    eps: float | None = loss_setting(
        None, "added to the denominator; null = the optimizer's default", Range(above=0)
    )
    layer_decay: float = loss_setting(
        1.0, "fine-tuning: lr of a layer / lr of the layer after it", Range(above=0, most=1)
    )
    clip_norm: float | None = setting(
        None, "clip gradients to this norm, after unscaling; null = off", Range(above=0)
    )


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run: a linear warm-up, then the curve `name`."""

    name: str = loss_setting(
        "cosine", "curve after the warm-up", choices=("cosine", "step", "linear", "constant")
    )
    warmup_epochs: float = loss_setting(
        0.0, "length of the linear warm-up in epochs (fractions allowed)", Range(0)
    )
    warmup_start: float = loss_setting(
        0.01, "learning rate at the start of the warm-up / lr", Range(0, 1)
    )
    warmup_prefix: bool = loss_setting(
        True, "cosine, linear: begin after the warm-up; false = at step 0, as in timm"
    )
    per_epoch: bool = loss_setting(
        False, "change the learning rate between epochs only, as torchvision and timm do"
    )
    step_epochs: float = loss_setting(
        30.0, "schedule=step: multiply by gamma every this many epochs", Range(above=0)
    )
    milestones: list[float] = loss_setting(
        [], "schedule=step: the epochs to multiply at, instead of every step_epochs", Range(above=0)
    )
    gamma: float = loss_setting(0.1, "schedule=step: the factor", Range(above=0, most=1))
    final_lr_ratio: float = loss_setting(
        0.0, "cosine and linear: final learning rate / lr", Range(0, 1)
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, and when besides the end, SIGTERM, SIGINT, SIGHUP and SIGUSR1."""

    every_epochs: int = setting(1, "save every this many epochs; 0 = only at the end", Range(0))
    every_steps: int = setting(0, "save every this many optimizer steps; 0 = off", Range(0))
    keep: int = neutral_setting(
        2, "number of newest checkpoints to keep, besides the best", Range(1)
    )


@dataclass(frozen=True)
class LauncherConfig:
    """Where the jobs of a sweep run."""

    gpus: list[str] = multirun_setting(
        [], "run one job per GPU at a time; all, or some: 0,1,2; [] = one job at a time"
    )
