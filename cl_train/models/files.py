"""Files of models: weights are read without running code, and what a file says of its model is read with them.

Readable as weights are files of `torch.save` (a state dict, or a checkpoint that holds one), checkpoints of cl_train,
and safetensors. Programs (TorchScript, `torch.export`) run code when they are loaded: only for files that the user
trusts, and even then nothing in them is unpickled.
"""

import os
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from cl_train.config.schema import ConfigError
from cl_train.config.validation import optional_module, suggest
from cl_train.memory_format.layout import memory_format_of, named_tensors, to_contiguous_state
from cl_train.memory_format.model_call import failure_explained
from cl_train.models.card import KEYS, ModelCard
from cl_train.system.checkpoints import UnreadableFile, is_checkpoint, read_torch_file

Kind = Literal["state dict", "checkpoint", "safetensors", "TorchScript", "exported program", "zoo"]

ENTRIES = ("state_dict", "model_state_dict", "model", "module", "model_ema", "state_dict_ema", "ema_state_dict", "ema")
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_MAX_CODE_BYTES = 64 << 20  # TorchScript compresses its source code; nothing else in these archives is compressed
_EXECUTED_MEMBERS = ("custom_obj", "opaque_obj", "aotinductor")


@dataclass(frozen=True)
class SavedModel:
    """The content of a file."""

    kind: Kind
    state: dict[str, Any]  # parameters, buffers and the modules' extra state, by name
    card: ModelCard = ModelCard()
    taken: str = ""  # the entry and the prefix that were removed, for messages
    program: Any = None  # a ScriptModule or an ExportedProgram

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.state.items() if isinstance(value, torch.Tensor)}

    def with_card(self, **known: Any) -> "SavedModel":
        return replace(self, card=replace(self.card, **known))

    @property
    def stored(self) -> str:
        """The memory format of the tensors in the file."""
        return memory_format_of(value for value in self.tensors.values() if value.is_floating_point())


# --- names ------------------------------------------------------------------------------------------------------------


def weights_path(weights: str | Path) -> Path | None:
    """The file that `weights` names: of a run folder its best checkpoint, or else the newest; None for another name.

    Raises ConfigError: a folder without a checkpoint.
    """
    path = Path(weights).expanduser()
    if not path.is_dir():
        return path if path.suffix in SUFFIXES or path.is_file() else None
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = [*sorted(folder.glob("step-*.pt")), *folder.glob("best.pt")]
    if not found:
        raise ConfigError(f"{path}: a folder without a checkpoint (checkpoints/best.pt or step-*.pt)")
    return found[-1]


