"""Turns plain values into checked settings, and imports the code that some of them name.

Every problem is reported at once, one line each.
"""

import dataclasses
import importlib
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from cl_train.config.combinations import combination_problems
from cl_train.config.fields import Setting, setting_fields
from cl_train.config.fields import suggest as suggest
from cl_train.config.removed import removal_of
from cl_train.config.schema import Config
from cl_train.errors import ConfigError

T = TypeVar("T")


def from_mapping(
    schema: type[T], values: Mapping[str, Any], earlier_problems: Sequence[str] = ()
) -> T:
    """Returns a dataclass of settings from nested plain values.

    Raises ConfigError: `earlier_problems`, and all wrong keys, types and values.
    """
    fields = setting_fields(schema)
    problems = list(earlier_problems)
    checked: dict[str, Any] = {}
    for key, value in flatten(values, fields):
        if removed := removal_of(key):
            problems.append(removed)
            continue
        if key not in fields:
            problems.append(f"unknown setting '{key}'{suggest(key, fields)}")
            continue
        try:
            checked[key] = _converted(value, fields[key], fields[key].list_depth)
        except (ValueError, OverflowError):
            # 1.0 is no whole number, so it is not shown as 1.
            text = (str(value) if isinstance(value, float) else show(value))[:80]
            near = suggest(text, fields[key].choices)
            problems.append(f"{key}={text}: expected {kind_of(fields[key])}{near}")
    if problems:
        raise ConfigError(problems)
    return typing.cast(T, _built(schema, checked))


def _built(schema: Any, checked: Mapping[str, Any], prefix: str = "") -> Any:
    """Builds the dataclass, and those in its fields, from the values by key or the defaults."""
    values: dict[str, Any] = {}
    for item in dataclasses.fields(schema):
        key = prefix + (item.metadata.get("key") or item.name)
        if dataclasses.is_dataclass(item.type):
            values[item.name] = _built(item.type, checked, f"{key}.")
        elif key in checked:
            values[item.name] = checked[key]
    return schema(**values)


def flatten(
    values: Mapping[Any, Any], leaves: Collection[str] = (), prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested settings by full key; a mapping is a leaf if its key is in
    `leaves`.
    """
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in leaves:
            yield from flatten(value, leaves, f"{key}.")
        else:
            yield key, value


def _converted(value: Any, setting: Setting, list_depth: int) -> Any:
    """Returns `value`, as YAML or Hydra reads it, in the setting's type (YAML reads 1e-3 as text).
    Raises ValueError: it is not allowed.
    """
    kind, choices = setting.base_type, setting.choices
    if setting.optional and value in (None, setting.null_word):
        return None
    if list_depth:
        items = value if isinstance(value, list | tuple) else [value]
        return [_converted(item, setting, list_depth - 1) for item in items]
    if isinstance(value, bool) and choices:  # YAML reads channels_last=true as a boolean
        value = show(value)
    if kind is bool and value in (0, 1):
        return bool(value)
    is_plain = isinstance(value, int | float | str) and not isinstance(value, bool)
    if kind is bool or not is_plain or (kind is int and isinstance(value, float)):
        raise ValueError
    converted = kind(value)
    if isinstance(converted, str):
        is_allowed = converted in (choices or (converted,))
    else:
        is_allowed = converted in setting.range
    if not is_allowed:
        raise ValueError
    return converted


def kind_of(setting: Setting) -> str:
    """Returns the allowed values: `whole number >= 1 or auto`, `fp32|fp16`, `list of number`."""
    names = {int: "whole number", float: "number", bool: "true|false", str: "text"}
    kind = "list of " * setting.list_depth
    kind += "|".join(setting.choices) or names[setting.base_type]
    kind = f"{kind} {setting.range}".rstrip()
    return " or ".join(filter(None, [kind, setting.null_word]))


def show(value: Any) -> str:
    """Returns a value as it is written on a command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def checked_config(values: Mapping[str, Any]) -> Config:
    """Calls `from_mapping`, then checks combinations. Raises ConfigError."""
    cfg = from_mapping(Config, values)
    if problems := [*combination_problems(cfg)]:
        raise ConfigError(problems)
    return cfg


def train_program() -> str:
    return "python train.py" if Path(sys.argv[0]).name == "train.py" else "cl-train train"


def user_function(setting: str, name: str) -> Callable[..., Any]:
    """Imports `package.module:function`, also of a module in the working folder. Raises
    ConfigError.
    """
    module_name, _, function_name = name.partition(":")
    if ":" not in name:
        raise ConfigError(f"{setting}={name}: use package.module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # of the user's code
        what = f"cannot import '{module_name}' from {Path.cwd()} or PYTHONPATH"
        raise ConfigError(f"{setting}={name}: {what}: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        near = suggest(function_name, [key for key in vars(module) if not key.startswith("_")])
        problem = f"module '{module_name}' has no function '{function_name}'{near}"
        raise ConfigError(f"{setting}={name}: {problem}")
    return function


def optional_module(module: str, setting: str) -> types.ModuleType:
    """Imports a module of an optional package, which `setting` needs. Raises ConfigError."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ConfigError(f"{setting}: {package} is not installed; pip install {package}") from None


class _WithoutAliases(yaml.SafeLoader):
    """Refuses aliases: a few lines of aliases of aliases are gigabytes of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("what a run left has no aliases (*name)")
        return super().compose_node(parent, index)


def read_yaml(path: Path, *, is_trusted: bool = False) -> Any:
    """Returns the values in a file, without aliases unless the user wrote it. Raises OSError,
    ValueError: it cannot be read.
    """
    try:
        loader = yaml.SafeLoader if is_trusted else _WithoutAliases
        return yaml.load(path.read_text(encoding="utf-8"), loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None
