"""Convert a saved model from file to file, and check that outputs do not change."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from cl_train.config.schema import ConfigError
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import CHANNELS_LAST, MEMORY_FORMAT_NAMES, to_memory_format
from cl_train.memory_format.model_call import failure_explained, output_tensors
from cl_train.models import sources as models
from cl_train.models.program_file import read_program, write_program
from cl_train.models.weights_file import PROGRAMS, SavedModel, kind_of, read_weights, write_weights

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}  # of the largest output; the formats sum in another order
HALF_TOLERANCE = 2e-2


@dataclass
class FileConversion:
    """What was converted, and whether values and outputs are the same."""

    kind: str
    taken: str
    tensors: int
    stored_before: str
    memory_format: str
    values_equal: bool
    difference: float | None = None  # the largest difference of the outputs / the largest output; None: not compared
    tolerance: float | None = None
    problems: list[str] = field(default_factory=list)  # why equal outputs are not confirmed

    @property
    def passed(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [
            f"{self.kind}{f', {self.taken}' if self.taken else ''}: {self.tensors} tensors, {self.stored_before} "
            f"before and contiguous now; recorded memory format: {self.memory_format}",
            f"values read back: {'equal' if self.values_equal else 'NOT EQUAL'}",
        ]
        if self.difference is not None:
            lines.append(
                f"outputs, contiguous against {self.memory_format}: largest difference {self.difference:.1e} of the "
                f"largest output (allowed: {self.tolerance:.0e})"
            )
        return "\n".join(lines + self.problems)


def convert_file(
    source: Path,
    target: Path,
    *,
    memory_format: torch.memory_format = torch.channels_last,
    model_name: str | None = None,
    input_shape: tuple[int, ...] = (2, 3, 224, 224),
    entry: str | None = None,
    prefix: str | None = None,
    output: str | int | None = None,
    trust: bool = False,
) -> FileConversion:
    """Write `source` to `target` with `memory_format` recorded, read it back, and compare values and outputs.

    Args:
        memory_format: the format of the model once it is loaded; on disk all tensors are contiguous.
        model_name: builds the model that the weights belong to; a checkpoint of cl_train names its own.
        input_shape: of the random images for the comparison; an exported program has its own shapes.
        entry, prefix: see `read_weights`.
        output: the entry of the model's output to compare; None: all floating-point tensors.
        trust: load a TorchScript or exported program, which runs its code.

    Raises ConfigError: see `read_weights` and `read_program`; `target` is `source`; the weights do not fit the model.
    """
    if target.resolve() == source.resolve():
        raise ConfigError(f"{target}: the converted file must have another name than the original")
    recorded = MEMORY_FORMAT_NAMES[memory_format]
    before = _read(source, trust, entry, prefix)
    if before.program is None or target.suffix == ".safetensors":
        write_weights(before, target, recorded)
        after = read_weights(target)
    else:
        write_program(before.program, target, recorded)
        after = read_program(target, before.kind)
    is_equal = _same_values(before.tensors, after.tensors)
    result = FileConversion(before.kind, before.taken, len(after.tensors), before.stored, recorded, is_equal)
    if not is_equal:
        result.problems.append("not converted: the values read back differ")
    if not any(tensor.dim() in CHANNELS_LAST for tensor in after.tensors.values()):
        result.problems.append(
            "not converted: the file has no tensor of 4 or 5 dimensions (a frozen program holds its weights as "
            "constants; convert it before torch.jit.freeze)"
        )
    _compare_outputs(result, before, after, model_name, memory_format, input_shape, output)
    return result


def load_model(path: Path, model_name: str | None = None, *, trust: bool = False) -> nn.Module:
    """The model of a file, in eval mode, in the recorded memory format; contiguous if there is none, or if it is mixed.

    Raises ConfigError: see `read_weights` and `read_program`; a file of weights without `model_name`.
    """
    saved = _read(path, trust)
    model = _runnable(saved, model_name)
    if model is None:
        raise ConfigError(f"{path}: holds weights only; name the model that they belong to (model=<name>)")
    named = {name: memory_format for memory_format, name in MEMORY_FORMAT_NAMES.items()}
    convert(model, memory_format=named.get(str(saved.recorded), torch.contiguous_format))
    return model


def _read(path: Path, trust: bool, entry: str | None = None, prefix: str | None = None) -> SavedModel:
    kind = kind_of(path)
    if kind in PROGRAMS and trust:
        return read_program(path, kind)
    return read_weights(path, entry=entry, prefix=prefix)


def _same_values(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    """Equality where NaN equals NaN, because a diverged model is copied exactly too."""
    return before.keys() == after.keys() and all(
        (one.dtype, one.shape) == (other.dtype, other.shape)
        and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        for one, other in ((value, after[name]) for name, value in before.items())
    )


def _compare_outputs(
    result: FileConversion,
    before: SavedModel,
    after: SavedModel,
    model_name: str | None,
    memory_format: torch.memory_format,
    input_shape: tuple[int, ...],
    output: str | int | None,
) -> None:
    """Fill in the difference of the outputs, or why they are not compared."""
    own_name = before.metadata.get("model")
    if model_name is None and isinstance(own_name, str) and ":" not in own_name:
        model_name = own_name  # only the user, not the file, may name a function to import
    pair = [_runnable(saved, model_name, input_shape[-1]) for saved in (before, after)]
    if pair[0] is None or pair[1] is None:
        result.problems.append("outputs not compared: give model=<name>, the model that these weights belong to")
        return
    inputs = _random_inputs(before, input_shape, pair[0])
    result.tolerance = TOLERANCES.get(_dtype_of(pair[0]), HALF_TOLERANCE)
    try:
        references = _outputs(pair[0], inputs, torch.contiguous_format, output)
        outputs = _outputs(pair[1], inputs, memory_format, output)
    except ConfigError as error:
        result.problems.append(f"outputs not compared: {error}")
        return
    result.difference = max(
        ((one - other).abs().max() / one.abs().max().clamp_min(1e-30)).item()
        for one, other in zip(references, outputs, strict=True)
    )
    if not result.difference <= result.tolerance:  # a NaN fails too
        result.problems.append("the outputs of the two formats differ")


def _runnable(saved: SavedModel, model_name: str | None, image_size: int | None = None) -> nn.Module | None:
    """The model of a file, in eval mode; None if only its weights are known."""
    if saved.program is not None:
        return saved.program.module() if saved.kind == "exported program" else copy.deepcopy(saved.program).eval()
    if model_name is None:
        return None
    model = models.build_model(model_name, num_classes=1000, image_size=image_size)
    own = model.state_dict()
    other = [value for name, value in saved.tensors.items() if name in own and own[name].shape != value.shape]
    if other and other[0].dim() > 0:  # the classifier's, whose first dimension is the number of classes
        model = models.build_model(model_name, num_classes=len(other[0]), image_size=image_size)
    try:
        model.load_state_dict(saved.state)
    except RuntimeError as error:
        raise ConfigError(f"model={model_name} does not fit the file: {' '.join(str(error).split())[:300]}") from error
    return model.eval()


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _random_inputs(saved: SavedModel, shape: tuple[int, ...], model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """Positional and named inputs; an exported program uses the shapes of its example inputs."""
    generator = torch.Generator().manual_seed(0)

    def random_like(example: Any) -> Any:
        is_float = isinstance(example, torch.Tensor) and example.is_floating_point()
        return torch.randn(example.shape, generator=generator).to(example.dtype) if is_float else example

    images = torch.empty(shape, dtype=_dtype_of(model))
    arguments, named = tree_map(random_like, getattr(saved.program, "example_inputs", None) or ((images,), {}))
    return arguments, named


def _outputs(
    model: nn.Module, inputs: tuple[Any, dict[str, Any]], memory_format: torch.memory_format, output: str | int | None
) -> list[torch.Tensor]:
    """The outputs of `model` in `memory_format`. Raises ConfigError: the model fails; it may raise any exception."""

    def formatted(value: torch.Tensor) -> torch.Tensor:
        return to_memory_format(value, memory_format) if value.dim() in CHANNELS_LAST else value

    convert(model, memory_format=memory_format)
    arguments, named = tree_map_only(torch.Tensor, formatted, inputs)
    shapes = [list(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    what = f"the {MEMORY_FORMAT_NAMES[memory_format]} model fails on {shapes}"
    with torch.no_grad(), failure_explained(what, "input=N,C,H,W sets the shape"):
        return output_tensors(model(*arguments, **named), output)
