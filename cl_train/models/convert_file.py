"""Converting a saved model from file to file, and checking that the new file computes what the old one did."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from cl_train.config.schema import ConfigError
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import CHANNELS_LAST, model_memory_format, named_tensors, to_memory_format
from cl_train.memory_format.model_call import explain_failure, output_tensors
from cl_train.memory_format.names import memory_format_named, name_of
from cl_train.models import registry as models
from cl_train.models.program_file import read_program, write_program
from cl_train.models.weights_file import Kind, Weights, kind_of, read_weights, write_weights

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}  # of the largest output; the formats sum in another order
HALF_TOLERANCE = 2e-2


@dataclass
class SavedModel:
    """A file that was read: weights, or a program."""

    kind: Kind
    content: Weights | Any  # a ScriptModule or an ExportedProgram
    recorded: str | None  # memory format

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self.content.tensors if isinstance(self.content, Weights) else dict(named_tensors(self.content))

    @property
    def stored(self) -> str:
        """The memory format of the tensors in the file."""
        return self.content.stored if isinstance(self.content, Weights) else model_memory_format(self.content)


@dataclass
class FileConversion:
    """The result of converting a file. It is proved only if the outputs were compared and are equal.

    `difference`: the largest of the outputs, relative to the largest output; None: not compared. `problems`: what is
    missing for a proof.
    """

    kind: str
    taken: str
    tensors: int
    stored_before: str
    memory_format: torch.memory_format
    bytes_before: int
    bytes_after: int
    values_equal: bool
    difference: float | None = None
    tolerance: float | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "memory_format": name_of(self.memory_format), "passed": self.passed}

    def __str__(self) -> str:
        lines = [
            f"{self.kind}{f', {self.taken}' if self.taken else ''}: {self.tensors} tensors, {self.stored_before} "
            f"before and contiguous now; recorded memory format: {name_of(self.memory_format)}",
            f"{self.bytes_before / 2**20:.2f} MiB before, {self.bytes_after / 2**20:.2f} MiB after",
            f"values read back: {'equal' if self.values_equal else 'NOT EQUAL'}",
        ]
        if self.difference is not None:
            lines.append(
                f"outputs, contiguous against {name_of(self.memory_format)}: largest difference {self.difference:.1e} "
                f"of the largest output (allowed: {self.tolerance:.0e})"
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

    Raises:
        ConfigError: see `read_weights` and `read_program`; `target` is `source`; the weights do not fit the model.
    """
    if target.resolve() == source.resolve():
        raise ConfigError(f"{target}: the converted file must have another name than the original")
    before = _read(source, trust, entry, prefix)
    _write(before, target, name_of(memory_format))
    is_weights = isinstance(before.content, Weights) or target.suffix == ".safetensors"
    after = _read(target, trust=not is_weights)
    result = FileConversion(
        before.kind,
        before.content.taken if isinstance(before.content, Weights) else "",
        len(after.tensors),
        before.stored,
        memory_format,
        source.stat().st_size,
        target.stat().st_size,
        _same_values(before.tensors, after.tensors),
    )
    if not result.values_equal:
        result.problems.append("not converted: the values read back differ")
    if not any(tensor.dim() in CHANNELS_LAST for tensor in after.tensors.values()):
        result.problems.append(
            "not converted: the file has no tensor of 4 or 5 dimensions (a frozen program holds its weights as "
            "constants; convert it before torch.jit.freeze)"
        )
    problem = _compare_outputs(result, before, after, model_name, input_shape, output)
    if problem:
        result.problems.append(f"outputs not compared: {problem}" if result.difference is None else problem)
    return result


def load_model(path: Path, model_name: str | None = None, *, trust: bool = False) -> nn.Module:
    """The model of a file, in eval mode, in the memory format recorded in the file (contiguous if there is none).

    Raises:
        ConfigError: see `read_weights` and `read_program`; a file of weights without `model_name`.
    """
    saved = _read(path, trust)
    model = _runnable(saved, model_name)
    if model is None:
        raise ConfigError(f"{path}: holds weights only; name the model that they belong to (model=<name>)")
    convert(model, memory_format=memory_format_named(saved.recorded or "contiguous"))
    return model


def _read(path: Path, trust: bool, entry: str | None = None, prefix: str | None = None) -> SavedModel:
    kind = kind_of(path)
    if kind in ("TorchScript", "exported program") and trust:
        program, recorded = read_program(path, kind)
        return SavedModel(kind, program, recorded)
    weights = read_weights(path, entry=entry, prefix=prefix)
    return SavedModel(kind, weights, weights.recorded)


