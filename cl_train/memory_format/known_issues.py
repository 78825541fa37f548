"""Advice before a run: reasons to doubt that channels_last is faster for this model on this machine, with their source.

Versions of PyTorch and cuDNN change most of these answers, so every line ends in the command that measures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import nn

MEASURE = "measure: channels_last=auto"
VOLTA = (7, 0)  # the first tensor cores

Convolution = nn.Conv2d | nn.ConvTranspose2d | nn.Conv3d | nn.ConvTranspose3d


def advice(
    model: nn.Module,
    *,
    device: torch.device | str,
    precision_name: str,
    compute_capability: tuple[int, int] | None = None,
    input_channels: int = 3,
    sync_batchnorm: bool = False,
    platform: str | None = None,
) -> list[str]:
    """Reasons to doubt channels_last here, one line each; empty where none is known.

    Args:
        model: looked at, not run.
        precision_name: a resolved name, never "auto" (see `precision.resolve_precision`).
        compute_capability: of the CUDA device; None = what `device` has, where it is a CUDA device of this machine.
        platform: "linux", "win32", "darwin", or "rocm"; None = this machine's.
    """
    device = torch.device(device)
    platform = platform or ("rocm" if torch.version.hip else sys.platform)
    if compute_capability is None and device.type == "cuda" and torch.cuda.is_available():
        compute_capability = torch.cuda.get_device_capability(device)
    convolutions = {name: module for name, module in model.named_modules() if isinstance(module, Convolution)}
    reasons = [*_about_convolutions(convolutions), *_about_modules(model, device, sync_batchnorm)]
    reasons += _about_device(device, precision_name, compute_capability, platform)
    if input_channels == 1:
        reasons.append(
            "one input channel: the batch is contiguous and channels_last at once, so an operator may take it for "
            "either (pytorch/pytorch#24090)"
        )
    return [f"{reason}; {MEASURE}" for reason in reasons]


def _about_convolutions(convolutions: dict[str, Convolution]) -> list[str]:
    if not convolutions:
        return [
            "the model has no convolutions, and nothing else gains (torch.nn.utils.convert_conv2d_weight_memory_format)"
        ]
    reasons = []
    if all(_is_patch_embedding(module) for module in convolutions.values()):
        reasons.append(
            f"its only convolutions cut the image into patches ({_names(convolutions)}): the rest of the model has no "
            "channels to put last (torch.nn.utils.convert_conv2d_weight_memory_format)"
        )
    grouped = [name for name, module in convolutions.items() if 1 < module.groups < module.in_channels]
    if grouped:
        reasons.append(
            f"grouped convolutions with more than one channel per group ({_names(grouped)}) were up to 40 times slower "
            "with cuDNN's channels_last kernels; conversion=select can leave them (pytorch/pytorch#34977)"
        )
    standardised = [name for name, module in convolutions.items() if _computes_its_weight(module)]
    if standardised:
        reasons.append(
            f"weights that are computed in each forward ({_names(standardised)}), standardised or parametrised, may "
            "come out contiguous and be copied each step (pytorch/pytorch#121158)"
        )
    return reasons


def _is_patch_embedding(module: Convolution) -> bool:
    return tuple(module.kernel_size) == tuple(module.stride) and max(module.kernel_size) > 1


def _computes_its_weight(module: Convolution) -> bool:
    """Weight standardisation (StdConv2d, WSConv2d, ... by name, as each library has its own) or a parametrisation."""
    kind = type(module).__name__
    named_so = any(word in kind for word in ("StdConv", "WSConv", "WeightStandard", "ScaledStd"))
    return named_so or nn.utils.parametrize.is_parametrized(module) or hasattr(module, "weight_g")


def _about_modules(model: nn.Module, device: torch.device, sync_batchnorm: bool) -> list[str]:
    reasons = []
    modules = dict(model.named_modules())
    group_norms = [name for name, module in modules.items() if isinstance(module, nn.GroupNorm)]
    instance_norms = [name for name, module in modules.items() if "InstanceNorm" in type(module).__name__]
    if group_norms and device.type == "cuda":
        reasons.append(
            f"GroupNorm ({_names(group_norms)}) returns contiguous on CUDA before the kernel of "
            "pytorch/pytorch#191945, so each convolution after it copies (pytorch/pytorch#111824)"
        )
    if instance_norms:
        reasons.append(f"InstanceNorm ({_names(instance_norms)}) returns contiguous (pytorch/pytorch#111824)")
    if sync_batchnorm or any(isinstance(module, nn.SyncBatchNorm) for module in modules.values()):
        reasons.append(
            "SyncBatchNorm was slower in channels_last until torch 1.9 (2-D) and 2.0 (3-D) (pytorch/pytorch#50549)"
        )
    return reasons


def _about_device(
    device: torch.device, precision_name: str, compute_capability: tuple[int, int] | None, platform: str
) -> list[str]:
    reasons = []
    if device.type == "mps":
        reasons.append("MPS has had wrong or crashing channels_last backward passes (pytorch/pytorch#141009, #143196)")
    if platform == "rocm":
        reasons.append(
            "ROCm: channels_last kernels are opt-in (PYTORCH_MIOPEN_SUGGEST_NHWC=1) and regress on some GPUs "
            "(pytorch/pytorch#63617, #170947)"
        )
    elif device.type == "cuda" and compute_capability is not None:
        if compute_capability < VOLTA:
            major, minor = compute_capability
            reasons.append(
                f"compute capability {major}.{minor} is below 7.0: no tensor cores, which the gain comes from "
                "(torch.nn.utils.convert_conv2d_weight_memory_format)"
            )
        elif precision_name == "fp32":
            reasons.append(
                "fp32 does not use tensor cores, and was slower in channels_last on V100; precision=fp16, bf16 or tf32 "
                "does (pytorch/pytorch#44943)"
            )
    if platform == "win32" and device.type == "cuda":
        reasons.append("Windows: the extra layout kernels meet the launch cost of WDDM (ultralytics/ultralytics#26105)")
    return reasons


def _names(names: Iterable[str]) -> str:
    """The first few of a list of module names."""
    listed = list(names)
    more = f" and {len(listed) - 2} more" if len(listed) > 2 else ""
    return ", ".join(listed[:2]) + more
