"""One checkpoint file, written atomically. `training/state.py` defines its contents.

A checkpoint is a file of `torch.save` (plain types and contiguous tensors) with a SHA-256 of its bytes in the zip
archive's comment, because `torch.load` verifies no checksum. `torch.load(path, weights_only=True)` reads it without
this package. It is written under a temporary name, synced and renamed: a `.pt` file is always a whole checkpoint.
"""

import errno
import hashlib
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cl_train.system.files import replacing
from cl_train.system.torch_file import UnreadableFile, read_torch_file

FORMAT = "cl_train checkpoint"
FORMAT_VERSION = 1

_DIGEST_LABEL = b"sha256:"
_COMMENT_BYTES = len(_DIGEST_LABEL) + 2 * hashlib.sha256().digest_size
_TRAILER_BYTES = 2 + _COMMENT_BYTES  # the zip comment's length, little-endian, and the comment


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message has the file and the reason."""


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write `state`, a `snapshot`, to `path` atomically and durably.

    Raises OSError if the disk is full or failing; `path` is then unchanged.
    """
    with replacing(path) as temporary, temporary.open("w+b") as file:
        try:
            torch.save({"format": FORMAT, "format_version": FORMAT_VERSION, **state}, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch replaces it with an error of its zip writer
                raise error.__context__ from None
            raise
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(-2, os.SEEK_END)  # the empty comment's length, two zero bytes
        file.write(_trailer(digest))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def _trailer(digest: str) -> bytes:
    """The length of the zip archive's comment and the comment: the SHA-256 of the file as `torch.save` wrote it."""
    return struct.pack("<H", _COMMENT_BYTES) + _DIGEST_LABEL + digest.encode()


def sync_folder(folder: Path) -> None:
    """Make a rename durable. Some network file systems cannot sync a folder, which is not an error."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU after checking every byte of it against its digest; see `read_torch_file`.

    Raises CheckpointError if it is missing, truncated, altered, no checkpoint, or of a newer format.
    """
    path = Path(path)
    try:
        _check_digest(path)
        state = read_torch_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnreadableFile as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not a checkpoint of cl_train; weights={path} starts from its weights only")
    version = state.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(f"{path}: written by a newer version (format {version}, this one reads {FORMAT_VERSION})")
    return state


def _check_digest(path: Path) -> None:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a FIFO would block
        raise CheckpointError(f"{path}: not a regular file")
    content_bytes = status.st_size - _TRAILER_BYTES
    if content_bytes <= 0:
        raise CheckpointError(f"{path}: truncated: {status.st_size} bytes")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(min(1 << 20, content_bytes - file.tell())):
            digest.update(chunk)
        trailer = file.read(_TRAILER_BYTES)
    digest.update(b"\0\0")  # the comment's length as torch.save wrote it
    if trailer != _trailer(digest.hexdigest()):
        raise CheckpointError(
            f"{path}: truncated, altered or not written by cl_train (its SHA-256 does not match); if another program "
            f"wrote it, weights={path} starts from its weights only"
        )


def snapshot(tree: Any, where: str = "state") -> Any:
    """A deep copy on the CPU with contiguous tensors. The host waits for the device here.

    Raises TypeError for anything else than dict, list, tuple, str, bytes, int, float, bool, None or a tensor.
    """
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(tree, Mapping):
        for key in tree:
            if type(key) not in (str, int):
                raise TypeError(f"{where}: a key of type {type(key).__name__} cannot be saved")
        return {key: snapshot(value, f"{where}[{key!r}]") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [snapshot(value, f"{where}[{index}]") for index, value in enumerate(tree)]
    if tree is None or type(tree) in (str, bytes, int, float, bool):
        return tree
    raise TypeError(f"{where}: a value of type {type(tree).__name__} cannot be saved")
