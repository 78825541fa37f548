"""Load a saved model, and convert it from file to file: the file is read back, run, and compared
with the original.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cl_train.config.schema import ConfigError
from cl_train.config.validation import optional_module
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import (
    CHANNELS_LAST,
    MEMORY_FORMAT_NAMES,
    MEMORY_FORMATS,
    images_in,
)
from cl_train.memory_format.model_call import output_tensors
from cl_train.models import sources as models
from cl_train.models.card import ModelCard, Preprocessing
from cl_train.models.files import (
    SavedModel,
    module_versions,
    read_weights,
    weights_path,
    write_weights,
)
from cl_train.system.failures import failure_explained
from cl_train.system.files import output_file

# Of the largest output, else 2e-2: another order of sums.
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # positional and named
_SUFFIXES = (".pth", ".pt", ".safetensors", ".pt2", ".onnx")
_SUFFIXES_OF = {
    "TorchScript": (".pt", ".pth", ".safetensors"),
    "exported program": (".pt2", ".onnx", ".safetensors"),
}


class NotConverted(Exception):
    """There is nothing to convert, or the file has other values or outputs, and was removed."""


def load_model(
    file_or_run: str | Path,
    model: str | None = None,
    *,
    entry: str | None = None,
    trust: bool = False,
) -> tuple[nn.Module, Preprocessing | None, tuple[str, ...]]:
    """The model of a file or run folder, its preprocessing and the names of its classes.

    Args:
        file_or_run: a file of weights, a program, or a run folder: its best checkpoint, or else its
            newest.
        model: the name of the model that the weights belong to; needed if the file has none, or
            names a function `package.module:function`: a file may not choose the code that runs.
        entry: the one of a checkpoint that holds the weights; "average" is the EMA of a run.
        trust: load a TorchScript or exported program, which runs its code.

    Returns the model in eval mode, fp32, on the CPU, in its recorded memory format (contiguous if
    unknown or mixed); a function from a PIL image, or uint8 [H, W, 3], to float32 [3, H, W], or
    None; the classes, or (). Raises ConfigError: see `read_weights`; weights without a model.
    """
    if not isinstance(file_or_run, str | Path):
        raise ConfigError(f"load_model({file_or_run!r}): give a file or a run folder")
    loaded, card, _ = load_saved(file_or_run, model=model, entry=entry, trust=trust)
    return loaded, card.preprocessing, card.classes


def load_saved(
    source: str | Path, *, memory_format: torch.memory_format | None = None, **reading: Any
) -> tuple[nn.Module, ModelCard, torch.memory_format]:
    """As `load_model`, in `memory_format` (None: as recorded); or a zoo's model with `weights`."""
    saved = _read(source, **reading)
    model = _runnable(saved, saved.card.preprocessing.crop if saved.card.preprocessing else None)
    if model is None:
        raise ConfigError(f"{source}: holds weights only: {_needed_model(saved)}")
    recorded = MEMORY_FORMATS.get(str(saved.card.memory_format), torch.contiguous_format)
    memory_format = memory_format or recorded
    convert(model, memory_format=memory_format)
    return model, saved.card, memory_format


def convert_file(
    source: str | Path,
    out: str | Path,
    *,
    channels_last: bool = True,
    input: Sequence[int] = (),
    output_entry: str | int | None = None,
    overwrite: bool = False,
    **reading: Any,
) -> tuple[str, bool]:
    """Write `source` as the kind of file that the suffix of `out` names, read that back, run it on
    a batch in one memory format, and compare it with the original in the other one.

    The arguments are the settings of `cl-train convert`; `reading`: model, weights, entry, prefix,
    trust. Returns what was done, and whether the outputs are equal; false: not compared. Raises
    NotConverted; ConfigError: see `read_weights`; `out` exists or has another suffix; the weights
    do not fit the model.
    """
    path, target = weights_path(source), Path(out)
    if path is not None and target.resolve() == path.resolve():
        raise ConfigError(f"out={target}: give another name than that of the original")
    if target.suffix not in _SUFFIXES:
        raise ConfigError(f"out={target}: use one of the suffixes {', '.join(_SUFFIXES)}")
    for module in ("onnx", "onnxscript", "onnxruntime") if target.suffix == ".onnx" else ():
        optional_module(module, f"out={target}")
    with output_file(target, overwrite=overwrite) as file:
        saved = _read(source, **reading)
        suffixes = _SUFFIXES_OF.get(saved.kind, _SUFFIXES)
        if target.suffix not in suffixes:
            what = f"this {saved.kind} can be written as {', '.join(suffixes)}"
            raise ConfigError(f"out={target}: {what}")
        if not any(tensor.dim() in CHANNELS_LAST for tensor in saved.tensors.values()):
            what = "the file has no tensor of 4 or 5 dimensions"
            raise NotConverted(f"{what}; if it is frozen, convert it before that")
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        saved = saved.with_card(memory_format=MEMORY_FORMAT_NAMES[memory_format])
        done, is_proved = _convert(saved, file, memory_format, tuple(input), output_entry)
    written = f"written: {target}, {target.stat().st_size / 2**20:.1f} MiB; to load it:"
    return f"{done}\n{written} {_how_to_load(target, saved)}", is_proved


