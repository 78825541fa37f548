"""Converting a saved model from file to file, and proving that the new file computes what the old one did."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cl_train import models
from cl_train.config import ConfigError
from cl_train.memory_format import convert, in_format
from cl_train.saved_models import SavedModel, read, write

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}  # of the largest output; layouts sum in another order
HALF_TOLERANCE = 2e-2


@dataclass(frozen=True)
class FileConversion:
    """What became of a file. `difference`: largest of the outputs, relative to the largest output; None = not run."""

    kind: str
    tensors: int
    stored_before: str
    memory_format: str
    bytes_before: int
    bytes_after: int
    values_equal: bool
    difference: float | None
    tolerance: float | None
    note: str

    @property
    def passed(self) -> bool:
        return self.values_equal and (self.difference is None or self.difference <= (self.tolerance or 0.0))

    def __str__(self) -> str:
        lines = [
            f"{self.kind}: {self.tensors} tensors, stored {self.stored_before} before and contiguous now; "
            f"recorded layout: {self.memory_format}",
            f"{self.bytes_before / 2**20:.2f} MiB before, {self.bytes_after / 2**20:.2f} MiB after",
            f"values read back: {'equal, bit by bit' if self.values_equal else 'NOT EQUAL'}",
        ]
        if self.difference is None:
            lines.append(f"outputs: not compared ({self.note})")
        else:
            verdict = "equal" if self.passed else "NOT EQUAL"
            lines.append(
                f"outputs before (contiguous) and after ({self.memory_format}): {verdict}, largest difference "
                f"{self.difference:.1e} of the largest output (allowed {self.tolerance:.0e})"
            )
        return "\n".join(lines)


def convert_file(
    source: Path,
    target: Path,
    *,
    memory_format: str = "channels_last",
    model_name: str | None = None,
    input_shape: tuple[int, ...] = (2, 3, 224, 224),
) -> FileConversion:
    """Write `source` to `target` with `memory_format` recorded, read it back, and compare values and outputs.

    Args:
        memory_format: "channels_last" or "contiguous": what the model is for once loaded.
        model_name: builds the model that a file of weights belongs to; a checkpoint of ours knows its own.
        input_shape: of the images for the comparison; an exported program brings its own.

    Raises:
        ConfigError: see `saved_models.read`; `target` is `source`; the weights do not fit the model.
    """
    if target.resolve() == source.resolve():
        raise ConfigError(f"{target}: the converted file must have another name than the original")
    before = read(source)
    write(before, target, memory_format)
    after = read(target)
    old, new = before.weights(), after.weights()
    values_equal = old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    difference, tolerance, note = _compare_outputs(before, after, memory_format, model_name, input_shape)
    return FileConversion(
        before.kind,
        len(new),
        before.stored,
        memory_format,
        source.stat().st_size,
        target.stat().st_size,
        values_equal,
        difference,
        tolerance,
        note,
    )


def load_model(path: Path, model_name: str | None = None) -> nn.Module:
    """The model of a file, in eval mode, in the layout that is recorded in the file (contiguous where none is).

    Raises:
        ConfigError: see `saved_models.read`; a file of weights without `model_name`.
    """
    saved = read(path)
    model = _runnable(saved, model_name)
    if model is None:
        raise ConfigError(f"{path}: holds weights only; say which model they are of (model=<name>)")
    convert(model, memory_format=_torch_format(saved.memory_format or "contiguous"))
    return model


def _compare_outputs(
    before: SavedModel, after: SavedModel, memory_format: str, model_name: str | None, input_shape: tuple[int, ...]
) -> tuple[float | None, float | None, str]:
    reference, converted = _runnable(before, model_name), _runnable(after, model_name)
    if reference is None or converted is None:
        return None, None, "model=<name> would build the model that these weights are of"
    convert(reference, memory_format=torch.contiguous_format)
    convert(converted, memory_format=_torch_format(memory_format))
    dtype = next((p.dtype for p in reference.parameters() if p.is_floating_point()), torch.float32)
    inputs = _inputs(before, input_shape, dtype)
    images = tuple(in_format(x, _torch_format(memory_format)) if x.dim() in (4, 5) else x for x in inputs)
    with torch.no_grad():
        expected, found = _first_tensor(reference(*inputs)), _first_tensor(converted(*images))
    scale = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    difference = ((expected - found).abs().max() / scale).item()
    return difference, TOLERANCES.get(dtype, HALF_TOLERANCE), ""


def _runnable(saved: SavedModel, model_name: str | None) -> nn.Module | None:
    if saved.kind == "TorchScript":
        return copy.deepcopy(saved.content).eval()
    if saved.kind == "exported program":
        return saved.content.module()
    weights = saved.weights()
    name = model_name
    if saved.kind == "checkpoint":
        name = name or saved.content.get("facts", {}).get("model")
    if name is None:
        return None
    model = models.build_model(name, num_classes=1000)
    head = [key for key in model.state_dict() if key.endswith("bias")][-1:]
    classes = len(weights[head[0]]) if head and head[0] in weights else 1000
    if classes != 1000:
        model = models.build_model(name, num_classes=classes)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(f"model={name} does not fit the file: {' '.join(str(error).split())[:300]}") from error
    return model.eval()


def _inputs(saved: SavedModel, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    if saved.kind == "exported program" and saved.content.example_inputs is not None:
        examples = saved.content.example_inputs[0]
        return tuple(torch.randn(example.shape, generator=generator).to(example.dtype) for example in examples)
    return (torch.randn(shape, generator=generator).to(dtype),)


def _first_tensor(output: Any) -> torch.Tensor:
    return next(leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))


def _torch_format(memory_format: str) -> torch.memory_format:
    return torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
