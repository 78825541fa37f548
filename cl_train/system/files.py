"""Small files, replaced atomically: a killed process leaves the old or the new content. Also the cache folder."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

RETRY_S = 60.0


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` by `text`, in UTF-8; undecodable bytes of file names are kept.

    Raises:
        OSError: the disk is full or failing; it names `path`, which is unchanged. No temporary file remains.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape")
        os.replace(temporary, path)
    except OSError as error:
        raise with_file_name(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any, *, indent: int = 1) -> None:
    """`write_text` of strict JSON.

    Raises:
        ValueError: `value` holds a NaN or an infinity, which JSON cannot express.
        OSError: see `write_text`.
    """
    write_text(path, json.dumps(value, indent=indent, allow_nan=False) + "\n")


def with_file_name(error: OSError, path: Path) -> OSError:
    """The same error with the name of the file: a failed write, unlike a failed open, does not have it."""
    return OSError(error.errno, error.strerror or str(error), str(path))


def retry(write: Callable[[], None]) -> None:
    """Call `write` until it succeeds, for `RETRY_S`: somebody may free space on a full disk.

    Raises:
        OSError: of the last attempt.
    """
    deadline, is_first = time.monotonic() + RETRY_S, True
    while True:
        try:
            return write()
        except OSError as error:
            if time.monotonic() >= deadline:
                raise
            if is_first:
                log.warning("%s: trying again for %g s; free some space", error, RETRY_S)
            is_first = False
        time.sleep(min(1.0, RETRY_S))


def cache_folder() -> Path:
    """${XDG_CACHE_HOME:-~/.cache}/cl_train; in the temporary folder if there is no home directory."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "cl_train"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "cl_train"
