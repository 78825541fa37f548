"""Files of models: weights are read without running code, with the card: what a file says of its model besides them.

The card has the same keys in files of every kind: `facts` of a checkpoint, `_metadata[""]` of a state dict, the
metadata of safetensors and ONNX, the extra files of a program (TorchScript, `torch.export`). Programs run code when
they are loaded: only those that the user trusts, and even then nothing in them is unpickled.
"""

import contextlib
import dataclasses
import json
import os
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import nn

from cl_train.config.schema import AugmentConfig, ConfigError, DataConfig
from cl_train.config.validation import from_mapping, optional_module, suggest
from cl_train.data.device import DeviceFormat, Normalise
from cl_train.data.images import Pixels
from cl_train.data.transforms import ImageTransform, default_val_resize
from cl_train.memory_format.layout import memory_format_of, named_tensors
from cl_train.memory_format.model_call import failure_explained
from cl_train.system.checkpoints import CheckpointError, is_checkpoint, read_torch_file, snapshot

Kind = Literal["state dict", "checkpoint", "safetensors", "TorchScript", "exported program", "ONNX", "zoo"]

ENTRIES = ("state_dict", "model_state_dict", "model", "module", "model_ema", "state_dict_ema", "ema_state_dict", "ema")
_TEXTS = ("memory_format", "model", "precision")
_SETTINGS = {"crop": "image_size", "resize": "val_resize", "interpolation": "val_interpolation"}  # of `data`
_PREPROCESSING = (*_SETTINGS, "mean", "std")
KEYS = (*_TEXTS, "classes", "input_size", *_PREPROCESSING)


@dataclass(frozen=True)
class Preprocessing:
    """From an image to the input of a model: resize of the short side, centre crop, scale to 0-1, normalise.

    resize, crop: pixels. interpolation: bilinear or bicubic, antialiased. mean, std: per channel, on the 0-1 scale.
    """

    resize: int
    crop: int
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, data: DataConfig) -> "Preprocessing":
        """That of an evaluation with the settings `data`."""
        crop = data.val_size or data.image_size
        resize = data.val_resize or default_val_resize(crop)
        return cls(resize, crop, data.val_interpolation, tuple(data.mean), tuple(data.std))

    def settings(self) -> dict[str, Any]:
        """The settings of `data` with which an evaluation has this preprocessing."""
        return {_SETTINGS.get(name, name): list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}

    def to_dict(self) -> dict[str, Any]:
        return {"input_size": [3, self.crop, self.crop], **dataclasses.asdict(self)}

    def __call__(self, image: Image.Image | Pixels) -> torch.Tensor:
        """A PIL image or uint8 [H, W, 3] -> float32 [3, crop, crop], with the pixels of an evaluation."""
        pixels = np.array(image.convert("RGB")) if isinstance(image, Image.Image) else image
        rows = torch.empty(1, self.crop, self.crop, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
        ImageTransform(DataConfig(**self.settings()), AugmentConfig(), 0, training=False)(rows[0], pixels, 0, 0)
        form = DeviceFormat(torch.device("cpu"), torch.float32, torch.channels_last)
        return Normalise(self.mean, self.std, form)(rows)[0]


@dataclass(frozen=True)
class ModelCard:
    """None, or empty, is unknown."""

    memory_format: str | None = None  # of the model when it is loaded
    model: str | None = None
    precision: str | None = None  # of the run's evaluation
    classes: tuple[str, ...] = ()
    preprocessing: Preprocessing | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values without the unknown ones."""
        values = {name: getattr(self, name) for name in _TEXTS} | {"classes": list(self.classes)}
        values |= self.preprocessing.to_dict() if self.preprocessing else {}
        return {name: [*value] if isinstance(value, tuple) else value for name, value in values.items() if value}

    @classmethod
    def read(cls, metadata: object) -> "ModelCard":
        """From a file's metadata, which may hold anything: what is not as `to_dict` writes it is unknown."""
        values = {key: _parsed(metadata.get(key)) for key in KEYS} if isinstance(metadata, dict) else {}
        texts = {name: value for name in _TEXTS if isinstance(value := values.get(name), str) and value}
        classes = values.get("classes")
        preprocessing = None
        with contextlib.suppress(ConfigError):
            data = {_SETTINGS.get(name, name): values.get(name) for name in _PREPROCESSING}
            found = Preprocessing.of(from_mapping(DataConfig, data))
            if len(found.mean) == len(found.std) == 3 and min(found.std) > 0 and found.resize >= found.crop:
                preprocessing = found
        names = tuple(map(str, classes)) if isinstance(classes, list) else ()
        return cls(classes=names, preprocessing=preprocessing, **texts)


def _parsed(value: object) -> Any:
    """A list or number, its JSON, or a text."""
    value = value.decode(errors="replace") if isinstance(value, bytes) else value
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


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

    def names_of_other_shape(self, model: nn.Module) -> list[str]:
        """The tensors that `model` has in another shape."""
        current = model.state_dict()
        return [name for name, value in self.tensors.items() if name in current and current[name].shape != value.shape]

    def with_card(self, **known: Any) -> "SavedModel":
        return replace(self, card=replace(self.card, **known))

    @property
    def stored(self) -> str:
        """The memory format of the tensors in the file."""
        return memory_format_of(value for value in self.tensors.values() if value.is_floating_point())


def weights_path(weights: str | Path) -> Path | None:
    """The file that `weights` names: of a run folder its best checkpoint, or else the newest; None for another name."""
    path = Path(weights).expanduser()
    if not path.is_dir():
        return path if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".safetensors") or path.is_file() else None
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
    if not zipfile.is_zipfile(path):
        return "state dict"  # the format of torch.save before 1.6; the reader refuses anything else
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    members = {*names, *(name.partition("/")[2] for name in names)}
    if any(name.startswith("code/") or name == "constants.pkl" for name in members):
        return "TorchScript"
    if any(name.startswith("models/") or name.endswith("exported_program.json") for name in members):
        return "exported program"
    return "state dict"


