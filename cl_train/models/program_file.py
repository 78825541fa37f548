"""TorchScript archives and exported programs, which run code when they are loaded: only for files that the user trusts.

Even then nothing is unpickled: members that torch would unpickle are refused.
"""

import copy
import os
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cl_train.config.schema import ConfigError
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import named_tensors
from cl_train.models.weights_file import RECORD, Kind, SavedModel

_MAX_CODE_BYTES = 64 << 20  # TorchScript compresses its source code; nothing else in these archives is compressed
_EXECUTED_MEMBERS = ("custom_obj", "opaque_obj", "aotinductor")


def read_program(path: Path, kind: Kind) -> SavedModel:
    """Load a program to the CPU. Raises ConfigError: damaged, or with members that torch would unpickle or execute."""
    extra: dict[str, Any] = {RECORD: ""}
    _check_members(path)
    try:
        with _careful():
            if kind == "TorchScript":
                program = torch.jit.load(path, map_location="cpu", _extra_files=extra)
            else:
                with path.open("rb") as file:  # given a path, torch expects the suffix .pt2
                    program = torch.export.load(file, extra_files=extra)
    except Exception as error:  # RuntimeError, KeyError, AssertionError and others
        raise ConfigError(f"{path}: cannot be read as {kind}: {str(error)[:300]}") from error
    record = extra[RECORD].decode() if isinstance(extra[RECORD], bytes) else extra[RECORD]
    return SavedModel(kind, named_tensors(program), record or None, program=program)


def write_program(program: Any, path: Path, memory_format: str) -> None:
    """Write a contiguous copy of the program, with `memory_format` recorded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = copy.deepcopy(program)
    convert(contiguous, memory_format=torch.contiguous_format)
    try:
        with _careful():
            if isinstance(program, torch.export.ExportedProgram):
                torch.export.save(contiguous, path, extra_files={RECORD: memory_format})
            else:
                torch.jit.save(contiguous, path, _extra_files={RECORD: memory_format})
    except Exception as error:  # torch.export refuses to save some programs that it loaded
        raise ConfigError(f"{path}: torch cannot save this program again: {error}") from error


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
def _careful() -> Iterator[None]:
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