def _read(
    source: str | Path, model: str | None = None, weights: str | None = None, **reading: Any
) -> SavedModel:
    """A file, the checkpoint of a run folder, or `weights` of the model `source`. A function of the
    user's is only called if the user named it, as `model` or `source`.
    """
    path, name = weights_path(weights or source), str(source)
    if weights is not None and path is None:
        models.check_model(name, weights)
        num_classes, classes = models.zoo_classes(name, weights)
        state = models.build_model(name, num_classes=num_classes, weights=weights).state_dict()
        preprocessing = models.published_preprocessing(name, weights)
        card = ModelCard(model=name, classes=classes, preprocessing=preprocessing)
        return SavedModel("zoo", state, card, versions=module_versions(state))
    if path is None and (":" in name or name.startswith("timm/") or name in models.model_names()):
        raise ConfigError(f"{name} is a model: add weights=DEFAULT, another name, or a file")
    saved = read_weights(path or Path(source), **reading)
    recorded = saved.card.model
    code = recorded if ":" in (recorded or "") else None
    known = name if weights is not None else None if code else recorded
    return replace(saved, code=code).with_card(model=model or known)


def _needed_model(saved: SavedModel) -> str:
    """What the user can add where a model is needed, and the file may not choose it."""
    if saved.code is not None:
        return f"it names code, and a file never runs any: to run it, add model={saved.code}"
    return "give model=<name>, the model that these weights belong to"


def _runnable(saved: SavedModel, image_size: int | None) -> nn.Module | None:
    """The model of a file, in eval mode; None if only its weights are known."""
    if saved.program is not None:
        is_exported = saved.kind == "exported program"
        return saved.program.module() if is_exported else copy.deepcopy(saved.program).eval()
    if (name := saved.card.model) is None:
        return None
    build = partial(models.build_model, name, image_size=image_size)
    model = build(num_classes=len(saved.card.classes) or 1000)
    other = [saved.tensors[key] for key in saved.names_of_other_shape(model)]
    # The classifier's, whose first dimension is the number of classes.
    if other and other[0].dim() > 0:
        model = build(num_classes=len(other[0]))
    models.load_weights(model, saved, f"model={name} does not fit the file")
    return model.eval()


def _convert(
    saved: SavedModel,
    file: Path,
    memory_format: torch.memory_format,
    shape: Sequence[int],
    output: str | int | None,
) -> tuple[str, bool]:
    crop = saved.card.preprocessing.crop if saved.card.preprocessing else 224
    shape = shape or (2, 3, crop, crop)
    original = _runnable(saved, shape[-1])
    if original is not None and not saved.versions:  # they fit those of this code
        saved = replace(saved, versions=module_versions(original.state_dict()))
    done = f"{saved.kind}{f', {saved.taken}' if saved.taken else ''}: {len(saved.tensors)} tensors"
    done += f", {saved.stored} before; recorded memory format: {saved.card.memory_format}"

    inputs = _noise(original, saved.program, shape)
    other_format = torch.channels_last
    if memory_format == torch.channels_last:
        other_format = torch.contiguous_format
    references, reason = list[torch.Tensor](), _needed_model(saved)
    if original is not None:
        try:
            references, reason = _outputs(original, inputs, other_format, output), ""
        except ConfigError as error:
            reason = str(error)

    written = _write(saved, file, memory_format, original, inputs)  # in place, if it is a program
    if written.kind != "ONNX":
        # A program also has the buffers that are not persistent.
        names = written.tensors if saved.program is not None else saved.tensors.keys()
        values = {name: written.tensors[name] for name in written.tensors.keys() & names}
        try:  # NaN equals NaN, because a diverged model is copied exactly too
            torch.testing.assert_close(values, saved.tensors, rtol=0, atol=0, equal_nan=True)
        except AssertionError as error:
            raise NotConverted(f"the values read back differ: {error}") from None
        done += f"; {written.stored} now, the values read back are equal"
    converted = _runnable(written, shape[-1])
    if reason or converted is None:
        return f"{done}\noutputs not compared: {reason}", False

    try:
        outputs = _outputs(converted, inputs, memory_format, output)
    except ConfigError as error:
        raise NotConverted(str(error)) from error
    difference = max(
        ((ours - reference).abs().max() / reference.abs().max().clamp_min(1e-30)).item()
        for reference, ours in zip(references, outputs, strict=True)
    )
    if not difference <= _TOLERANCES.get(references[0].dtype, 2e-2):
        what = f"the outputs differ by {difference:.1e} of the largest, or are not finite"
        raise NotConverted(what)
    what = f"largest difference {difference:.1e} of the largest output"
    return f"{done}\noutputs of both memory formats: {what}", True


