"""The commands of `cl-train`: one short file each.

Each has `main(words)`, which returns the exit code. --help prints its docstring, SETTINGS and, if
it takes files, USAGE. Other packages are imported inside functions: --help does not need torch.
"""

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

from cl_train.config.arguments import is_setting, settings_from_arguments
from cl_train.system.files import output_file, write_json

T = TypeVar("T")
Result = tuple[dict[str, Any], str]  # what is written as JSON, and what is printed
COMMANDS = {
    "train": "train a model, or with -m compare settings",
    "compare": "compare finished runs, or check that both layouts of a model compute the same",
    "benchmark": "both layouts of a model in one process: parity, speed, memory",
    "audit": "which operators lose channels_last, where, and what it costs",
    "convert": "convert a saved model and check its outputs",
    "predict": "classify a folder of images with saved weights",
    "zoo": "many models in both layouts, in one table",
    "loader_benchmark": "images per second of the data loader, against other loaders",
    "prepare_imagenet": "unpack, check and resize ImageNet",
    "completion": 'tab completion in bash: eval "$(cl-train completion)"',
}


def settings_and_files(schema: type[T], words: list[str]) -> tuple[T, list[str]]:
    """Returns the settings (key=value) among the arguments, and the others."""
    typed = [word for word in words if is_setting(word)]
    return settings_from_arguments(schema, typed), [word for word in words if word not in typed]


def optional_file(settings: Any, key: str) -> AbstractContextManager[Path | None]:
    """Opens the `output_file` of the setting `key`; yields None if it is not given."""
    path = getattr(settings, key)
    return output_file(Path(path), overwrite=settings.overwrite, key=key) if path else nullcontext()


def print_result(schema: type[T], words: list[str], measure: Callable[[T], Result]) -> Any:
    """Calls `measure` with the settings in `words`, prints its text, and writes its result to
    `out`.

    With json=true stdout has the JSON only, stderr everything else. Returns the result.
    """
    settings: Any = settings_from_arguments(schema, words)
    text = ""
    with redirect_stdout(sys.stderr if settings.json else sys.stdout):
        try:
            # Opened before the measurement, which may take hours.
            with optional_file(settings, "out") as file:
                result, text = measure(settings)
                if file is not None:
                    write_json(file, result)
            if settings.out:
                print(f"written: {settings.out}")
        finally:
            if text:  # also if the file cannot be written
                print(text)
    if settings.json:
        print(json.dumps(result))
    return result
