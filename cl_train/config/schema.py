"""The settings of a run: names, types, defaults, ranges and meaning.

To add a setting, add a line here, read it in `training/` and pass the plain value on.
"""

import re
from dataclasses import dataclass

from cl_train.config.fields import (
    Range,
    loss_setting,
    multirun_setting,
    neutral_setting,
    setting,
    setting_fields,
)
from cl_train.config.groups import (
    AugmentConfig,
    CheckpointConfig,
    DataConfig,
    LauncherConfig,
    OptimConfig,
    ScheduleConfig,
)

IMAGE_FORMATS = dict.fromkeys((".jpg", ".jpeg", ".jfif"), "JPEG") | {".png": "PNG"}
IMAGE_FORMATS |= {".webp": "WEBP", ".bmp": "BMP"}
IMAGE_FORMATS |= dict.fromkeys((".tif", ".tiff"), "TIFF")  # Pillow's names
PRECISIONS = ("auto", "fp32", "tf32", "fp16", "bf16", "fp16_o2")
# torch's optimizers, with the settings that not all of them read. A fused kernel skips an update on
# the device.
FUSED_OPTIMIZERS = {"sgd": ("momentum", "nesterov"), "adamw": ("beta1", "beta2", "eps")}
OPTIMIZERS = FUSED_OPTIMIZERS | {"rmsprop": ("eps", "momentum")}
LOSSES = ("cross_entropy", "bce")
CONVERSIONS = ("full", "conv", "select")
LAYOUT_NAMES = {"true": "channels_last", "false": "contiguous"}  # by the value of channels_last=


class _Devices(tuple[str, ...]):
    """The values of `device=`, of which cuda:N stands for cuda:0, cuda:1, ..."""

    def __contains__(self, name: object) -> bool:
        return re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", str(name)) is not None


DEVICES = _Devices(("auto", "cpu", "cuda", "cuda:N"))
BOOL_OR_AUTO = ("true", "false", "auto")
MODEL_HELP = "a torchvision model, timm/<name>, or your own package.module:function"
PRECISION_HELP = (
    "precision of the step; auto = fp16 on CUDA from capability 7.0, bf16 on a CPU where it "
    "is faster, else fp32"
)
OVERWRITE_HELP = "replace an existing file, or write into a folder that holds other files, of `out`"
# Users write schedule=step, which also loads the defaults of that choice. With optim=timm,
# optim.name is a setting too.
CHOSEN_BY_GROUP = ("data.name", "optim.library", "schedule.name")
# These settings take package.module:function, which is imported and called.
SETTINGS_OF_CODE = ("model", "loss", "metrics", "log_to", "data.dataset")
HERE = "here"  # environment=here: that of the sweep itself


