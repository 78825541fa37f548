"""Files of models: weights are read without running code, with the card of their model.

The card is in `facts` of a checkpoint, `_metadata[""]` of a state dict, the metadata of
safetensors, the extra files of a program (TorchScript, `torch.export`). Programs run code when they
are loaded: only those that the user trusts are.
"""

import os
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from cl_train.config.fields import suggest_path
from cl_train.config.validation import optional_module, suggest
from cl_train.errors import ConfigError
from cl_train.memory_format.convert import view_of
from cl_train.memory_format.layout import COMPILED
from cl_train.models.card import KEYS, ModelCard
from cl_train.system.checkpoints import CheckpointError, is_checkpoint, read_torch_file, snapshot

Kind = Literal["state dict", "checkpoint", "safetensors", "TorchScript", "exported program", "zoo"]
# The entries of checkpoints that hold weights. `average` is the EMA of a run.
ENTRIES = (
    *("state_dict", "model_state_dict", "model", "module"),
    *("model_ema", "state_dict_ema", "ema_state_dict", "ema", "average"),
)


@dataclass(frozen=True)
class SavedModel:
    kind: Kind
    # Parameters, buffers and extra state by name, with the versions of the modules if known
    state: dict[str, Any]
    card: ModelCard = ModelCard()
    origin: str = ""  # the entry and the prefix that were removed, for messages
    file: str = ""  # its path, and epoch and step of a checkpoint, for messages
    program: Any = None  # a ScriptModule or an ExportedProgram
    code: str | None = None  # package.module:function, which the file names as its model

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        state = self.state.items()
        return {name: value for name, value in state if isinstance(value, torch.Tensor)}

    def names_of_other_shape(self, model: nn.Module) -> list[str]:
        own = model.state_dict()
        tensors = self.tensors.items()
        return [name for name, value in tensors if own.get(name, value).shape != value.shape]

    def with_card(self, **facts: Any) -> "SavedModel":
        return replace(self, card=replace(self.card, **facts))


def weights_path(weights: str | Path) -> Path | None:
    """Returns the file that `weights` names, for a run folder its best checkpoint or else its
    newest; None: `weights` is another name. Raises ConfigError: the folder has no checkpoint.
    """
    path = Path(weights).expanduser()
    if not path.is_dir():
        is_path = path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
        is_path |= path.is_file() or "/" in str(weights).removeprefix("timm/")
        return path if is_path else None
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    checkpoints = [*sorted(folder.glob("step-*.pt")), *folder.glob("best.pt")]
    if not checkpoints:
        raise ConfigError(f"{path}: no checkpoint in it (checkpoints/best.pt or step-*.pt)")
    return checkpoints[-1]


