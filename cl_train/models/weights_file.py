"""Files of weights: read without running code, written with contiguous tensors, so that equal weights are equal bytes.

Readable are files of `torch.save` (a state dict, or a checkpoint that holds one), checkpoints of cl_train, and
safetensors. Programs (TorchScript, `torch.export`) run code when they are loaded: see `program_file.py`.
"""

import zipfile
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from cl_train.config.schema import ConfigError
from cl_train.config.user_function import optional_module
from cl_train.config.validation import suggest
from cl_train.memory_format.layout import memory_format_of, to_contiguous_state
from cl_train.system import checkpoint_file
from cl_train.system.torch_file import UnreadableFile, read_torch_file

Kind = Literal["state dict", "checkpoint", "safetensors", "TorchScript", "exported program"]

PROGRAMS = ("TorchScript", "exported program")
RECORD = "memory_format"  # the key under which each kind of file records the memory format
ENTRIES = ("state_dict", "model_state_dict", "model", "module", "model_ema", "state_dict_ema", "ema_state_dict", "ema")
PREFIXES = ("module.", "_orig_mod.")  # of DDP and of torch.compile


@dataclass
class SavedModel:
    """The content of a file."""

    kind: Kind
    state: dict[str, Any]  # parameters, buffers and the modules' extra state, by name
    recorded: str | None = None  # the memory format that the file names
    taken: str = ""  # the entry and the prefix that were removed, for messages
    metadata: dict[str, Any] = field(default_factory=dict)  # of a checkpoint of cl_train
    program: Any = None  # a ScriptModule or an ExportedProgram

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.state.items() if isinstance(value, torch.Tensor)}

    @property
    def stored(self) -> str:
        """The memory format of the tensors in the file."""
        return memory_format_of(value for value in self.tensors.values() if value.is_floating_point())


def kind_of(path: Path) -> Kind:
    """The kind of a file, from its suffix and its members; nothing in it is executed."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        return "safetensors"
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.partition("/")[2] for name in archive.namelist()} | set(archive.namelist())
            comment = archive.comment
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return "state dict"  # the format of torch.save before 1.6; the reader refuses anything else
    if any(name.startswith("code/") or name == "constants.pkl" for name in members):
        return "TorchScript"
    if any(name.startswith("models/") or name.endswith("exported_program.json") for name in members):
        return "exported program"
    return "checkpoint" if comment.startswith(b"sha256:") else "state dict"


def read_weights(path: Path, *, entry: str | None = None, prefix: str | None = None) -> SavedModel:
    """Read a file of weights to the CPU. No code in the file runs, and its size bounds the memory used.

    Args:
        entry: of a file with several entries, the one that holds the weights; None: the first of `ENTRIES` in the file.
        prefix: take only the names that begin with it, and remove it; None: remove `module.` and `_orig_mod.`.

    Raises ConfigError: no such file, a program, more than tensors and plain types, a damaged file, no such entry.
    """
    kind = kind_of(path)
    if kind in PROGRAMS:
        raise ConfigError(
            f"{path}: a program ({kind}), whose code runs when it is loaded. If you trust its source, take its "
            f"weights with: cl-train convert {path} out=weights.safetensors trust=true"
        )
    metadata: dict[str, Any] = {}
    try:
        if kind == "safetensors":
            content, recorded = _read_safetensors(path)
        else:
            content = checkpoint_file.load(path) if kind == "checkpoint" else read_torch_file(path)
            metadata = _mapping(_mapping(content).get("facts"))
            recorded = metadata.get(RECORD)
    except (UnreadableFile, OSError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except checkpoint_file.CheckpointError as error:
        raise ConfigError(str(error)) from error
    state, taken = _find_state(content, path, entry)
    recorded = recorded or _mapping(_mapping(getattr(state, "_metadata", None)).get("")).get(RECORD)
    renamed, removed = _without_prefix(state, path, prefix)
    return SavedModel(kind, renamed, recorded, ", ".join(filter(None, (taken, removed))), metadata)


def write_weights(saved: SavedModel, path: Path, memory_format: str) -> None:
    """Write the weights with `memory_format` recorded: as safetensors for that suffix, else with torch.save."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".safetensors":
        state = OrderedDict(to_contiguous_state(saved.state))
        state._metadata = OrderedDict({"": {"version": 1, RECORD: memory_format}})  # type: ignore[attr-defined]
        torch.save(state, path)
        return
    if len(saved.tensors) < len(saved.state):
        raise ConfigError(f"{path}: safetensors cannot hold the extra state of a module; write a .pth file")
    untied = {name: value.clone() for name, value in to_contiguous_state(saved.tensors).items()}
    safetensors = optional_module("safetensors.torch", str(path))
    safetensors.save_file(untied, path, metadata={"format": "pt", RECORD: memory_format})


def _read_safetensors(path: Path) -> tuple[dict[str, Any], str | None]:
    safetensors = optional_module("safetensors.torch", str(path))
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            recorded = (file.metadata() or {}).get(RECORD)
        return safetensors.load_file(path), recorded
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
        raise ConfigError(f"{path}: holds no tensors by name; entry=NAME selects the entry with the weights")
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
    removed = ""
    while found := next((p for p in PREFIXES if all(name.startswith(p) for name in kept)), None):
        kept = {name.removeprefix(found): value for name, value in kept.items()}
        removed += found
    if any("._orig_mod." in name for name in kept):  # of a compiled child
        kept = {name.replace("._orig_mod.", "."): value for name, value in kept.items()}
        removed += "_orig_mod."
    return kept, f"prefix '{removed}' removed" if removed else ""
