"""Small files that a kill leaves either as they were or complete."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: a reader, or a kill, never meets half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value: Any, *, indent: int = 1) -> None:
    """`write_text` of strict JSON.

    Raises:
        ValueError: `value` holds a NaN or an infinity, which JSON has no form for.
    """
    write_text(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")