def _kind_of(path: Path) -> Kind:
    """From its suffix and members (a checkpoint: a state dict); executes nothing. Raises ConfigError: no file, ONNX."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if path.suffix == ".onnx":
        raise ConfigError(f"{path}: an ONNX file runs with onnxruntime; give the run, or a .pth or .safetensors file")
    if path.suffix == ".safetensors":
        return "safetensors"
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return "state dict"  # the format of torch.save before 1.6; the reader refuses anything else
    members = {*names, *(name.partition("/")[2] for name in names)}
    if any(name.startswith("code/") or name == "constants.pkl" for name in members):
        return "TorchScript"
    if any(name.startswith("models/") or name.endswith("exported_program.json") for name in members):
        return "exported program"
    return "state dict"


# --- weights ----------------------------------------------------------------------------------------------------------


def read_weights(path: Path, *, entry: str | None = None, prefix: str | None = None, trust: bool = False) -> SavedModel:
    """Read a file to the CPU. No code in it runs and its size bounds the memory used; with `trust` it may be a program.

    `entry` holds the weights, by default the first of `ENTRIES`. Only names with `prefix` are taken, and it is removed.
    Raises ConfigError: no such file, a program without `trust`, more than tensors and plain types, a damaged file, no
    such entry.
    """
    kind = _kind_of(path)
    if kind in ("TorchScript", "exported program"):
        if trust:
            return _read_program(path, kind)
        raise ConfigError(
            f"{path}: a program ({kind}), whose code runs when it is loaded. If you trust its source, take its "
            f"weights with: cl-train convert {path} out=weights.safetensors trust=true"
        )
    try:
        if kind == "safetensors":
            content, metadata = _read_safetensors(path)
        else:
            content = read_torch_file(path)
            metadata, kind = _mapping(content).get("facts"), "checkpoint" if is_checkpoint(content) else kind
    except (UnreadableFile, OSError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    state, taken = _find_state(content, path, entry)
    metadata = metadata or _mapping(getattr(state, "_metadata", None)).get("")
    renamed, removed = _without_prefix(state, path, prefix)
    return SavedModel(kind, renamed, ModelCard.read(metadata), ", ".join(filter(None, (taken, removed))))


def write_weights(saved: SavedModel, path: Path) -> None:
    """Write weights and card, as safetensors for that suffix, else with torch.save; or the program, if there is one.

    A file of torch.save is a plain state dict of contiguous tensors, whose `_metadata[""]` has the card; equal weights
    are equal bytes. A program keeps its strides.
    """
    texts = saved.card.to_strings()
    if path.suffix == ".safetensors":
        if len(saved.tensors) < len(saved.state):
            raise ConfigError(f"{path.suffix} cannot hold the extra state of a module; write a .pth file")
        untied = {name: value.clone() for name, value in to_contiguous_state(saved.tensors).items()}
        safetensors = optional_module("safetensors.torch", f"out=*{path.suffix}")
        safetensors.save_file(untied, path, metadata={"format": "pt", **texts})
    elif saved.program is None:
        state = OrderedDict(to_contiguous_state(saved.state))
        state._metadata = OrderedDict({"": {"version": 1, **saved.card.to_dict()}})  # type: ignore[attr-defined]
        torch.save(state, path)
    else:
        with careful_loading(), failure_explained("torch cannot save this program again", "write a .safetensors file"):
            if isinstance(saved.program, torch.export.ExportedProgram):
                torch.export.save(saved.program, path, extra_files=texts)
            else:
                torch.jit.save(saved.program, path, _extra_files=texts)


def _read_safetensors(path: Path) -> tuple[dict[str, Any], object]:
    safetensors = optional_module("safetensors.torch", str(path))
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        return safetensors.load_file(path), metadata
    except Exception as error:  # SafetensorError, and others for headers with odd types or sizes
        raise UnreadableFile(str(error)[:200]) from error


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _find_state(content: object, path: Path, entry: str | None) -> tuple[dict[str, Any], str]:
    """The state dict inside a checkpoint, at most three entries deep, and the names of the entries."""
    state, names, others = _mapping(content), list[str](), list[str]()
    if entry is not None:
        known = [str(name) for name, value in state.items() if isinstance(value, dict)]
        if entry not in known:
            raise ConfigError(f"{path}: entry={entry}: no such entry{suggest(entry, known)} (there are {known[:10]})")
        state, names = state[entry], [entry]
    for _ in range(3):
        found = [name for name in ENTRIES if _mapping(state.get(name))]
        if not found:
            break
        state = state[found[0]]
        names, others = [*names, found[0]], [*others, *found[1:]]
    if not any(isinstance(value, torch.Tensor) for value in state.values()):
        raise ConfigError(f"{path}: holds no tensors by name; entry=NAME of cl-train convert selects the weights")
    taken = f"entry '{'.'.join(names)}'" if names else ""
    return state, f"{taken} (not {', '.join(others)})" if others else taken


def _without_prefix(state: dict[str, Any], path: Path, prefix: str | None) -> tuple[dict[str, Any], str]:
    """Tensors and extra state by their names in the model, and what was removed from the names."""
    kept = {str(k): v for k, v in state.items() if isinstance(v, torch.Tensor) or str(k).endswith("_extra_state")}
    if prefix is not None:
        chosen = {name.removeprefix(prefix): value for name, value in kept.items() if name.startswith(prefix)}
        if not chosen:
            raise ConfigError(f"{path}: no name begins with prefix={prefix} (the first is {next(iter(kept))})")
        return chosen, f"the {len(chosen)} of {len(kept)} names with the prefix '{prefix}'"
    first = next(iter(kept))
    kept = {re.sub(r"(^|\.)_orig_mod\.", r"\1", name): value for name, value in kept.items()}  # of torch.compile
    while all(name.startswith("module.") for name in kept):  # of DDP
        kept = {name.removeprefix("module."): value for name, value in kept.items()}
    removed = first.removesuffix(next(iter(kept)))
    return kept, f"prefix '{removed}' removed" if removed else ""


# --- programs ---------------------------------------------------------------------------------------------------------


def _read_program(path: Path, kind: Kind) -> SavedModel:
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: member.file_size for member in archive.infolist()}
        is_damaged = len(members) < len(archive.infolist())
    if is_damaged or sum(members.values()) > path.stat().st_size + _MAX_CODE_BYTES:
        raise ConfigError(f"{path}: damaged: two members have one name, or they are larger than the file")
    if executed := [name for name in members if any(word in name for word in _EXECUTED_MEMBERS)]:
        raise ConfigError(f"{path}: torch would unpickle or execute its member {executed[0]}, so it is not loaded")
    extra: dict[str, Any] = dict.fromkeys(KEYS, "")
    try:
        with careful_loading():
            if kind == "TorchScript":
                program = torch.jit.load(path, map_location="cpu", _extra_files=extra)
            else:
                with path.open("rb") as file:  # given a path, torch expects the suffix .pt2
                    program = torch.export.load(file, extra_files=extra)
    except Exception as error:  # RuntimeError, KeyError, AssertionError and others
        raise ConfigError(f"{path}: cannot be read as {kind}: {str(error)[:300]}") from error
    texts = {key: value.decode(errors="replace") if isinstance(value, bytes) else value for key, value in extra.items()}
    return SavedModel(kind, named_tensors(program), ModelCard.read(texts), program=program)


@contextmanager
def careful_loading() -> Iterator[None]:
    """Suppress torch's warnings about its formats, and prevent torch.export's fallback to `weights_only=False`."""
    with warnings.catch_warnings(), mock.patch.dict(os.environ, TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"):
        warnings.simplefilter("ignore")
        yield