@dataclass(frozen=True)
class Config:
    """One run. The settings that most people change come first."""

    channels_last: str = setting(
        "false", "memory format of the model and its input", choices=BOOL_OR_AUTO
    )
    precision: str = setting("auto", PRECISION_HELP, choices=PRECISIONS)
    model: str = setting("resnet18", MODEL_HELP)
    weights: str | None = loss_setting(
        None, "pretrained weights: a name (DEFAULT, IMAGENET1K_V2, ...) or a file"
    )
    entry: str | None = loss_setting(
        None, "the entry of weights=FILE with the weights: average = the EMA of a run"
    )
    batch_size: int = setting(32, "images per device and micro-step", Range(1))
    epochs: int = loss_setting(5, "passes over the training images", Range(1, 1000000))
    max_steps: int | None = loss_setting(None, "stop after this many optimizer steps", Range(1))
    seed: int = loss_setting(
        0, "seed of weights, image order, augmentation, dropout", Range(0, 4294967295)
    )
    device: str = setting("auto", "cuda if available, else cpu", choices=DEVICES)
    compile: bool = setting(False, "compile the model with torch.compile")

    cuda_graph: str = setting(
        "false", "one CUDA graph per step; auto = where it is possible", choices=BOOL_OR_AUTO
    )
    conversion: str = setting(
        "full", "what channels_last converts: all, convolutions, or `select`", choices=CONVERSIONS
    )
    select: list[str] = setting([], "conversion=select: names of modules (shell patterns)")
    parity: str = neutral_setting(
        "auto",
        "before channels_last trains, compare what both layouts compute; auto = once per model and "
        "machine, false = train unchecked",
        choices=BOOL_OR_AUTO,
    )
    accumulate_steps: int = setting(1, "micro-steps per optimizer step", Range(1))
    global_batch_size: int | None = setting(
        None, "images of a step of all processes; sets accumulate_steps", Range(1)
    )
    freeze: list[str] = setting(
        [], "parts that are not trained, such as layer1*; backbone = all but the classifier"
    )
    loss: str = loss_setting(
        "cross_entropy", "cross_entropy, bce or your package.module:function(logits, targets)"
    )
    class_weight: str | None = loss_setting(
        None,
        "balanced = an image counts images / (classes x images of its class)",
        choices=("balanced",),
    )
    bce_threshold: float | None = loss_setting(
        None, "loss=bce: targets above it are 1, others 0", Range(0, 1)
    )
    label_smoothing: float = setting(0.0, "label smoothing of the loss", Range(0, 0.999))
    drop_path: float | None = setting(
        None, "stochastic depth; null = the model's default", Range(0, 0.999)
    )
    ema_decay: float = setting(
        0.0, "decay of the moving average of the weights; 0 = off", Range(0, 0.999999)
    )
    ema_every: int = setting(1, "optimizer steps between updates of the EMA", Range(1))
    sync_batchnorm: bool = setting(False, "compute BatchNorm statistics over all ranks")
    deterministic: bool = setting(False, "use deterministic algorithms only; slower on a GPU")
    evaluate_every: int = neutral_setting(
        1, "epochs between evaluations; 0 = only at the end, -1 = never", Range(-1)
    )
    evaluate_flip: bool = loss_setting(
        False, "evaluation averages the logits of each image and of its mirror image"
    )
    metrics: str | None = neutral_setting(
        None, "package.module:function(logits, targets) whose numbers are recorded"
    )
    best_by: str | None = loss_setting(
        None,
        "what best.pt and patience follow: top1, balanced_accuracy, loss (the lowest), a number of "
        "`metrics`, or that of the EMA, such as average.top1; null = top1, or balanced_accuracy "
        "with class_weight=balanced",
    )
    patience: int | None = loss_setting(
        None, "stop after this many evaluations in a row without a gain", Range(1)
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
        10, "optimizer steps per window: one console line and one record", Range(1)
    )
    warmup_steps: int = neutral_setting(
        10, "first steps left out of the speed; not schedule.warmup_epochs", Range(0)
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
        ["tensorboard"], "get the records; also wandb, package.module:function"
    )
    on_nonfinite: str = neutral_setting(
        "stop", "at a NaN or Inf loss or gradient; skip = stop after ten", choices=("stop", "skip")
    )

    nproc: int = multirun_setting(
        1, "processes per job; above 1 each job runs under torchrun", Range(1)
    )
    environment: str = multirun_setting(
        HERE, "a Python, or variables A=1, that the jobs run in", affects="speed"
    )
    repeats: int | None = multirun_setting(
        1,
        "runs of each setting, interleaved A B B A; auto = until every pair is decided",
        Range(1),
        null_word="auto",
    )
    max_repeats: int = multirun_setting(12, "the most that repeats=auto runs", Range(2))
    time_limit_s: float | None = multirun_setting(
        None, "add no repeat that would end later than this", Range(above=0)
    )
    resume_sweep: str | None = multirun_setting(
        None, "run what is missing in this folder of a sweep; repeats=N adds repeats"
    )
    compare_by: str = multirun_setting(
        "channels_last", "the setting whose values the report compares"
    )

    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    launcher: LauncherConfig = LauncherConfig()


FIELDS = setting_fields(Config)  # every setting of a run by its full key
MULTIRUN_KEYS = [key for key, item in FIELDS.items() if item.multirun]
GROUPS = ("data", "augment", "optim", "schedule", "experiment")  # of files in conf/


def affects(key: str) -> str:
    """Returns what a setting of a run changes, as in `Setting`; an unknown one may affect the
    speed.
    """
    return FIELDS[key].affects if key in FIELDS else "speed"


