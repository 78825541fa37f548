"""Load a saved model, and convert it from file to file: the file is read back, run, and compared with the original."""

import copy
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from cl_train.config.schema import ConfigError, DataConfig
from cl_train.config.user_function import optional_module
from cl_train.memory_format.convert import convert
from cl_train.memory_format.crashes import crash_safe
from cl_train.memory_format.layout import CHANNELS_LAST, MEMORY_FORMAT_NAMES, to_memory_format
from cl_train.memory_format.model_call import failure_explained, output_tensors
from cl_train.models import sources as models
from cl_train.models.card import ModelCard, Preprocessing
from cl_train.models.files import (
    PROGRAMS,
    SavedModel,
    careful_loading,
    kind_of,
    read_program,
    read_weights,
    weights_path,
    write_program,
    write_weights,
)
from cl_train.models.preprocessing import published_preprocessing
from cl_train.system.files import output_file

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}  # of the largest output; the formats sum in another order
HALF_TOLERANCE = 2e-2
Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # positional and named
_EXCHANGE = (".pt2", ".onnx")
_SUFFIXES = (".pth", ".pt", ".safetensors", *_EXCHANGE)
_SUFFIXES_OF = {"TorchScript": (".pt", ".pth", ".safetensors"), "exported program": (".pt2", ".onnx", ".safetensors")}
_NO_MODEL = "give model=<name>, the model that these weights belong to"


class _Discarded(Exception):
    """The written file is wrong: `output_file` removes it."""


