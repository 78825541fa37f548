"""Converts a file to another one, which is read back, run, and compared with the original."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cl_train.config.validation import optional_module
from cl_train.errors import ConfigError
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import CHANNELS_LAST_BY_DIM, MEMORY_FORMAT_NAMES, images_in
from cl_train.memory_format.model_call import output_tensors
from cl_train.models import files
from cl_train.models.files import SavedModel, read_weights
from cl_train.models.load import needed_model, read_saved, runnable
from cl_train.models.sources import dtype_of
from cl_train.system.failures import failure_explained
from cl_train.system.files import output_file

# Shares of the largest output, as the order of sums differs; 2e-2 for 16-bit outputs
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
PROGRAMS = (".pt2", ".onnx")
_SUFFIXES = (".pth", ".pt", ".safetensors", *PROGRAMS)


class NotConverted(Exception):
    """Nothing to convert, or the file has other values or outputs; it was removed."""


def convert_file(
    source: str | Path,
    out: str | Path,
    *,
    channels_last: bool = True,
    input: Sequence[int] = (),
    overwrite: bool = False,
    **reading: Any,
) -> tuple[str, bool]:
    """Writes `source` as the kind of file that the suffix of `out` names; the arguments are the
    settings of `cl-train convert`. Returns what was done, and whether the outputs were found equal;
    False: they were not compared. Raises NotConverted or ConfigError.
    """
    path, target = files.weights_path(source), Path(out)
    if path is not None and target.resolve() == path.resolve():
        raise ConfigError(f"out={target}: give another name than that of the original")
    if target.suffix not in _SUFFIXES:
        raise ConfigError(f"out={target}: use one of the suffixes {', '.join(_SUFFIXES)}")
    for module in ("onnx", "onnxscript", "onnxruntime") if target.suffix == ".onnx" else ():
        optional_module(module, f"out={target}")
    with output_file(target, overwrite=overwrite) as file:
        saved = read_saved(source, **reading)
        if saved.code is not None and saved.card.model is None:
            raise ConfigError(f"{source}: {needed_model(saved)}")
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
    how, what = f"written as {saved.card.memory_format}", ""
    if target.suffix == ".onnx":  # it has no strides
        how, what = "written", ", from normalised images to logits"
    return f"{done}\n{how}: {target}, {size_mib:.1f} MiB{what}", is_proved


def _convert(
    saved: SavedModel, file: Path, memory_format: torch.memory_format, shape: Sequence[int]
) -> tuple[str, bool]:
    shape = shape or _usual_shape(saved)
    original = runnable(saved, shape[-1])
    if original is not None:
        images = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        images = images.to(dtype_of(original))
        references = _outputs(original, images, torch.contiguous_format)
        if not files.module_versions(saved.state):
            versions = files.module_versions(original.state_dict())
            saved = replace(saved, state=files.with_versions(saved.state, versions))

    converted: Callable[..., Any] | None
    if file.suffix not in PROGRAMS:
        proof = "the values read back are equal; "
        converted = runnable(_written_weights(saved, memory_format, file), shape[-1])
    elif original is not None:
        proof, converted = "", _written_program(saved, original, images, memory_format, file)
    else:
        raise ConfigError(f"out=*{file.suffix}: {needed_model(saved)}")
    if original is None or converted is None:  # weights alone, or those of a program
        what = "the file is written, but its outputs are not compared (exit code 1)"
        return f"{proof}{what}: {needed_model(saved)}", False
    try:
        outputs = _outputs(converted, images, memory_format)
    except ConfigError as error:
        raise NotConverted(str(error)) from error
    difference = max(
        ((ours - reference).abs().max() / reference.abs().max().clamp_min(1e-30)).item()
        for reference, ours in zip(references, outputs, strict=True)
    )
    if not difference <= _TOLERANCES.get(references[0].dtype.to_real(), 2e-2):
        what = f"the outputs differ by {difference:.1e} of the largest, or are not finite"
        raise NotConverted(what)
    return f"{proof}the outputs are within {difference:.1e} of the largest", True


def _usual_shape(saved: SavedModel) -> Sequence[int]:
    """Returns the shape of the images that a program was exported with, or of two usual images."""
    size = saved.card.image_size or 224
    example, _ = getattr(saved.program, "example_inputs", None) or ((), {})
    return next((x.shape for x in example if isinstance(x, Tensor)), (2, 3, size, size))


def _written_weights(
    saved: SavedModel, memory_format: torch.memory_format, file: Path
) -> SavedModel:
    """Writes weights, or TorchScript as such; returns what is read back. Raises NotConverted."""
    if saved.kind == "TorchScript":
        convert(saved.program, memory_format=memory_format)
    files.write_weights(saved, file)
    written = read_weights(file, trust=True).with_card(model=saved.card.model)
    try:  # NaN equals NaN, because a diverged model is copied exactly too
        torch.testing.assert_close(written.tensors, saved.tensors, rtol=0, atol=0, equal_nan=True)
    except AssertionError as error:
        raise NotConverted(f"the values read back differ: {error}") from None
    return written


def _written_program(
    saved: SavedModel,
    model: nn.Module,
    images: Tensor,
    memory_format: torch.memory_format,
    file: Path,
) -> Callable[..., Any]:
    """Exports `model`, unless it is exported already; returns what is read back from the file."""
    if file.suffix == ".onnx":  # it has no strides
        memory_format = torch.contiguous_format
    # A model that fails does so here: torch.export would print a traceback before its error.
    _outputs(model, images, memory_format)
    explained = failure_explained("torch cannot export the model", "write a .pth file")
    with explained, torch.no_grad(), warnings.catch_warnings(action="ignore"):
        program = saved.program if saved.kind == "exported program" else None
        if program is None:
            # AUTO keeps the example's number of images if the model takes no other.
            any_batch = ({0: torch.export.Dim.AUTO},)
            arguments = (images_in(memory_format, images),)
            program = torch.export.export(model, arguments, dynamic_shapes=any_batch)
        if file.suffix == ".pt2":
            convert(program, memory_format=memory_format)
            torch.export.save(program, file, extra_files=saved.card.to_texts())
            return torch.export.load(file).module()
        exported: Any = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=["images"], output_names=["logits"]
        )
        graph = exported.model.graph
        batch = graph.inputs[0].shape[0]  # a number, or a name of torch's: s77
        for value in (*graph.inputs, *graph.outputs):
            if value.shape[0] == batch and not isinstance(batch, int):
                value.shape[0] = "batch"
        exported.model.metadata_props.update(saved.card.to_texts())
        exported.save(file, external_data=False)
    runtime = optional_module("onnxruntime", "out=*.onnx")
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda images: list(map(torch.from_numpy, session.run(None, {"images": images.numpy()})))


def _outputs(
    model: Callable[..., Any], images: Tensor, memory_format: torch.memory_format
) -> list[Tensor]:
    """Returns the outputs of `model` in `memory_format`. Raises ConfigError: the model fails."""
    name = MEMORY_FORMAT_NAMES[memory_format]
    what = f"the {name} model fails on {list(images.shape)}"
    if isinstance(model, nn.Module):
        convert(model, memory_format=memory_format)
    with torch.no_grad(), failure_explained(what, "input=N,C,H,W sets the shape"):
        return output_tensors(model(images_in(memory_format, images)))