# --- other commands; what several of them have is inherited ---------------------------------------


@dataclass
class OnDevice:
    device: str = setting("auto", "cuda if available, else cpu", choices=DEVICES)


@dataclass
class ModelInput(OnDevice):
    image_size: int | None = setting(
        None, "pixels; null = 224, inception_v3: 299, video: 112", Range(8), key="data.image_size"
    )
    frames: int = setting(0, "above 0: video [N,C,D,H,W] with that many frames", Range(0))


@dataclass
class ModelOfRun(ModelInput):
    config: str | None = setting(
        None, "a run folder or YAML file: its model, image size, batch, precision, unless typed"
    )


@dataclass
class JsonResult:
    out: str | None = setting(None, "file for the result as JSON")
    overwrite: bool = setting(False, OVERWRITE_HELP)
    json: bool = setting(False, "print the result as JSON")


# Layouts of a benchmark; the last one converts only convolutions.
LAYOUT_CHOICES = ["contiguous", "channels_last", "channels_last_conv"]


@dataclass
class BenchmarkSettings(ModelOfRun, JsonResult):
    """What to measure: every combination of the lists, which are written a,b,c."""

    model: list[str] = setting(["resnet50"], MODEL_HELP)
    mode: list[str] = setting(
        ["train"], "train (forward, backward, optimizer) or infer", choices=("train", "infer")
    )
    precision: list[str] = setting(["auto"], PRECISION_HELP, choices=PRECISIONS)
    batch_size: list[int] = setting([32], "images per step", Range(1))
    compile: list[bool] = setting([False], "compile the model with torch.compile")
    cuda_graph: list[str] = setting(
        ["auto"], "replay the step as a CUDA graph; auto = on a GPU", choices=BOOL_OR_AUTO
    )
    compare_by: str = setting(
        "layout",
        "what is timed in turns: the layouts, or all of `model` in one layout",
        choices=("layout", "model"),
    )
    channels_last: bool = setting(True, "the layout of compare_by=model")
    layouts: list[str] = setting(
        LAYOUT_CHOICES[:2],
        "the baseline first; channels_last_conv: convolutions",
        choices=LAYOUT_CHOICES,
    )
    optimizer: str = setting("sgd", "optimizer of the training step", choices=OPTIMIZERS)
    target_ci: float = setting(
        0.02, "stop when the 95 % interval of the ratio is at most this wide", Range(above=0)
    )
    time_limit_s: float = setting(60.0, "seconds of each combination, about", Range(0))
    parity: str = setting(
        "auto",
        "first compare what the layouts compute; auto = once per model and machine",
        choices=BOOL_OR_AUTO,
    )


@dataclass
class LoaderBenchmarkSettings(JsonResult):
    """The data, and the loaders to compare."""

    root: str | None = setting(
        None, "folder of train/<class>/* or <class>/*; null = the sample", key="data.root"
    )
    image_size: int = setting(224, "side of the crops, pixels", Range(8), key="data.image_size")
    workers: list[int] = setting(
        [], "numbers to try; empty = 1, 2, 4, ... cores", Range(1), key="data.workers"
    )
    batch_size: int = setting(64, "images per batch", Range(1))
    images: int = setting(
        2048, "images per pipeline and round, at most one epoch (fairest: all of it)", Range(1)
    )
    rounds: int = setting(3, "interleaved rounds A B B A, after one warm-up", Range(1))
    gpu_images_per_s: float = setting(
        5400.0, "training speed, images/s, for which cores are computed", Range(above=0)
    )


@dataclass
class ZooSettings(ModelInput):
    """Which models, and how they are measured."""

    model: list[str] = setting(
        ["tutorial"], "tutorial, torchvision, timm, video, or names and shell patterns"
    )
    precision: str = setting("auto", PRECISION_HELP, choices=PRECISIONS)
    batch_size: int = setting(32, "images per step of the timing", Range(1))
    speed: bool = setting(True, "time both layouts")
    time_limit_s: float = setting(20.0, "seconds for each timing", Range(above=0))
    model_time_limit_s: float = setting(900.0, "timeout per model, seconds", Range(above=0))
    out: str = setting("results", "folder for the tables")
