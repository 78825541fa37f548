"""From plain values to checked settings, combinations that cannot work, names of code, and `--help`.

Every problem is reported at once, one line each. Nothing here imports torch or Hydra.
"""

import dataclasses
import difflib
import functools
import importlib
import itertools
import math
import operator
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from cl_train.config import schema as defined
from cl_train.config.schema import CHOSEN_BY_GROUP, AugmentConfig, Config, ConfigError, DataConfig

T = TypeVar("T")
_LIMITS = (("minimum", ">=", operator.ge), ("above", ">", operator.gt), ("maximum", "<=", operator.le))


@dataclasses.dataclass(frozen=True)
class Setting:
    """One leaf of a dataclass of settings."""

    base_type: type  # bool, int, float or str: of the value, or of the items of a list
    list_depth: int  # 0: one value, 1: a list, 2: a list of lists
    optional: bool  # null is allowed
    default: Any
    metadata: Mapping[str, Any]  # see `schema.Limits`


def parse_yaml(text: str) -> Any:
    """YAML without aliases: nested ones expand to any size (a "billion laughs" file). Raises ValueError, YAMLError."""
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
        raise ValueError("YAML aliases (*name) are not supported; refer to a setting as ${key}")
    return yaml.safe_load(text)


def setting_fields(schema: type, prefix: str = "") -> dict[str, Setting]:
    """Every leaf setting of a dataclass by its full key."""
    leaves: dict[str, Setting] = {}
    for item in dataclasses.fields(schema):
        hint: Any = item.type
        key = prefix + (item.metadata.get("key") or item.name)
        if dataclasses.is_dataclass(hint):
            leaves |= setting_fields(hint, f"{key}.")  # type: ignore[arg-type]
            continue
        optional, list_depth = isinstance(hint, types.UnionType), 0
        hint = typing.get_args(hint)[0] if optional else hint
        while typing.get_origin(hint) is list:
            hint, list_depth = typing.get_args(hint)[0], list_depth + 1
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        leaves[key] = Setting(hint, list_depth, optional, default, item.metadata)
    return leaves


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean a, b?` for the nearest of the known names (`optim.lr` for `lr`), or an empty string."""
    known = sorted(known)
    near = [full for full in known if full.endswith(f".{name}")][:3] or difflib.get_close_matches(name, known)
    return f"; did you mean {', '.join(near)}?" if near else ""


def from_mapping(schema: type[T], values: Mapping[str, Any], earlier_problems: Sequence[str] = ()) -> T:
    """Build a dataclass of settings from nested plain values, checking keys, types and ranges.

    Raises ConfigError: with every problem found, not only the first, after `earlier_problems`.
    """
    known, problems = setting_fields(schema), list(earlier_problems)
    checked: dict[str, Any] = {}
    for key, value in flatten(values, known):
        if key not in known:
            problems.append(f"unknown setting '{key}'{suggest(key, known)}")
            continue
        try:
            checked[key] = _converted(value, known[key], known[key].list_depth)
        except (ValueError, OverflowError):
            text = (str(value) if isinstance(value, float) else show(value))[:80]  # 1.0, which is no whole number
            near = suggest(text, known[key].metadata["choices"] or ())
            problems.append(f"{key}={text}: expected {kind_of(known[key])}{near}")
    if problems:
        raise ConfigError(problems)
    return typing.cast(T, _built(schema, checked))


def _built(schema: Any, checked: Mapping[str, Any], prefix: str = "") -> Any:
    """The dataclass, and those in its fields, with these values by key; others have their defaults."""
    values: dict[str, Any] = {}
    for item in dataclasses.fields(schema):
        key = prefix + (item.metadata.get("key") or item.name)
        if dataclasses.is_dataclass(item.type):
            values[item.name] = _built(item.type, checked, f"{key}.")
        elif key in checked:
            values[item.name] = checked[key]
    return schema(**values)


def flatten(values: Mapping[Any, Any], known: Collection[str] = (), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested settings by their full keys; a mapping whose key is `known` is a leaf."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in known:
            yield from flatten(value, known, f"{key}.")
        else:
            yield key, value


def _converted(value: Any, setting: Setting, list_depth: int) -> Any:
    """`value`, as YAML or Hydra reads it, in the setting's type: text as numbers (YAML reads 1e-3 as text), numbers as
    text. Raises ValueError, OverflowError: it is of another type or out of range."""
    kind, limits = setting.base_type, setting.metadata
    if value is None and setting.optional:
        return None
    if list_depth:
        items = value if isinstance(value, list | tuple) else [value]
        return [_converted(item, setting, list_depth - 1) for item in items]
    if isinstance(value, str) and value in (limits["words"] or ()):
        return limits["words"][value]
    if isinstance(value, bool) and limits["choices"]:  # YAML reads channels_last=true as a boolean
        value = show(value)
    if kind is bool and value in (0, 1):
        return bool(value)
    is_plain = isinstance(value, int | float | str) and not isinstance(value, bool)
    if kind is bool or not is_plain or (kind is int and isinstance(value, float)):
        raise ValueError
    converted = kind(value)
    if isinstance(converted, str):
        is_allowed = len(converted) <= 4096 and converted in (limits["choices"] or (converted,))  # Linux' longest path
    else:
        given = [(is_within, limits[name]) for name, _, is_within in _LIMITS if limits[name] is not None]
        is_allowed = math.isfinite(converted) and all(is_within(converted, limit) for is_within, limit in given)
    if not is_allowed:
        raise ValueError
    return converted


def kind_of(setting: Setting) -> str:
    """The allowed values: `whole number >= 1 or auto`, `fp32|fp16`, `list of number`."""
    limits = setting.metadata
    names = {int: "whole number", float: "number", bool: "true|false", str: "text"}
    kind = "list of " * setting.list_depth + ("|".join(limits["choices"] or ()) or names[setting.base_type])
    if limits["minimum"] is not None and limits["maximum"] is not None:
        kind += f" {limits['minimum']:.10g} to {limits['maximum']:.10g}"
    else:
        kind += "".join(f" {sign} {limits[name]:.10g}" for name, sign, _ in _LIMITS if limits[name] is not None)
    return " or ".join([kind, *(limits["words"] or {})])


def show(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, float):
        return f"{value:.10g}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def load(values: Mapping[str, Any]) -> Config:
    """Turn nested plain values into a checked `Config`.

    Raises ConfigError: unknown keys, wrong types, values out of range, combinations that cannot work.
    """
    cfg = from_mapping(Config, values)
    if problems := [*combination_problems(cfg)]:
        raise ConfigError(problems)
    return cfg


def combination_problems(cfg: Config) -> Iterator[str]:
    """One line per problem."""
    has_class_folders, is_slurm = defined.DATA_SETS[cfg.data.name].has_class_folders, cfg.launcher.name == "slurm"
    needs = [  # a setting, whether it has an effect, and what the user would have to write for it
        ("label_smoothing", cfg.loss in defined.LOSSES, "loss=cross_entropy"),
        ("patience", cfg.evaluate_every > 0, "evaluate_every=1"),
        ("bce_threshold", cfg.loss == "bce", "loss=bce"),
        ("augment.timm_policy", cfg.augment.policy == "timm", "augment.policy=timm"),
        ("launcher.gpus", not is_slurm, "launcher=local (Slurm: launcher.gpus_per_node)"),
        *(
            (f"launcher.{name}", is_slurm, "launcher=slurm")
            for name in sorted(vars(cfg.launcher).keys() - {"name", "gpus"})
        ),
        *((f"data.{name}", has_class_folders, "data=folder") for name in ("val_fraction", "val_split", "extensions")),
    ]
    for key in sorted({key for keys in defined.OPTIMIZERS.values() for key in keys}):
        readers = [f"optim={name}" for name, keys in defined.OPTIMIZERS.items() if key in keys]
        is_read = cfg.optim.library == "timm" or f"optim={cfg.optim.name}" in readers
        needs.append((f"optim.{key}", is_read, " or ".join(readers)))
    defaults = Config()
    for key, has_effect, remedy in needs:
        value, default = (functools.reduce(getattr, key.split("."), settings) for settings in (cfg, defaults))
        if value != default and not has_effect:
            hint = f"write {key}={'null' if default is None else default} if a recipe sets it"
            yield f"{key}={value} has no effect without {remedy}: leave it out, or {hint}"
    yield from _data_problems(cfg.data, cfg.augment, cfg.epochs)
    yield from _run_problems(cfg)
    if cfg.optim.library == "torch" and cfg.optim.name not in defined.OPTIMIZERS:
        yield f"optim.name={cfg.optim.name}: only optim=timm has other optimizers than {', '.join(defined.OPTIMIZERS)}"
    if cfg.compare_by not in (known := setting_fields(Config)):
        yield f"compare_by={cfg.compare_by}: no such setting{suggest(cfg.compare_by, known)}"
    if cfg.optim.nesterov and cfg.optim.momentum == 0:
        yield "optim.nesterov=true needs optim.momentum above 0"
    if cfg.cuda_graph == "true" and (conflict := graph_conflict(cfg)):
        yield f"cuda_graph=true: {conflict}"


def _data_problems(data: DataConfig, augment: AugmentConfig, epochs: int) -> Iterator[str]:
    val_size = data.val_size or data.image_size
    if data.root is None and (content := defined.DATA_SETS[data.name].root):
        yield f"data={data.name} needs data.root=FOLDER with {content}"
    if data.name == "dataset" and data.dataset is None:
        yield "data=dataset needs data.dataset=package.module:function"
    if data.name == "dataset" and data.size_schedule:
        yield "data.size_schedule does not work with data=dataset, whose images have one size"
    if len(data.mean) != 3 or len(data.std) != 3 or min(data.std) <= 0:
        yield "data.mean and data.std need three numbers each, those of data.std above 0"
    if not data.extensions or any(extension.lower() not in defined.IMAGE_FORMATS for extension in data.extensions):
        yield f"data.extensions={data.extensions}: use some of {', '.join(defined.IMAGE_FORMATS)}"
    if data.val_resize is not None and data.val_resize < val_size:
        yield f"data.val_resize={data.val_resize} is smaller than the validation crop of {val_size} px"
    for name in ("crop_scale", "crop_ratio"):
        if getattr(augment, f"{name}_min") > getattr(augment, f"{name}_max"):
            yield f"augment.{name}_min is above augment.{name}_max"
    if any(0 < alpha < 0.01 for alpha in (augment.mixup, augment.cutmix)):
        yield "augment.mixup and augment.cutmix must be 0 (off) or at least 0.01"
    starts = [point[0] for point in data.size_schedule if len(point) == 2 and point[1] in range(8, 4097, 4)]
    is_rising = all(later > earlier for earlier, later in itertools.pairwise((*starts, epochs)))
    if data.size_schedule and (len(starts) < len(data.size_schedule) or starts[0] != 0 or not is_rising):
        yield (
            f"data.size_schedule={data.size_schedule}: write [[epoch,size],...], such as [[0,128],[6,160]]: epochs "
            f"from 0 on, each later than the last and below epochs={epochs}; sizes are multiples of 4 from 8 to 4096"
        )


def _run_problems(cfg: Config) -> Iterator[str]:
    if cfg.resume == "auto" and cfg.overwrite:
        yield "resume=auto continues the run in the folder and overwrite=true deletes it: leave out one of them"
    if cfg.loss not in defined.LOSSES and ":" not in cfg.loss:
        yield f"loss={cfg.loss}: use {', '.join(defined.LOSSES)}, or your own function as package.module:function"
    if cfg.schedule.warmup_epochs > cfg.epochs:
        yield f"schedule.warmup_epochs={cfg.schedule.warmup_epochs:g} is longer than epochs={cfg.epochs}"
    if (cfg.conversion in ("select", "mixed")) != bool(cfg.select):
        yield "conversion=select or mixed and select=[NAMES] must be used together"
    if cfg.evaluate_only and cfg.weights is None and cfg.resume is None:
        yield "evaluate_only=true needs weights=... or resume=..., else it would evaluate random weights"
    if cfg.ddp_static_graph and cfg.accumulate_steps > 1:
        yield "ddp_static_graph=true does not work with accumulate_steps above 1"
    if cfg.batch_size == defined.AUTO_BATCH_SIZE and cfg.resume is not None:
        yield "batch_size=auto with resume=...: give the batch size that the run started with (see its config.yaml)"
    if cfg.global_batch_size is not None and (cfg.accumulate_steps > 1 or cfg.batch_size == defined.AUTO_BATCH_SIZE):
        yield "global_batch_size sets accumulate_steps and needs batch_size=NUMBER: leave out the other setting"
    if cfg.report and cfg.evaluate_every == -1 and not cfg.evaluate_only:
        yield "report=true is written by evaluations, and evaluate_every=-1 has none; use evaluate_every=0"


def graph_conflict(cfg: Config) -> str | None:
    """Why a step with these settings cannot be recorded as a CUDA graph; None where it can."""
    if cfg.optim.library != "torch" or cfg.optim.name not in defined.FUSED_OPTIMIZERS:
        name = cfg.optim.name if cfg.optim.library == "torch" else f"timm's {cfg.optim.name}"
        return f"{name} has no fused kernel, so the host decides whether to skip a step; use optim=sgd"
    if cfg.compile and cfg.compile_mode in ("reduce-overhead", "max-autotune"):
        return f"compile_mode={cfg.compile_mode} makes CUDA graphs itself; use default or max-autotune-no-cudagraphs"
    return None


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
            problems.append(f"{word}: write {f'{name}=' if name in known else f'key=value{suggest(name, known)}'}")
        elif word == "channels_last=auto" and key in known:
            problems.append(f"{word}: only train measures which layout is faster; write true or false")
        elif not text and key in known and not known[key].optional and known[key].default:
            problems.append(f"{word} is empty: give a value, or leave it out for {show(known[key].default)}")
        elif key in known and known[key].list_depth and not text.startswith("["):
            values[key] = [_value_of(part) for part in text.split(",")] if text else []
        else:
            values[key] = _value_of(text)
    missing = {key: item for key, item in known.items() if item.metadata["required"] and key not in values}
    problems += [f"{key}=... is missing: {item.metadata['help']}" for key, item in missing.items()]
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


def user_function(setting: str, name: str) -> Callable[..., Any]:
    """The function `package.module:function`, also of a module in the working folder. Raises ConfigError."""
    module_name, _, function_name = name.partition(":")
    if ":" not in name:
        raise ConfigError(f"{setting}={name}: use package.module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the import may raise any exception of the user's code
        what = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{setting}={name}: cannot import '{module_name}' from here ({what})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        near = suggest(function_name, [known for known in vars(module) if not known.startswith("_")])
        raise ConfigError(f"{setting}={name}: module '{module_name}' has no function '{function_name}'{near}")
    return function


def optional_module(module: str, setting: str) -> types.ModuleType:
    """Import a module of an optional package, which `setting` needs. Raises ConfigError."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ConfigError(f"{setting}: {package} is not installed; pip install {package}") from None


def command_help(usage: str, doc: str, settings: Mapping[str, type], choices: Sequence[str] = ()) -> str:
    """The help page of a command.

    Args:
        doc: the docstring of its module: a summary, a blank line, then examples and notes.
        settings: dataclasses of settings by the title of their section; dataclasses in them have their own sections.
        choices: the groups of settings, one line each.
    """
    width = max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
    indent = "\n" + " " * 34  # of the meanings
    sections = {"groups of settings (conf/<group>/<choice>.yaml)": [f"  {line}" for line in choices]} if choices else {}
    for title, schema in settings.items():
        for key, item in setting_fields(schema).items():
            group = key.rpartition(".")[0]
            section = f"{group}: {schema.__annotations__[group].__doc__}" if group in schema.__annotations__ else title
            required = ", required" if item.metadata["required"] else ""
            default = "..." if required else "" if item.default == [] else show(item.default)
            name = f"  {key}={default}"
            first = f"{name:34}" if len(name) < 34 else name + indent
            meaning = f"{item.metadata['help']} [{kind_of(item)}{required}]"
            if key not in CHOSEN_BY_GROUP:
                lines = textwrap.wrap(meaning, width - 34, break_on_hyphens=False)
                sections.setdefault(section, []).append(first + indent.join(lines))
    summary, _, examples = doc.strip().partition("\n\n")
    texts = ["\n".join([title, *rows]) for title, rows in sections.items()]
    summary = textwrap.fill(" ".join(summary.split()), width)
    return "\n\n".join([f"usage: {usage}", summary, *texts, f"examples:\n{examples.rstrip()}"])
