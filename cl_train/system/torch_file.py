"""Read untrusted files of `torch.save`: no code runs, and the file's size bounds the memory."""

import argparse
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_MAX_VALUES = 1_000_000  # containers, tensors and plain values
_ZIP_BEGIN = b"PK\x03\x04"
_MAX_GROWTH = 8  # bytes of all tensors per byte of the file: weights may be shared between a few names


class UnreadableFile(ValueError):
    """A file cannot be read safely; the message is the reason in one line."""


def read_torch_file(path: Path) -> Any:
    """Load a file of `torch.save`, with all tensors on the CPU.

    The unpickler is restricted to tensors and plain types (`weights_only=True`), without a fallback.

    Raises:
        UnreadableFile: damaged; needs other types; is a program (TorchScript); is compressed; has tensors that are
            larger than the file, or that are sparse, quantised or on the meta device.
        OSError: the file cannot be opened.
    """
    try:
        if zipfile.is_zipfile(path):
            _check_members(path)
        with path.open("rb") as file, warnings.catch_warnings():
            if file.read(len(_ZIP_BEGIN)) == _ZIP_BEGIN and not zipfile.is_zipfile(file):
                raise UnreadableFile("it is truncated or damaged")  # torch raises several errors, OSError too
            file.seek(0)
            warnings.simplefilter("ignore")  # deprecated formats are either read or refused without a warning
            with torch.serialization.safe_globals([argparse.Namespace]):  # many checkpoints contain it
                value = torch.load(file, map_location="cpu", weights_only=True)
        _check_values(value, path.stat().st_size)
    except (UnreadableFile, OSError):
        raise
    except pickle.UnpicklingError as error:
        raise UnreadableFile("it holds more than tensors and plain types; reading it could run code") from error
    except Exception as error:  # of a damaged file: RuntimeError, EOFError, KeyError, struct.error and others
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnreadableFile(f"it is truncated, damaged or no file of torch.save: {reason[:300]}") from error
    return value


def _check_members(path: Path) -> None:
    """Compressed members could expand to a thousand times the file."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise UnreadableFile("it is a compressed zip archive, which torch.save does not write")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise UnreadableFile("its table of contents claims more bytes than the file has")


def _check_values(value: Any, file_bytes: int) -> None:
    """A tensor of stride 0, or a container that is referred to many times, would grow when it is copied."""
    visited, tensor_bytes, pending = 0, 0, [value]
    while pending:
        item = pending.pop()
        visited += 1
        if isinstance(item, torch.Tensor):
            if item.layout != torch.strided or item.device.type != "cpu" or item.is_quantized or item.is_nested:
                raise UnreadableFile(f"it has a tensor that is not dense ({item.layout}, {item.dtype}, {item.device})")
            tensor_bytes += item.numel() * item.element_size()
        elif isinstance(item, Mapping):
            pending.extend(item.values())
        elif isinstance(item, list | tuple | set):
            pending.extend(item)
        if visited + len(pending) > _MAX_VALUES or tensor_bytes > _MAX_GROWTH * file_bytes:
            raise UnreadableFile("its tensors or lists are many times larger than the file")
