"""From plain values to checked settings: types, ranges, choices, and suggestions for unknown names.

Every problem is reported at once, one line each. Nothing here imports torch or Hydra.
"""

import dataclasses
import difflib
import math
import os
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cl_train.config.rules import combination_problems
from cl_train.config.schema import Config, ConfigError

T = TypeVar("T")
MAX_LENGTH = 4096  # of a value; the longest path of Linux

# --- names ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setting:
    """One leaf of a dataclass of settings."""

    key: str  # the full one, such as optim.lr
    path: tuple[str, ...]  # the fields that lead to it
    base_type: type  # bool, int, float or str: of the value, or of the items of a list
    list_depth: int  # 0: one value, 1: a list, 2: a list of lists
    optional: bool  # null is allowed
    default: Any
    metadata: Mapping[str, Any]  # see `schema.setting`


def setting_fields(schema: type, prefix: str = "", parents: tuple[str, ...] = ()) -> dict[str, Setting]:
    """Every leaf setting of a dataclass by its full key."""
    hints = typing.get_type_hints(schema)
    leaves: dict[str, Setting] = {}
    for item in dataclasses.fields(schema):
        key, path, hint = prefix + (item.metadata.get("key") or item.name), (*parents, item.name), hints[item.name]
        if dataclasses.is_dataclass(hint):
            leaves |= setting_fields(typing.cast(type, hint), f"{key}.", path)
            continue
        optional, list_depth = isinstance(hint, types.UnionType), 0
        hint = typing.get_args(hint)[0] if optional else hint
        while typing.get_origin(hint) is list:
            hint, list_depth = typing.get_args(hint)[0], list_depth + 1
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        leaves[key] = Setting(key, path, hint, list_depth, optional, default, item.metadata)
    return leaves


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean a, b?` for the nearest of the known names, or an empty string where none is near."""
    near = difflib.get_close_matches(name, sorted(known))
    return f"; did you mean {', '.join(near)}?" if near else ""


def suggest_key(key: str, known: Iterable[str]) -> str:
    """As `suggest`; a key given without its group is found too: `lr` is `optim.lr`."""
    known, leaf = list(known), key.rpartition(".")[2]
    same = [full for full in known if full.rpartition(".")[2] == leaf][:3]
    return f"; did you mean {', '.join(same)}?" if same else suggest(key, known)


# --- values -----------------------------------------------------------------------------------------------------------


def from_mapping(schema: type[T], values: Mapping[str, Any], earlier_problems: Sequence[str] = ()) -> T:
    """Build a dataclass of settings from nested plain values, checking keys, types and ranges.

    Raises ConfigError: with every problem found, not only the first, after `earlier_problems`.
    """
    known, problems = setting_fields(schema), list(earlier_problems)
    checked: dict[tuple[str, ...], Any] = {}
    for key, value in flatten(values, known):
        if key not in known:
            few = f" (there are {', '.join(known)})" if len(known) <= 12 else ""
            problems.append(f"unknown setting '{key}'{suggest_key(key, known) or few}")
            continue
        try:
            checked[known[key].path] = checked_value(value, known[key])
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return _built(schema, checked)


def _built(schema: type[T], checked: Mapping[tuple[str, ...], Any], parents: tuple[str, ...] = ()) -> T:
    """The dataclass, and those in its fields, with these values by path; others have their defaults."""
    values: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(schema).items():
        if dataclasses.is_dataclass(hint):
            values[name] = _built(typing.cast(type, hint), checked, (*parents, name))
        elif (*parents, name) in checked:
            values[name] = checked[*parents, name]
    return schema(**values)


def flatten(
    values: Mapping[Any, Any], known: Mapping[str, Any] | None = None, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The leaves of nested settings by their full keys; a mapping whose key is `known` is a leaf."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in (known or ()):
            yield from flatten(value, known, f"{key}.")
        else:
            yield key, value


def checked_value(value: Any, setting: Setting) -> Any:
    """`value`, as YAML or Hydra reads it, in the setting's type and within its range.

    Raises ConfigError: it has another type or lies outside the range.
    """
    words, choices = setting.metadata["words"] or {}, setting.metadata["choices"] or ()
    if isinstance(value, str) and value in words:
        return words[value]
    if value is None and setting.optional:
        return None
    if isinstance(value, bool) and choices:  # YAML reads channels_last=true as a boolean
        value = show(value)
    try:
        return _converted(value, setting, setting.list_depth)
    except (ValueError, OverflowError):
        text = str(value) if isinstance(value, float) else show(value)  # 1.0, which is no whole number
        shown = text if len(text) <= 80 else f"{text[:80]}..."
        raise ConfigError(f"{setting.key}={shown}: expected {kind_of(setting)}{suggest(text[:80], choices)}") from None


def _converted(value: Any, setting: Setting, list_depth: int) -> Any:
    """`value` in the setting's type; text is read as numbers (YAML reads 1e-3 as text), numbers as text."""
    if list_depth:
        items = value if isinstance(value, list | tuple) else [value]
        return [_converted(item, setting, list_depth - 1) for item in items]
    kind = setting.base_type
    if kind is bool and value in (0, 1):
        return bool(value)
    is_plain = isinstance(value, int | float | str) and not isinstance(value, bool)
    if kind is bool or not is_plain or (kind is int and isinstance(value, float)):
        raise ValueError
    converted = kind(value)
    if not _is_in_range(converted, setting.metadata):
        raise ValueError
    return converted


def _is_in_range(value: float | str, limits: Mapping[str, Any]) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_LENGTH and value in (limits["choices"] or (value,))
    low, above, high = (limits[name] for name in ("minimum", "above", "maximum"))
    is_above = (low is None or value >= low) and (above is None or value > above)
    return math.isfinite(value) and is_above and (high is None or value <= high)


def kind_of(setting: Setting) -> str:
    """The allowed values: `whole number >= 1 or auto`, `fp32|fp16`, `list of number`."""
    limits = setting.metadata
    names = {int: "whole number", float: "number", bool: "true|false", str: "text"}
    kind = "list of " * setting.list_depth + ("|".join(limits["choices"] or ()) or names[setting.base_type])
    if limits["minimum"] is not None and limits["maximum"] is not None:
        kind += f" {limits['minimum']:.10g} to {limits['maximum']:.10g}"
    else:
        signs = ((">=", "minimum"), (">", "above"), ("<=", "maximum"))
        kind += "".join(f" {sign} {limits[name]:.10g}" for sign, name in signs if limits[name] is not None)
    return " or ".join([kind, *(limits["words"] or {})])


def show(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, float):
        return f"{value:.10g}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- whole configurations ---------------------------------------------------------------------------------------------


def load(values: Mapping[str, Any] | DictConfig) -> Config:
    """Turn a composed configuration (Hydra's, or plain nested values) into a checked `Config`.

    Raises ConfigError: unknown keys, wrong types, values out of range, combinations that cannot work.
    """
    if isinstance(values, DictConfig):
        try:
            values = typing.cast(Mapping[str, Any], OmegaConf.to_container(values, resolve=True))
        except OmegaConfBaseException as error:  # ${...} refers to a missing key
            raise ConfigError(f"cannot resolve a value: {str(error).splitlines()[0]}") from None
    cfg, known = from_mapping(Config, values), setting_fields(Config)
    problems = [*combination_problems(cfg)]
    if cfg.compare_by not in known:
        problems.append(f"compare_by={cfg.compare_by}: no such setting{suggest_key(cfg.compare_by, known)}")
    if problems:
        raise ConfigError(problems)
    return cfg


def settings_from_arguments(schema: type[T], arguments: Sequence[str]) -> T:
    """The key=value arguments of a command line as a dataclass; lists are written a,b,c.

    Raises ConfigError: as `from_mapping`, and for arguments that are not key=value.
    """
    known = setting_fields(schema)
    problems: list[str] = []
    values: dict[str, Any] = {}
    for word in arguments:
        key, equals, text = word.partition("=")
        name = key.lstrip("-").replace("-", "_")
        if not equals or name != key:
            problems.append(f"{word}: write {f'{name}=' if name in known else f'key=value{suggest_key(name, known)}'}")
        elif word == "channels_last=auto" and key in known:
            problems.append(f"{word}: only train measures which layout is faster; write true or false")
        elif not text and key in known and not known[key].optional and known[key].default:
            problems.append(f"{word} is empty: give a value, or leave it out for {show(known[key].default)}")
        elif key in known and known[key].list_depth and not text.startswith("["):
            values[key] = [_value_of(part) for part in text.split(",")] if text else []
        else:
            values[key] = _value_of(text)
    missing = [item for key, item in known.items() if item.metadata["required"] and key not in values]
    problems += [f"{item.key}=... is missing: {item.metadata['help']}" for item in missing]
    return from_mapping(schema, values, problems)


def is_setting(word: str) -> bool:
    """Whether an argument is key=value (or an option), rather than a file or folder."""
    return word.startswith("-") or re.fullmatch(r"[\w.]+=.*", word, flags=re.S) is not None


def _value_of(text: str) -> Any:
    """`text` read as YAML, or unchanged if it is not YAML, such as a shell pattern that begins with a star."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def to_mapping(cfg: object) -> dict[str, Any]:
    """The settings as nested plain values, as `config.yaml` has them."""
    return dataclasses.asdict(cfg)  # type: ignore[call-overload]  # any dataclass instance


def to_yaml(cfg: object) -> str:
    return yaml.safe_dump(to_mapping(cfg), sort_keys=False)


def print_problems(error: ConfigError) -> None:
    """The problems, one line each. Of several ranks only rank 0 prints."""
    is_other_rank = "LOCAL_WORLD_SIZE" in os.environ and os.environ.get("RANK", "").strip("0").isdecimal()
    if not is_other_rank:
        print(f"configuration error{'s' if len(error.problems) > 1 else ''}:", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
