"""One model of a zoo, looked at from all sides: converted, compared, audited and timed in both memory formats."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from cl_train.comparison.paired import CHANNELS_LAST, CONTIGUOUS, Effort, Workload, benchmark_layouts
from cl_train.comparison.parity import check_parity
from cl_train.memory_format.audit import audit
from cl_train.memory_format.convert import convert
from cl_train.models import registry as models
from cl_train.step.precision import Precision, cast_model
from cl_train.step.train_step import loss_of

# The models of the tutorial "Channels Last Memory Format in PyTorch": "full support ... 8%-35% gains on Volta devices".
TUTORIAL = (
    "alexnet", "mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3", "mobilenet_v2", "resnet101", "resnet152",
    "resnet18", "resnet34", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0",
    "shufflenet_v2_x1_5", "shufflenet_v2_x2_0", "squeezenet1_0", "squeezenet1_1", "vgg11", "vgg11_bn", "vgg13",
    "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn", "wide_resnet101_2", "wide_resnet50_2",
)  # fmt: skip

# Ten families of timm: what a layout may meet in each is said behind it.
TIMM = (
    "timm/resnet50_gn",  # GroupNorm
    "timm/resnetv2_50",  # pre-activation, weight-standardised convolutions and GroupNorm
    "timm/nfnet_l0",  # scaled weight standardisation, no normalisation
    "timm/mobilenetv3_small_100",  # depthwise, squeeze and excitation
    "timm/efficientnet_lite0",  # depthwise
    "timm/regnety_002",  # grouped convolutions
    "timm/convnext_atto",  # LayerNorm in channels_last order
    "timm/mobilevit_xxs",  # convolutions and attention
    "timm/vit_tiny_patch16_224",  # attention alone
    "timm/resnet10t:1",  # a deep stem, on one input channel
)

GROUPS = ("tutorial", "torchvision", "timm")
SMALL, FIXED = 64, 224
# These are built for their image size; all others take a small one.
_FIXED_SIZE = ("vit_", "maxvit", "timm/vit_", "timm/mobilevit")
_MOST_PARITY_PARAMETERS = 200e6  # parity keeps four copies, one in float64


@dataclass(frozen=True)
class Look:
    """How the models of a zoo are looked at; equal for all rows of a table."""

    device: str
    precision: str
    batch_size: int
    image_size: int | None  # None = small where the model permits, for a look without speed
    speed: bool
    speed_s: float  # seconds of timing per model and mode


def group_names(group: str) -> list[str]:
    """The models of a group."""
    return {"tutorial": list(TUTORIAL), "torchvision": models.model_names(), "timm": list(TIMM)}[group]


def image_size_of(name: str, look: Look) -> int:
    """Side of the images that `name` is looked at with, pixels."""
    if name == "inception_v3":
        return models.usual_image_size(name)
    if name.startswith(_FIXED_SIZE):
        return FIXED
    return look.image_size or SMALL


def look_at(name: str, look: Look, precision: Precision) -> dict[str, Any]:
    """One row: conversion, parity, audit, speed and memory of both layouts, and a verdict.

    `name` may end in ":1", which means one input channel (timm only).
    """
    started = time.perf_counter()
    device = torch.device(look.device)
    model, channels = _build(name)
    size = image_size_of(name, look)
    convolutions = sum(isinstance(module, nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d) for module in model.modules())
    row: dict[str, Any] = {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "convolutions": convolutions,
        "image_size": size,
        "batch_size": look.batch_size,
    }
    row["parity"] = _parity(model, row["parameters"], precision, device, size, channels)
    row |= _convert_and_audit(model, name, look, precision, device, size, channels)
    if look.speed:
        row |= _speeds(name, look, precision, device, size)
    row["verdict"] = verdict(row)
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def _build(name: str) -> tuple[nn.Module, int]:
    torch.manual_seed(0)
    plain, _, channels = name.partition(":")
    if not channels.isdigit():
        return models.build_model(name, num_classes=1000, image_size=FIXED), 3
    import timm

    return timm.create_model(plain.removeprefix("timm/"), in_chans=int(channels)), int(channels)


def _parity(
    model: nn.Module, parameters: int, precision: Precision, device: torch.device, size: int, channels: int
) -> dict[str, Any]:
    if parameters > _MOST_PARITY_PARAMETERS:
        return {"passed": None, "why": f"not run: {parameters / 1e6:.0f} million parameters"}
    # A Linear layer has no memory format. Its inputs and outputs are compared; the gradients of its weights, most of
    # the parameters of AlexNet and VGG, are left out.
    frozen = [module.requires_grad_(False) for module in model.modules() if isinstance(module, nn.Linear)]
    report = check_parity(
        model,
        image_size=size,
        precision=precision,
        device=device,
        batch_size=2,
        input_channels=channels,
        steps=1,
    )
    for module in frozen:
        module.requires_grad_(True)
    result: dict[str, Any] = {"passed": report.passed, "why": str(report)}
    if report.worst is not None:
        result["worst"] = asdict(report.worst)
    return result


def _convert_and_audit(
    model: nn.Module, name: str, look: Look, precision: Precision, device: torch.device, size: int, channels: int
) -> dict[str, Any]:
    model = cast_model(model.to(device), precision)
    conversion = convert(model)
    images = torch.randn(2, channels, size, size).to(device, precision.input_dtype, memory_format=torch.channels_last)
    targets = torch.zeros(2, dtype=torch.int64, device=device)
    report = audit(model, images, precision=precision, loss=_loss_on(targets), name=name, measure=look.speed)
    lost = {way: _counted([(_plain(c.operator), c.count) for c in report.of("lost", way)]) for way in _WAYS}
    return {
        "converted": len(conversion.changed),
        "ambiguous_weights": len(conversion.ambiguous),
        "audit": {
            **report.totals,
            "moved_pct": round(report.moved_pct, 2),
            "copy_ms": report.copy_ms,
            "lost_forward": lost["forward"],
            "lost_backward": lost["backward"],
            "verdict": report.verdict(),
        },
    }


_WAYS = ("forward", "backward")


def _loss_on(targets: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    return lambda output: loss_of(output, targets)


def _plain(operator: str) -> str:
    return operator.removeprefix("aten.").partition(".")[0]


def _counted(pairs: list[tuple[str, int]]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for operator, count in pairs:
        counts[operator] = counts.get(operator, 0) + count
    return counts


def _speeds(name: str, look: Look, precision: Precision, device: torch.device, size: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for mode in ("train", "infer"):
        model, channels = _build(name)
        workload = Workload(look.batch_size, size, precision, device, mode=mode, input_channels=channels)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = benchmark_layouts(model, workload, (CONTIGUOUS, CHANNELS_LAST), Effort(time_limit_s=look.speed_s))
        first, second = done.of(CONTIGUOUS), done.of(CHANNELS_LAST)
        result[mode] = {
            "contiguous_images_per_s": round(first.images_per_s, 2),
            "channels_last_images_per_s": round(second.images_per_s, 2),
            "ratio": round(second.versus_first.ratio, 4),
            "ci95": [round(second.versus_first.low, 4), round(second.versus_first.high, 4)],
            "verdict": second.verdict,
            "batch_size": done.batch_size,
            "contiguous_peak_memory_gib": first.peak_memory_gib,
            "channels_last_peak_memory_gib": second.peak_memory_gib,
        }
    return result


def verdict(row: dict[str, Any]) -> str:
    """A few words: correctness first, then speed where it was measured, then what is lost."""
    if row["parity"]["passed"] is False:
        return "do not use: the layouts compute different things"
    if row["convolutions"] == 0:
        return "no convolution: nothing to gain"
    words = []
    if "train" in row:
        words.append(f"train {row['train']['verdict']} ({row['train']['ratio']:.2f}x)")
        words.append(f"infer {row['infer']['verdict']} ({row['infer']['ratio']:.2f}x)")
    lost, moved = row["audit"]["lost"], row["audit"]["moved_pct"]
    kept = "keeps the layout" if lost == 0 else f"loses the layout in {lost} call{'s' if lost > 1 else ''}"
    words.append(f"{kept}, {moved:.1f} % of the step's bytes moved")
    return "; ".join(words)
