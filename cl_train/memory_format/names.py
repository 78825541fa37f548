"""The one translation between a `torch.memory_format` and its name in configurations and records."""

from __future__ import annotations

import torch

_NAMES = {
    torch.contiguous_format: "contiguous",
    torch.channels_last: "channels_last",
    torch.channels_last_3d: "channels_last_3d",
}


def name_of(memory_format: torch.memory_format) -> str:
    """`channels_last`, `channels_last_3d` or `contiguous`."""
    return _NAMES[memory_format]


def memory_format_named(name: str) -> torch.memory_format:
    """The inverse of `name_of`. Raises ValueError: no memory format has this name."""
    for memory_format, known in _NAMES.items():
        if known == name:
            return memory_format
    raise ValueError(f"{name!r} is not a memory format; use {', '.join(_NAMES.values())}")
