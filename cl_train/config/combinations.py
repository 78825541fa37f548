"""Combinations of settings that cannot work, or have no effect."""

import itertools
import operator
import re
from collections.abc import Iterator

from cl_train.config import schema as defined
from cl_train.config.fields import suggest
from cl_train.config.groups import DATA_SETS, OF_FILES, POLICIES, TIMM_POLICIES
from cl_train.config.schema import FIELDS, AugmentConfig, Config, DataConfig, OptimConfig


def combination_problems(cfg: Config) -> Iterator[str]:
    is_csv, has_files = cfg.data.name == "csv", cfg.data.name in OF_FILES
    needs = [  # a setting, whether it has an effect, and what the user would have to write for it
        ("label_smoothing", cfg.loss in defined.LOSSES, "loss=cross_entropy"),
        ("class_weight", cfg.loss in defined.LOSSES, "loss=cross_entropy"),
        ("patience", cfg.evaluate_every > 0, "evaluate_every=1"),
        ("bce_threshold", cfg.loss == "bce", "loss=bce"),
        ("schedule.milestones", cfg.schedule.name == "step", "schedule=step"),
        ("data.val_fraction", has_files, "data=folder"),
        ("data.val_split", has_files, "data=folder"),
        ("data.extensions", has_files or cfg.data.name == "shards", "data=folder"),
        ("data.csv", is_csv, "data=csv"),
        ("data.val_csv", is_csv, "data=csv"),
    ]
    for key in sorted({key for keys in defined.OPTIMIZERS.values() for key in keys}):
        readers = [f"optim={name}" for name, keys in defined.OPTIMIZERS.items() if key in keys]
        is_read = cfg.optim.library == "timm" or f"optim={cfg.optim.name}" in readers
        needs.append((f"optim.{key}", is_read, " or ".join(readers)))
    for key, has_effect, remedy in needs:
        value, default = operator.attrgetter(key)(cfg), FIELDS[key].default
        if value != default and not has_effect:
            hint = f"write {key}={'null' if default is None else default} if a recipe sets it"
            yield f"{key}={value} has no effect without {remedy}: leave it out, or {hint}"
    yield from _data_problems(cfg.data, cfg.augment, cfg.epochs)
    yield from _run_problems(cfg)
    if cfg.optim.library == "torch" and cfg.optim.name not in defined.OPTIMIZERS:
        of_torch = ", ".join(defined.OPTIMIZERS)
        yield f"optim.name={cfg.optim.name}: only optim=timm has others than {of_torch}"
    if cfg.compare_by not in FIELDS:
        yield f"compare_by={cfg.compare_by}: no such setting{suggest(cfg.compare_by, FIELDS)}"
    if cfg.optim.nesterov and cfg.optim.momentum == 0:
        yield "optim.nesterov=true needs optim.momentum above 0"
    if cfg.cuda_graph == "true" and (conflict := graph_conflict(cfg.optim)):
        yield f"cuda_graph=true: {conflict}"


def _data_problems(data: DataConfig, augment: AugmentConfig, epochs: int) -> Iterator[str]:
    if data.root is None and (content := DATA_SETS[data.name]):
        yield f"data={data.name} needs data.root=FOLDER with {content}"
    if data.name == "dataset" and data.dataset is None:
        yield "data=dataset needs data.dataset=package.module:function"
    if data.name == "dataset" and data.size_schedule:
        yield "data.size_schedule does not work with data=dataset, whose images have one size"
    if not re.fullmatch(r"\d+|(100|\d{1,2}(\.\d+)?)%", str(data.max_bad_images)):
        yield f"data.max_bad_images={data.max_bad_images}: expected a whole number, or such as 10%"
    if len(data.mean) != 3 or len(data.std) != 3 or min(data.std) <= 0:
        yield "data.mean and data.std need three numbers each, those of data.std above 0"
    extensions = {extension.lower() for extension in data.extensions}
    if not extensions or extensions - defined.IMAGE_FORMATS.keys():
        yield f"data.extensions={data.extensions}: use some of {', '.join(defined.IMAGE_FORMATS)}"
    if data.val_resize is not None and data.val_resize < data.eval_size:
        yield f"data.val_resize={data.val_resize} is smaller than the crop of {data.eval_size} px"
    policy = augment.policy
    if policy not in POLICIES and not re.match(TIMM_POLICIES, policy):
        there_are = f"(there are {', '.join(POLICIES)}, and timm's, such as rand-m9-mstd0.5-inc1)"
        yield f"augment.policy={policy}: no such policy{suggest(policy, POLICIES)} {there_are}"
    points = data.size_schedule
    starts = [point[0] for point in points if len(point) == 2 and point[1] in range(8, 4097, 4)]
    is_rising = all(later > earlier for earlier, later in itertools.pairwise((*starts, epochs)))
    if points and (len(starts) < len(points) or starts[0] != 0 or not is_rising):
        example = "write [[epoch,size],...], such as [[0,128],[6,160]]"
        ranges = f"epochs rise from 0 to below {epochs}, sizes are multiples of 4 from 8 to 4096"
        yield f"data.size_schedule={points}: {example}; {ranges}"


def _run_problems(cfg: Config) -> Iterator[str]:
    if cfg.resume == "auto" and cfg.overwrite:
        yield "resume=auto continues a run and overwrite=true deletes it: leave out one of them"
    if cfg.loss not in defined.LOSSES and ":" not in cfg.loss:
        yield f"loss={cfg.loss}: use {', '.join(defined.LOSSES)}, or package.module:function"
    if cfg.schedule.warmup_epochs > cfg.epochs:
        warmup_epochs = cfg.schedule.warmup_epochs
        yield f"schedule.warmup_epochs={warmup_epochs:g} is longer than epochs={cfg.epochs}"
    if (cfg.conversion == "select") != bool(cfg.select):
        yield "conversion=select and select=[NAMES] must be used together"
    if cfg.evaluate_only and cfg.weights is None and cfg.resume is None:
        yield "evaluate_only=true needs weights=... or resume=...: random weights say nothing"
    if cfg.entry is not None and cfg.weights is None:
        yield f"entry={cfg.entry} is one of the file that weights=FILE or weights=RUN names"
    if (cfg.best_by or "").startswith("average.") and not cfg.ema_decay:
        yield f"best_by={cfg.best_by} needs an average of the weights, such as ema_decay=0.999"
    if cfg.global_batch_size is not None and cfg.accumulate_steps > 1:
        yield "global_batch_size sets accumulate_steps: leave that out"
    if cfg.report and cfg.evaluate_every == -1 and not cfg.evaluate_only:
        yield "report=true needs an evaluation: evaluate_every=-1 has none, evaluate_every=0 one"


def graph_conflict(optim: OptimConfig) -> str | None:
    """Returns why a step of this optimizer cannot be recorded as a CUDA graph; None if it can."""
    if optim.library == "torch" and optim.name in defined.FUSED_OPTIMIZERS:
        return None
    name = optim.name if optim.library == "torch" else f"timm's {optim.name}"
    return f"{name} has no fused kernel: the host decides whether to skip a step; use optim=sgd"
