"""From plain values to checked settings: types, ranges, choices, combinations, and suggestions for unknown names.

Every problem is reported at once, one line each. Nothing here imports torch or Hydra.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
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

from cl_train.config.group_problems import data_problems, launcher_problems, size_schedule_problems
from cl_train.config.schema import AUTO_BATCH_SIZE, OPTIMIZERS, Config, ConfigError

T = TypeVar("T")
MAX_LENGTH = 4096  # of a value; the longest path of Linux

# --- names ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setting:
    """One leaf of a dataclass of settings."""

    key: str  # the full one, such as optim.lr
    type: Any  # int, str | None, list[float], ...
    default: Any
    metadata: Mapping[str, Any]  # see `schema.setting`

    @property
    def optional(self) -> bool:
        return isinstance(self.type, types.UnionType)

    @property
    def base_type(self) -> Any:
        """The type without `| None`."""
        return typing.get_args(self.type)[0] if self.optional else self.type

    @property
    def is_list_of_lists(self) -> bool:
        return self.is_list and typing.get_origin(typing.get_args(self.base_type)[0]) is list

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.type) is list


def setting_fields(schema: type, prefix: str = "") -> dict[str, Setting]:
    """Every leaf setting of a dataclass by its full key."""
    hints = typing.get_type_hints(schema)
    leaves: dict[str, Setting] = {}
    for item in dataclasses.fields(schema):
        key, hint = _key(item, prefix), hints[item.name]
        if dataclasses.is_dataclass(hint):
            leaves |= setting_fields(typing.cast(type, hint), f"{key}.")
        else:
            default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
            leaves[key] = Setting(key, hint, default, item.metadata)
    return leaves


def _key(item: dataclasses.Field[Any], prefix: str) -> str:
    return prefix + (item.metadata.get("key") or item.name)


def suggest(name: str, known: Iterable[str], count: int = 3) -> str:
    """`; did you mean a, b?` for the nearest of the known names, or an empty string where none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=count, cutoff=0.6)
    return f"; did you mean {', '.join(near)}?" if near else ""


def suggest_key(key: str, known: Iterable[str]) -> str:
    """As `suggest`; a key given without its group is found too: `lr` is `optim.lr`."""
    known, leaf = list(known), key.rpartition(".")[2]
    same = [full for full in known if full.rpartition(".")[2] == leaf][:3]
    return f"; did you mean {', '.join(same)}?" if same else suggest(key, known)


# --- values -----------------------------------------------------------------------------------------------------------


def from_mapping(schema: type[T], values: Mapping[str, Any]) -> T:
    """Build a dataclass of settings from nested plain values, checking keys, types and ranges.

    Raises:
        ConfigError: with every problem found, not only the first.
    """
    known = setting_fields(schema)
    problems, checked = [], {}
    for key, value in flatten(values, known):
        if key not in known:
            few = f" (there are {', '.join(known)})" if len(known) <= 12 else ""
            problems.append(f"unknown setting '{key}'{suggest_key(key, known) or few}")
            continue
        try:
            checked[key] = checked_value(value, known[key])
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return _build(schema, checked)


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


