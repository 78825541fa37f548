"""Combinations of settings that cannot work, contradict each other, or in which one setting has no effect."""

import functools
import itertools
from collections.abc import Iterator

from cl_train.config import schema
from cl_train.config.schema import AugmentConfig, Config, DataConfig, LauncherConfig


def combination_problems(cfg: Config) -> Iterator[str]:
    """One line per problem."""
    has_class_folders = schema.DATA_SETS[cfg.data.name].has_class_folders
    needs = [  # a setting, whether it has an effect, and what the user would have to write for it
        ("label_smoothing", cfg.loss in schema.LOSSES, "loss=cross_entropy"),
        ("patience", cfg.evaluate_every > 0, "evaluate_every=1"),
        ("bce_threshold", cfg.loss == "bce", "loss=bce"),
        ("data.val_fraction", has_class_folders, "data=folder"),
        ("data.val_split", has_class_folders, "data=folder"),
        ("data.extensions", has_class_folders, "data=folder"),
        ("augment.timm_policy", cfg.augment.policy == "timm", "augment.policy=timm"),
    ]
    for key in sorted({key for keys in schema.OPTIMIZERS.values() for key in keys}):
        readers = [f"optim={name}" for name, keys in schema.OPTIMIZERS.items() if key in keys]
        is_read = cfg.optim.library == "timm" or f"optim={cfg.optim.name}" in readers
        needs.append((f"optim.{key}", is_read, " or ".join(readers)))
    for key, has_effect, remedy in needs:
        value, default = (functools.reduce(getattr, key.split("."), settings) for settings in (cfg, Config()))
        if value != default and not has_effect:
            hint = f"write {key}={'null' if default is None else default} if a recipe sets it"
            yield f"{key}={value} has no effect without {remedy}: leave it out, or {hint}"
    yield from _data_problems(cfg.data, cfg.augment, cfg.epochs)
    yield from _run_problems(cfg)
    if cfg.optim.library == "torch" and cfg.optim.name not in schema.OPTIMIZERS:
        yield f"optim.name={cfg.optim.name}: only optim=timm has other optimizers than {', '.join(schema.OPTIMIZERS)}"
    if cfg.optim.nesterov and cfg.optim.momentum == 0:
        yield "optim.nesterov=true needs optim.momentum above 0"
    if cfg.cuda_graph == "true" and (conflict := graph_conflict(cfg)):
        yield f"cuda_graph=true: {conflict}"
    if cfg.launcher.name == "slurm" and cfg.launcher.gpus:
        yield "launcher.gpus is for launcher=local; use launcher.gpus_per_node with launcher=slurm"
    if cfg.launcher.name == "local" and cfg.launcher != LauncherConfig(gpus=cfg.launcher.gpus):
        yield "with launcher=local only launcher.gpus can be set; the other launcher settings need launcher=slurm"


def _data_problems(data: DataConfig, augment: AugmentConfig, epochs: int) -> Iterator[str]:
    val_size = data.val_size or data.image_size
    if data.root is None and (content := schema.DATA_SETS[data.name].root):
        yield f"data={data.name} needs data.root=FOLDER with {content}"
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
    starts = [point[0] for point in data.size_schedule if len(point) == 2 and point[1] in range(8, 4097, 4)]
    is_rising = all(later > earlier for earlier, later in itertools.pairwise((*starts, epochs)))
    if data.size_schedule and (len(starts) < len(data.size_schedule) or starts[0] != 0 or not is_rising):
        yield (
            f"data.size_schedule={data.size_schedule}: write [[epoch,size],...], such as [[0,128],[6,160]]: epochs "
            f"from 0 on, each later than the last and below epochs={epochs}; sizes are multiples of 4 from 8 to 4096"
        )


def _run_problems(cfg: Config) -> Iterator[str]:
    if cfg.resume == "auto" and cfg.overwrite:
        yield "resume=auto continues the run in the folder and overwrite=true deletes it: leave out one of them"
    if cfg.loss not in schema.LOSSES and ":" not in cfg.loss:
        yield f"loss={cfg.loss}: use {', '.join(schema.LOSSES)}, or your own function as package.module:function"
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
    if cfg.optim.library != "torch" or cfg.optim.name not in schema.FUSED_OPTIMIZERS:
        name = cfg.optim.name if cfg.optim.library == "torch" else f"timm's {cfg.optim.name}"
        return f"{name} has no fused kernel, so the host decides whether to skip a step; use optim=sgd"
    if cfg.compile and cfg.compile_mode in ("reduce-overhead", "max-autotune"):
        return f"compile_mode={cfg.compile_mode} makes CUDA graphs itself; use default or max-autotune-no-cudagraphs"
    return None
