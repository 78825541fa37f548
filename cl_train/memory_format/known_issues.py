"""Known crashes and wrong results of channels_last; docs/channels_last.md has what is only slow."""

import torch
from torch import nn


def known_issues(model: nn.Module, *, device: torch.device | str) -> list[str]:
    """What is known to crash or to be wrong in channels_last on `device`, one line each. The model is not run."""
    if torch.device(device).type == "mps":
        return ["MPS had wrong or crashing channels_last backward passes (pytorch/pytorch#141009, #143196)"]
    if torch.device(device).type != "cpu":
        return []
    found = [name or "the model" for name, module in model.named_modules() if known_crash(module)]
    more = f" and {len(found) - 2} more" if len(found) > 2 else ""
    return [f"{', '.join(found[:2])}{more}: {ONEDNN_CRASH}"] if found else []


# Tried: torch 2.15, images of 8 to 320 px. AVX-512: 1 to 15 channels, fp32 and bf16, above 64 px; AVX2: 1 to 7, fp32.
ONEDNN_CRASH = (
    "PyTorch's oneDNN crashes in the weight gradient of a 1x1 convolution with stride >= 2 and fewer than 16 input "
    "channels, in channels_last on a CPU (found with torch 2.15)"
)


def known_crash(module: nn.Module) -> str | None:
    """Why a layer can crash on a CPU in channels_last; None if nothing is known."""
    if not isinstance(module, nn.Conv2d) or module.groups > 1 or module.in_channels >= 16:
        return None
    is_strided_1x1 = max(module.kernel_size) == 1 and max(module.stride) > 1 and not any(module.padding)
    return ONEDNN_CRASH if is_strided_1x1 else None
