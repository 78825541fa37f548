"""Audit a model: which operators keep channels_last, which lose it, where in the model, and what it costs.

    cl-train audit model=shufflenet_v2_x1_0                      a table; every loss with module and line
    cl-train audit model=my_package.my_model:build json=audit.json
    cl-train audit model=resnext50_32x4d compile=true            also: which graphs inductor lays out itself
    cl-train audit --operators                                   which operators keep the layout, here
    cl-train audit --operators --diff results/operators-cpu-torch2.15.json

Settings are key=value words; `cl-train audit --help` lists them. Exit code 2: wrong usage.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cl_train.config.schema import AugmentConfig, ConfigError, DataConfig, OptimConfig, setting
from cl_train.config.validation import settings_from_arguments
from cl_train.data.augment import label_mix
from cl_train.data.batch import DeviceFormat
from cl_train.data.build import build_data
from cl_train.memory_format import convert as memory_format
from cl_train.memory_format import operators as operator_table
from cl_train.memory_format.audit import audit
from cl_train.memory_format.audit_report import LayoutReport, markdown_table
from cl_train.memory_format.inductor import compiled_graphs
from cl_train.memory_format.training_path import Mix, surroundings
from cl_train.models import registry as models
from cl_train.step.ema import WeightAverage
from cl_train.step.optim import build_optimizer
from cl_train.step.precision import (
    MasterWeights,
    Precision,
    autocast,
    cast_model,
    resolve_precision,
    trainable_parameters,
)
from cl_train.step.train_step import loss_of
from cl_train.system.distributed import Dist, choose_device

PRECISIONS = ("auto", "fp32", "tf32", "fp16", "bf16", "fp16_o2")


@dataclass
class AuditSettings:
    model: str = setting("resnet18", "a torchvision model, timm/<name>, or your own package.module:function")
    weights: str | None = setting(None, "pretrained weights by name, or a file")
    channels_last: bool = setting(True, "convert the model and its input")
    conversion: str = setting("full", "what is converted", choices=memory_format.MODES)
    select: list[str] = setting([], "conversion=select: module names (shell patterns)")
    input_channels_last: bool = setting(True, "false: leave the input contiguous, as most loaders hand it over")
    batch_size: int = setting(2, "images", minimum=1)
    image_size: int = setting(224, "side of the image, pixels", minimum=8)
    data: str = setting("noise", "where the images come from", choices=("noise", "sample", "imagenet", "folder"))
    data_root: str | None = setting(None, "folder of the images, for data=imagenet and data=folder")
    frames: int = setting(0, "above 0: video, [N,C,D,H,W] with so many frames", minimum=0)
    input_channels: int = setting(3, "channels of the input", minimum=1)
    num_classes: int = setting(1000, "outputs", minimum=2)
    precision: str = setting("auto", "what the step runs under", choices=PRECISIONS)
    device: str = setting("auto", "where", choices=("auto", "cpu", "cuda"))
    backward: bool = setting(True, "false: inference only, in eval mode")
    measure: bool = setting(True, "time the step and each permuting copy")
    compile: bool = setting(False, "also ask inductor which graphs it lays out channels_last by itself")
    mixup: float = setting(0.2, "alpha of the MixUp that is looked at; 0 = none", minimum=0)
    cutmix: float = setting(1.0, "alpha of the CutMix that is looked at; 0 = none", minimum=0)
    json: str | None = setting(None, "write the whole report to this file")


@dataclass
class OperatorSettings:
    device: str = setting("auto", "where", choices=("auto", "cpu", "cuda"))
    out: str = setting("results", "folder for operators-<device>-torch<version>.json and .md")


def main(arguments: list[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        for schema in (AuditSettings, OperatorSettings):
            print(f"{schema.__name__.removesuffix('Settings').lower()}:")
            for field in dataclasses.fields(schema):
                print(f"  {field.name}: {field.metadata['help']}")
    elif "--operators" in arguments:
        operators([word for word in arguments if word != "--operators"])
    else:
        report = audit_model(settings_from_arguments(AuditSettings, arguments))
        print(report)
    return 0


def audit_model(cfg: AuditSettings) -> LayoutReport:
    """Build, convert and audit what the settings name; write the report where they say."""
    device = choose_device(cfg.device)
    precision = resolve_precision(cfg.precision, device)
    torch.manual_seed(0)
    model = models.build_model(
        cfg.model, num_classes=cfg.num_classes, weights=cfg.weights, image_size=cfg.image_size
    ).to(device)
    cast_model(model, precision).train(cfg.backward)
    if cfg.channels_last:
        print(memory_format.convert(model, cfg.conversion, cfg.select))
    images, targets = _batch(cfg, device, precision)

    def loss(output: Any) -> torch.Tensor:
        return loss_of(output, targets) if cfg.backward else torch.zeros(())

    report = audit(
        model, images, precision=precision, loss=loss, backward=cfg.backward, measure=cfg.measure, name=cfg.model
    )
    if cfg.backward:
        report.surroundings = _around(cfg, copy.deepcopy(model), images, targets, precision)
    if cfg.compile:
        report.compiled = _compiled(cfg, model, images, targets, precision)
    if cfg.json:
        Path(cfg.json).parent.mkdir(parents=True, exist_ok=True)
        Path(cfg.json).write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    return report


def _batch(cfg: AuditSettings, device: torch.device, precision: Precision) -> tuple[torch.Tensor, torch.Tensor]:
    if cfg.data != "noise":
        return _loaded_batch(cfg, device, precision)
    sides = [cfg.image_size, cfg.image_size]
    images = torch.randn(cfg.batch_size, cfg.input_channels, *([cfg.frames] if cfg.frames else []), *sides)
    images = images.to(device, precision.input_dtype)
    if cfg.channels_last and cfg.input_channels_last:
        images = images.to(memory_format=torch.channels_last_3d if cfg.frames else torch.channels_last)
    return images, torch.randint(cfg.num_classes, (cfg.batch_size,), device=device)


def _loaded_batch(cfg: AuditSettings, device: torch.device, precision: Precision) -> tuple[torch.Tensor, torch.Tensor]:
    """The first batch of the loader, as training gets it."""
    data = build_data(
        DataConfig(name=cfg.data, root=cfg.data_root, image_size=cfg.image_size, workers=0),
        AugmentConfig(),
        batch_size=cfg.batch_size,
        seed=0,
        dist=Dist(0, 0, 1, device),
    )
    is_last = cfg.channels_last and cfg.input_channels_last
    form = DeviceFormat(device, precision.input_dtype, torch.channels_last if is_last else torch.contiguous_format)
    try:
        batch = next(iter(data.train(0, form)))
        return batch.images.clone(), batch.targets.clone()
    finally:
        data.close()


def _around(
    cfg: AuditSettings, model: nn.Module, images: torch.Tensor, targets: torch.Tensor, precision: Precision
) -> list[Any]:
    masters = MasterWeights(model) if precision.master_weights else None
    optimizer = build_optimizer(OptimConfig(), model, trainable_parameters(model, masters), lr=1e-3)

    def loss(output: Any, wanted: torch.Tensor) -> torch.Tensor:
        return loss_of(output, wanted)

    mixes: dict[str, Mix] = {}
    for name in ("mixup", "cutmix"):
        augment = AugmentConfig()
        setattr(augment, name, 0.0 if cfg.frames else getattr(cfg, name))
        mix = label_mix(augment, cfg.num_classes, seed=0)
        if mix is not None:
            mixes[name] = lambda x, y, mix=mix: mix(x, y, 0, 0)  # type: ignore[misc]
    average = WeightAverage(model, 0.99).module
    with autocast(precision, images.device):
        return surroundings(model, images, targets, loss=loss, mixes=mixes, average=average, optimizer=optimizer)


def _compiled(
    cfg: AuditSettings, model: nn.Module, images: torch.Tensor, targets: torch.Tensor, precision: Precision
) -> list[dict[str, Any]]:
    def step(compiled: nn.Module) -> torch.Tensor:
        with autocast(precision, images.device):
            return loss_of(compiled(images), targets)

    return [dataclasses.asdict(graph) for graph in compiled_graphs(copy.deepcopy(model), step, cfg.backward)]


def operators(arguments: list[str]) -> None:
    """Measure the operator table; with `--diff OLD.json` print what changed since."""
    old: dict[str, Any] | None = None
    if "--diff" in arguments:
        position = arguments.index("--diff")
        if position + 1 >= len(arguments):
            raise ConfigError(
                "--diff needs the .json of an older table, for instance --diff results/operators-....json"
            )
        old = operator_table.read(Path(arguments[position + 1]))
        arguments = arguments[:position] + arguments[position + 2 :]
    cfg = settings_from_arguments(OperatorSettings, arguments)
    table = operator_table.measure(choose_device(cfg.device))
    if old is not None:
        changes = operator_table.diff(old, table)
        print(markdown_table(changes) if changes else f"no operator changed since torch {old['torch']}")
        return
    print(operator_table.markdown(table))
    json_path = operator_table.write(table, Path(cfg.out))
    print(f"written: {json_path} and {json_path.with_suffix('.md')}")
