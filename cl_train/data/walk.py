"""The files below a folder: which are images, and which are left out. Imports no torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from cl_train.errors import ConfigError

_DROPPINGS = (b"@eaDir", b"__MACOSX", b"Thumbs.db")  # left by network storage, archives, Windows


def is_hidden(name: bytes) -> bool:
    """Whether a name is hidden, or left by another program."""
    return name.startswith(b".") or name in _DROPPINGS


@dataclass
class Files:
    """The images below a folder, sorted, and other names, relative to it; the folders read."""

    images: list[bytes] = field(default_factory=list)
    folders: list[bytes] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)


def files_below(folder: Path, extensions: Sequence[str]) -> Files:
    """Follows links to folders, as torchvision and timm do, but for those that lead back to a
    folder above. Raises ConfigError.
    """
    suffixes = tuple(os.fsencode(extension.lower()) for extension in extensions)
    found, top = Files(), os.path.join(os.fsencode(folder), b"")

    def read(below: bytes, above: set[tuple[int, int]]) -> None:
        here = _identity(below)
        if here in above:
            return
        found.folders.append(below)
        with os.scandir(below) as entries:
            for entry in entries:
                name = entry.path.removeprefix(top)
                if is_hidden(entry.name):
                    found.hidden.append(os.fsdecode(name))
                # `is_dir` of a link that leads to itself raises
                elif os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():
                    read(entry.path, above | {here})
                elif name.lower().endswith(suffixes):
                    found.images.append(name)
                else:
                    found.others.append(os.fsdecode(name))

    try:
        read(os.fsencode(folder), {_identity(parent) for parent in folder.resolve().parents})
    except OSError as error:
        unreadable(error)
    found.images.sort()
    found.others.sort()
    return found


def unreadable(error: OSError) -> NoReturn:
    """Raises ConfigError: without this folder, its images would be left out unnoticed."""
    raise ConfigError(f"'{os.fsdecode(error.filename)}' cannot be read: {error.strerror}") from None


def _identity(folder: bytes | Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino
