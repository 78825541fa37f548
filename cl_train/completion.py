"""Tab completion in bash for `cl-train`: commands, keys, choices and model names.

`eval "$(cl-train completion)"` installs it; bash then runs `cl-train completion query` for each Tab.
"""

from __future__ import annotations

import importlib
import os
from importlib.metadata import PackageNotFoundError, version

from cl_train.commands import COMMANDS
from cl_train.config.command_line import GROUPS, group_choices
from cl_train.config.schema import Config
from cl_train.config.validation import Setting, setting_fields
from cl_train.system.files import cache_folder, write_text

INSTALL = "complete -o default -o nospace -C 'cl-train completion query' cl-train"


def main(words: list[str]) -> int:
    if not words:
        print(INSTALL)
    elif words[0] == "query":
        line = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", "0") or 0)]
        print("\n".join(candidates(line)))
    return 0


def candidates(line: str) -> list[str]:
    """What can stand in the place of the last word of `line`, without the part up to its last `=`, `,` or `:`.

    bash ends a word at `=` and `:`, so it expects only what follows them.
    """
    *before, word = line.split(" ")
    before = [part for part in before if part]
    if len(before) < 2:
        return [f"{name} " for name in COMMANDS if name.startswith(word)]
    key, equals, value = word.partition("=")
    known = _settings(before[1], before[2:])
    if not equals:
        groups = GROUPS if before[1] == "train" else ()
        return sorted(f"{name}=" for name in {*known, *groups} if name.startswith(key))
    done, comma, last = value.rpartition(",")
    if key in GROUPS and before[1] == "train":
        choices = group_choices(key)
    else:
        choices = _values(known[key]) if key in known else []
    prefix = f"{done}{comma}"
    return [f"{prefix}{choice}" for choice in choices if choice.startswith(last)]


def _settings(command: str, words: list[str]) -> dict[str, Setting]:
    if command == "train":
        return setting_fields(Config)
    try:
        schemas = importlib.import_module(f"cl_train.commands.{command}").SETTINGS.values()
    except ImportError:
        return {}
    return {key: item for schema in schemas for key, item in setting_fields(schema).items()}


def _values(setting: Setting) -> list[str]:
    if setting.key == "model":
        return model_names()
    if setting.base_type is bool:
        return ["true", "false"]
    return [*(setting.metadata["choices"] or ()), *(setting.metadata["words"] or {})]


def model_names() -> list[str]:
    """torchvision's models, kept in a file per version, because asking torchvision takes seconds."""
    try:
        path = cache_folder() / f"models-torchvision-{version('torchvision')}.txt"
        if not path.is_file():
            from cl_train.models import registry

            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "\n".join(registry.model_names()) + "\n")
        return path.read_text(encoding="utf-8").split()
    except (OSError, PackageNotFoundError):
        return []