def _kind_of(path: Path) -> Kind:
    """Returns the kind by suffix and members; a checkpoint's is "state dict". Raises ConfigError:
    there is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or folder{suggest_path(path)}")
    if path.suffix == ".safetensors":
        return "safetensors"
    members = []
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            members = [name.partition("/")[2] or name for name in archive.namelist()]
    if any(name.startswith(("code/", "constants.pkl")) for name in members):
        return "TorchScript"
    is_exported = any(name.startswith(("models/", "serialized_exported_")) for name in members)
    return "exported program" if is_exported else "state dict"


def read_weights(
    path: Path, *, entry: str | None = None, prefix: str | None = None, trust: bool = False
) -> SavedModel:
    """Reads a file to the CPU; code in it runs only with `trust`.

    entry: holds the weights, by default the first of `ENTRIES`. prefix: only names that begin with
    it are taken; it is removed. Raises ConfigError: no such file or entry, a damaged file, a
    program without `trust`, more than tensors and plain types.
    """
    trained = ""
    try:
        kind = _kind_of(path)
        if kind in ("TorchScript", "exported program"):
            if trust:
                return _read_program(path, kind)
            what = f"{path}: a program ({kind}), whose code runs when it is loaded"
            advice = f"cl-train convert {path} out=weights.safetensors trust=true"
            raise ConfigError(f"{what}. If you trust its source, take its weights with: {advice}")
        if kind == "safetensors":
            safetensors = optional_module("safetensors.torch", str(path))
            with safetensors.safe_open(path, framework="pt") as file:
                metadata: object = file.metadata()
            content: Any = safetensors.load_file(path)
        else:
            content = read_torch_file(path)
            metadata = _mapping(content).get("facts")
            if is_checkpoint(content):
                progress = _mapping(content.get("progress"))
                epoch, step = (progress.get(key, "unknown") for key in ("epoch", "step"))
                kind, trained = "checkpoint", f" (epoch {epoch}, step {step})"
    except (ConfigError, CheckpointError) as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # safetensors raises many
        raise ConfigError(f"{path}: cannot be read: {str(error)[:300]}") from error

    content, origin = _find_state(content, path, entry)
    metadata = metadata or _mapping(getattr(content, "_metadata", None)).get("")
    state = {
        str(name): value
        for name, value in content.items()
        if isinstance(value, torch.Tensor) or str(name).endswith("_extra_state")
    }
    renamed, removed = _renamed(state, path, prefix)
    versions = module_versions(content) if renamed.keys() == state.keys() else {}
    origin = ", ".join(filter(None, (origin, removed)))
    state, card = with_versions(renamed, versions), ModelCard.read(metadata)
    return SavedModel(kind, state, card, origin, file=f"{path}{trained}")


def _read_program(path: Path, kind: Kind) -> SavedModel:
    facts: dict[str, Any] = dict.fromkeys(KEYS, "")
    with path.open("rb") as file, warnings.catch_warnings(action="ignore"):
        if kind == "TorchScript":
            program = torch.jit.load(file, map_location="cpu", _extra_files=facts)
            state = program.state_dict()
        else:  # given a path, torch expects the suffix .pt2
            program = torch.export.load(file, extra_files=facts)
            state = program.state_dict
    return SavedModel(kind, dict(state), ModelCard.read(facts), program=program)


def write_weights(saved: SavedModel, path: Path) -> None:
    """Writes safetensors or a plain state dict, by the suffix, contiguous, with the card.
    TorchScript stays a program in a .pt or .pth file, with its strides.
    """
    if path.suffix == ".safetensors":
        if len(saved.tensors) < len(saved.state):
            raise ConfigError("safetensors cannot hold extra state of a module: write a .pth file")
        safetensors = optional_module("safetensors.torch", f"out=*{path.suffix}")
        copies = {name: snapshot(value) for name, value in saved.tensors.items()}
        safetensors.save_file(copies, path, metadata={"format": "pt", **saved.card.to_texts()})
        return
    if saved.kind == "TorchScript":
        with warnings.catch_warnings(action="ignore"):
            torch.jit.save(saved.program, path, _extra_files=saved.card.to_texts())
        return
    state = dict(saved.state)
    copy_of: dict[Any, torch.Tensor] = {}  # by view, so that tied tensors stay tied
    for name, value in saved.tensors.items():
        if value.layout == torch.strided:
            state[name] = copy_of.setdefault(view_of(value), snapshot(value))
    torch.save(with_versions(state, module_versions(saved.state), saved.card), path)


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _find_state(content: object, path: Path, entry: str | None) -> tuple[dict[str, Any], str]:
    """Returns the state dict in a checkpoint, at most three entries deep, and the entries taken."""
    state = _mapping(content)
    names = list[str]()
    if entry is not None:
        entries = [str(name) for name, value in state.items() if isinstance(value, dict)]
        if entry not in entries:
            what = f"{path}: entry={entry}: no such entry{suggest(entry, entries)}"
            raise ConfigError(f"{what} (there are {entries[:10]})")
        state = state[entry]
        names = [entry]
    for _ in range(3):
        usual = next((name for name in ENTRIES if _mapping(state.get(name))), None)
        if usual is None:
            break
        state = state[usual]
        names.append(usual)
    if not any(isinstance(value, torch.Tensor) for value in state.values()):
        advice = "entry=NAME of cl-train convert selects the weights"
        raise ConfigError(f"{path}: holds no tensors by name; {advice}")
    return state, f"entry '{'.'.join(names)}'" if names else ""


def _renamed(state: dict[str, Any], path: Path, prefix: str | None) -> tuple[dict[str, Any], str]:
    """Returns the part of `state` with `prefix` (None: what DDP and compile add), by the names in
    the model, and what was removed, for messages.
    """
    names = list(state)
    if prefix is None:
        common = os.path.commonprefix(names)  # noqa: RUF071 (of names)
        prefix = str(re.findall(rf"^(?:(?:module|{COMPILED})\.)*", common)[0])
        removed = f"prefix '{prefix}' removed" if prefix else ""
    else:
        selected = sum(name.startswith(prefix) for name in names)
        removed = f"the {selected} of {len(names)} names with the prefix '{prefix}'"
        if not selected:
            what = f"no name begins with prefix={prefix} (the first is {names[0]})"
            raise ConfigError(f"{path}: {what}")
    renamed = {
        re.sub(rf"(^|\.){COMPILED}\.", r"\1", name.removeprefix(prefix)): value
        for name, value in state.items()
        if name.startswith(prefix)
    }
    return renamed, removed


# --- versions of modules --------------------------------------------------------------------------


def module_versions(state: object) -> dict[str, int]:
    """Returns the version of each module that a state dict records, by the module's path."""
    recorded = _mapping(getattr(state, "_metadata", None))
    versions = {path: _mapping(entry).get("version") for path, entry in recorded.items()}
    return {path: version for path, version in versions.items() if isinstance(version, int)}


def with_versions(
    state: Mapping[str, Any], versions: Mapping[str, int], card: ModelCard | None = None
) -> dict[str, Any]:
    """Returns `state` as `torch.nn.Module.state_dict` does, and with the card."""
    metadata = {path: {"version": version} for path, version in versions.items()}
    metadata[""] = metadata.get("", {}) | (card.to_dict() if card else {})
    versioned = OrderedDict(state)
    versioned._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    return versioned


def load_state(
    model: nn.Module, state: Mapping[str, Any], what: str, without: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Copies `state`, but for `without`, into `model`; returns the names that it lacks, and those
    that the model lacks. Raises ConfigError: "`what`: reason".

    torch takes a module without a version for one of the oldest. Where a file has no versions, a
    module whose names are all in the file therefore gets the version of this code.
    """
    versions = module_versions(state)
    state = {name: value for name, value in state.items() if name not in without}
    try:
        own = model.state_dict()
        if not versions:
            incomplete = {name.rpartition(".")[0] for name in own.keys() - state.keys()}
            current = module_versions(own)
            versions = {path: current[path] for path in current.keys() - incomplete}
        versioned = with_versions(state, versions)
        missing, unexpected = model.load_state_dict(versioned, strict=False)
    except Exception as error:  # the hooks of a user's module may raise any exception
        # torch names every tensor, one a line below a title.
        lines = [" ".join(line.split()) for line in str(error).splitlines()]
        more = f" And {len(lines) - 2} more like it." if len(lines) > 2 else ""
        raise ConfigError(f"{what}: {' '.join(lines[:2])[:300]}{more}") from error
    return missing, unexpected
