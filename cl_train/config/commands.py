"""The settings of the commands beside `train`. The same key means the same thing in every command and in train.py."""

from __future__ import annotations

from dataclasses import dataclass

from cl_train.config.schema import CONVERSIONS, DEVICES, MODEL_HELP, PRECISION_HELP, PRECISIONS, setting

OUT_FILE = "file for the result as JSON"
JSON = "print the result as JSON on stdout"
ROOT = "folder that holds train/<class>/* and val/<class>/*"


@dataclass
class AuditSettings:
    """Which operators of a model lose channels_last, where, and what it costs."""

    model: str = setting("resnet18", MODEL_HELP)
    weights: str | None = setting(None, "pretrained weights by name, or a file")
    channels_last: bool = setting(True, "convert the model and its input")
    conversion: str = setting("full", "what is converted", choices=CONVERSIONS)
    select: list[str] = setting([], "conversion=select: module names to convert (shell patterns)")
    input_channels_last: bool = setting(True, "false: leave the input contiguous")
    batch_size: int = setting(2, "images", minimum=1)
    data: str = setting("noise", "source of the images", choices=("noise", "sample", "imagenet", "folder"))
    root: str | None = setting(None, ROOT, key="data.root")
    image_size: int = setting(224, "side of the images, pixels", minimum=8, key="data.image_size")
    frames: int = setting(0, "above 0: video input [N,C,D,H,W] with this many frames", minimum=0)
    input_channels: int = setting(3, "channels of the input", minimum=1)
    num_classes: int = setting(1000, "outputs of the model", minimum=2)
    precision: str = setting("auto", PRECISION_HELP, choices=PRECISIONS)
    device: str = setting("auto", "cuda if available, else cpu", choices=DEVICES)
    backward: bool = setting(True, "false: inference only, in eval mode")
    measure: bool = setting(True, "time the step and each permuting copy")
    compile: bool = setting(False, "also report which graphs inductor lays out as channels_last")
    mixup: float = setting(0.2, "alpha of the MixUp that is audited; 0 = none", minimum=0, key="augment.mixup")
    cutmix: float = setting(1.0, "alpha of the CutMix that is audited; 0 = none", minimum=0, key="augment.cutmix")
    operators: bool = setting(False, "measure every operator alone instead of a model")
    baseline: str | None = setting(None, "operators=true: an earlier table; print only what changed")
    out: str | None = setting(None, "file for the report as JSON; operators=true: folder for the table (results)")
    json: bool = setting(False, JSON)


@dataclass
class CompareSettings:
    """Compare finished runs, or check that both layouts of a model compute the same."""

    compare_by: str | None = setting(None, "the setting whose values are compared (null = the sweep's, channels_last)")
    parity: bool = setting(False, "check that both layouts of `model` compute the same")
    model: str | None = setting(None, f"parity=true: {MODEL_HELP}")
    precision: str = setting("fp32", "parity=true: the precision of the step", choices=PRECISIONS)
    device: str = setting("auto", "parity=true: cuda if available, else cpu", choices=DEVICES)
    image_size: int | None = setting(
        None, "parity=true: side of the images, pixels; null = 96, or the model's own", minimum=8, key="data.image_size"
    )
    seed: int = setting(0, "parity=true: seed of the weights", minimum=0)
    out: str | None = setting(None, "folder for the report; null = the sweep's folder, or the last run's")
    json: bool = setting(False, JSON)


@dataclass
class ConvertSettings:
    """Convert a saved model; its values and outputs are compared before and after."""

    out: str = setting("", "file to write", required=True)
    channels_last: bool = setting(True, "the layout of the model when it is loaded; false = contiguous")
    model: str | None = setting(None, "the model that a file of weights belongs to; its outputs are then compared too")
    input: list[int] = setting([2, 3, 224, 224], "shape of the random images for the comparison", minimum=1)
    entry: str | None = setting(None, "which entry of a checkpoint holds the weights, such as model_ema")
    prefix: str | None = setting(None, "take only the names with this prefix, such as backbone., and remove it")
    output: str | None = setting(None, "which entry of the model's output is compared: a dict's key or an index")
    trust: bool = setting(False, "load a TorchScript or exported program, which runs the code in the file")


@dataclass
class ZooSettings:
    """Many models in both layouts: converted, compared, audited, timed. One process per model; resumable."""

    model: list[str] = setting(["tutorial"], "tutorial (28 models), torchvision, timm, or names and shell patterns")
    device: str = setting("auto", "cuda if available, else cpu", choices=DEVICES)
    precision: str = setting("auto", PRECISION_HELP, choices=PRECISIONS)
    batch_size: int = setting(32, "images per step of the timing", minimum=1)
    image_size: int | None = setting(
        None, "side of the images, pixels; null = 224, without timing 64 if the model allows", minimum=8,
        key="data.image_size",
    )  # fmt: skip
    speed: bool = setting(True, "time both layouts")
    time_limit_s: float = setting(20.0, "seconds for each timing", above=0)
    model_time_limit_s: float = setting(900.0, "seconds after which a model is given up", above=0)
    jobs: int = setting(2, "models at once, if speed=false on a CPU", minimum=1)
    out: str = setting("results", "folder for the tables")


@dataclass
class TarsSettings:
    """Unpack the official archives into train/ and val/."""

    out: str = setting("", "folder to make train/ and val/ in", required=True)
    train: str | None = setting(None, "ILSVRC2012_img_train.tar; null = leave train/ as it is")
    val: str | None = setting(None, "ILSVRC2012_img_val.tar, or a folder of its files, which are moved")
    devkit: str | None = setting(None, "ILSVRC2012_devkit_t12.tar.gz or its folder, or a text file of val WordNet ids")


@dataclass
class VerifySettings:
    """Count images and classes, and find files that are not images."""

    root: str = setting("", ROOT, key="data.root", required=True)
    deep: bool = setting(False, "decode every image: about 10 minutes per core and 600,000 images")
    expect: str = setting("imagenet", "the official counts, or any", choices=("imagenet", "any"))
    workers: int | None = setting(None, "processes; null = all cores", minimum=1, key="data.workers")


@dataclass
class ResizeSettings:
    """Copy a folder with smaller images."""

    root: str = setting("", "folder with the images", key="data.root", required=True)
    out: str = setting("", "folder for the copies; made if it is missing", required=True)
    max_side: int | None = setting(None, "longest side of a copy, pixels; 400 if short_side is not given", minimum=8)
    short_side: int | None = setting(None, "shortest side of a copy, pixels", minimum=8)
    quality: int = setting(90, "JPEG quality of the copies", minimum=1, maximum=100)
    workers: int | None = setting(None, "processes; null = all cores", minimum=1, key="data.workers")
