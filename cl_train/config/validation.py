"""From plain values to checked settings, combinations that cannot work, names of code, and
`--help`.

Every problem is reported at once, one line each. Nothing here imports torch or Hydra.
"""

import dataclasses
import difflib
import functools
import importlib
import itertools
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
_LIMITS = (
    ("minimum", ">=", operator.ge),
    ("above", ">", operator.gt),
    ("maximum", "<=", operator.le),
)
# Words of other training programs, and the settings here that mean the same.
_OF_OTHER_PROGRAMS = {
    "amp": "precision",
    "arch": "model",
    "batch": "batch_size",
    "data_dir": "root",
    "data_path": "root",
    "img_size": "image_size",
    "learning_rate": "lr",
    "num_workers": "workers",
    "pretrained": "weights",
    "wd": "weight_decay",
}


_LARGEST = 2.0**62  # of numbers without a maximum: whole ones fit into an int64 of torch


@dataclasses.dataclass(frozen=True)
class Setting:
    """One leaf of a dataclass of settings."""

    base_type: type  # bool, int, float or str: of the value, or of the items of a list
    list_depth: int  # 0: one value, 1: a list, 2: a list of lists
    optional: bool  # null is allowed
    default: Any
    metadata: Mapping[str, Any]  # see `schema.Limits`


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
        default = (
            item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        )
        leaves[key] = Setting(hint, list_depth, optional, default, item.metadata)
    return leaves


def suggest(name: str, names: Iterable[str]) -> str:
    """`; did you mean a, b?` for the nearest of the `names` (`optim.lr` for `learning_rate`),
    or an empty string.
    """
    names = sorted(names)
    last = name.rpartition(".")[2]
    last = _OF_OTHER_PROGRAMS.get(last, last)
    near = [full for full in names if full == last or full.endswith(f".{last}")][:3]
    if not near:
        matches = difflib.get_close_matches(name, names)
        ratios = [difflib.SequenceMatcher(None, match, name).ratio() for match in matches]
        near = [
            match for match, ratio in zip(matches, ratios, strict=True) if ratio > ratios[0] - 0.15
        ]
    return f"; did you mean {', '.join(near)}?" if near else ""


def from_mapping(
    schema: type[T], values: Mapping[str, Any], earlier_problems: Sequence[str] = ()
) -> T:
    """Build a dataclass of settings from nested plain values, checking keys, types and ranges.

    Raises ConfigError: with every problem found, not only the first, after `earlier_problems`.
    """
    fields = setting_fields(schema)
    problems = list(earlier_problems)
    checked: dict[str, Any] = {}
    for key, value in flatten(values, fields):
        if key not in fields:
            problems.append(f"unknown setting '{key}'{suggest(key, fields)}")
            continue
        try:
            checked[key] = _converted(value, fields[key], fields[key].list_depth)
        except (ValueError, OverflowError):
            # 1.0 is no whole number, so it is not shown as 1.
            text = (str(value) if isinstance(value, float) else show(value))[:80]
            near = suggest(text, fields[key].metadata["choices"] or ())
            problems.append(f"{key}={text}: expected {kind_of(fields[key])}{near}")
    if problems:
        raise ConfigError(problems)
    return typing.cast(T, _built(schema, checked))


def _built(schema: Any, checked: Mapping[str, Any], prefix: str = "") -> Any:
    """The dataclass and those in its fields, with these values by key, or their defaults."""
    values: dict[str, Any] = {}
    for item in dataclasses.fields(schema):
        key = prefix + (item.metadata.get("key") or item.name)
        if dataclasses.is_dataclass(item.type):
            values[item.name] = _built(item.type, checked, f"{key}.")
        elif key in checked:
            values[item.name] = checked[key]
    return schema(**values)


