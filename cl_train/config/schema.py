"""The settings of a run: names, types, defaults, ranges and meaning.

To add a setting, add a line here, read it in `training/` and pass the plain value on.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

from cl_train.errors import ConfigError as ConfigError

_CLASSES = "train/<class>/* and val/<class>/* (no data? data=sample)"
_SHARDS = "*-train-*.tar and *-val-*.tar, or a shell pattern of tar files"


class DataSet(NamedTuple):
    """`root`: what data.root must hold; None = it may be left out. Its reader: `data/build.py`."""

    root: str | None = None
    has_class_folders: bool = True


DATA_SETS = {
    "sample": DataSet(),
    "imagenet": DataSet(_CLASSES),
    "folder": DataSet(_CLASSES),
    "shards": DataSet(_SHARDS, has_class_folders=False),
    "dataset": DataSet(has_class_folders=False),
    "imagenette": DataSet(),
    "synthetic": DataSet(has_class_folders=False),  # no images
}
IMAGE_FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".bmp": "BMP"}
IMAGE_FORMATS |= dict.fromkeys((".tif", ".tiff"), "TIFF")  # Pillow's names
_OPERATIONS = ("randaugment", "trivialaugment", "autoaugment", "augmix", "three_augment")
POLICIES = ("none", *_OPERATIONS, "timm")
PRECISIONS = ("auto", "fp32", "tf32", "fp16", "bf16", "fp16_o2")
# torch's optimizers, with the settings that not all of them read. A fused kernel skips an update on
# the device.
FUSED_OPTIMIZERS = {"sgd": ("momentum", "nesterov"), "adamw": ("beta1", "beta2", "eps")}
OPTIMIZERS = FUSED_OPTIMIZERS | {"rmsprop": ("alpha", "eps", "momentum")}
LOSSES = ("cross_entropy", "bce")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CONVERSIONS = ("full", "conv", "select")
LAYOUT_NAMES = {"true": "channels_last", "false": "contiguous"}  # of the values of channels_last=


class _Devices(tuple[str, ...]):
    """The values of `device=`, of which cuda:N stands for cuda:0, cuda:1, ..."""

    def __contains__(self, name: object) -> bool:
        return re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", str(name)) is not None


DEVICES = _Devices(("auto", "cpu", "cuda", "cuda:N"))
BOOL_OR_AUTO = ("true", "false", "auto")
MODEL_HELP = "a torchvision model, timm/<name>, or your own package.module:function"
PRECISION_HELP = (
    "precision of the step; auto = fp16 on CUDA from capability 7.0, bf16 on a CPU that has it, "
    "else fp32"
)
OVERWRITE_HELP = "replace an existing file, or write into a folder that holds other files, of `out`"
# Users write schedule=step, which loads its defaults too. optim.name is in addition a setting if
# optim=timm.
CHOSEN_BY_GROUP = ("data.name", "optim.library", "schedule.name")
SAMPLE_TRAIN_IMAGES = 1100  # of data=sample
AUTO_REPEATS = 0  # repeats=auto
AUTO_BATCH_SIZE = 0  # batch_size=auto, until `resolve_batch_size` has found the number
_AUTO = {"auto": AUTO_BATCH_SIZE}
# They take package.module:function, which is imported and called.
SETTINGS_OF_CODE = ("model", "loss", "metrics", "log_to", "data.dataset")
HERE = "here"  # environment=here: that of the sweep itself


class Limits(TypedDict, total=False):
    """What `setting` takes besides the default and the help text; what is left out is None."""

    minimum: float  # inclusive
    above: float  # exclusive
    maximum: float  # inclusive
    choices: Collection[str]  # the allowed values of a setting of type str
    words: Mapping[str, int]  # names for numbers outside the range, such as batch_size=auto
    # "speed": runs with different values are not comparable; "loss": only their losses are not;
    # "nothing": both are.
    affects: Literal["speed", "loss", "nothing"]
    required: bool  # the user must give a value; the default is not used
    key: str  # that users write, if it is not the field's name: `data.root` for a field `root`


def setting(default: Any, help: str, **limits: Unpack[Limits]) -> Any:
    """A dataclass field with its help text and its range."""
    metadata = dict.fromkeys(Limits.__annotations__) | {"affects": "speed", "help": help} | limits
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


loss_setting = partial(setting, affects="loss")  # changes the losses of a run, not its speed
neutral_setting = partial(setting, affects="nothing")  # changes neither


@dataclass(frozen=True)
class DataConfig:
    """Where images come from and how they are loaded."""

    name: str = setting("sample", "the data set", choices=DATA_SETS)
    root: str | None = setting(
        None, "folder of train/<class>/* and val/<class>/*, or what the data set expects"
    )
    shuffle: str = setting(
        "full", "permute all images, or shard after shard", choices=("full", "shards")
    )
    dataset: str | None = setting(
        None, "data=dataset: package.module:function, called with (split, size)"
    )
    val_split: str | None = setting(
        None, "folder of the validation images; null = val, valid, validation or test"
    )
    val_fraction: float | None = setting(
        None, "share of the training images used for validation", above=0, maximum=0.9
    )
    extensions: list[str] = setting(
        [".jpg", ".jpeg", ".png"], "image file extensions; also: .webp, .bmp, .tif, .tiff"
    )
    image_size: int = setting(
        224, "training crop, pixels; sample sets 48, imagenette 128", minimum=8, maximum=4096
    )
    size_schedule: list[list[int]] = setting(
        [], "growing images: [[epoch,size],...]; linear in between, rounded to 32"
    )
    val_size: int | None = setting(
        None, "side of the validation crop; null = image_size", minimum=8, maximum=4096
    )
    val_resize: int | None = setting(
        None,
        "validation: short side before the crop; null = val_size * 8/7",
        minimum=8,
        maximum=8192,
    )
    interpolation: str = setting(
        "bilinear", "of the resize in training, antialiased", choices=("bilinear", "bicubic")
    )
    val_interpolation: str = loss_setting(
        "bilinear", "of the validation's resize", choices=("bilinear", "bicubic")
    )
    workers: int | None = setting(
        None, "loader workers; null = cores / ranks, at most 32", minimum=0, maximum=256
    )
    decoder: str = setting(
        "simplejpeg", "decoder of ordinary JPEGs", choices=("simplejpeg", "pillow")
    )
    prefetch: int = setting(
        3, "batches prepared in advance by all workers together", minimum=1, maximum=64
    )
    worker_timeout_s: float = setting(
        60.0, "stop if no worker finishes an image for this many seconds", above=0
    )
    on_bad_image: str = neutral_setting(
        "error", "when an image cannot be decoded", choices=("error", "skip")
    )
    max_bad_images: int = neutral_setting(
        100, "on_bad_image=skip: stop after more than this many", minimum=0
    )
    mean: list[float] = setting(
        [0.485, 0.456, 0.406], "subtracted from each channel, on the 0-1 scale"
    )
    std: list[float] = setting(
        [0.229, 0.224, 0.225], "each channel is divided by it, on the 0-1 scale"
    )
    download: bool = setting(False, "data=imagenette: fetch the archive when it is missing")
    synthetic_images: int = setting(1280, "data=synthetic: images per epoch", minimum=1)
    synthetic_classes: int = setting(
        1000, "data=synthetic: number of classes", minimum=2, maximum=10**6
    )


@dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of the training images.

    Defaults: large random crops, no flips (augment=imagenet has ImageNet's).
    """

    crop_scale_min: float = setting(
        0.35, "smallest area of the crop / area of the image", above=0, maximum=1
    )
    crop_scale_max: float = setting(
        1.0, "largest area of the crop / area of the image", above=0, maximum=1
    )
    crop_ratio_min: float = setting(3 / 4, "smallest width / height of the crop", above=0)
    crop_ratio_max: float = setting(4 / 3, "largest width / height of the crop", above=0)
    flip: float = setting(0.0, "probability of a horizontal flip", minimum=0, maximum=1)
    policy: str = setting("none", "operations on each image", choices=POLICIES)
    timm_policy: str = setting(
        "rand-m7-mstd0.5-inc1", "policy=timm: timm's name of an automatic policy (--aa)"
    )
    randaugment_ops: int = setting(2, "RandAugment: operations per image", minimum=1, maximum=14)
    randaugment_magnitude: int = setting(9, "RandAugment: strength, 0 to 30", minimum=0, maximum=30)
    erase: float = setting(0.0, "probability of random erasing", minimum=0, maximum=1)
    mixup: float = setting(0.0, "alpha of MixUp; 0 = off", minimum=0)
    cutmix: float = setting(0.0, "alpha of CutMix; 0 = off", minimum=0)
    repeats: int = setting(
        1, "repeated augmentation: copies of an image per batch; same epoch length", minimum=1
    )


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer: torch's, or one of timm's with optim=timm optim.name=lamb."""

    library: str = setting("torch", "library of the optimizer", choices=("torch", "timm"))
    name: str = setting(
        "sgd", "optim=timm: the name of the optimizer, such as lamb, lion, muon, nadamw, rmsproptf"
    )
    lr: float = loss_setting(
        0.1, "learning rate for a global batch of `reference_batch_size`", above=0
    )
    reference_batch_size: int = loss_setting(
        256, "lr is scaled by global batch size / this; 0 = not scaled", minimum=0
    )
    momentum: float = loss_setting(
        0.9, "SGD, RMSprop and timm's optimizers with momentum", minimum=0, maximum=1
    )
    nesterov: bool = setting(False, "SGD: use Nesterov momentum")
    weight_decay: float = loss_setting(1e-4, "weight decay", minimum=0)
    decay_norm_and_bias: bool = setting(
        True, "false: no weight decay on vectors: normalisation layers, biases, ..."
    )
    beta1: float | None = loss_setting(
        None, "decay of the first moment; null = default", minimum=0, maximum=0.999999
    )
    beta2: float | None = loss_setting(
        None, "decay of the second moment; null = default", minimum=0, maximum=0.999999
    )
    alpha: float = loss_setting(0.9, "RMSprop: smoothing constant", minimum=0, maximum=1)
    eps: float | None = loss_setting(
        None, "added to the denominator; null = the optimizer's default", above=0
    )
    layer_decay: float = loss_setting(
        1.0, "fine-tuning: lr of a layer / lr of the layer after it", above=0, maximum=1
    )
    head_lr_ratio: float = loss_setting(
        1.0, "fine-tuning: learning rate of the classifier / lr", above=0
    )
    clip_norm: float | None = setting(
        None, "clip gradients to this norm, after unscaling; null = off", above=0
    )


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run: a linear warm-up, then the curve `name`."""

    name: str = loss_setting(
        "cosine", "curve after the warm-up", choices=("cosine", "step", "linear", "constant")
    )
    warmup_epochs: float = loss_setting(
        0.0, "length of the linear warm-up in epochs (fractions allowed)", minimum=0
    )
    warmup_start: float = loss_setting(
        0.01, "learning rate at the start of the warm-up / lr", minimum=0, maximum=1
    )
    warmup_prefix: bool = loss_setting(
        True, "cosine, linear: begin after the warm-up; false = at step 0, as in timm"
    )
    per_epoch: bool = loss_setting(
        False, "change the learning rate between epochs only, as torchvision and timm do"
    )
    step_epochs: float = loss_setting(
        30.0, "schedule=step: multiply by gamma every this many epochs", above=0
    )
    milestones: list[float] = loss_setting(
        [], "schedule=step: the epochs to multiply at, instead of every step_epochs", above=0
    )
    gamma: float = loss_setting(0.1, "schedule=step: the factor", above=0, maximum=1)
    final_lr_ratio: float = loss_setting(
        0.0, "cosine and linear: final learning rate / lr", minimum=0, maximum=1
    )


