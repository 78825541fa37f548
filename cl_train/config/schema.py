"""The settings: their names, types, ranges and meaning, and how plain values become a checked `Config`.

The dataclasses below are the schema; `conf/*.yaml` holds choices, `command_line.py` brings the two together. After
`load` there is no DictConfig left. Nothing here imports torch, so that a wrong command line is refused in well under a
second.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

T = TypeVar("T")


class ConfigError(ValueError):
    """What the user asked for cannot be done. Carries every problem found, one line each; programs exit with 2."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] | None = None,
    words: Mapping[str, int] | None = None,
) -> Any:
    """A field with its meaning and its range; `minimum` and `maximum` are inclusive, `above` is exclusive.

    `words` may be written in the place of a number, and stand for numbers outside the range.
    """
    metadata = {
        "help": help,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "choices": choices,
        "words": words,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


PRECISIONS = ("auto", "fp32", "tf32", "fp16", "bf16", "fp16_o2")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
CONVERSIONS = ("full", "conv", "select")
AUTO_BATCH_SIZE = 0  # batch_size=auto, until `batch_size.settle_batch_size` has found the number


@dataclass
class DataConfig:
    """Where images come from, and how they reach the device."""

    name: str = setting("sample", "which data set", choices=("sample", "imagenet", "folder", "imagenette", "synthetic"))
    root: str | None = setting(None, "folder that holds train/<class>/* and val/<class>/*")
    image_size: int = setting(224, "side of the training crop, pixels", minimum=8, maximum=4096)
    val_resize: int | None = setting(None, "short side before the centre crop; null = 256/224 image_size", minimum=8)
    workers: int | None = setting(None, "loader workers per process; null = cores / ranks, at most 16", minimum=0)
    worker_type: str = setting("auto", "what a worker is", choices=("auto", "process", "thread"))
    decoder: str = setting("auto", "JPEG decoder", choices=("auto", "simplejpeg", "pillow"))
    decode: str = setting("cpu", "where images are decoded; gpu needs torchcodec", choices=("cpu", "gpu"))
    exact_decode: bool = setting(True, "false: decode large images at 1/2, 1/4, 1/8 where the crop allows it")
    memory_format: str = setting(
        "channels_last", "layout of the uint8 batches of the loader", choices=("channels_last", "contiguous")
    )
    prefetch: int = setting(3, "batches prepared ahead by the workers together", minimum=1, maximum=64)
    worker_timeout_s: float = setting(60.0, "no worker finishes an image for so long: the run stops", above=0)
    device_prefetch: int = setting(1, "batches copied to the device ahead of the step", minimum=0, maximum=16)
    pin_memory: bool | None = setting(None, "page-locked batches, on CUDA; null = true")
    persistent_workers: bool = setting(True, "keep workers alive between epochs")
    on_bad_image: str = setting("error", "an image that cannot be decoded", choices=("error", "skip"))
    max_bad_images: int = setting(100, "with on_bad_image=skip: stop when more than this many were skipped", minimum=0)
    mean: list[float] = setting([0.485, 0.456, 0.406], "subtracted from each channel, on the 0-1 scale")
    std: list[float] = setting([0.229, 0.224, 0.225], "each channel is divided by it, on the 0-1 scale")
    download: bool = setting(False, "data=imagenette: fetch the archive when it is missing")
    synthetic_images: int = setting(1280, "data=synthetic: images per epoch", minimum=1)
    synthetic_classes: int = setting(1000, "data=synthetic: number of classes", minimum=2)


@dataclass
class AugmentConfig:
    """What happens to a training image. Defaults: torchvision's RandomResizedCrop and horizontal flip."""

    crop_scale_min: float = setting(0.08, "smallest share of the image's area in the crop", above=0, maximum=1)
    crop_scale_max: float = setting(1.0, "largest share of the image's area in the crop", above=0, maximum=1)
    crop_ratio_min: float = setting(3 / 4, "smallest width / height of the crop", above=0)
    crop_ratio_max: float = setting(4 / 3, "largest width / height of the crop", above=0)
    flip: float = setting(0.5, "probability of a horizontal flip", minimum=0, maximum=1)
    policy: str = setting("none", "torchvision's automatic policy", choices=("none", "randaugment", "trivialaugment"))
    randaugment_ops: int = setting(2, "operations per image", minimum=1, maximum=14)
    randaugment_magnitude: int = setting(9, "strength, 0 to 30", minimum=0, maximum=30)
    erase: float = setting(0.0, "probability of random erasing", minimum=0, maximum=1)
    mixup: float = setting(0.0, "alpha of MixUp; 0 = off", minimum=0)
    cutmix: float = setting(0.0, "alpha of CutMix; 0 = off", minimum=0)


@dataclass
class OptimConfig:
    """The optimizer."""

    name: str = setting("sgd", "which optimizer", choices=("sgd", "adamw", "rmsprop"))
    lr: float = setting(0.1, "learning rate for a global batch of `reference_batch_size`", above=0)
    reference_batch_size: int = setting(256, "lr is scaled by global batch / this; 0 = not scaled", minimum=0)
    momentum: float = setting(0.9, "of SGD and RMSprop", minimum=0, maximum=1)
    nesterov: bool = setting(False, "SGD with Nesterov momentum")
    weight_decay: float = setting(1e-4, "of weights", minimum=0)
    decay_norm_and_bias: bool = setting(True, "false: no weight decay on normalisation layers and biases")
    beta1: float = setting(0.9, "of AdamW", minimum=0, maximum=0.999999)
    beta2: float = setting(0.999, "of AdamW", minimum=0, maximum=0.999999)
    alpha: float = setting(0.9, "smoothing of RMSprop", minimum=0, maximum=1)
    eps: float = setting(1e-8, "of AdamW and RMSprop", above=0)
    clip_norm: float | None = setting(None, "gradients are clipped to this norm, after unscaling; null = off", above=0)


@dataclass
class ScheduleConfig:
    """The learning rate over the run: a linear warm-up, then one of four curves."""

    name: str = setting("cosine", "the curve after warm-up", choices=("cosine", "step", "linear", "constant"))
    warmup_epochs: float = setting(0.0, "linear warm-up, epochs (fractions allowed)", minimum=0)
    warmup_start: float = setting(0.01, "first learning rate of the warm-up / lr", minimum=0, maximum=1)
    step_epochs: int = setting(30, "schedule=step: multiply by gamma each so many epochs", minimum=1)
    gamma: float = setting(0.1, "schedule=step: the factor", above=0, maximum=1)
    final_lr_ratio: float = setting(0.0, "cosine and linear: last learning rate / lr", minimum=0, maximum=1)


@dataclass
class AmpConfig:
    """Dynamic loss scaling (fp16 and fp16_o2 only)."""

    init_scale: float = setting(65536.0, "first loss scale", above=0)
    growth_interval: int = setting(2000, "steps without overflow before the scale doubles", minimum=1)
    min_scale: float = setting(1.0, "the run stops when the scale falls below it", above=0)


@dataclass
class CheckpointConfig:
    """What is saved, and when. Saving always also happens at the end and on SIGTERM, SIGINT and SIGUSR1."""

    every_epochs: int = setting(1, "save after each so many epochs; 0 = only at the end", minimum=0)
    every_steps: int = setting(0, "save after each so many steps; 0 = off", minimum=0)
    every_minutes: float = setting(0.0, "save after each so many minutes; 0 = off", minimum=0)
    keep: int = setting(2, "how many of the newest checkpoints to keep, beside the best", minimum=1)
    save_best: bool = setting(True, "keep the checkpoint with the best top-1")
    background: bool = setting(True, "write to disk off the training thread")


@dataclass
class Config:
    """One run. The first block are the settings that most people change."""

    channels_last: str = setting("false", "memory format of the model and its input", choices=("true", "false", "auto"))
    precision: str = setting("auto", "fp16 on CUDA with capability >= 7.0, bf16 on a CPU with it", choices=PRECISIONS)
    model: str = setting("resnet18", "a torchvision model, timm/<name>, or your own package.module:function")
    weights: str | None = setting(None, "pretrained weights by name (DEFAULT, IMAGENET1K_V2, ...) or a file")
    batch_size: int = setting(
        32,
        "images per device and micro-step; auto = the fastest that fits, measured",
        minimum=1,
        words={"auto": AUTO_BATCH_SIZE},
    )
    epochs: int = setting(5, "passes over the training images", minimum=1)
    max_steps: int | None = setting(None, "stop after so many optimizer steps", minimum=1)
    seed: int = setting(0, "of weights, order, augmentation and dropout", minimum=0, maximum=2**32 - 1)
    device: str = setting("auto", "cuda where there is one, else cpu", choices=("auto", "cpu", "cuda"))
    compile: bool = setting(False, "torch.compile the model")

    compile_mode: str = setting(
        "default",
        "mode of torch.compile",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    cuda_graph: str = setting(
        "false",
        "replay the whole step as one CUDA graph; auto = where launching it is what limits the step",
        choices=("true", "false", "auto"),
    )
    conversion: str = setting("full", "what is converted: all, convolution weights, `select`", choices=CONVERSIONS)
    select: list[str] = setting([], "conversion=select: module names to convert (shell patterns)")
    accumulate_steps: int = setting(1, "micro-steps per optimizer step", minimum=1)
    label_smoothing: float = setting(0.0, "of the cross-entropy", minimum=0, maximum=0.999)
    ema_decay: float = setting(
        0.0, "decay of the weights' moving average, evaluated beside the model; 0 = off", minimum=0, maximum=1
    )
    ema_every: int = setting(1, "steps between updates of the moving average", minimum=1)
    sync_batchnorm: bool = setting(False, "BatchNorm statistics over all ranks")
    ddp_static_graph: bool = setting(False, "tell DDP that every step uses the same parameters in the same order")
    deterministic: bool = setting(False, "deterministic algorithms only; slower on a GPU")
    evaluate_every: int = setting(1, "epochs between evaluations; 0 = only at the end, -1 = never", minimum=-1)
    evaluate_only: bool = setting(False, "evaluate `weights` or `resume` and stop")

    log_every: int = setting(10, "optimizer steps per window: one console line and one record", minimum=1)
    warmup_steps: int = setting(10, "steps left out of the throughput averages", minimum=0)
    resume: str | None = setting(None, "a checkpoint file or run folder; auto = the newest of this run's folder")
    profile: bool = setting(False, "write a torch.profiler trace of a few steps into the run folder")
    tensorboard: bool = setting(True, "write TensorBoard events into the run folder")
    on_nonfinite: str = setting("stop", "a NaN or Inf loss or gradient", choices=("stop", "skip", "rollback"))
    max_nonfinite: int = setting(10, "on_nonfinite=skip or rollback: stop after more than this many", minimum=0)
    rank_timeout_s: float = setting(600.0, "a rank silent for so long ends the run", above=0)

    nproc: int = setting(1, "multirun: processes per job, under torchrun when above 1", minimum=1)
    repeats: int = setting(1, "multirun: runs of each setting, interleaved A B B A", minimum=1)
    resume_sweep: str | None = setting(None, "multirun: a sweep's folder; run only what is missing in it")
    compare_by: str = setting("channels_last", "multirun: the key whose values the report compares")

    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    amp: AmpConfig = field(default_factory=AmpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


# --- names and suggestions ------------------------------------------------------------------------------------------


def suggest(name: str, known: Iterable[str], count: int = 3) -> str:
    """`; did you mean a, b?` for the nearest of the known names, or an empty string where none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=count, cutoff=0.6)
    return f"; did you mean {', '.join(near)}?" if near else ""


def setting_fields(schema: type, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Every leaf setting of a dataclass by its full key, such as `optim.lr`."""
    hints = typing.get_type_hints(schema)
    leaves: dict[str, dataclasses.Field[Any]] = {}
    for item in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[item.name]):
            leaves |= setting_fields(typing.cast(type, hints[item.name]), f"{prefix}{item.name}.")
        else:
            leaves[prefix + item.name] = item
    return leaves


def suggest_key(key: str, known: Iterable[str]) -> str:
    """As `suggest`, and a key given without its group is found too: `lr` is `optim.lr`."""
    known = list(known)
    same_leaf = [full for full in known if full.rpartition(".")[2] == key.rpartition(".")[2]]
    if same_leaf:
        return f"; did you mean {', '.join(same_leaf[:3])}?"
    by_leaf = {full.rpartition(".")[2]: full for full in known}
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    near_leaves = difflib.get_close_matches(key, list(by_leaf), n=3, cutoff=0.75)
    candidates = {name: difflib.SequenceMatcher(None, key, name).ratio() for name in near}
    for leaf in near_leaves:
        ratio = difflib.SequenceMatcher(None, key, leaf).ratio()
        candidates[by_leaf[leaf]] = max(ratio, candidates.get(by_leaf[leaf], 0.0))
    best = sorted(candidates, key=lambda name: -candidates[name])[:3]
    return f"; did you mean {', '.join(best)}?" if best else ""


# --- from plain values to checked dataclasses -----------------------------------------------------------------------


def from_mapping(schema: type[T], values: Mapping[str, Any]) -> T:
    """Build a dataclass of settings from nested plain values, checking keys, types and ranges.

    Raises:
        ConfigError: with every problem found, not just the first.
    """
    known = setting_fields(schema)
    typed = OmegaConf.structured(schema)
    problems = []
    for key, value in _flatten(values, known):
        if key not in known:
            problems.append(f"unknown setting '{key}'{suggest_key(key, known)}")
            continue
        try:
            OmegaConf.update(typed, key, _as_written(value, known[key]))
        except (ValidationError, ValueError):
            problems.append(f"{key}={show(value)}: needs {_type_name(schema, key)}")
            continue
        if not _is_word(value, known[key]):
            problems += _range_problems(key, OmegaConf.select(typed, key), known[key])
    if problems:
        raise ConfigError(problems)
    return typing.cast(T, OmegaConf.to_object(typed))


def _flatten(values: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        inner = any(other.startswith(f"{key}.") for other in known)
        if isinstance(value, Mapping) and (inner or key not in known):
            yield from _flatten(value, known, f"{key}.")
        else:
            yield key, value


def _is_word(value: Any, item: dataclasses.Field[Any]) -> bool:
    """Does `value` stand for a number?"""
    return isinstance(value, str) and value in (item.metadata["words"] or {})


def _as_written(value: Any, item: dataclasses.Field[Any]) -> Any:
    """YAML reads true and false as booleans; a setting with choices has them as words."""
    if _is_word(value, item):
        return item.metadata["words"][value]
    if isinstance(value, bool) and item.metadata["choices"]:
        return str(value).lower()
    if isinstance(value, bool) and item.type in ("int", "float", "int | None", "float | None", "str", "str | None"):
        raise ValueError
    if item.type in ("bool", "bool | None") and isinstance(value, int | float) and value not in (0, 1):
        raise ValueError  # OmegaConf takes any number for true
    return value


def show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _type_name(schema: type, key: str) -> str:
    written = str(setting_fields(schema)[key].type)
    names = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word"}
    names |= {"list[float]": "a list of numbers, [a,b,c]", "list[str]": "a list of words, [a,b,c]"}
    names |= {"list[int]": "a list of whole numbers, [a,b,c]", "list[bool]": "a list of true and false"}
    base = names.get(written.removesuffix(" | None"), written)
    base = " or ".join([base, *(setting_fields(schema)[key].metadata["words"] or {})])
    return f"{base} or null" if written.endswith("| None") else base


def _range_problems(key: str, value: Any, item: dataclasses.Field[Any]) -> list[str]:
    limits = item.metadata
    if isinstance(value, str) and limits["choices"] and value not in limits["choices"]:
        return [f"{key}={value}: must be one of {', '.join(limits['choices'])}{suggest(value, limits['choices'])}"]
    if not isinstance(value, int | float) or isinstance(value, bool):
        return []
    if not math.isfinite(value):
        return [f"{key}={value}: must be a finite number"]
    bounds = (
        (limits["minimum"], lambda bound: value < bound, "at least"),
        (limits["above"], lambda bound: value <= bound, "above"),
        (limits["maximum"], lambda bound: value > bound, "at most"),
    )
    return [
        f"{key}={value}: must be {words} {bound:g}"
        for bound, broken, words in bounds
        if bound is not None and broken(bound)
    ]


def check_together(cfg: Config) -> list[str]:
    """Combinations of settings that cannot work, or in which one has no effect; one line each."""
    augment, data = cfg.augment, cfg.data
    rules = {
        "augment.crop_scale_min is larger than augment.crop_scale_max": augment.crop_scale_min > augment.crop_scale_max,
        "augment.crop_ratio_min is larger than augment.crop_ratio_max": augment.crop_ratio_min > augment.crop_ratio_max,
        f"data={data.name} needs data.root=FOLDER with train/<class>/* and val/<class>/* (no data? data=sample)": (
            data.name in ("imagenet", "folder") and data.root is None
        ),
        "data.mean and data.std need three numbers each, those of data.std above 0": (
            len(data.mean) != 3 or len(data.std) != 3 or not all(value > 0 for value in data.std)
        ),
        f"data.val_resize={data.val_resize} is smaller than data.image_size={data.image_size}: the crop does not fit": (
            data.val_resize is not None and data.val_resize < data.image_size
        ),
        "optim.nesterov=true needs optim.momentum above 0": cfg.optim.nesterov and cfg.optim.momentum == 0,
        f"schedule.warmup_epochs={cfg.schedule.warmup_epochs:g} is longer than epochs={cfg.epochs}": (
            cfg.schedule.warmup_epochs > cfg.epochs
        ),
        "conversion=select needs select=[NAMES], the modules to convert": cfg.conversion == "select" and not cfg.select,
        "select=... has an effect with conversion=select only": cfg.conversion != "select" and bool(cfg.select),
        "evaluate_only=true needs weights=... or resume=..., else it would evaluate random weights": (
            cfg.evaluate_only and cfg.weights is None and cfg.resume is None
        ),
        f"cuda_graph=true: {graph_conflict(cfg)}": cfg.cuda_graph == "true" and graph_conflict(cfg) is not None,
        "ddp_static_graph=true does not go with accumulate_steps above 1: only the last micro-step is synchronised": (
            cfg.ddp_static_graph and cfg.accumulate_steps > 1
        ),
        "batch_size=auto with resume=...: a run goes on with the batch size that it began with; see its config.yaml": (
            cfg.batch_size == AUTO_BATCH_SIZE and cfg.resume is not None
        ),
        "data.decode=gpu needs device=cuda": data.decode == "gpu" and cfg.device == "cpu",
        f"compare_by={cfg.compare_by}: no such setting{suggest_key(cfg.compare_by, setting_fields(Config))}": (
            cfg.compare_by not in setting_fields(Config)
        ),
    }
    return [text for text, broken in rules.items() if broken]


def graph_conflict(cfg: Config) -> str | None:
    """Why a step with these settings cannot be recorded as a CUDA graph; None where it can."""
    if cfg.optim.name == "rmsprop":
        return "RMSprop has no fused kernel, so the host decides whether to skip a step; use optim=sgd or adamw"
    if cfg.compile and cfg.compile_mode in ("reduce-overhead", "max-autotune"):
        return f"compile_mode={cfg.compile_mode} makes CUDA graphs itself; use default or max-autotune-no-cudagraphs"
    return None


def load(values: Mapping[str, Any] | DictConfig) -> Config:
    """Turn a composed configuration (Hydra's, or plain nested values) into a checked `Config`.

    Raises:
        ConfigError: unknown keys, wrong types, values out of range, combinations that cannot work.
    """
    if isinstance(values, DictConfig):
        try:
            values = typing.cast(Mapping[str, Any], OmegaConf.to_container(values, resolve=True))
        except OmegaConfBaseException as error:  # ${...} of something that is not there
            raise ConfigError(f"cannot resolve a value: {str(error).splitlines()[0]}") from None
    cfg = from_mapping(Config, values)
    problems = check_together(cfg)
    if problems:
        raise ConfigError(problems)
    return cfg


def settings_from_arguments(schema: type[T], arguments: Sequence[str]) -> T:
    """The key=value words of a script's command line as a dataclass; lists are written a,b,c.

    Raises:
        ConfigError: as `from_mapping`, and for words that are not key=value.
    """
    known = setting_fields(schema)
    problems = [f"'{word}' is not of the form key=value" for word in arguments if "=" not in word]
    values: dict[str, Any] = {}
    for word in arguments:
        key, _, text = word.partition("=")
        if key in known and str(known[key].type).startswith("list") and not text.startswith("["):
            values[key] = [_value_of(part) for part in text.split(",")] if text else []
        elif "=" in word:
            values[key] = _value_of(text)
    try:
        settings = from_mapping(schema, values)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return settings


def _value_of(text: str) -> Any:
    """`text` read as yaml, or itself where it is none, such as a shell pattern that begins with a star."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def to_mapping(cfg: object) -> dict[str, Any]:
    """The settings as nested plain values, as `config.yaml` has them."""
    return dataclasses.asdict(cfg)  # type: ignore[call-overload]  # any dataclass instance


def to_yaml(cfg: object) -> str:
    return yaml.safe_dump(to_mapping(cfg), sort_keys=False)


def stop_with(error: ConfigError) -> typing.NoReturn:
    """Print the problems, one line each, and leave with exit code 2. Under torchrun rank 0 alone speaks."""
    if os.environ.get("RANK", "0") == "0":
        print(f"configuration error{'s' if len(error.problems) > 1 else ''}:", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
    raise SystemExit(2)
