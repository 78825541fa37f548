"""An output folder that repeated calls with the same settings complete: a file with its final name is whole."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cl_train.config.schema import ConfigError
from cl_train.system.files import write_json
from cl_train.system.locks import lock_file


@contextmanager
def output_folder(out: Path, settings: dict[str, Any]) -> Iterator[None]:
    """Create and lock `out`. Raises ConfigError if it was started with other settings."""
    out.mkdir(parents=True, exist_ok=True)
    with lock_file(out / ".lock", waiting_for=str(out)):
        record = out / ".settings.json"
        if record.is_file() and (known := json.loads(record.read_text())) != settings:
            changed = ", ".join(f"{key}={known.get(key)}" for key in settings if known.get(key) != settings[key])
            raise ConfigError(f"'{out}' was started with {changed}; give another folder for out")
        write_json(record, settings)
        yield


def write_image(path: Path, data: bytes) -> None:
    """Write under a temporary name, which a repeated call uses again, and rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(data)
    os.replace(temporary, path)
