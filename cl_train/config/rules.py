"""Combinations of settings that cannot work, contradict each other, or in which one setting has no effect."""

import functools
import itertools
from collections.abc import Callable, Iterator

from cl_train.config import schema
from cl_train.config.schema import (
    CLASS_FOLDERS,
    DATA_SETS,
    LOSSES,
    OPTIMIZERS,
    AugmentConfig,
    Config,
    DataConfig,
    LauncherConfig,
)


def _has_class_folders(cfg: Config) -> bool:
    return cfg.data.name in CLASS_FOLDERS


def _needs_optimizer(key: str) -> tuple[str, Callable[[Config], bool], str]:
    names = [name for name, keys in OPTIMIZERS.items() if key in keys]
    return (
        f"optim.{key}",
        lambda cfg: cfg.optim.library == "timm" or cfg.optim.name in names,
        " or ".join(f"optim={name}" for name in names),
    )


# Settings that have an effect only if the function says so, and what the user would have to write for it.
_NEEDS: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
    ("label_smoothing", lambda cfg: cfg.loss in LOSSES, "loss=cross_entropy"),
    ("patience", lambda cfg: cfg.evaluate_every > 0, "evaluate_every=1"),
    ("bce_threshold", lambda cfg: cfg.loss == "bce", "loss=bce"),
    ("data.val_fraction", _has_class_folders, "data=folder"),
    ("data.val_split", _has_class_folders, "data=folder"),
    ("data.extensions", _has_class_folders, "data=folder"),
    ("augment.timm_policy", lambda cfg: cfg.augment.policy == "timm", "augment.policy=timm"),
    *(_needs_optimizer(key) for key in sorted({key for keys in OPTIMIZERS.values() for key in keys})),
)


def combination_problems(cfg: Config) -> Iterator[str]:
    """One line per problem."""
    for key, has_effect, remedy in _NEEDS:
        value, default = (functools.reduce(getattr, key.split("."), settings) for settings in (cfg, Config()))
        if value != default and not has_effect(cfg):
            hint = f"write {key}={'null' if default is None else default} if a recipe sets it"
            yield f"{key}={value} has no effect without {remedy}: leave it out, or {hint}"
    yield from _data_problems(cfg.data, cfg.augment)
    yield from _run_problems(cfg)
    if cfg.optim.library == "torch" and cfg.optim.name not in OPTIMIZERS:
        yield f"optim.name={cfg.optim.name}: only optim=timm has other optimizers than {', '.join(OPTIMIZERS)}"
    if cfg.optim.nesterov and cfg.optim.momentum == 0:
        yield "optim.nesterov=true needs optim.momentum above 0"
    conflict = graph_conflict(cfg)
    if cfg.cuda_graph == "true" and conflict is not None:
        yield f"cuda_graph=true: {conflict}"
    if cfg.launcher.name == "slurm" and cfg.launcher.gpus:
        yield "launcher.gpus is for launcher=local; use launcher.gpus_per_node with launcher=slurm"
    if cfg.launcher.name == "local" and cfg.launcher != LauncherConfig(gpus=cfg.launcher.gpus):
        yield "with launcher=local only launcher.gpus can be set; the other launcher settings need launcher=slurm"
    if cfg.data.size_schedule:
        yield from _size_schedule_problems(cfg.data.size_schedule, cfg.epochs)


def _data_problems(data: DataConfig, augment: AugmentConfig) -> Iterator[str]:
    val_size = data.val_size or data.image_size
    if data.root is None and DATA_SETS[data.name]:
        yield f"data={data.name} needs data.root=FOLDER with {DATA_SETS[data.name]}"
    if data.name == "dataset" and data.dataset is None:
        yield "data=dataset needs data.dataset=package.module:function"
    if data.name == "dataset" and data.size_schedule:
        yield "data.size_schedule does not work with data=dataset, whose images have one size"
    if len(data.mean) != 3 or len(data.std) != 3 or min(data.std) <= 0:
        yield "data.mean and data.std need three numbers each, those of data.std above 0"
    if data.val_resize is not None and data.val_resize < val_size:
        yield f"data.val_resize={data.val_resize} is smaller than the validation crop of {val_size} px"
    for name in ("crop_scale", "crop_ratio"):
        if getattr(augment, f"{name}_min") > getattr(augment, f"{name}_max"):
            yield f"augment.{name}_min is above augment.{name}_max"
    if any(0 < alpha < 0.01 for alpha in (augment.mixup, augment.cutmix)):
        yield "augment.mixup and augment.cutmix must be 0 (off) or at least 0.01"