def read_weights(path: Path, *, entry: str | None = None, prefix: str | None = None, trust: bool = False) -> SavedModel:
    """Read a file to the CPU. No code in it runs and its size bounds the memory used; with `trust` it may be a program.

    `entry` holds the weights, by default the first of `ENTRIES`. Only names with `prefix` are taken, and it is removed.
    Raises ConfigError: no such file, a program without `trust`, more than tensors and plain types, a damaged file, no
    such entry.
    """
    try:
        kind = _kind_of(path)
        if kind in ("TorchScript", "exported program"):
            if trust:
                return _read_program(path, kind)
            raise ConfigError(
                f"{path}: a program ({kind}), whose code runs when it is loaded. If you trust its source, take its "
                f"weights with: cl-train convert {path} out=weights.safetensors trust=true"
            )
        if kind == "safetensors":
            safetensors = optional_module("safetensors.torch", str(path))
            with safetensors.safe_open(path, framework="pt") as file:
                metadata: object = file.metadata()
            content: Any = safetensors.load_file(path)
        else:
            content = read_torch_file(path)
            metadata, kind = _mapping(content).get("facts"), "checkpoint" if is_checkpoint(content) else kind
    except ConfigError:
        raise
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # safetensors raises many
        raise ConfigError(f"{path}: cannot be read: {str(error)[:300]}") from error
    state, taken = _find_state(content, path, entry)
    metadata = metadata or _mapping(getattr(state, "_metadata", None)).get("")
    renamed, removed = _without_prefix(state, path, prefix)
    return SavedModel(kind, renamed, ModelCard.read(metadata), ", ".join(filter(None, (taken, removed))))


def write_weights(saved: SavedModel, path: Path) -> None:
    """Write weights and card, as safetensors for that suffix, else with torch.save; or the program, if there is one.

    A file of torch.save is a plain state dict of contiguous tensors: equal weights are equal bytes. A program keeps its
    strides.
    """
    values, is_safetensors = saved.card.to_dict(), path.suffix == ".safetensors"
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    if saved.program is None or is_safetensors:
        state = dict(saved.state)
        copies: dict[Any, torch.Tensor] = {}
        for name, value in state.items():
            if getattr(value, "layout", None) == torch.strided:
                # Tied tensors stay tied; safetensors refuses them.
                place = name if is_safetensors else (value.data_ptr(), value.shape, value.stride())
                if place not in copies:
                    copies[place] = snapshot(value)
                state[name] = copies[place]
    if is_safetensors:
        if len(saved.tensors) < len(saved.state):
            raise ConfigError(f"{path.suffix} cannot hold the extra state of a module; write a .pth file")
        safetensors = optional_module("safetensors.torch", f"out=*{path.suffix}")
        safetensors.save_file(state, path, metadata={"format": "pt", **texts})
    elif saved.program is None:
        state = OrderedDict(state)
        state._metadata = OrderedDict({"": {"version": 1, **values}})  # type: ignore[attr-defined]
        torch.save(state, path)
    else:
        what = f"torch cannot write the program as {path.suffix}"
        with _careful_loading(), failure_explained(what, "write a .safetensors file"):
            if path.suffix == ".onnx":
                exported: Any = torch.onnx.export(saved.program, dynamo=True, verbose=False)
                exported.model.metadata_props.update(texts)
                exported.save(path, external_data=False)
            elif isinstance(saved.program, torch.export.ExportedProgram):
                torch.export.save(saved.program, path, extra_files=texts)
            else:
                torch.jit.save(saved.program, path, _extra_files=texts)


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
    names = {re.sub(r"(^|\.)_orig_mod\.", r"\1", name): name for name in kept}  # of torch.compile
    while all(name.startswith("module.") for name in names):  # of DDP
        names = {name.removeprefix("module."): old for name, old in names.items()}
    removed = next((old.removesuffix(name) or "_orig_mod." for name, old in names.items() if name != old), "")
    return {name: kept[old] for name, old in names.items()}, f"prefix '{removed}' removed" if removed else ""


def _read_program(path: Path, kind: Kind) -> SavedModel:
    with zipfile.ZipFile(path) as archive:
        members = archive.namelist()
    if executed := [name for name in members if re.search("custom_obj|opaque_obj|aotinductor", name)]:
        raise ConfigError(f"{path}: torch would unpickle or execute its member {executed[0]}, so it is not loaded")
    extra: dict[str, Any] = dict.fromkeys(KEYS, "")
    with _careful_loading():
        if kind == "TorchScript":
            program = torch.jit.load(path, map_location="cpu", _extra_files=extra)
        else:
            with path.open("rb") as file:  # given a path, torch expects the suffix .pt2
                program = torch.export.load(file, extra_files=extra)
    return SavedModel(kind, named_tensors(program), ModelCard.read(extra), program=program)


@contextlib.contextmanager
def _careful_loading() -> Iterator[None]:
    """Suppress torch's warnings about its formats, and prevent torch.export's fallback to `weights_only=False`."""
    with warnings.catch_warnings(), mock.patch.dict(os.environ, TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"):
        warnings.simplefilter("ignore")
        yield
