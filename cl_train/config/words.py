"""The words of train.py's command line: which are wrong, and what each one expands to."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from cl_train.config.fields import FIELDS, suggest
from cl_train.config.schema import CHOSEN_BY_GROUP
from cl_train.config.validation import show, train_program
from cl_train.errors import ConfigError

GROUPS = ("data", "augment", "optim", "schedule", "experiment")
HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir")
# What can stand before the `=`.
TYPED_KEYS = [*GROUPS, *(key for key in FIELDS if key not in CHOSEN_BY_GROUP)]
_PACKAGE = Path(__file__).resolve().parents[1]
# An installed wheel holds conf/ in the package, a checkout beside it.
CONF_DIR = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"


def settings_folders(config_dir: Path | None = None) -> tuple[Path, ...]:
    """Where files of settings are: --config-dir, `conf/` of the working folder, the project's."""
    users = (config_dir or CONF_DIR, Path.cwd() / "conf")
    own = [folder for folder in users if folder.is_dir() and folder.resolve() != CONF_DIR]
    return (*own, CONF_DIR)


@functools.lru_cache(maxsize=4096)
def parsed(word: str) -> Override:
    if word.startswith("launcher.gpus=") and "[" not in word:
        word = f"launcher.gpus=[{word.partition('=')[2]}]"  # 0,1,2 is a list here, not a sweep
    return OverridesParser.create().parse_override(word)


def word_problems(word: str, folders: Sequence[Path], multirun: bool) -> list[str]:
    """What is wrong with key=value, besides the type and the range of the value."""
    try:
        override = parsed(word)
    except HydraException:
        example = word if re.fullmatch(r"[\w./-]+", word) else "resnet50"
        hint = "" if "=" in word else f"; settings are written key=value, such as model={example}"
        return [f"cannot read '{word}'{hint} (quote a value with spaces or commas: 'key=\"a, b\"')"]
    key, value = override.key_or_group, override.value()
    is_sweep = override.is_sweep_override()
    words = alternatives(word, folders) if is_sweep and multirun else [f"{key}={value}"]
    for is_wrong, problem in (
        (override.is_delete(), "a setting cannot be removed; give it another value"),
        (is_sweep and not multirun, f"several values need multirun, {train_program()} -m ..."),
        (not words, "the pattern or the range has no value"),
        (key == "hydra.sweep.subdir", "the folder of a job is named after its settings"),
        (key in HYDRA_KEYS and (is_sweep or not value), "needs a folder"),
        (re.match(r"hydra\b(?![./]launcher)", key) and key not in HYDRA_KEYS, only_folders(key)),
        (key in GROUPS and isinstance(value, dict), f"write {key}=NAME, or {key}.key=value"),
        (key in CHOSEN_BY_GROUP, chosen_by_group(word)),
        (key in FIELDS and word.startswith("+"), "the setting exists, so leave out the '+'"),
        (word == "resume=", "the value is empty: give a checkpoint, a run folder or auto"),
    ):
        if is_wrong:
            return [f"{word}: {problem}"]
    if key not in GROUPS:
        return key_problems(key)
    names = [name.partition("=")[2] for name in words]
    return [problem for name in names for problem in choice_problems(key, name, folders)]


def key_problems(key: str) -> list[str]:
    if key not in FIELDS and re.match(r"(hydra[./])?launcher\b", key):
        advice = "a sweep on Slurm is one allocation: sbatch scripts/slurm/sweep.sbatch FOLDER ..."
        return [f"{key}: {advice} (docs/clusters.md)"]
    is_known = key in FIELDS or key in HYDRA_KEYS
    return [] if is_known else [f"unknown setting '{key}'{suggest(key, TYPED_KEYS)}"]


def choice_problems(group: str, name: str, folders: Sequence[Path]) -> list[str]:
    choices = group_choices(group, folders)
    if name in choices:
        return []
    of_timm = "; of timm optim=timm optim.name=NAME" if group == "optim" else ""
    there_are = f"(there are {', '.join(choices)}{of_timm})"
    return [f"{group}={name}: no such choice{suggest(name, choices)} {there_are}"]


def only_folders(key: str) -> str:
    return f"of Hydra's settings only {' and '.join(HYDRA_KEYS)} are used here, not {key}"


def chosen_by_group(word: str) -> str:
    group, _, value = word.partition("=")
    return f"write {group.rpartition('.')[0]}={value}, which also loads the defaults of that choice"


def alternatives(word: str, folders: Sequence[Path]) -> list[str]:
    """The arguments a word expands to: one, or one per value of a sweep."""
    override = parsed(word)
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key, value = override.get_key_element(), override.value()
    if isinstance(value, Glob):
        return [f"{key}={name}" for name in value.filter(group_choices(key.lstrip("+~"), folders))]
    try:
        values = list(override.sweep_string_iterator())
    except HydraException:
        raise ConfigError(f"{word}: list the values, or use range()") from None
    as_typed = {"True": "true", "False": "false", "None": "null"}
    return [f"{key}={as_typed.get(value, value)}" for value in values]


def group_choices(group: str, folders: Sequence[Path] = ()) -> list[str]:
    """The files of `conf/<group>/`, by name."""
    folders = folders or settings_folders()
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def as_word(value: Any) -> str:
    """A Python value as it is typed after the `=`."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_word, value))}]"
    if isinstance(value, float):
        return repr(float(value))  # NumPy's too
    return quoted(value) if isinstance(value, str | Path) else show(value)


def quoted(path: Path | str) -> str:
    """A text as the value of a setting, quoted so that commas and equal signs are literal."""

    # Hydra reads a backslash as an escape only before a quote or the end.
    def doubled(match: re.Match[str]) -> str:
        return 2 * match[1] + (match[2] and "\\'")

    return "'" + re.sub(r"(\\*)('|\Z)", doubled, str(path)) + "'"
