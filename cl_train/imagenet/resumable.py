"""An output folder that repeated calls with the same settings complete: a file with its final name is whole."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cl_train.config.schema import ConfigError
from cl_train.system.files import lock_file, output_folder, write_json

SETTINGS, _LOCK = ".settings.json", ".settings.lock"


@contextmanager
def resumable_folder(out: Path, *, overwrite: bool, outside: Sequence[Path] = ()) -> Iterator[None]:
    """Create and lock `out`; the block calls `record_settings` before it writes.

    Raises ConfigError if `out` is or lies in one of the folders `outside`, which are read, or holds files of something
    else without `overwrite`.
    """
    for folder in outside:
        if out.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"out={out} lies inside '{folder}', which is read: give another folder")
    with (
        output_folder(out, overwrite=overwrite, markers=(SETTINGS, _LOCK)),
        lock_file(out / _LOCK, waiting_for=str(out)),
    ):
        yield


def record_settings(out: Path, settings: dict[str, Any]) -> None:
    """Raises ConfigError if `out` was started with others."""
    record = out / SETTINGS
    known = json.loads(record.read_text()) if record.is_file() else settings
    if known != settings:
        changed = ", ".join(f"{key}={known.get(key)}" for key in settings if known.get(key) != settings[key])
        raise ConfigError(f"out={out} was started with {changed}: give another folder")
    write_json(record, settings)


def write_image(path: Path, data: bytes) -> None:
    """Write under a temporary name, which a repeated call uses again, and rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(data)
    os.replace(temporary, path)
