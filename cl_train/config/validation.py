"""From plain values to checked settings: types, ranges, choices, combinations, and suggestions for unknown names.

Every problem is reported at once, one line each. Nothing here imports torch or Hydra.
"""

from __future__ import annotations

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

from cl_train.config.schema import AUTO_BATCH_SIZE, Config, ConfigError

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
    near = [full for full in known if full.rpartition(".")[2] == leaf]
    if not near:
        score = {full: max(_likeness(key, full), _likeness(key, full.rpartition(".")[2]) - 0.15) for full in known}
        best = max(score.values(), default=0)
        near = sorted((full for full in known if score[full] >= max(0.6, best - 0.15)), key=lambda full: -score[full])
    return f"; did you mean {', '.join(near[:3])}?" if near else ""


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


# --- values -----------------------------------------------------------------------------------------------------------


def from_mapping(schema: type[T], values: Mapping[str, Any]) -> T:
    """Build a dataclass of settings from nested plain values, checking keys, types and ranges.

    Raises:
        ConfigError: with every problem found, not only the first.
    """
    known = setting_fields(schema)
    problems, checked = [], {}
    for key, value in _flatten(values, known):
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


def _flatten(values: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in known:
            yield from _flatten(value, known, f"{key}.")
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
    words = setting.metadata["words"] or {}
    if isinstance(value, str) and value in words:
        return words[value]
    if value is None and setting.optional:
        return None
    if isinstance(value, bool) and setting.metadata["choices"]:  # YAML reads channels_last=true as a boolean
        value = show(value)
    try:
        value = _converted(value, setting.base_type)
    except (ValueError, OverflowError):
        raise ConfigError(f"{setting.key}={show(value)}: needs {type_name(setting)}") from None
    if len(str(value)) > MAX_LENGTH:
        raise ConfigError(f"{setting.key}={str(value)[:40]}...: longer than {MAX_LENGTH:,} characters")
    items = value if isinstance(value, list) else [value]
    problems = [problem for item in items for problem in _range_problems(item, setting)]
    if problems:
        raise ConfigError(problems)
    return value


def _converted(value: Any, kind: Any) -> Any:
    """`value` as a `kind`; words are read as numbers (YAML takes 1e-3 for a word), numbers as words.

    Raises:
        ValueError: that is not possible without losing something.
    """
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


def _range_problems(value: Any, setting: Setting) -> list[str]:
    limits, key = setting.metadata, setting.key
    if isinstance(value, str) and limits["choices"] and value not in limits["choices"]:
        return [f"{key}={value}: must be one of {', '.join(limits['choices'])}{suggest(value, limits['choices'])}"]
    if not isinstance(value, int | float) or isinstance(value, bool):
        return []
    if not math.isfinite(value):
        return [f"{key}={value}: must be a finite number"]
    bounds = (
        (limits["minimum"], lambda bound: value < bound, "at least"),
        (limits["above"], lambda bound: value <= bound, "above"),
        (limits["maximum"], lambda bound: value > bound, "at most"),
    )
    return [
        f"{key}={value}: must be {words} {bound:g}"
        for bound, broken, words in bounds
        if bound is not None and broken(bound)
    ]


def type_name(setting: Setting) -> str:
    """What a value of this setting looks like: `a whole number or auto or null`."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    lists = {int: "whole numbers", float: "numbers", bool: "true and false", str: "words"}
    kind = setting.base_type
    name = f"a list of {lists[typing.get_args(kind)[0]]}, [a,b,c]" if setting.is_list else names[kind]
    return " or ".join([name, *(setting.metadata["words"] or {}), *(["null"] if setting.optional else [])])


def show(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(show, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- combinations -----------------------------------------------------------------------------------------------------


def check_together(cfg: Config) -> list[str]:
    """Combinations of settings that cannot work, or in which one has no effect; one line each."""
    augment, data = cfg.augment, cfg.data
    rules = {
        "augment.crop_scale_min is larger than augment.crop_scale_max": augment.crop_scale_min > augment.crop_scale_max,
        "augment.crop_ratio_min is larger than augment.crop_ratio_max": augment.crop_ratio_min > augment.crop_ratio_max,
        f"data={data.name} needs data.root=FOLDER with train/<class>/* and val/<class>/* (no data? data=sample)": (
            data.name in ("imagenet", "folder") and data.root is None
        ),
        "data.mean and data.std need three numbers each, those of data.std above 0": (
            len(data.mean) != 3 or len(data.std) != 3 or not all(value > 0 for value in data.std)
        ),
        f"data.val_resize={data.val_resize} is smaller than data.image_size={data.image_size}: the crop does not fit": (
            data.val_resize is not None and data.val_resize < data.image_size
        ),
        "augment.mixup and augment.cutmix must be 0 (off) or at least 0.01": any(
            0 < alpha < 0.01 for alpha in (augment.mixup, augment.cutmix)
        ),
        "optim.nesterov=true needs optim.momentum above 0": cfg.optim.nesterov and cfg.optim.momentum == 0,
        f"schedule.warmup_epochs={cfg.schedule.warmup_epochs:g} is longer than epochs={cfg.epochs}": (
            cfg.schedule.warmup_epochs > cfg.epochs
        ),
        "conversion=select needs select=[NAMES], the modules to convert": cfg.conversion == "select" and not cfg.select,
        "select=... has an effect with conversion=select only": cfg.conversion != "select" and bool(cfg.select),
        "evaluate_only=true needs weights=... or resume=..., else it would evaluate random weights": (
            cfg.evaluate_only and cfg.weights is None and cfg.resume is None
        ),
        f"cuda_graph=true: {graph_conflict(cfg)}": cfg.cuda_graph == "true" and graph_conflict(cfg) is not None,
        "ddp_static_graph=true does not go with accumulate_steps above 1: only the last micro-step is synchronised": (
            cfg.ddp_static_graph and cfg.accumulate_steps > 1
        ),
        "batch_size=auto with resume=...: a run goes on with the batch size that it began with; see its config.yaml": (
            cfg.batch_size == AUTO_BATCH_SIZE and cfg.resume is not None
        ),
        f"compare_by={cfg.compare_by}: no such setting{suggest_key(cfg.compare_by, setting_fields(Config))}": (
            cfg.compare_by not in setting_fields(Config)
        ),
    }
    return [text for text, broken in rules.items() if broken]


def graph_conflict(cfg: Config) -> str | None:
    """Why a step with these settings cannot be recorded as a CUDA graph; None where it can."""
    if cfg.optim.name == "rmsprop":
        return "RMSprop has no fused kernel, so the host decides whether to skip a step; use optim=sgd or adamw"
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
        except OmegaConfBaseException as error:  # ${...} of something that is not there
            raise ConfigError(f"cannot resolve a value: {str(error).splitlines()[0]}") from None
    cfg = from_mapping(Config, values)
    problems = check_together(cfg)
    if problems:
        raise ConfigError(problems)
    return cfg


RENAMED = {
    "batch": "batch_size=",
    "by": "compare_by=",
    "diff": "baseline=",
    "folder": "out=",
    "memory_format": "channels_last=",
    "models": "model=",
    "no_speed": "speed=false",
    "output": "out=",
    "seconds": "time_limit_s=",
    "timeout": "model_time_limit_s=",
}


def settings_from_arguments(schema: type[T], arguments: Sequence[str]) -> T:
    """The key=value words of a command line as a dataclass; lists are written a,b,c.

    Raises:
        ConfigError: as `from_mapping`, and for words that are not key=value.
    """
    known = setting_fields(schema)
    problems: list[str] = []
    values: dict[str, Any] = {}
    for word in arguments:
        key, equals, text = word.partition("=")
        if not equals or word.startswith("-"):
            problems.append(f"{word}: settings are written key=value{_written(key, known)}")
        elif key not in known and key in RENAMED:
            problems.append(f"{word}: written {RENAMED[key]}{text if RENAMED[key].endswith('=') else ''} now")
        elif key == "json" and key in known and text not in ("true", "false"):
            problems.append(f"{word}: needs true or false; the file is given as out={text}")
        elif key in known and known[key].is_list and not text.startswith("["):
            values[key] = [_value_of(part) for part in text.split(",")] if text else []
        else:
            values[key] = _value_of(text)
    problems += [
        f"{key}=... is missing: {item.metadata['help']}"
        for key, item in known.items()
        if item.metadata["required"] and key not in values
    ]
    try:
        settings = from_mapping(schema, values)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return settings


def _written(option: str, known: Mapping[str, Setting]) -> str:
    """`; here out=...` for an option such as --output."""
    name = option.lstrip("-").replace("-", "_")
    if name in known:
        return f"; here {name}={'true' if known[name].base_type is bool else '...'}"
    return f"; here {RENAMED[name]}" if name in RENAMED else suggest_key(name, known)


def is_setting(word: str) -> bool:
    """Is a word of a command line key=value (or an option), rather than a file or folder?"""
    return word.startswith("-") or re.fullmatch(r"[\w.]+=.*", word, flags=re.S) is not None


def _value_of(text: str) -> Any:
    """`text` read as yaml, or itself where it is none, such as a shell pattern that begins with a star."""
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
    """Print the problems, one line each, and exit with code 2. Under torchrun only rank 0 prints."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK") == "0":
        print(f"configuration error{'s' if len(error.problems) > 1 else ''}:", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
    raise SystemExit(2)
