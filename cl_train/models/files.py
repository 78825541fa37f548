"""Files of models: weights are read without running code, and what a file says of its model is read with them.

Readable as weights are files of `torch.save` (a state dict, or a checkpoint that holds one), checkpoints of cl_train,
and safetensors. Programs (TorchScript, `torch.export`) run code when they are loaded: only for files that the user
trusts, and even then nothing in them is unpickled.
"""

import os
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from cl_train.config.schema import ConfigError
from cl_train.config.user_function import optional_module
from cl_train.config.validation import suggest
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import memory_format_of, named_tensors, to_contiguous_state
from cl_train.models.card import KEYS, ModelCard
from cl_train.system import checkpoint_file
from cl_train.system.torch_file import UnreadableFile, read_torch_file

Kind = Literal["state dict", "checkpoint", "safetensors", "TorchScript", "exported program", "zoo"]

PROGRAMS = ("TorchScript", "exported program")
ENTRIES = ("state_dict", "model_state_dict", "model", "module", "model_ema", "state_dict_ema", "ema_state_dict", "ema")
PREFIXES = ("module.", "_orig_mod.")  # of DDP and of torch.compile
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


def kind_of(path: Path) -> Kind:
    """The kind of a file, from its suffix and its members; nothing is executed. Raises ConfigError: none, or ONNX."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if path.suffix == ".onnx":
        raise ConfigError(
            f"{path}: an ONNX file runs with onnxruntime; here give the run, or a .pth or .safetensors file"
        )
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


# --- weights ----------------------------------------------------------------------------------------------------------


def read_weights(path: Path, *, entry: str | None = None, prefix: str | None = None) -> SavedModel:
    """Read a file of weights to the CPU. No code in the file runs, and its size bounds the memory used.

    `entry` holds the weights, by default the first of `ENTRIES`. Only names with `prefix` are taken, and it is removed.
    Raises ConfigError: no such file, a program, more than tensors and plain types, a damaged file, no such entry.
    """
    kind = kind_of(path)
    if kind in PROGRAMS:
        raise ConfigError(
            f"{path}: a program ({kind}), whose code runs when it is loaded. If you trust its source, take its "
            f"weights with: cl-train convert {path} out=weights.safetensors trust=true"
        )
    metadata: object = None
    try:
        if kind == "safetensors":
            content, metadata = _read_safetensors(path)
        else:
            content = checkpoint_file.load(path) if kind == "checkpoint" else read_torch_file(path)
            metadata = _mapping(content).get("facts")
    except (UnreadableFile, OSError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except checkpoint_file.CheckpointError as error:
        raise ConfigError(str(error)) from error
    state, taken = _find_state(content, path, entry)
    metadata = metadata or _mapping(getattr(state, "_metadata", None)).get("")
    renamed, removed = _without_prefix(state, path, prefix)
    return SavedModel(kind, renamed, ModelCard.read(metadata), ", ".join(filter(None, (taken, removed))))


def write_weights(saved: SavedModel, path: Path) -> None:
    """Write weights and card, as safetensors for that suffix, else with torch.save; equal weights are equal bytes.

    A file of torch.save is a plain state dict of contiguous tensors, whose `_metadata[""]` has the card.
    """
    if path.suffix != ".safetensors":
        state = OrderedDict(to_contiguous_state(saved.state))
        state._metadata = OrderedDict({"": {"version": 1, **saved.card.to_dict()}})  # type: ignore[attr-defined]
        torch.save(state, path)
        return
    if len(saved.tensors) < len(saved.state):
        raise ConfigError(f"{path.suffix} cannot hold the extra state of a module; write a .pth file")
    untied = {name: value.clone() for name, value in to_contiguous_state(saved.tensors).items()}
    safetensors = optional_module("safetensors.torch", f"out=*{path.suffix}")
    safetensors.save_file(untied, path, metadata={"format": "pt", **saved.card.to_strings()})


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
    removed = ""
    while found := next((p for p in PREFIXES if all(name.startswith(p) for name in kept)), None):
        kept = {name.removeprefix(found): value for name, value in kept.items()}
        removed += found
    if any("._orig_mod." in name for name in kept):  # of a compiled child
        kept = {name.replace("._orig_mod.", "."): value for name, value in kept.items()}
        removed += "_orig_mod."
    return kept, f"prefix '{removed}' removed" if removed else ""


def names_differ(missing: Iterable[str], unexpected: list[str]) -> str:
    """Why weights do not fit a model, and the options of `convert` that may mend it."""
    absent = set(missing)
    cuts = ((name, dot + 1) for name in unexpected for dot, letter in enumerate(name) if letter == ".")
    prefixes = Counter(name[:cut] for name, cut in cuts if name[cut:] in absent).most_common(1)
    advice = f"prefix={prefixes[0][0]}" if prefixes else "entry=... prefix=..."
    return (
        f"the file lacks {len(absent)} of its tensors ({', '.join(sorted(absent)[:3])}) and has {len(unexpected)} "
        f"others ({', '.join(unexpected[:3])}); cl-train convert FILE out=... {advice} selects an entry and removes a "
        "prefix"
    )


# --- programs ---------------------------------------------------------------------------------------------------------


def read_program(path: Path, kind: Kind) -> SavedModel:
    """Load a program to the CPU. Raises ConfigError: damaged, or with members that torch would unpickle or execute."""
    extra: dict[str, Any] = dict.fromkeys(KEYS, "")
    _check_members(path)
    try:
        with careful_loading():
            if kind == "TorchScript":
                program = torch.jit.load(path, map_location="cpu", _extra_files=extra)
            else:
                with path.open("rb") as file:  # given a path, torch expects the suffix .pt2
                    program = torch.export.load(file, extra_files=extra)
    except Exception as error:  # RuntimeError, KeyError, AssertionError and others
        raise ConfigError(f"{path}: cannot be read as {kind}: {str(error)[:300]}") from error
    texts = {
        name: value.decode(errors="replace") if isinstance(value, bytes) else value for name, value in extra.items()
    }
    card = ModelCard.read({name: text for name, text in texts.items() if text})
    return SavedModel(kind, named_tensors(program), card, program=program)


def write_program(program: Any, path: Path, card: ModelCard, memory_format: torch.memory_format) -> None:
    """Convert the program, in place, and write it: torch keeps the strides of its tensors in the file."""
    convert(program, memory_format=memory_format)
    try:
        with careful_loading():
            if isinstance(program, torch.export.ExportedProgram):
                torch.export.save(program, path, extra_files=card.to_strings())
            else:
                torch.jit.save(program, path, _extra_files=card.to_strings())
    except Exception as error:  # torch.export refuses to save some programs that it loaded
        raise ConfigError(f"torch cannot save this program again: {error}") from error


def _check_members(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    names = [member.filename for member in members]
    if len(set(names)) < len(names) or sum(m.file_size for m in members) > path.stat().st_size + _MAX_CODE_BYTES:
        raise ConfigError(f"{path}: damaged: two members have one name, or they are larger than the file")
    for name in names:
        if any(word in name for word in _EXECUTED_MEMBERS):
            raise ConfigError(f"{path}: torch would unpickle or execute its member {name}, so it is not loaded")


@contextmanager
def careful_loading() -> Iterator[None]:
    """Suppress torch's warnings about its formats, and prevent torch.export's fallback to `weights_only=False`."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
