"""The result of a measuring command: as text, in a file, and as JSON on stdout."""

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

from cl_train.config.schema import ConfigError
from cl_train.config.validation import settings_from_arguments
from cl_train.system.files import write_json

T = TypeVar("T")


def print_result(schema: type[T], words: list[str], measure: Callable[[T], tuple[dict[str, Any], str]]) -> Any:
    """Call `measure` with the settings in `words`, print its text, and write its result to the file `out`.

    With json=true stdout has the JSON only, and everything else is printed to stderr. Returns the result.
    """
    settings: Any = settings_from_arguments(schema, words)
    path = Path(settings.out) if settings.out else None
    with redirect_stdout(sys.stderr if settings.json else sys.stdout):
        if path is not None:  # before the measurement, which may take hours
            if path.is_dir():
                raise ConfigError(f"out={path} is a folder: name a file")
            path.parent.mkdir(parents=True, exist_ok=True)
        result, text = measure(settings)
        try:
            if path is not None:
                write_json(path, result)
                print(f"written: {path}")
        finally:
            print(text)  # also if the file cannot be written
    if settings.json:
        print(json.dumps(result))
    return result
