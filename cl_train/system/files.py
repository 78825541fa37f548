"""Small files, replaced atomically: a killed process leaves the old content or the new one. And where caches lie."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` by `text`, in UTF-8.

    Raises:
        OSError: the disk is full or failing; `path` is unchanged, and no temporary file stays.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, *, indent: int = 1) -> None:
    """`write_text` of strict JSON.

    Raises:
        ValueError: `value` holds a NaN or an infinity, which JSON cannot express.
        OSError: see `write_text`.
    """
    write_text(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


def cache_folder() -> Path:
    """${XDG_CACHE_HOME:-~/.cache}/cl_train; in the temporary folder if there is no home directory."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "cl_train"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "cl_train"