def _write(saved: SavedModel, path: Path, memory_format: str) -> None:
    if isinstance(saved.content, Weights):
        write_weights(saved.content, path, memory_format)
    elif path.suffix == ".safetensors":
        write_weights(Weights(saved.kind, saved.tensors), path, memory_format)
    else:
        write_program(saved.content, path, memory_format)


def _same_values(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    """NaN equals NaN: the file of a diverged model is copied faithfully, too."""

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.is_floating_point():
            return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        return torch.equal(one, other)

    return before.keys() == after.keys() and all(same(value, after[name]) for name, value in before.items())


# --- comparing outputs ------------------------------------------------------------------------------------------------


def _compare_outputs(
    result: FileConversion,
    before: SavedModel,
    after: SavedModel,
    model_name: str | None,
    input_shape: tuple[int, ...],
    output: str | int | None,
) -> str:
    """Fill in the difference of the outputs; returns why there is none, or why it is too large, or nothing."""
    name = model_name or _recorded_model(before)
    reference, converted = _runnable(before, name), _runnable(after, name)
    if reference is None or converted is None:
        return "give model=<name>, the model that these weights belong to"
    convert(reference, memory_format=torch.contiguous_format)
    convert(converted, memory_format=result.memory_format)
    dtype = next((p.dtype for p in reference.parameters() if p.is_floating_point()), torch.float32)
    batch = _random_inputs(before, input_shape, dtype)
    try:
        expected = _outputs(reference, batch, torch.contiguous_format, output)
    except ConfigError as error:
        return str(error)
    except Exception as error:  # a model may raise anything on images of a shape that it is not made for
        return f"the model does not run on {list(input_shape)}: {explain_failure(error)}; give input=N,C,H,W"
    try:
        found = _outputs(converted, batch, result.memory_format, output)
    except Exception as error:
        return f"the model runs contiguous, but fails in {name_of(result.memory_format)}: {explain_failure(error)}"
    result.tolerance = TOLERANCES.get(dtype, HALF_TOLERANCE)
    result.difference = max(_relative_difference(*pair) for pair in zip(expected, found, strict=True))
    return "" if result.difference <= result.tolerance else "the outputs of the two formats differ"


def _relative_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    if not expected.numel():
        return 0.0
    return ((expected - found).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def _recorded_model(saved: SavedModel) -> str | None:
    """The zoo model that a checkpoint of cl_train names. Only the user may name a function to import."""
    name = saved.content.metadata.get("model") if isinstance(saved.content, Weights) else None
    return name if isinstance(name, str) and ":" not in name else None


def _recorded_image_size(weights: Weights) -> int | None:
    """For vision transformers, which are built for one size; a file may say anything."""
    value: Any = weights.metadata
    for key in ("config", "data", "image_size"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, int) and 8 <= value <= 2048 else None


def _runnable(saved: SavedModel, model_name: str | None) -> nn.Module | None:
    """The model of a file, in eval mode; None if only its weights are known."""
    if not isinstance(saved.content, Weights):
        return saved.content.module() if saved.kind == "exported program" else copy.deepcopy(saved.content).eval()
    if model_name is None:
        return None
    state = saved.content.state
    image_size = _recorded_image_size(saved.content)
    model = models.build_model(model_name, num_classes=1000, image_size=image_size)
    own = model.state_dict()
    other = [value for name, value in saved.tensors.items() if name in own and own[name].shape != value.shape]
    if other and other[0].dim() > 0:  # the classifier's, whose first dimension is the number of classes
        model = models.build_model(model_name, num_classes=len(other[0]), image_size=image_size)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"model={model_name} does not fit the file: {' '.join(str(error).split())[:300]}") from error
    return model.eval()


def _random_inputs(saved: SavedModel, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Positional and named inputs; an exported program's have the shapes of its own examples."""
    generator = torch.Generator().manual_seed(0)

    def random_like(example: Any) -> Any:
        is_float = isinstance(example, torch.Tensor) and example.is_floating_point()
        return torch.randn(example.shape, generator=generator).to(example.dtype) if is_float else example

    examples = getattr(saved.content, "example_inputs", None)
    if examples is not None:
        arguments, named = tree_map(random_like, examples)
        return arguments, named
    return (torch.randn(shape, generator=generator).to(dtype),), {}


def _outputs(
    model: nn.Module, batch: tuple[Any, dict[str, Any]], memory_format: torch.memory_format, output: str | int | None
) -> list[torch.Tensor]:
    def formatted(value: Any) -> Any:
        is_image = isinstance(value, torch.Tensor) and value.dim() in CHANNELS_LAST
        return to_memory_format(value, memory_format) if is_image else value

    arguments, named = tree_map(formatted, batch)
    with torch.no_grad():
        return output_tensors(model(*arguments, **named), output)
