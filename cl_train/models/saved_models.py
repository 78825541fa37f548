"""Saved models of any kind: reading them without running code from a pickle, and writing them in one canonical form.

On disk every tensor is contiguous, and the layout that the model is meant for is recorded beside it, where other
programs do not stumble over it: equal weights are then equal bytes, safetensors accepts them, and `read` gives the
layout back. Kinds: a state dict (torchvision's and timm's weight files), a training checkpoint of ours,
`.safetensors`, a TorchScript archive and an exported program.
"""

from __future__ import annotations

import copy
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import model_memory_format, to_contiguous_state
from cl_train.system import checkpoint_file as checkpoint

Kind = Literal["state dict", "checkpoint", "safetensors", "TorchScript", "exported program"]
RECORD = "memory_format"  # the key of the layout, in each kind's own place for such things
LAYOUTS = ("contiguous", "channels_last", "mixed")


@dataclass
class SavedModel:
    """What a file holds.

    `content`: a state dict; a checkpoint's whole state; a ScriptModule; an ExportedProgram. `memory_format`: the layout
    that was recorded, or None where none was. `stored`: the layout that its tensors have in the file.
    """

    kind: Kind
    content: Any
    memory_format: str | None
    stored: str

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        if self.kind == "checkpoint":
            return dict(self.content["model"])
        if self.kind in ("state dict", "safetensors"):
            return {name: value for name, value in self.content.items() if isinstance(value, torch.Tensor)}
        state: Mapping[str, torch.Tensor] = (
            self.content.state_dict() if isinstance(self.content, nn.Module) else self.content.state_dict
        )
        return dict(state)


def read(path: Path) -> SavedModel:
    """Read a file of any of the kinds to the CPU.

    Pickles are read with `weights_only=True` and no fallback. A TorchScript archive holds a program, which runs when it
    is called; so does an exported program.

    Raises:
        ConfigError: no such file, an unknown kind, a pickle of more than plain types, an altered checkpoint.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    kind = _kind_of(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch.jit is deprecated, its files are still about
            warnings.filterwarnings("ignore", message="No complete tensor found")  # torch.export about its own format
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # such a file is read, or refused
            saved = _READERS[kind](path)
    except checkpoint.CheckpointError as error:
        raise ConfigError(str(error)) from error
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path}: neither a saved model nor a pickle of tensors and plain types; any other pickle could run code, "
            "so it is not read"
        ) from error
    except (RuntimeError, ValueError, EOFError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{path}: cannot be read as {kind}: {reason}") from error
    return saved


def write(saved: SavedModel, path: Path, memory_format: str) -> None:
    """Write `saved` in its kind (a `.safetensors` path: its weights), contiguous, with `memory_format` recorded."""
    assert memory_format in LAYOUTS, memory_format
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        _write_safetensors(saved.weights(), path, memory_format)
    elif saved.kind == "checkpoint":
        facts = {**saved.content.get("facts", {}), RECORD: memory_format}
        checkpoint.save(path, {**saved.content, "facts": facts})
    elif saved.kind in ("state dict", "safetensors"):
        state = to_contiguous_state(saved.content)
        if saved.kind == "safetensors":
            state = _with_metadata(state)
        if hasattr(state, "_metadata"):
            state._metadata = {**state._metadata, "": {**state._metadata.get("", {}), RECORD: memory_format}}
        torch.save(state, path)
    else:
        _write_program(saved, path, memory_format)


def parameters_layout(weights: Mapping[str, torch.Tensor]) -> str:
    """The layout of a state dict's tensors, as `model_memory_format` says it of a model's."""
    holder = nn.Module()
    for index, value in enumerate(weights.values()):
        if value.is_floating_point() and value.dim() in (4, 5):
            holder.register_parameter(str(index), nn.Parameter(value, requires_grad=False))
    return model_memory_format(holder)


# --- reading ----------------------------------------------------------------------------------------------------------


def _kind_of(path: Path) -> Kind:
    if path.suffix == ".safetensors":
        return "safetensors"
    if not zipfile.is_zipfile(path):
        return "state dict"  # torch.save's old format; what is not one is refused by the reader
    with zipfile.ZipFile(path) as archive:
        names = {name.partition("/")[2] for name in archive.namelist()}
        comment = archive.comment
    if any(name.startswith("code/") for name in names):
        return "TorchScript"
    if any(name.startswith("models/") or name.endswith("exported_program.json") for name in names):
        return "exported program"
    return "checkpoint" if comment.startswith(b"sha256:") else "state dict"


def _read_state_dict(path: Path) -> SavedModel:
    state = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]  # as many training scripts wrap it
    if not isinstance(state, dict) or not any(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError("it holds no tensors by name")
    recorded = getattr(state, "_metadata", {}).get("", {}).get(RECORD)
    saved = SavedModel("state dict", _with_metadata(state), recorded, "contiguous")
    saved.stored = parameters_layout(saved.weights())
    return saved


def _with_metadata(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict that carries `_metadata`, as `Module.state_dict()` does; the layout is recorded there."""
    if hasattr(state, "_metadata"):
        return state
    carrier = nn.Module().state_dict()
    carrier.update(state)
    return carrier


def _read_checkpoint(path: Path) -> SavedModel:
    state = checkpoint.load(path)
    recorded = state.get("facts", {}).get(RECORD)
    return SavedModel("checkpoint", state, recorded, parameters_layout(state["model"]))


def _read_safetensors(path: Path) -> SavedModel:
    try:
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import load_file
    except ImportError:
        raise ConfigError(f"{path}: safetensors is not installed; pip install safetensors") from None
    try:
        with safe_open(path, framework="pt") as file:
            recorded = (file.metadata() or {}).get(RECORD)
        return SavedModel("safetensors", load_file(path), recorded, "contiguous")
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _read_torchscript(path: Path) -> SavedModel:
    extra: dict[str, Any] = {RECORD: ""}
    module = torch.jit.load(path, map_location="cpu", _extra_files=extra)
    record = extra[RECORD].decode() if isinstance(extra[RECORD], bytes) else extra[RECORD]
    return SavedModel("TorchScript", module, record or None, model_memory_format(module))


def _read_exported(path: Path) -> SavedModel:
    extra: dict[str, Any] = {RECORD: ""}
    program = torch.export.load(path, extra_files=extra)
    return SavedModel("exported program", program, extra[RECORD] or None, model_memory_format(program))


_READERS = {
    "state dict": _read_state_dict,
    "checkpoint": _read_checkpoint,
    "safetensors": _read_safetensors,
    "TorchScript": _read_torchscript,
    "exported program": _read_exported,
}


# --- writing ----------------------------------------------------------------------------------------------------------


def _write_safetensors(weights: Mapping[str, torch.Tensor], path: Path, memory_format: str) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise ConfigError(f"{path}: safetensors is not installed; pip install safetensors") from None
    separate = {name: value.clone() for name, value in to_contiguous_state(dict(weights)).items()}  # it refuses ties
    save_file(separate, path, metadata={"format": "pt", RECORD: memory_format})


def _write_program(saved: SavedModel, path: Path, memory_format: str) -> None:
    """TorchScript and exported programs carry their code; a converted copy is written, the one in memory stays."""
    program = copy.deepcopy(saved.content)
    convert(program, memory_format=torch.contiguous_format)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if saved.kind == "TorchScript":
            torch.jit.save(program, path, _extra_files={RECORD: memory_format})
        else:
            torch.export.save(program, path, extra_files={RECORD: memory_format})
