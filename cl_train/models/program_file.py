"""Programs in files: TorchScript archives and exported programs.

Loading one runs its code: TorchScript calls `__setstate__`, and `torch.export` evaluates expressions. `read_program` is
for files whose source the user trusts (`trust=true`), and does not unpickle either: members that torch would unpickle
are refused.
"""

from __future__ import annotations

import copy
import json
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
from cl_train.models.weights_file import RECORD, Kind

_MAX_CODE_BYTES = 64 << 20  # TorchScript compresses its source code; nothing else in these archives is compressed


def read_program(path: Path, kind: Kind) -> tuple[Any, str | None]:
    """Load a program to the CPU; returns a ScriptModule or an ExportedProgram, and the recorded memory format.

    Raises:
        ConfigError: damaged; has members that torch would unpickle; claims to be larger than the file.
    """
    extra: dict[str, Any] = {RECORD: ""}
    try:
        _check_members(path)
        with _quiet(), _no_unpickling():
            if kind == "TorchScript":
                program = torch.jit.load(path, map_location="cpu", _extra_files=extra)
            else:
                with path.open("rb") as file:  # given a path, torch expects the suffix .pt2
                    program = torch.export.load(file, extra_files=extra)
    except ConfigError:
        raise
    except Exception as error:  # of damaged archives: RuntimeError, KeyError, AssertionError and others
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"{path}: cannot be read as {kind}: {reason[0][:300]}") from error
    record = extra[RECORD].decode() if isinstance(extra[RECORD], bytes) else extra[RECORD]
    return program, record or None


def write_program(program: Any, path: Path, memory_format: str) -> None:
    """Write a contiguous copy of the program, with `memory_format` recorded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    contiguous = copy.deepcopy(program)
    convert(contiguous, memory_format=torch.contiguous_format)
    try:
        with _quiet():
            if isinstance(program, torch.export.ExportedProgram):
                torch.export.save(contiguous, path, extra_files={RECORD: memory_format})
            else:
                torch.jit.save(contiguous, path, _extra_files={RECORD: memory_format})
    except Exception as error:  # torch.export's verifier refuses some programs that it loaded
        raise ConfigError(f"{path}: torch cannot save this program again: {error}") from error


def _check_members(path: Path) -> None:
    file_bytes = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        if len(set(names)) < len(names):
            raise ConfigError(f"{path}: two members of the archive have the same name")
        if sum(member.file_size for member in members) > file_bytes + _MAX_CODE_BYTES:
            raise ConfigError(f"{path}: its table of contents claims {file_bytes + _MAX_CODE_BYTES} bytes or more")
        for name in names:
            inner = name.partition("/")[2]
            unpickled = inner.startswith(("data/weights/", "data/constants/")) and inner.endswith(".pt")
            if unpickled or "custom_obj" in inner or "opaque_obj" in inner or "aotinductor" in inner:
                raise ConfigError(f"{path}: torch would unpickle or execute its member {inner}, so it is not loaded")
            if inner.startswith("data/") and inner.endswith(".json") and _uses_pickle(json.loads(archive.read(name))):
                raise ConfigError(f"{path}: {inner} asks for unpickling (use_pickle), so the file is not loaded")


def _uses_pickle(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value.get("use_pickle")) or any(map(_uses_pickle, value.values()))
    return isinstance(value, list) and any(map(_uses_pickle, value))


@contextmanager
def _no_unpickling() -> Iterator[None]:
    """torch.export loads sample inputs with `weights_only=False` if the safe way fails; this variable overrules it."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.jit is deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message="No complete tensor found")  # torch.export, about its own format
        yield
