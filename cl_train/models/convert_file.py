"""Converting a saved model from file to file, and proving that the new file computes what the old one did."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from cl_train.config.schema import ConfigError
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import to_memory_format
from cl_train.models import registry as models
from cl_train.models.saved_models import SavedModel, read, write

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
    values_equal = old.keys() == new.keys() and all(_same_values(old[name], new[name]) for name in old)
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
    arguments, named = _inputs(before, input_shape, dtype)
    try:
        expected = _output(reference, arguments, named, torch.contiguous_format)
        found = _output(converted, arguments, named, _torch_format(memory_format))
    except Exception as error:  # whatever a model does with images of another shape than its own
        why = (str(error) or type(error).__name__).strip().splitlines()[-1][:200]
        return None, None, f"the model does not run on {list(input_shape)} ({why}); give input=N,C,H,W"
    scale = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    difference = ((expected - found).abs().max() / scale).item()
    return difference, TOLERANCES.get(dtype, HALF_TOLERANCE), ""


def _runnable(saved: SavedModel, model_name: str | None) -> nn.Module | None:
    if saved.kind == "TorchScript":
        return copy.deepcopy(saved.content).eval()
    if saved.kind == "exported program":
        return saved.content.module()
    facts = saved.content.get("facts", {}) if saved.kind == "checkpoint" else {}
    name = model_name or facts.get("model")
    if name is None:
        return None
    weights = saved.weights()
    image_size = facts.get("config", {}).get("data", {}).get("image_size")
    model = models.build_model(name, num_classes=facts.get("num_classes", 1000), image_size=image_size)
    own = model.state_dict()
    other = [value for name, value in weights.items() if name in own and own[name].shape != value.shape]
    if other and other[0].dim() > 0:  # the classifier's, whose first dimension is the number of classes
        model = models.build_model(name, num_classes=len(other[0]), image_size=image_size)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(f"model={name} does not fit the file: {' '.join(str(error).split())[:300]}") from error
    return model.eval()


def _inputs(saved: SavedModel, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Positional and named inputs: noise, in the shapes of an exported program's own examples."""
    generator = torch.Generator().manual_seed(0)

    def noise(example: Any) -> Any:
        is_real = isinstance(example, torch.Tensor) and example.is_floating_point()
        return torch.randn(example.shape, generator=generator).to(example.dtype) if is_real else example

    if saved.kind == "exported program" and saved.content.example_inputs is not None:
        arguments, named = tree_map(noise, saved.content.example_inputs)
        return arguments, named
    return (torch.randn(shape, generator=generator).to(dtype),), {}


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN equals NaN: a diverged model's file is copied as faithfully as any."""
    if one.is_floating_point() and one.dtype == other.dtype and one.shape == other.shape:
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return torch.equal(one, other)


def _output(
    model: nn.Module, arguments: Any, named: dict[str, Any], memory_format: torch.memory_format
) -> torch.Tensor:
    def laid_out(value: Any) -> Any:
        is_image = isinstance(value, torch.Tensor) and value.dim() in (4, 5)
        return to_memory_format(value, memory_format) if is_image else value

    arguments, named = tree_map(laid_out, (arguments, named))
    with torch.no_grad():
        return _first_tensor(model(*arguments, **named))


def _first_tensor(output: Any) -> torch.Tensor:
    return next(leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))


def _torch_format(memory_format: str) -> torch.memory_format:
    return torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