def _noise(model: nn.Module | None, program: Any, shape: Sequence[int]) -> Inputs:
    """Random images in the dtype of the model, for a program in the shapes of its example."""
    weights = model.parameters() if model is not None else ()
    dtype = next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32)
    images: Inputs = ((torch.empty(*shape, dtype=dtype),), {})
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    example = getattr(program, "example_inputs", None) or images
    return tree_map_only(torch.Tensor, noise, example)


def _write(
    saved: SavedModel,
    file: Path,
    memory_format: torch.memory_format,
    original: nn.Module | None,
    inputs: Inputs,
) -> SavedModel:
    """Returns what is read back from the file."""
    program, is_onnx = saved.program, file.suffix == ".onnx"
    if program is None and file.suffix in (".pt2", ".onnx"):
        if original is None:
            raise ConfigError(f"out=*{file.suffix}: {_needed_model(saved)}")
        example_format = torch.contiguous_format if is_onnx else memory_format
        # A model that fails does so here: torch.export would print a traceback before its error.
        _outputs(original, inputs, example_format, None)
        arguments, named = images_in(example_format, inputs)
        # The number of images of the example, if the model takes no other.
        any_batch = tuple({0: torch.export.Dim.AUTO} for _ in arguments)
        failure = "torch.export cannot export the model"
        with torch.no_grad(), failure_explained(failure, "write a .pth file"):
            program = torch.export.export(original, arguments, named, dynamic_shapes=any_batch)
    if program is not None and not is_onnx:
        convert(program, memory_format=memory_format)
    write_weights(replace(saved, program=program), file)
    if is_onnx:
        return SavedModel("ONNX", {}, program=_OnnxModel(file))
    return read_weights(file, trust=True).with_card(model=saved.card.model)


def _how_to_load(file: Path, saved: SavedModel) -> str:
    """A line of Python."""
    if file.suffix == ".onnx":
        return f'onnxruntime.InferenceSession("{file}").run(None, {{"images": images}})'
    if file.suffix == ".pt2":
        return f'torch.export.load("{file}").module()'
    if saved.program is not None and file.suffix != ".safetensors":
        return f'torch.jit.load("{file}")'
    name = saved.code or saved.card.model
    is_needed = saved.code is not None or saved.card.model is None
    named = f', model="{name or "NAME"}"' if is_needed else ""
    return f'model, preprocess, classes = cl_train.load_model("{file}"{named})'


class _OnnxModel(nn.Module):
    """An ONNX file, run by onnxruntime on the CPU."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def forward(self, *arguments: Any, **named: Any) -> list[torch.Tensor]:
        runtime = optional_module("onnxruntime", "out=*.onnx")
        session = runtime.InferenceSession(self._path, providers=["CPUExecutionProvider"])
        tensors = [
            leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)
        ]
        names = [value.name for value in session.get_inputs()]
        arrays = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, arrays)]


def _outputs(
    model: nn.Module, inputs: Inputs, memory_format: torch.memory_format, output: str | int | None
) -> list[torch.Tensor]:
    """The outputs of `model` in `memory_format`.

    Raises ConfigError: the model fails; it may raise any exception.
    """
    convert(model, memory_format=memory_format)
    arguments, named = images_in(memory_format, inputs)
    shapes = [list(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    what = f"the {MEMORY_FORMAT_NAMES[memory_format]} model fails on {shapes}"
    with torch.no_grad(), failure_explained(what, "input=N,C,H,W sets the shape"):
        return output_tensors(model(*arguments, **named), output)
