"""Inputs and outputs of any model: a batch or an output may be a tensor, or dicts, lists and objects that hold some."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from cl_train.config.schema import ConfigError
from cl_train.memory_format.convert import in_format

LossFunction = Callable[[Any], torch.Tensor]

_TORCH = str(Path(torch.__file__).parent)


def call_model(model: nn.Module, batch: Any) -> Any:
    """`model` on its input, a tuple of its inputs, or a dict of its keyword arguments; a list is one input."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def place_batch(batch: Any, device: torch.device, dtype: torch.dtype | None, memory_format: torch.memory_format) -> Any:
    """A copy of `batch` on `device`: floating tensors in `dtype`, those with 4 or 5 dimensions in `memory_format`."""

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        placed = value.detach().to(device, dtype if value.is_floating_point() else None, copy=True)
        return in_format(placed, memory_format) if placed.dim() in (4, 5) else placed

    return tree_map(place, batch)


def output_tensors(output: Any, select: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors in a model's output by name: `output`, or `out`, `0`, `heads.0` inside dicts, lists and objects.

    Args:
        select: keep the tensor of this name, or those inside it.

    Raises:
        ConfigError: no tensor, or none of the selected name.
    """
    found: dict[str, torch.Tensor] = {}
    _collect(output, "", found)
    if not found:
        raise ConfigError(
            f"the model returned {type(output).__name__} without a tensor: wrap it in a module that returns one"
        )
    if select is None:
        return found
    chosen = {name: value for name, value in found.items() if name == select or name.startswith(f"{select}.")}
    if not chosen:
        raise ConfigError(f"output={select}: the model returned {', '.join(list(found)[:8])}")
    return chosen


def _collect(value: Any, name: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[name or "output"] = value
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif hasattr(value, "_asdict"):
        items = value._asdict().items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value) or type(value).__module__ != "builtins":
        items = getattr(value, "__dict__", {}).items()
    for key, item in items:
        _collect(item, f"{name}.{key}" if name else str(key), found)


def mean_square(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A loss for any output, whose gradient has the output's layout (that of a mean is a broadcast, contiguous)."""
    floats = [value for value in tensors.values() if value.is_floating_point() or value.is_complex()]
    squares = [value.abs().float().square().sum() / max(1, value.numel()) for value in floats]
    return torch.stack(squares).sum() if squares else torch.zeros(())


def explain(error: BaseException) -> str:
    """An exception of the user's model in one line: kind, reason, the line of code outside torch, and the remedy."""
    reason = " ".join(str(error).split())[:240] or "no message"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_TORCH)]
    frames = [frame for frame in frames if "/cl_train/" not in frame.filename]
    place = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    remedy = ""
    if "view size is not compatible" in str(error):
        remedy = "; use .reshape(...) in place of .view(...), which needs contiguous memory"
    return f"{type(error).__name__}: {reason}{place}{remedy}"
