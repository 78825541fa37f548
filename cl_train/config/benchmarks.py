"""The settings of the benchmarks, which `comparison` needs too."""

from dataclasses import dataclass

from cl_train.config.schema import DEVICES, MODEL_HELP, OPTIMIZERS, OVERWRITE_HELP, PRECISION_HELP, PRECISIONS, setting

LAYOUTS = ["contiguous", "channels_last", "channels_last_conv"]


@dataclass
class BenchmarkSettings:
    """What to measure: every combination of the lists, which are written a,b,c."""

    model: list[str] = setting(["resnet50"], MODEL_HELP)
    mode: list[str] = setting(["train"], "train (forward, backward, optimizer) or infer", choices=("train", "infer"))
    precision: list[str] = setting(["auto"], PRECISION_HELP, choices=PRECISIONS)
    batch_size: list[int] = setting([32], "images per step", minimum=1)
    compile: list[bool] = setting([False], "compile the model with torch.compile")
    cuda_graph: list[bool] = setting([False], "replay the step as a CUDA graph")
    image_size: int | None = setting(None, "pixels; null = 224, inception_v3: 299", minimum=8, key="data.image_size")
    layouts: list[str] = setting(
        LAYOUTS[:2], "the first is the baseline; channels_last_conv converts convolutions only", choices=LAYOUTS
    )
    optimizer: str = setting("sgd", "optimizer of the training step", choices=OPTIMIZERS)
    device: str = setting("auto", "cuda if available, else cpu", choices=DEVICES)
    target_ci: float = setting(0.02, "stop when the 95 % interval of the ratio is at most this wide", above=0)
    time_limit_s: float = setting(60.0, "seconds per combination, without warm-up and compilation", above=0)
    parity: bool = setting(True, "first check that the layouts compute the same")
    out: str | None = setting(None, "file for the result as JSON")
    overwrite: bool = setting(False, OVERWRITE_HELP)
    json: bool = setting(False, "print the result as JSON")


@dataclass
class LoaderBenchmarkSettings:
    """The data, and the loaders to compare."""

    root: str | None = setting(None, "folder of train/<class>/* and val/<class>/*; null = the sample", key="data.root")
    image_size: int = setting(224, "side of the crops, pixels", minimum=8, key="data.image_size")
    workers: list[int] = setting([], "numbers to try; empty = 1, 2, 4, ... cores", minimum=1, key="data.workers")
    batch_size: int = setting(64, "images per batch", minimum=1)
    images: int = setting(2048, "images per pipeline and round, at most one epoch (fairest: all of it)", minimum=1)
    rounds: int = setting(3, "interleaved rounds A B B A, after one warm-up", minimum=1)
    gpu_images_per_s: float = setting(5400.0, "training speed, images/s, for which cores are computed", above=0)
    out: str | None = setting(None, "file for the result as JSON")
    overwrite: bool = setting(False, OVERWRITE_HELP)
    json: bool = setting(False, "print the result as JSON")


@dataclass
class ZooSettings:
    """Which models, and how they are measured."""

    model: list[str] = setting(["tutorial"], "tutorial, torchvision, timm, or names and shell patterns")
    device: str = setting("auto", "cuda if available, else cpu", choices=DEVICES)
    precision: str = setting("auto", PRECISION_HELP, choices=PRECISIONS)
    batch_size: int = setting(32, "images per step of the timing", minimum=1)
    image_size: int | None = setting(None, "pixels; null = 224, speed=false: 64", minimum=8, key="data.image_size")
    speed: bool = setting(True, "time both layouts")
    time_limit_s: float = setting(20.0, "seconds for each timing", above=0)
    model_time_limit_s: float = setting(900.0, "timeout per model, seconds", above=0)
    out: str = setting("results", "folder for the tables")
