"""Tab completion in bash for `cl-train`: commands, keys and choices.

`eval "$(cl-train completion)"` installs it; bash then runs `cl-train completion query` for each
Tab.
"""

import importlib
import os

from cl_train.commands import COMMANDS
from cl_train.config.command_line import TYPED_KEYS, group_choices
from cl_train.config.fields import setting_fields
from cl_train.config.schema import GROUPS, Config

INSTALL = "complete -o default -o nospace -C 'cl-train completion query' cl-train"


def main(words: list[str]) -> int:
    if words[:1] == ["query"]:  # bash appends the command, the word and the word before it
        line = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", "0") or 0)]
        print("\n".join(candidates(line)))
    else:
        print(__doc__ if words else INSTALL)
    return 0


def candidates(line: str) -> list[str]:
    """For key=value only the value, as bash expects."""
    *before, word = line.split(" ")
    before = [part for part in before if part]
    if len(before) < 2:
        return [f"{name} " for name in COMMANDS if name.startswith(word)]
    command = before[1]
    if command not in COMMANDS:
        return []
    module = importlib.import_module(f"cl_train.commands.{command}")
    schemas = [Config] if command == "train" else getattr(module, "SETTINGS", {}).values()
    settings = {key: item for schema in schemas for key, item in setting_fields(schema).items()}
    key, equals, value = word.partition("=")
    if not equals:
        names = TYPED_KEYS if command == "train" else settings
        return sorted(f"{name}=" for name in names if name.startswith(key))

    choices: list[str] = []
    if command == "train" and key in GROUPS:
        choices = group_choices(key)
    elif key in settings:
        item = settings[key]
        words = ("true", "false") if item.base_type is bool else item.choices
        choices = [*words, *filter(None, [item.null_word])]
    done, comma, last = value.rpartition(",")
    return [f"{done}{comma}{choice}" for choice in choices if choice.startswith(last)]