def flatten(
    values: Mapping[Any, Any], known: Collection[str] = (), prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The leaves of nested settings by full key; a mapping whose key is `known` is a leaf."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in known:
            yield from flatten(value, known, f"{key}.")
        else:
            yield key, value


def _converted(value: Any, setting: Setting, list_depth: int) -> Any:
    """`value`, as YAML or Hydra reads it, in the setting's type: text as numbers (YAML reads 1e-3
    as text), numbers as text. Raises ValueError, OverflowError: it is of another type or out of
    range.
    """
    kind = setting.base_type
    limits = setting.metadata
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
        is_allowed = converted in (limits["choices"] or (converted,))
    else:
        is_allowed = abs(converted) <= max(_LARGEST, limits["maximum"] or 0) and all(
            is_within(converted, limits[name])
            for name, _, is_within in _LIMITS
            if limits[name] is not None
        )
    if not is_allowed:
        raise ValueError
    return converted


def kind_of(setting: Setting) -> str:
    """The allowed values: `whole number >= 1 or auto`, `fp32|fp16`, `list of number`."""
    limits = setting.metadata
    names = {int: "whole number", float: "number", bool: "true|false", str: "text"}
    kind = "list of " * setting.list_depth + (
        "|".join(limits["choices"] or ()) or names[setting.base_type]
    )
    if limits["minimum"] is not None and limits["maximum"] is not None:
        kind += f" {limits['minimum']:.10g} to {limits['maximum']:.10g}"
    else:
        kind += "".join(
            f" {sign} {limits[name]:.10g}" for name, sign, _ in _LIMITS if limits[name] is not None
        )
    return " or ".join([kind, *(limits["words"] or {})])


def show(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, float):
        return f"{value:.10g}"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def load(values: Mapping[str, Any]) -> Config:
    """Turn nested plain values into a checked `Config`.

    Raises ConfigError: unknown keys, wrong types, values out of range, combinations that cannot
    work.
    """
    cfg = from_mapping(Config, values)
    if problems := [*combination_problems(cfg)]:
        raise ConfigError(problems)
    return cfg


def combination_problems(cfg: Config) -> Iterator[str]:
    """One line per problem."""
    has_class_folders = defined.DATA_SETS[cfg.data.name].has_class_folders
    needs = [  # a setting, whether it has an effect, and what the user would have to write for it
        ("label_smoothing", cfg.loss in defined.LOSSES, "loss=cross_entropy"),
        ("patience", cfg.evaluate_every > 0, "evaluate_every=1"),
        ("bce_threshold", cfg.loss == "bce", "loss=bce"),
        ("augment.timm_policy", cfg.augment.policy == "timm", "augment.policy=timm"),
        ("schedule.milestones", cfg.schedule.name == "step", "schedule=step"),
        ("drop_path_constant", cfg.drop_path is not None, "drop_path=RATE"),
        ("layer_scale", cfg.weights is None, "random weights: trained ones hold their own"),
        *(
            (f"data.{name}", has_class_folders, "data=folder")
            for name in ("val_fraction", "val_split", "extensions")
        ),
    ]
    for key in sorted({key for keys in defined.OPTIMIZERS.values() for key in keys}):
        readers = [f"optim={name}" for name, keys in defined.OPTIMIZERS.items() if key in keys]
        is_read = cfg.optim.library == "timm" or f"optim={cfg.optim.name}" in readers
        needs.append((f"optim.{key}", is_read, " or ".join(readers)))
    defaults = Config()
    for key, has_effect, remedy in needs:
        value, default = (
            functools.reduce(getattr, key.split("."), settings) for settings in (cfg, defaults)
        )
        if value != default and not has_effect:
            hint = f"write {key}={'null' if default is None else default} if a recipe sets it"
            yield f"{key}={value} has no effect without {remedy}: leave it out, or {hint}"
    yield from _data_problems(cfg.data, cfg.augment, cfg.epochs)
    yield from _run_problems(cfg)
    if cfg.optim.library == "torch" and cfg.optim.name not in defined.OPTIMIZERS:
        of_torch = ", ".join(defined.OPTIMIZERS)
        yield f"optim.name={cfg.optim.name}: only optim=timm has others than {of_torch}"
    fields = setting_fields(Config)
    if cfg.compare_by not in fields:
        yield f"compare_by={cfg.compare_by}: no such setting{suggest(cfg.compare_by, fields)}"
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
    extensions = {extension.lower() for extension in data.extensions}
    if not extensions or extensions - defined.IMAGE_FORMATS.keys():
        yield f"data.extensions={data.extensions}: use some of {', '.join(defined.IMAGE_FORMATS)}"
    if data.val_resize is not None and data.val_resize < val_size:
        yield f"data.val_resize={data.val_resize} is smaller than the crop of {val_size} px"
    for name in ("crop_scale", "crop_ratio"):
        if getattr(augment, f"{name}_min") > getattr(augment, f"{name}_max"):
            yield f"augment.{name}_min is above augment.{name}_max"
    if any(0 < alpha < 0.01 for alpha in (augment.mixup, augment.cutmix)):
        yield "augment.mixup and augment.cutmix must be 0 (off) or at least 0.01"
    points = data.size_schedule
    starts = [point[0] for point in points if len(point) == 2 and point[1] in range(8, 4097, 4)]
    is_rising = all(later > earlier for earlier, later in itertools.pairwise((*starts, epochs)))
    if points and (len(starts) < len(points) or starts[0] != 0 or not is_rising):
        yield (
            f"data.size_schedule={points}: write [[epoch,size],...], such as [[0,128],[6,160]]: "
            f"epochs from 0 on, each later than the last and below epochs={epochs}; "
            "sizes are multiples of 4 from 8 to 4096"
        )


def _run_problems(cfg: Config) -> Iterator[str]:
    if cfg.resume == "auto" and cfg.overwrite:
        yield "resume=auto continues a run and overwrite=true deletes it: leave out one of them"
    if cfg.loss not in defined.LOSSES and ":" not in cfg.loss:
        yield f"loss={cfg.loss}: use {', '.join(defined.LOSSES)}, or package.module:function"
    if cfg.schedule.warmup_epochs > cfg.epochs:
        warmup_epochs = cfg.schedule.warmup_epochs
        yield f"schedule.warmup_epochs={warmup_epochs:g} is longer than epochs={cfg.epochs}"
    if (cfg.conversion == "select") != bool(cfg.select):
        yield "conversion=select and select=[NAMES] must be used together"
    if cfg.evaluate_only and cfg.weights is None and cfg.resume is None:
        yield "evaluate_only=true needs weights=... or resume=...: random weights say nothing"
    if cfg.entry is not None and cfg.weights is None:
        yield f"entry={cfg.entry} is one of the file that weights=FILE or weights=RUN names"
    if (cfg.best_by or "").startswith("average.") and not cfg.ema_decay:
        yield f"best_by={cfg.best_by} needs an average of the weights, such as ema_decay=0.999"
    if cfg.ddp_static_graph and cfg.accumulate_steps > 1:
        yield "ddp_static_graph=true does not work with accumulate_steps above 1"
    is_auto = cfg.batch_size == defined.AUTO_BATCH_SIZE
    if is_auto and cfg.resume is not None:
        yield "batch_size=auto with resume=...: give the number of the run (see its config.yaml)"
    if cfg.global_batch_size is not None and (is_auto or cfg.accumulate_steps > 1):
        yield "global_batch_size sets accumulate_steps and needs batch_size=NUMBER: leave that out"
    if cfg.report and cfg.evaluate_every == -1 and not cfg.evaluate_only:
        yield "report=true needs an evaluation: evaluate_every=-1 has none, evaluate_every=0 one"


def graph_conflict(cfg: Config) -> str | None:
    """Why a step with these settings cannot be recorded as a CUDA graph; None where it can."""
    if cfg.optim.library != "torch" or cfg.optim.name not in defined.FUSED_OPTIMIZERS:
        name = cfg.optim.name if cfg.optim.library == "torch" else f"timm's {cfg.optim.name}"
        return f"{name} has no fused kernel: the host decides whether to skip a step; use optim=sgd"
    if cfg.compile and cfg.compile_mode in ("reduce-overhead", "max-autotune"):
        others = "default or max-autotune-no-cudagraphs"
        return f"compile_mode={cfg.compile_mode} makes CUDA graphs itself; use {others}"
    return None


def settings_from_arguments(schema: type[T], arguments: Sequence[str]) -> T:
    """The key=value arguments of a command line as a dataclass; lists are written a,b,c.

    Raises ConfigError: as `from_mapping`, and for arguments that are not key=value.
    """
    fields = setting_fields(schema)
    problems: list[str] = []
    values: dict[str, Any] = {}
    for word in arguments:
        key, equals, text = word.partition("=")
        name = key.lstrip("-").replace("-", "_")
        if not equals or name != key:
            hint = f"key=value{suggest(name, fields)}"
            if name in fields:
                hint = f"{name}="
            elif name == word and "model" in fields:
                hint = f"key=value, such as model={word}"
            problems.append(f"{word}: write {hint}")
        elif word == "channels_last=auto" and key in fields:
            problems.append(
                f"{word}: only train measures which layout is faster; write true or false"
            )
        elif not text and key in fields and not fields[key].optional and fields[key].default:
            problems.append(
                f"{word} is empty: give a value, or leave it out for {show(fields[key].default)}"
            )
        elif key in fields and fields[key].list_depth and not text.startswith("["):
            values[key] = [_value_of(part) for part in text.split(",")] if text else []
        else:
            values[key] = _value_of(text)
    missing = {
        key: item for key, item in fields.items() if item.metadata["required"] and key not in values
    }
    problems += [f"{key}=... is missing: {item.metadata['help']}" for key, item in missing.items()]
    return from_mapping(schema, values, problems)


def is_setting(word: str) -> bool:
    """Whether an argument is key=value (or an option), rather than a file or folder."""
    return word.startswith("-") or re.fullmatch(r"[\w.]+=.*", word, flags=re.S) is not None


def _value_of(text: str) -> Any:
    """`text` read as YAML, or unchanged if it is not YAML, such as a shell pattern that begins with
    a star.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def names_code(value: Any) -> bool:
    """Whether a setting's value, or an item of it, is package.module:function."""
    return any(":" in str(item) for item in (value if isinstance(value, list) else [value]))


def train_program() -> str:
    """The words that start the training, as the user typed them."""
    return "python train.py" if Path(sys.argv[0]).name == "train.py" else "cl-train train"


def user_function(setting: str, name: str) -> Callable[..., Any]:
    """The function `package.module:function`, also of a module in the working folder.

    Raises ConfigError.
    """
    module_name, _, function_name = name.partition(":")
    if ":" not in name:
        raise ConfigError(f"{setting}={name}: use package.module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except (
        Exception,
        SystemExit,
    ) as error:  # the import may raise any exception of the user's code
        what = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{setting}={name}: cannot import '{module_name}' from here ({what})"
        ) from error
    function = getattr(module, function_name, None)
    if callable(function):
        return function
    if function is not None:
        kind = type(function).__name__
        raise ConfigError(f"{setting}={name}: it is no function, but of type {kind}")
    near = suggest(function_name, [public for public in vars(module) if not public.startswith("_")])
    raise ConfigError(
        f"{setting}={name}: module '{module_name}' has no function '{function_name}'{near}"
    )


def optional_module(module: str, setting: str) -> types.ModuleType:
    """Import a module of an optional package, which `setting` needs. Raises ConfigError."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ConfigError(f"{setting}: {package} is not installed; pip install {package}") from None


def command_help(
    usage: str, doc: str, settings: Mapping[str, type], choices: Sequence[str] = ()
) -> str:
    """The help page of a command.

    Args:
        doc: the docstring of its module: a summary, a blank line, then examples and notes.
        settings: dataclasses of settings by the title of their section; dataclasses in them have
        their own sections. choices: the groups of settings, one line each.
    """
    width = max(60, min(120, shutil.get_terminal_size((120, 24)).columns))
    indent = "\n" + " " * 34  # of the meanings
    sections = (
        {"groups of settings (conf/<group>/<choice>.yaml)": [f"  {line}" for line in choices]}
        if choices
        else {}
    )
    for title, schema in settings.items():
        for key, item in setting_fields(schema).items():
            group = key.rpartition(".")[0]
            section = (
                f"{group}: {schema.__annotations__[group].__doc__}"
                if group in schema.__annotations__
                else title
            )
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
