"""Load a saved model, and convert it from file to file: the file is read back, run, and compared
with the original.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cl_train.config.validation import optional_module
from cl_train.errors import ConfigError
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import (
    CHANNELS_LAST_BY_DIM,
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
    with_versions,
    write_weights,
)
from cl_train.system.failures import failure_explained
from cl_train.system.files import output_file
from cl_train.system.tensors import map_tensors, tensors_in

# Of the largest output, for another order of sums; 2e-2 for 16-bit outputs
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # positional and named
PROGRAMS = (".pt2", ".onnx")
_SUFFIXES = (".pth", ".pt", ".safetensors", *PROGRAMS)


class NotConverted(Exception):
    """Nothing to convert, or the file has other values or outputs; it was removed."""


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
    model = _runnable(saved, saved.card.image_size)
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
        dimensions = {tensor.dim() for tensor in saved.tensors.values()}
        if saved.program is not None and not dimensions & CHANNELS_LAST_BY_DIM.keys():
            what = f"{saved.kind} without a tensor of 4 or 5 dimensions"
            raise NotConverted(f"{what}; if it is frozen, convert it before that")
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        saved = saved.with_card(memory_format=MEMORY_FORMAT_NAMES[memory_format])
        proof, is_proved = _convert(saved, file, memory_format, input)
    origin = f", {saved.origin}" if saved.origin else ""
    done = f"{saved.kind}{origin}: {len(saved.tensors)} tensors; {proof}"
    size_mib = target.stat().st_size / 2**20
    return f"{done}\nwritten as {saved.card.memory_format}: {target}, {size_mib:.1f} MiB", is_proved


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
        return SavedModel("zoo", state, card)
    if path is None and (":" in name or name.startswith("timm/") or name in models.model_names()):
        raise ConfigError(f"{name} is a model: add weights=DEFAULT, another name, or a file")
    saved = read_weights(path or Path(source), **reading)
    recorded = saved.card.model or ""
    if ":" in recorded:  # a file may not choose the code that runs
        saved, recorded = replace(saved, code=recorded), ""
    return saved.with_card(model=model or (name if weights is not None else recorded) or None)


def _needed_model(saved: SavedModel) -> str:
    return f"give model={saved.code or 'NAME'}, the model of these weights; a file never runs code"


def _runnable(saved: SavedModel, image_size: int | None) -> nn.Module | None:
    """The model of a file, in eval mode; None if only its weights are known."""
    if saved.program is not None:
        is_exported = saved.kind == "exported program"
        return saved.program.module() if is_exported else copy.deepcopy(saved.program).eval()
    name = saved.card.model
    if name is None:
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
    saved: SavedModel, file: Path, memory_format: torch.memory_format, shape: Sequence[int]
) -> tuple[str, bool]:
    """Write the file, read it back and compare; returns what is equal, and whether all is."""
    size = saved.card.image_size or 224
    shape = shape or (2, 3, size, size)
    other_format = torch.channels_last
    if memory_format == torch.channels_last:
        other_format = torch.contiguous_format
    original = _runnable(saved, shape[-1])
    inputs = _noise(original, saved.program, shape)
    references, reason = list[torch.Tensor](), _needed_model(saved)
    if original is not None:
        versions = module_versions(saved.state) or module_versions(original.state_dict())
        saved = replace(saved, state=with_versions(saved.state, versions))
        try:
            references, reason = _outputs(original, inputs, other_format), ""
        except ConfigError as error:
            reason = str(error)

    proof = ""
    converted: Callable[..., Any] | None
    if file.suffix in PROGRAMS:
        if original is None:
            raise ConfigError(f"out=*{file.suffix}: {reason}")
        converted = _written_program(saved, original, inputs, memory_format, file)
    else:
        if saved.kind == "TorchScript":
            convert(saved.program, memory_format=memory_format)
        write_weights(saved, file)
        written = read_weights(file, trust=True).with_card(model=saved.card.model)
        try:  # NaN equals NaN, because a diverged model is copied exactly too
            torch.testing.assert_close(
                written.tensors, saved.tensors, rtol=0, atol=0, equal_nan=True
            )
        except AssertionError as error:
            raise NotConverted(f"the values read back differ: {error}") from None
        proof = "the values read back are equal; "
        converted = _runnable(written, shape[-1])
    if reason or converted is None:
        return f"{proof}outputs not compared: {reason}", False

    try:
        outputs = _outputs(converted, inputs, memory_format)
    except ConfigError as error:
        raise NotConverted(str(error)) from error
    difference = max(
        ((ours - reference).abs().max() / reference.abs().max().clamp_min(1e-30)).item()
        for reference, ours in zip(references, outputs, strict=True)
    )
    if not difference <= _TOLERANCES.get(references[0].dtype.to_real(), 2e-2):
        what = f"the outputs differ by {difference:.1e} of the largest, or are not finite"
        raise NotConverted(what)
    return f"{proof}outputs of both formats are within {difference:.1e} of the largest", True


def _noise(model: nn.Module | None, program: Any, shape: Sequence[int]) -> Inputs:
    """Random images in the dtype of the model; for a program values like its example."""
    dtype = torch.float32 if model is None else models.dtype_of(model)
    images: Inputs = ((torch.empty(*shape, dtype=dtype),), {})
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    example = getattr(program, "example_inputs", None) or images
    return map_tensors(noise, example)


def _written_program(
    saved: SavedModel,
    model: nn.Module,
    inputs: Inputs,
    memory_format: torch.memory_format,
    file: Path,
) -> Callable[..., Any]:
    """Export `model`, unless it is a program; returns what is read back from the file."""
    is_onnx = file.suffix == ".onnx"
    if is_onnx:  # it has no strides
        memory_format = torch.contiguous_format
    # A model that fails does so here: torch.export would print a traceback before its error.
    _outputs(model, inputs, memory_format)
    arguments, named = images_in(memory_format, inputs)
    # The number of images of the example, if the model takes no other.
    any_batch = ({0: torch.export.Dim.AUTO},)
    explained = failure_explained("torch cannot export the model", "write a .pth file")
    with explained, torch.no_grad(), warnings.catch_warnings(action="ignore"):
        program = saved.program if saved.kind == "exported program" else None
        if program is None:
            program = torch.export.export(model, arguments, named, dynamic_shapes=any_batch)
        if not is_onnx:
            convert(program, memory_format=memory_format)
            torch.export.save(program, file, extra_files=saved.card.to_texts())
            return torch.export.load(file).module()
        exported: Any = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=["images"], output_names=["logits"]
        )
        exported.model.metadata_props.update(saved.card.to_texts())
        exported.save(file, external_data=False)
    runtime = optional_module("onnxruntime", "out=*.onnx")
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(*arguments: Any, **named: Any) -> list[torch.Tensor]:
        tensors = tensors_in((arguments, named))
        arrays = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, arrays)]

    return run


def _outputs(
    model: Callable[..., Any], inputs: Inputs, memory_format: torch.memory_format
) -> list[torch.Tensor]:
    """The outputs of `model` in `memory_format`. Raises ConfigError: the model fails."""
    name = MEMORY_FORMAT_NAMES[memory_format]
    shapes = [list(tensor.shape) for tensor in tensors_in(inputs)]
    what = f"the {name} model fails on {str(shapes)[1:-1]}"
    if isinstance(model, nn.Module):
        convert(model, memory_format=memory_format)
    with torch.no_grad(), failure_explained(what, "input=N,C,H,W sets the shape"):
        arguments, named = images_in(memory_format, inputs)
        return output_tensors(model(*arguments, **named))