def _run_problems(cfg: Config) -> Iterator[str]:
    if cfg.resume == "auto" and cfg.overwrite:
        yield "resume=auto continues the run in the folder and overwrite=true deletes it: leave out one of them"
    if cfg.loss not in LOSSES and ":" not in cfg.loss:
        yield f"loss={cfg.loss}: use {', '.join(LOSSES)}, or your own function as package.module:function"
    if cfg.schedule.warmup_epochs > cfg.epochs:
        yield f"schedule.warmup_epochs={cfg.schedule.warmup_epochs:g} is longer than epochs={cfg.epochs}"
    if (cfg.conversion in ("select", "mixed")) != bool(cfg.select):
        yield "conversion=select or mixed and select=[NAMES] must be used together"
    if cfg.evaluate_only and cfg.weights is None and cfg.resume is None:
        yield "evaluate_only=true needs weights=... or resume=..., else it would evaluate random weights"
    if cfg.ddp_static_graph and cfg.accumulate_steps > 1:
        yield "ddp_static_graph=true does not work with accumulate_steps above 1"
    if cfg.batch_size == schema.AUTO_BATCH_SIZE and cfg.resume is not None:
        yield "batch_size=auto with resume=...: give the batch size that the run started with (see its config.yaml)"
    if cfg.global_batch_size is not None and (cfg.accumulate_steps > 1 or cfg.batch_size == schema.AUTO_BATCH_SIZE):
        yield "global_batch_size sets accumulate_steps and needs batch_size=NUMBER: leave out the other setting"
    if cfg.report and cfg.evaluate_every == -1 and not cfg.evaluate_only:
        yield "report=true is written by evaluations, and evaluate_every=-1 has none; use evaluate_every=0"


def graph_conflict(cfg: Config) -> str | None:
    """Why a step with these settings cannot be recorded as a CUDA graph; None where it can."""
    if cfg.optim.library != "torch" or cfg.optim.name in schema.WITHOUT_FUSED_KERNEL:
        name = cfg.optim.name if cfg.optim.library == "torch" else f"timm's {cfg.optim.name}"
        return f"{name} has no fused kernel, so the host decides whether to skip a step; use optim=sgd"
    if cfg.compile and cfg.compile_mode in ("reduce-overhead", "max-autotune"):
        return f"compile_mode={cfg.compile_mode} makes CUDA graphs itself; use default or max-autotune-no-cudagraphs"
    return None


def _size_schedule_problems(schedule: list[list[int]], epochs: int) -> Iterator[str]:
    """One problem at most."""
    if any(len(point) != 2 for point in schedule):
        yield f"data.size_schedule={schedule}: write pairs of epoch and size, such as [[0,128],[6,160],[12,192]]"
        return
    starts, sizes = zip(*schedule, strict=True)
    wrong = [size for size in sizes if not 8 <= size <= 4096 or size % 4]
    if starts[0] != 0 or any(later <= earlier for earlier, later in itertools.pairwise(starts)):
        yield f"data.size_schedule={schedule}: the first epoch must be 0, and each later than the one before it"
    elif wrong:
        yield f"data.size_schedule={schedule}: size {wrong[0]} is not a multiple of 4 from 8 to 4096"
    elif starts[-1] >= epochs:
        yield f"data.size_schedule={schedule}: epoch {starts[-1]} is not reached with epochs={epochs}"