@dataclass(frozen=True)
class FileConversion:
    """What was converted, and whether values and outputs are the same."""

    kind: str
    taken: str
    tensors: int
    stored_before: str
    stored: str
    memory_format: str
    values_equal: bool | None  # None: an ONNX file, whose weights have other names and shapes
    difference: float | None = None  # the largest difference of the outputs / the largest output; None: not compared
    tolerance: float | None = None
    faults: tuple[str, ...] = ()  # the file is wrong, and was not kept
    doubts: tuple[str, ...] = ()  # why equal outputs are not confirmed

    @property
    def problems(self) -> list[str]:
        return [*self.faults, *self.doubts]

    @property
    def passed(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [
            f"{self.kind}{f', {self.taken}' if self.taken else ''}: {self.tensors} tensors, {self.stored_before} "
            f"before and {self.stored} now; recorded memory format: {self.memory_format}"
        ]
        if self.values_equal is not None:
            lines.append(f"values read back: {'equal' if self.values_equal else 'NOT EQUAL'}")
        if self.difference is not None:
            lines.append(
                f"outputs of the file, run in {self.memory_format}, against the original in the other format: largest "
                f"difference {self.difference:.1e} of the largest output (allowed: {self.tolerance:.0e})"
            )
        return "\n".join([*lines, *self.problems, *(["no file was written"] if self.faults else [])])


def load_model(
    file_or_run: str | Path, model: str | None = None, *, trust: bool = False
) -> tuple[nn.Module, Preprocessing | None, tuple[str, ...]]:
    """The model of a file or run folder, its preprocessing and the names of its classes.

    Args:
        file_or_run: a file of weights, a program, or a run folder: its best checkpoint, or else its newest.
        model: the name of the model that the weights belong to; needed if the file has none, or names a function
            `package.module:function`, because a file may not choose the code that runs.
        trust: load a TorchScript or exported program, which runs its code.

    Returns:
        The model in eval mode, fp32, on the CPU, in its recorded memory format (contiguous if that is unknown or
        mixed); a function from a PIL image, or uint8 [H, W, 3], to float32 [3, H, W], None if unknown; the classes, ()
        if unknown.

    Raises ConfigError: see `read_weights` and `read_program`; weights without a model.
    """
    found, card, _ = load_saved(file_or_run, model, trust=trust)
    return found, card.preprocessing, card.classes


def load_saved(
    source: str | Path,
    model_name: str | None = None,
    weights: str | None = None,
    *,
    memory_format: torch.memory_format | None = None,
    trust: bool = False,
) -> tuple[nn.Module, ModelCard, torch.memory_format]:
    """As `load_model`, in `memory_format` (None: the recorded one); also the zoo's model `source` with `weights`."""
    saved = read_saved(source, model_name, weights, trust=trust)
    model = _runnable(saved)
    if model is None:
        raise ConfigError(f"{source}: holds weights only: {_NO_MODEL}")
    named = {name: memory_format for memory_format, name in MEMORY_FORMAT_NAMES.items()}
    memory_format = memory_format or named.get(str(saved.card.memory_format), torch.contiguous_format)
    convert(model, memory_format=memory_format)
    return model, saved.card, memory_format


def convert_file(
    source: str | Path,
    target: Path,
    *,
    memory_format: torch.memory_format = torch.channels_last,
    model_name: str | None = None,
    weights: str | None = None,
    input_shape: tuple[int, ...] = (),
    entry: str | None = None,
    prefix: str | None = None,
    output: str | int | None = None,
    trust: bool = False,
    overwrite: bool = False,
) -> FileConversion:
    """Write `source` as the kind of file that the suffix of `target` names, read that back, run it on a batch in
    `memory_format`, and compare it with the original in the other one. A file that is wrong is not kept.

    The arguments are the settings of `cl-train convert`.
    Raises ConfigError: see `read_weights`; `target` exists or has another suffix; the weights do not fit the model.
    """
    path = weights_path(source)
    if path is not None and target.resolve() == path.resolve():
        raise ConfigError(f"out={target}: the converted file must have another name than the original")
    if target.suffix not in _SUFFIXES:
        raise ConfigError(f"out={target}: use one of the suffixes {', '.join(_SUFFIXES)}")
    for module in ("onnx", "onnxscript", "onnxruntime") if target.suffix == ".onnx" else ():
        optional_module(module, f"out={target}")
    result = None
    with suppress(_Discarded), output_file(target, overwrite=overwrite) as file:
        saved = read_saved(source, model_name, weights, entry=entry, prefix=prefix, trust=trust)
        if target.suffix not in (known := _SUFFIXES_OF.get(saved.kind, _SUFFIXES)):
            raise ConfigError(f"out={target}: this {saved.kind} can be written as {', '.join(known)}")
        saved = saved.with_card(memory_format=MEMORY_FORMAT_NAMES[memory_format])
        result = _convert(saved, file, memory_format, input_shape, output)
        if result.faults:
            raise _Discarded
    assert result is not None
    return result


def read_saved(
    source: str | Path,
    model_name: str | None = None,
    weights: str | None = None,
    *,
    entry: str | None = None,
    prefix: str | None = None,
    trust: bool = False,
) -> SavedModel:
    """A file, the checkpoint of a run folder, or `weights` (a name, or a file) of the model `source`.

    A function of the user's is only called if the user named it: as `model_name` or `source`.
    """
    path, name = weights_path(weights or source), str(source)
    if weights is not None and path is None:
        return _zoo_model(name, weights)
    if path is None and (":" in name or name.startswith("timm/") or name in models.model_names()):
        raise ConfigError(f"{name} is the name of a model: add weights=DEFAULT, or other weights by name or file")
    path = path or Path(source)
    kind = kind_of(path)
    saved = read_program(path, kind) if kind in PROGRAMS and trust else read_weights(path, entry=entry, prefix=prefix)
    recorded = saved.card.model if ":" not in (saved.card.model or "") else None
    return saved.with_card(model=model_name or (name if weights is not None else recorded))


def _zoo_model(name: str, weights: str) -> SavedModel:
    models.check_model(name, weights)
    num_classes, classes = models.zoo_classes(name, weights)
    model = models.build_model(name, num_classes=num_classes, weights=weights)
    published = published_preprocessing(name, weights)
    preprocessing = Preprocessing.of(DataConfig(**published)) if published else None
    return SavedModel("zoo", model.state_dict(), ModelCard(model=name, classes=classes, preprocessing=preprocessing))


def _runnable(saved: SavedModel, image_size: int | None = None) -> nn.Module | None:
    """The model of a file, in eval mode; None if only its weights are known."""
    if saved.program is not None:
        return saved.program.module() if saved.kind == "exported program" else copy.deepcopy(saved.program).eval()
    name, preprocessing = saved.card.model, saved.card.preprocessing
    if name is None:
        return None
    size = image_size or (preprocessing.crop if preprocessing else None)
    model = models.build_model(name, num_classes=len(saved.card.classes) or 1000, image_size=size)
    own = model.state_dict()
    other = [value for name, value in saved.tensors.items() if name in own and own[name].shape != value.shape]
    if other and other[0].dim() > 0:  # the classifier's, whose first dimension is the number of classes
        model = models.build_model(name, num_classes=len(other[0]), image_size=size)
    models.load_state(model, saved.state, f"model={name} does not fit the file")
    return model.eval()


def _convert(
    saved: SavedModel,
    file: Path,
    memory_format: torch.memory_format,
    input_shape: tuple[int, ...],
    output: str | int | None,
) -> FileConversion:
    crop = saved.card.preprocessing.crop if saved.card.preprocessing else 224
    shape, stored_before = input_shape or (2, 3, crop, crop), saved.stored
    original = _runnable(saved, shape[-1])
    dtype = next((p.dtype for p in original.parameters() if p.is_floating_point()), torch.float32) if original else None
    inputs = _random_inputs(saved, shape, dtype or torch.float32)
    written, candidate = _write(saved, file, memory_format, original, inputs)
    tolerance = TOLERANCES.get(dtype, HALF_TOLERANCE) if dtype else None
    difference, faults, doubts = None, [], []
    is_equal = None if written is None else _same_values(saved.tensors, written.tensors)
    if is_equal is False:
        faults.append("not converted: the values read back differ")
    if not any(tensor.dim() in CHANNELS_LAST for tensor in saved.tensors.values()):
        faults.append(
            "not converted: the file has no tensor of 4 or 5 dimensions (a frozen program holds its weights as "
            "constants; convert it before torch.jit.freeze)"
        )
    if original is None or candidate is None or tolerance is None:
        doubts.append(f"outputs not compared: {_NO_MODEL}")
    else:
        other = torch.channels_last if memory_format == torch.contiguous_format else torch.contiguous_format
        failed, reason = doubts, "outputs not compared"
        try:
            references = _outputs(original, inputs, other, output)
            failed, reason = faults, "not converted"
            difference = _largest_difference(references, _outputs(candidate, inputs, memory_format, output))
            if not difference <= tolerance:
                faults.append(f"the outputs {'differ' if math.isfinite(difference) else 'are not finite'}")
        except ConfigError as error:
            failed.append(f"{reason}: {error}")
    return FileConversion(
        saved.kind,
        saved.taken,
        len(saved.tensors),
        stored_before,
        written.stored if written else stored_before,
        str(saved.card.memory_format),
        is_equal,
        difference,
        tolerance,
        tuple(faults),
        tuple(doubts),
    )


def _write(
    saved: SavedModel, file: Path, memory_format: torch.memory_format, original: nn.Module | None, inputs: Inputs
) -> tuple[SavedModel | None, nn.Module | None]:
    """Returns what is read back from the file (None: ONNX), and the model that it runs (None: only its weights)."""
    program = saved.program
    if file.suffix in _EXCHANGE and program is None:
        if original is None:
            raise ConfigError(f"out=*{file.suffix}: {_NO_MODEL}")
        program = _exported(original, inputs, torch.contiguous_format if file.suffix == ".onnx" else memory_format)
    if file.suffix == ".onnx":
        return None, _write_onnx(program, file, saved.card)
    if program is not None and file.suffix != ".safetensors":
        write_program(program, file, saved.card, memory_format)
        written = read_program(file, kind_of(file))
    else:
        write_weights(saved, file)
        written = read_weights(file).with_card(model=saved.card.model)
    return written, _runnable(written)


def _exported(model: nn.Module, inputs: Inputs, memory_format: torch.memory_format) -> torch.export.ExportedProgram:
    """The program of `model` for any number of images; of the example's number if the model does not allow others."""
    convert(model, memory_format=memory_format)  # before the export: it records `view`s that suit the strides
    arguments, named = _formatted(inputs, memory_format)
    any_batch = tuple({0: torch.export.Dim.AUTO} for _ in arguments)
    with torch.no_grad(), failure_explained("torch.export cannot export the model", "write a .pth file"):
        return torch.export.export(model, arguments, named, dynamic_shapes=any_batch)


def _write_onnx(program: torch.export.ExportedProgram, file: Path, card: ModelCard) -> nn.Module:
    with careful_loading(), failure_explained("torch.onnx cannot export the model", "write a .pt2 file"):
        exported = torch.onnx.export(program, dynamo=True, verbose=False)
        assert exported is not None
        exported.model.metadata_props.update(card.to_strings())
        exported.save(file, external_data=False)
    return _OnnxModel(file)


class _OnnxModel(nn.Module):
    """An ONNX file, run by onnxruntime on the CPU."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def forward(self, *arguments: Any, **named: Any) -> list[torch.Tensor]:
        # Opened here: `crash_safe` forks, and the threads of a session do not survive that.
        runtime = optional_module("onnxruntime", f"out={self._path}")
        session = runtime.InferenceSession(self._path, providers=["CPUExecutionProvider"])
        tensors = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)]
        names = [value.name for value in session.get_inputs()]
        arrays = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, arrays)]


def _same_values(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    """Equality where NaN equals NaN, because a diverged model is copied exactly too."""
    return before.keys() == after.keys() and all(
        (one.dtype, one.shape) == (other.dtype, other.shape)
        and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        for one, other in ((value, after[name]) for name, value in before.items())
    )


def _largest_difference(references: list[torch.Tensor], outputs: list[torch.Tensor]) -> float:
    """Relative to the largest output."""
    return max(
        ((one - other).abs().max() / one.abs().max().clamp_min(1e-30)).item()
        for one, other in zip(references, outputs, strict=True)
    )


def _random_inputs(saved: SavedModel, shape: tuple[int, ...], dtype: torch.dtype) -> Inputs:
    """Positional and named inputs; an exported program uses the shapes of its example inputs."""
    generator = torch.Generator().manual_seed(0)

    def random_like(example: Any) -> Any:
        is_float = isinstance(example, torch.Tensor) and example.is_floating_point()
        return torch.randn(example.shape, generator=generator).to(example.dtype) if is_float else example

    example: Any = getattr(saved.program, "example_inputs", None) or ((torch.empty(shape, dtype=dtype),), {})
    arguments, named = tree_map(random_like, example)
    return arguments, named


@crash_safe
def _outputs(
    model: nn.Module, inputs: Inputs, memory_format: torch.memory_format, output: str | int | None
) -> list[torch.Tensor]:
    """The outputs of `model` in `memory_format`. Raises ConfigError: the model fails; it may raise any exception."""
    convert(model, memory_format=memory_format)
    arguments, named = _formatted(inputs, memory_format)
    shapes = [list(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    what = f"the {MEMORY_FORMAT_NAMES[memory_format]} model fails on {shapes}"
    with torch.no_grad(), failure_explained(what, "input=N,C,H,W sets the shape"):
        return output_tensors(model(*arguments, **named), output)


def _formatted(inputs: Inputs, memory_format: torch.memory_format) -> Inputs:
    def formatted(value: torch.Tensor) -> torch.Tensor:
        return to_memory_format(value, memory_format) if value.dim() in CHANNELS_LAST else value

    arguments, named = tree_map_only(torch.Tensor, formatted, inputs)
    return arguments, named
