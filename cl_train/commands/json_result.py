"""The result of a measuring command: as text, in a file, and as JSON on stdout."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

from cl_train.config.validation import settings_from_arguments
from cl_train.system.files import output_file, write_json

T = TypeVar("T")


def print_result(schema: type[T], words: list[str], measure: Callable[[T], tuple[dict[str, Any], str]]) -> Any:
    """Call `measure` with the settings in `words`, print its text, and write its result to the file `out`.

    With json=true stdout has the JSON only, and everything else is printed to stderr. Returns the result.
    """
    settings: Any = settings_from_arguments(schema, words)
    path = Path(settings.out) if settings.out else None
    text = ""
    with redirect_stdout(sys.stderr if settings.json else sys.stdout):
        try:
            # Opened before the measurement, which may take hours.
            with output_file(path, overwrite=settings.overwrite) if path else nullcontext() as file:
                result, text = measure(settings)
                if file is not None:
                    write_json(file, result)
            if path is not None:
                print(f"written: {path}")
        finally:
            if text:  # also if the file cannot be written
                print(text)
    if settings.json:
        print(json.dumps(result))
    return result
