"""Tab completion in bash for `cl-train`: commands, keys, choices and model names.

`eval "$(cl-train completion)"` installs it; bash then runs `cl-train completion query` for each
Tab.
"""

import importlib
import os
import re
from importlib.util import find_spec
from pathlib import Path

from cl_train.commands import COMMANDS
from cl_train.config.command_line import TYPED_KEYS, group_choices
from cl_train.config.fields import setting_fields
from cl_train.config.schema import GROUPS, Config

# The function below a decorator, which may have others below it, of several lines.
_REGISTERED = re.compile(r"^@register_model.*\n(?:[@ )].*\n)*def (\w+)", re.MULTILINE)
INSTALL = "complete -o default -o nospace -C 'cl-train completion query' cl-train"


def main(words: list[str]) -> int:
    if words[:1] == ["query"]:  # bash appends the command, the word and the word before it
        line = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", "0") or 0)]
        print("\n".join(candidates(line)))
    else:
        print(__doc__ if words else INSTALL)
    return 0


def candidates(line: str) -> list[str]:
    """Returns what completes `line`: of key=value only the value, as bash expects."""
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
    elif key == "model" and key in settings:
        choices = model_names("timm" if value.startswith("timm/") else "torchvision")
    elif key in settings:
        item = settings[key]
        words = ("true", "false") if item.base_type is bool else item.choices
        choices = [*words, *filter(None, [item.null_word])]
    done, comma, last = value.rpartition(",")
    return [f"{done}{comma}{choice}" for choice in choices if choice.startswith(last)]


def model_names(package: str) -> list[str]:
    """Reads the models of torchvision or timm from the source: importing them takes seconds."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return []
    modules = (Path(spec.origin).parent / "models").glob("*.py")
    texts = "".join(path.read_text(encoding="utf-8") for path in sorted(modules))
    prefix = "timm/" if package == "timm" else ""
    return sorted(prefix + name for name in _REGISTERED.findall(texts))