def _build(schema: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """The dataclass with its leaves from `values` (by full key), and defaults for the rest."""
    hints = typing.get_type_hints(schema)
    given = {}
    for item in dataclasses.fields(schema):  # type: ignore[arg-type]
        key = _key(item, prefix)
        if dataclasses.is_dataclass(hints[item.name]):
            given[item.name] = _build(hints[item.name], values, f"{key}.")
        elif key in values:
            given[item.name] = values[key]
    return schema(**given)


def checked_value(value: Any, setting: Setting) -> Any:
    """`value`, as YAML or Hydra reads it, in the setting's type and within its range.

    Raises:
        ConfigError: it has another type or lies outside the range.
    """
    words, choices = setting.metadata["words"] or {}, setting.metadata["choices"] or ()
    if isinstance(value, str) and value in words:
        return words[value]
    if value is None and setting.optional:
        return None
    if isinstance(value, bool) and choices:  # YAML reads channels_last=true as a boolean
        value = show(value)
    try:
        converted = _converted(value, setting.base_type)
        items = converted if setting.is_list else [converted]
        for item in itertools.chain.from_iterable(items) if setting.is_list_of_lists else items:
            _check_range(item, setting.metadata)
        return converted
    except (ValueError, OverflowError):
        text = show(value)
        shown = text if len(text) <= 80 else f"{text[:80]}..."
        raise ConfigError(f"{setting.key}={shown}: expected {kind_of(setting)}{suggest(text[:80], choices)}") from None


def _converted(value: Any, kind: Any) -> Any:
    """`value` as a `kind`; text is read as numbers (YAML reads 1e-3 as text), numbers as text."""
    if typing.get_origin(kind) is list:
        items = list(value) if isinstance(value, list | tuple) else [value]
        return [_converted(item, typing.get_args(kind)[0]) for item in items]
    if kind is bool and value in (0, 1):
        return bool(value)
    if kind is bool or isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    if kind is int and isinstance(value, float):
        raise ValueError
    return kind(value)


def _check_range(value: Any, limits: Mapping[str, Any]) -> None:
    if isinstance(value, str):
        if (limits["choices"] and value not in limits["choices"]) or len(value) > MAX_LENGTH:
            raise ValueError
        return
    low, above, high = (limits[name] for name in ("minimum", "above", "maximum"))
    if not math.isfinite(value) or (low is not None and value < low) or (above is not None and value <= above):
        raise ValueError
    if high is not None and value > high:
        raise ValueError


def kind_of(setting: Setting) -> str:
    """The allowed values: `whole number >= 1 or auto`, `fp32|fp16`, `list of number`."""
    limits = setting.metadata
    names = {int: "whole number", float: "number", bool: "true|false", str: "text"}
    base = setting.base_type
    while typing.get_origin(base) is list:
        base = typing.get_args(base)[0]
    kind = "|".join(limits["choices"] or ()) or names[base]
    if limits["minimum"] is not None and limits["maximum"] is not None:
        kind += f" {limits['minimum']:.10g} to {limits['maximum']:.10g}"
    else:
        signs = ((">=", "minimum"), (">", "above"), ("<=", "maximum"))
        kind += "".join(f" {sign} {limits[name]:.10g}" for sign, name in signs if limits[name] is not None)
    lists = "list of " * (setting.is_list + setting.is_list_of_lists)
    return " or ".join([f"{lists}{kind}", *(limits["words"] or {})])


def show(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, float):
        return f"{value:.10g}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- combinations -----------------------------------------------------------------------------------------------------


def check_together(cfg: Config) -> list[str]:
    """Problems of combinations that cannot work, or in which one setting has no effect; one line each."""
    conflict, keys = graph_conflict(cfg), setting_fields(Config)
    rules = [
        (
            cfg.loss != "bce" and cfg.bce_threshold is not None,
            f"bce_threshold={cfg.bce_threshold} has no effect with loss={cfg.loss}; use loss=bce",
        ),
        (
            cfg.optim.library == "torch" and cfg.optim.name not in OPTIMIZERS,
            f"optim.name={cfg.optim.name}: only optim=timm has other optimizers than {', '.join(OPTIMIZERS)}",
        ),
        (cfg.optim.nesterov and cfg.optim.momentum == 0, "optim.nesterov=true needs optim.momentum above 0"),
        (
            cfg.schedule.warmup_epochs > cfg.epochs,
            f"schedule.warmup_epochs={cfg.schedule.warmup_epochs:g} is longer than epochs={cfg.epochs}",
        ),
        (
            (cfg.conversion == "select") != bool(cfg.select),
            "conversion=select and select=[NAMES] must be used together",
        ),
        (
            cfg.evaluate_only and cfg.weights is None and cfg.resume is None,
            "evaluate_only=true needs weights=... or resume=..., else it would evaluate random weights",
        ),
        (cfg.cuda_graph == "true" and conflict is not None, f"cuda_graph=true: {conflict}"),
        (
            cfg.ddp_static_graph and cfg.accumulate_steps > 1,
            "ddp_static_graph=true does not work with accumulate_steps above 1",
        ),
        (
            cfg.batch_size == AUTO_BATCH_SIZE and cfg.resume is not None,
            "batch_size=auto with resume=...: give the batch size that the run started with (see its config.yaml)",
        ),
        (
            cfg.global_batch_size is not None and (cfg.accumulate_steps > 1 or cfg.batch_size == AUTO_BATCH_SIZE),
            "global_batch_size sets accumulate_steps and needs a number as batch_size: leave out the other setting, or "
            "write global_batch_size=null if a recipe sets it",
        ),
        (
            cfg.report and cfg.evaluate_every == -1 and not cfg.evaluate_only,
            "report=true is written by evaluations, and evaluate_every=-1 has none; use evaluate_every=0",
        ),
        (
            cfg.compare_by not in keys,
            f"compare_by={cfg.compare_by}: no such setting{suggest_key(cfg.compare_by, keys)}",
        ),
    ]
    return (
        data_problems(cfg.data, cfg.augment)
        + [text for broken, text in rules if broken]
        + launcher_problems(cfg.launcher)
        + size_schedule_problems(cfg.data.size_schedule, cfg.epochs)
    )


def graph_conflict(cfg: Config) -> str | None:
    """Why a step with these settings cannot be recorded as a CUDA graph; None where it can."""
    if cfg.optim.library != "torch" or cfg.optim.name == "rmsprop":
        name = cfg.optim.name if cfg.optim.library == "torch" else f"timm's {cfg.optim.name}"
        return f"{name} has no fused kernel, so the host decides whether to skip a step; use optim=sgd or optim=adamw"
    if cfg.compile and cfg.compile_mode in ("reduce-overhead", "max-autotune"):
        return f"compile_mode={cfg.compile_mode} makes CUDA graphs itself; use default or max-autotune-no-cudagraphs"
    return None


def load(values: Mapping[str, Any] | DictConfig) -> Config:
    """Turn a composed configuration (Hydra's, or plain nested values) into a checked `Config`.

    Raises:
        ConfigError: unknown keys, wrong types, values out of range, combinations that cannot work.
    """
    if isinstance(values, DictConfig):
        try:
            values = typing.cast(Mapping[str, Any], OmegaConf.to_container(values, resolve=True))
        except OmegaConfBaseException as error:  # ${...} refers to a missing key
            raise ConfigError(f"cannot resolve a value: {str(error).splitlines()[0]}") from None
    cfg = from_mapping(Config, values)
    problems = check_together(cfg)
    if problems:
        raise ConfigError(problems)
    return cfg


def settings_from_arguments(schema: type[T], arguments: Sequence[str]) -> T:
    """The key=value arguments of a command line as a dataclass; lists are written a,b,c.

    Raises:
        ConfigError: as `from_mapping`, and for arguments that are not key=value.
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
        elif key in known and known[key].is_list and not text.startswith("["):
            values[key] = [_value_of(part) for part in text.split(",")] if text else []
        else:
            values[key] = _value_of(text)
    missing = [item for key, item in known.items() if item.metadata["required"] and key not in values]
    problems += [f"{item.key}=... is missing: {item.metadata['help']}" for item in missing]
    try:
        settings = from_mapping(schema, values)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return settings


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


def stop_with(error: ConfigError) -> typing.NoReturn:
    """Print the problems, one line each, and exit with code 2. Of several ranks only rank 0 prints."""
    is_other_rank = "LOCAL_WORLD_SIZE" in os.environ and os.environ.get("RANK", "").strip("0").isdecimal()
    if not is_other_rank:
        print(f"configuration error{'s' if len(error.problems) > 1 else ''}:", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
    raise SystemExit(2)
