"""An output folder that repeated calls with the same settings complete: a file with its final name is whole."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cl_train.config.schema import ConfigError
from cl_train.system.files import lock_file, output_folder, replacing, write_json

SETTINGS, _LOCK = ".settings.json", ".settings.lock"


@contextmanager
def resumable_folder(
    out: Path, settings: dict[str, Any], *, overwrite: bool, outside: Sequence[Path] = ()
) -> Iterator[None]:
    """Create and lock `out`, and record the settings in it.

    Raises ConfigError: `out` was started with others, holds files of something else without `overwrite`, or lies in one
    of the folders `outside`, which are read.
    """
    for folder in outside:
        if out.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"out={out} lies inside '{folder}', which is read: give another folder")
    record, lock = out / SETTINGS, out / _LOCK
    with output_folder(out, overwrite=overwrite, markers=(SETTINGS, _LOCK)), lock_file(lock, waiting_for=str(out)):
        known = json.loads(record.read_text()) if record.is_file() else settings
        if known != settings:
            changed = ", ".join(f"{key}={known.get(key)}" for key in settings if known.get(key) != settings[key])
            raise ConfigError(f"out={out} was started with {changed}: give another folder")
        write_json(record, settings)
        yield


def write_image(path: Path, data: bytes) -> None:
    """Write under a temporary name, which a repeated call uses again, and rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, path.with_name(f".{path.name}.part")) as temporary:
        temporary.write_bytes(data)
