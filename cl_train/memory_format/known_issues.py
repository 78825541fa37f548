"""Known reasons why channels_last may not be faster for a model on a machine, each with its source.

Most depend on the version of PyTorch or cuDNN, so every line ends with the command that measures.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cl_train.memory_format.layout import CONVOLUTIONS
from cl_train.step.precision import VOLTA

MEASURE = "measure: channels_last=auto"

_UTILITY = "torch.nn.utils.convert_conv2d_weight_memory_format"  # its docstring is the source


def known_issues(model: nn.Module, *, device: torch.device | str, precision_name: str) -> list[str]:
    """Reasons why channels_last may not be faster here, one line each; empty if none is known. The model is not run.

    Args:
        precision_name: a resolved name, never "auto" (see `precision.resolve_precision`).
    """
    device = torch.device(device)
    return [f"{reason}; {MEASURE}" for reason in _model_issues(model, device) + _device_issues(device, precision_name)]


def _model_issues(model: nn.Module, device: torch.device) -> list[str]:
    def names(condition: Callable[[Any], bool], modules: dict[str, nn.Module]) -> str:
        found = [name or "(top)" for name, module in modules.items() if condition(module)]
        return ", ".join(found[:2]) + (f" and {len(found) - 2} more" if len(found) > 2 else "")

    modules = dict(model.named_modules())
    convolutions: dict[str, Any] = {
        name: module for name, module in modules.items() if isinstance(module, CONVOLUTIONS)
    }
    reasons = []
    if not convolutions:
        reasons.append(f"the model has no convolutions, and other operators do not get faster ({_UTILITY})")
    elif all(map(_is_patch_embedding, convolutions.values())):
        found = names(_is_patch_embedding, convolutions)
        reasons.append(f"the only convolutions are patch embeddings ({found}); the rest is attention ({_UTILITY})")
    elif next(iter(convolutions.values())).in_channels == 1:
        reasons.append("a batch with one channel is ambiguous: it is in both formats (pytorch/pytorch#24090)")
    if grouped := names(lambda module: 1 < module.groups < module.in_channels, convolutions):
        reasons.append(
            f"grouped convolutions with more than one channel per group ({grouped}) were up to 40 times slower in "
            "cuDNN's channels_last kernels; conversion=select can leave them contiguous (pytorch/pytorch#34977)"
        )
    if computed := names(_computes_its_weight, convolutions):
        reasons.append(
            f"the weights of {computed} are computed in each forward pass (weight standardisation or a "
            "parametrisation) and may be contiguous, so that each step copies them (pytorch/pytorch#121158)"
        )
    group_norms = names(lambda module: isinstance(module, nn.GroupNorm), modules)
    if group_norms and device.type == "cuda":
        reasons.append(
            f"GroupNorm ({group_norms}) returns contiguous on CUDA before pytorch/pytorch#191945, so that each "
            "convolution after it copies its input (pytorch/pytorch#111824)"
        )
    if instance_norms := names(lambda module: "InstanceNorm" in type(module).__name__, modules):
        reasons.append(f"InstanceNorm ({instance_norms}) returns contiguous (pytorch/pytorch#111824)")
    return reasons


def _is_patch_embedding(module: Any) -> bool:
    return tuple(module.kernel_size) == tuple(module.stride) and max(module.kernel_size) > 1


def _computes_its_weight(module: nn.Module) -> bool:
    """Weight standardisation is recognised by the class names of timm, Detectron2 and others."""
    kind = type(module).__name__
    is_standardised = any(word in kind for word in ("StdConv", "WSConv", "WeightStandard", "ScaledStd"))
    return is_standardised or nn.utils.parametrize.is_parametrized(module) or hasattr(module, "weight_g")


def _device_issues(device: torch.device, precision_name: str) -> list[str]:
    if device.type == "mps":
        return ["MPS had wrong or crashing channels_last backward passes (pytorch/pytorch#141009, #143196)"]
    if torch.version.hip:
        return [
            "ROCm needs PYTORCH_MIOPEN_SUGGEST_NHWC=1 for channels_last kernels, and is slower with them on some GPUs "
            "(pytorch/pytorch#63617, #170947)"
        ]
    if device.type != "cuda":
        return []
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < VOLTA:
        return [f"compute capability {major}.{minor} is below 7.0 and has no tensor cores ({_UTILITY})"]
    if precision_name == "fp32":
        return [
            "fp32 does not use tensor cores, and was slower in channels_last on V100; fp16, bf16 and tf32 do "
            "(pytorch/pytorch#44943)"
        ]
    return []