@dataclass(frozen=True)
class AmpConfig:
    """Dynamic loss scaling (fp16 and fp16_o2 only)."""

    init_scale: float = loss_setting(65536.0, "initial loss scale", above=0, maximum=2.0**64)
    growth_interval: int = loss_setting(
        2000, "steps without overflow before the scale doubles", minimum=1, maximum=10**9
    )
    min_scale: float = loss_setting(
        1.0, "stop the run when the loss scale falls below this", above=0
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, and when.

    A checkpoint is always saved at the end, and on SIGTERM, SIGINT, SIGHUP and SIGUSR1.
    """

    every_epochs: int = setting(1, "save every this many epochs; 0 = only at the end", minimum=0)
    every_steps: int = setting(0, "save every this many optimizer steps; 0 = off", minimum=0)
    every_minutes: float = setting(0.0, "save every this many minutes; 0 = off", minimum=0)
    keep: int = neutral_setting(
        2, "number of newest checkpoints to keep, besides the best", minimum=1
    )
    save_best: bool = setting(True, "keep the checkpoint with the best top-1")
    background: bool = setting(True, "write to disk in another thread")


@dataclass(frozen=True)
class LauncherConfig:
    """Multirun: where the jobs of a sweep run."""

    gpus: list[str] = neutral_setting(
        [], "run one job per GPU at a time; all, or some: 0,1,2; [] = one job at a time"
    )


@dataclass(frozen=True)
class Config:
    """One run. The settings that most people change come first."""

    channels_last: str = setting(
        "false", "memory format of the model and its input", choices=BOOL_OR_AUTO
    )
    precision: str = setting("auto", PRECISION_HELP, choices=PRECISIONS)
    model: str = setting("resnet18", MODEL_HELP)
    weights: str | None = loss_setting(
        None, "pretrained weights by name (DEFAULT, IMAGENET1K_V2, ...) or a file"
    )
    entry: str | None = loss_setting(
        None, "which entry of weights=FILE holds the weights: average = the EMA of a run"
    )
    batch_size: int = setting(
        32, "images per device and micro-step; auto = the fastest", minimum=1, words=_AUTO
    )
    epochs: int = loss_setting(5, "passes over the training images", minimum=1, maximum=10**6)
    max_steps: int | None = loss_setting(None, "stop after this many optimizer steps", minimum=1)
    seed: int = loss_setting(
        0, "seed of weights, image order, augmentation, dropout", minimum=0, maximum=2**32 - 1
    )
    device: str = setting("auto", "cuda if available, else cpu", choices=DEVICES)
    compile: bool = setting(False, "compile the model with torch.compile")

    compile_mode: str = setting("default", "mode of torch.compile", choices=COMPILE_MODES)
    cuda_graph: str = setting(
        "false", "one CUDA graph per step; auto = where it is possible", choices=BOOL_OR_AUTO
    )
    conversion: str = setting(
        "full", "what channels_last converts: all, convolutions, or `select`", choices=CONVERSIONS
    )
    select: list[str] = setting([], "conversion=select: names of modules (shell patterns)")
    accumulate_steps: int = setting(1, "micro-steps per optimizer step", minimum=1)
    global_batch_size: int | None = setting(
        None, "images of a step of all processes; sets accumulate_steps", minimum=1
    )
    freeze: list[str] = setting(
        [], "parts that are not trained, such as layer1*; backbone = all but the classifier"
    )
    loss: str = loss_setting(
        "cross_entropy", "cross_entropy, bce or your package.module:function(logits, targets)"
    )
    bce_threshold: float | None = loss_setting(
        None, "loss=bce: targets above it are 1, others 0", minimum=0, maximum=1
    )
    label_smoothing: float = setting(0.0, "label smoothing of the loss", minimum=0, maximum=0.999)
    drop_path: float | None = setting(
        None, "stochastic depth; null = the model's default", minimum=0, maximum=0.999
    )
    drop_path_constant: bool = setting(
        False, "drop_path in every block; false = rising from 0 to it with the depth"
    )
    layer_scale: float | None = loss_setting(
        None, "initial value of layer scale; null = the model's default", above=0, maximum=1
    )
    ema_decay: float = setting(
        0.0, "decay of the moving average of the weights; 0 = off", minimum=0, maximum=1
    )
    ema_every: int = setting(1, "optimizer steps between updates of the EMA", minimum=1)
    sync_batchnorm: bool = setting(False, "compute BatchNorm statistics over all ranks")
    ddp_static_graph: bool = setting(
        False, "tell DDP that every step uses the same parameters in the same order"
    )
    deterministic: bool = setting(False, "use deterministic algorithms only; slower on a GPU")
    evaluate_every: int = neutral_setting(
        1, "epochs between evaluations; 0 = only at the end, -1 = never", minimum=-1
    )
    evaluate_flip: bool = loss_setting(
        False, "evaluation averages the logits of each image and of its mirror image"
    )
    metrics: str | None = neutral_setting(
        None, "package.module:function(logits, targets) whose numbers are recorded"
    )
    best_by: str | None = loss_setting(
        None,
        "what best.pt and patience follow: top1, loss (the lowest), a number of `metrics`, or that "
        "of the EMA, such as average.top1; null = top1, of several labels mean_average_precision",
    )
    patience: int | None = loss_setting(
        None, "stop after this many evaluations in a row without a gain", minimum=1
    )
    evaluate_only: bool = setting(
        False, "evaluate `resume`, with the settings of its run, or `weights`"
    )
    report: bool = neutral_setting(
        False, "evaluation: also per-class accuracy, confusions and the worst images"
    )

    config: str | None = neutral_setting(
        None, "start from the settings of a run folder or a YAML file"
    )
    log_every: int = neutral_setting(
        10, "optimizer steps per window: one console line and one record", minimum=1
    )
    warmup_steps: int = neutral_setting(
        10, "first steps left out of the speed; not schedule.warmup_epochs", minimum=0
    )
    overwrite: bool = neutral_setting(
        False, "delete the records and checkpoints of an earlier run in the run folder"
    )
    resume: str | None = neutral_setting(
        None, "checkpoint or run folder; auto = the newest one in the run folder"
    )
    profile: bool = setting(
        False, "write a torch.profiler trace of a few steps into the run folder"
    )
    log_to: list[str] = neutral_setting(
        ["tensorboard"], "get the records; also wandb, mlflow, package.module:function"
    )
    on_nonfinite: str = neutral_setting(
        "stop", "action for a NaN or Inf loss or gradient", choices=("stop", "skip")
    )
    max_nonfinite: int = neutral_setting(
        10, "on_nonfinite=skip: stop after more than this many", minimum=0
    )
    rank_timeout_s: float = neutral_setting(
        600.0, "end the run if a rank is silent for this many seconds", above=0, maximum=10**7
    )

    nproc: int = neutral_setting(
        1, "multirun: processes per job; above 1 each job runs under torchrun", minimum=1
    )
    environment: str = setting(HERE, "multirun: a Python, or variables A=1, that the jobs run in")
    repeats: int = neutral_setting(
        1,
        "multirun: runs of each setting, interleaved A B B A; auto = until every pair is decided",
        minimum=1,
        words={"auto": AUTO_REPEATS},
    )
    max_repeats: int = neutral_setting(12, "multirun: the most that repeats=auto runs", minimum=2)
    max_reruns: int = neutral_setting(
        2, "multirun: how often a run that other processes disturbed is run again", minimum=0
    )
    wait_for_quiet_s: float | None = neutral_setting(
        None,
        "multirun: before each run, wait so long for other processes to end; null = as long as a "
        "run takes, at most 600",
        minimum=0,
    )
    time_limit_s: float | None = neutral_setting(
        None, "multirun: add no repeat and no rerun that would end later than this", above=0
    )
    resume_sweep: str | None = neutral_setting(
        None, "multirun: run what is missing in this folder of a sweep; repeats=N adds repeats"
    )
    rerun: str = neutral_setting(
        "missing",
        "with resume_sweep: noisy = also what other processes disturbed",
        choices=("missing", "noisy"),
    )
    compare_by: str = neutral_setting(
        "channels_last", "multirun: the setting whose values the report compares"
    )

    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    amp: AmpConfig = field(default_factory=AmpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)


# Of a benchmark; the last one converts convolutions only.
LAYOUTS = ["contiguous", "channels_last", "channels_last_conv"]


@dataclass
class BenchmarkSettings:
    """What to measure: every combination of the lists, which are written a,b,c."""

    model: list[str] = setting(["resnet50"], MODEL_HELP)
    mode: list[str] = setting(
        ["train"], "train (forward, backward, optimizer) or infer", choices=("train", "infer")
    )
    precision: list[str] = setting(["auto"], PRECISION_HELP, choices=PRECISIONS)
    batch_size: list[int] = setting([32], "images per step", minimum=1)
    compile: list[bool] = setting([False], "compile the model with torch.compile")
    cuda_graph: list[bool] = setting([False], "replay the step as a CUDA graph")
    image_size: int | None = setting(
        None, "pixels; null = 224, inception_v3: 299, video: 112", minimum=8, key="data.image_size"
    )
    frames: int = setting(0, "above 0: video [N,C,D,H,W] with that many frames", minimum=0)
    layouts: list[str] = setting(
        LAYOUTS[:2], "the baseline first; channels_last_conv: convolutions", choices=LAYOUTS
    )
    optimizer: str = setting("sgd", "optimizer of the training step", choices=OPTIMIZERS)
    device: str = setting("auto", "cuda if available, else cpu", choices=DEVICES)
    target_ci: float = setting(
        0.02, "stop when the 95 % interval of the ratio is at most this wide", above=0
    )
    time_limit_s: float | None = setting(
        None,
        "seconds for all combinations, undecided ones last; null = 60 each, without warm-up",
        minimum=0,
    )
    parity: bool = setting(True, "first check that the layouts compute the same")
    against: list[str] = setting(
        [], "a Python, or variables A=1,B=2: compare each layout here with that environment"
    )
    time: bool = setting(False, "with against=: name the operators whose time differs most")
    out: str | None = setting(None, "file for the result as JSON")
    overwrite: bool = setting(False, OVERWRITE_HELP)
    json: bool = setting(False, "print the result as JSON")


@dataclass
class LoaderBenchmarkSettings:
    """The data, and the loaders to compare."""

    root: str | None = setting(
        None, "folder of train/<class>/* and val/<class>/*; null = the sample", key="data.root"
    )
    image_size: int = setting(224, "side of the crops, pixels", minimum=8, key="data.image_size")
    workers: list[int] = setting(
        [], "numbers to try; empty = 1, 2, 4, ... cores", minimum=1, key="data.workers"
    )
    batch_size: int = setting(64, "images per batch", minimum=1)
    images: int = setting(
        2048, "images per pipeline and round, at most one epoch (fairest: all of it)", minimum=1
    )
    rounds: int = setting(3, "interleaved rounds A B B A, after one warm-up", minimum=1)
    gpu_images_per_s: float = setting(
        5400.0, "training speed, images/s, for which cores are computed", above=0
    )
    out: str | None = setting(None, "file for the result as JSON")
    overwrite: bool = setting(False, OVERWRITE_HELP)
    json: bool = setting(False, "print the result as JSON")


@dataclass
class ZooSettings:
    """Which models, and how they are measured."""

    model: list[str] = setting(
        ["tutorial"], "tutorial, torchvision, timm, video, or names and shell patterns"
    )
    device: str = setting("auto", "cuda if available, else cpu", choices=DEVICES)
    precision: str = setting("auto", PRECISION_HELP, choices=PRECISIONS)
    batch_size: int = setting(32, "images per step of the timing", minimum=1)
    image_size: int | None = setting(
        None, "pixels; null = 224, speed=false: 64, video: 112", minimum=8, key="data.image_size"
    )
    frames: int = setting(0, "above 0: video [N,C,D,H,W] with that many frames", minimum=0)
    speed: bool = setting(True, "time both layouts")
    time_limit_s: float = setting(20.0, "seconds for each timing", above=0)
    model_time_limit_s: float = setting(900.0, "timeout per model, seconds", above=0)
    out: str = setting("results", "folder for the tables")
