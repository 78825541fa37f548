"""From the words of a command line to checked settings: the only file that knows Hydra.

Everything is checked before Hydra runs, before torch is imported and before any file is made. Hydra's own message for a
typo advises `+key`, which would train with the default value; here it never reaches the user.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from cl_train.config.schema import Config, ConfigError
from cl_train.config.validation import load, setting_fields, show, suggest, suggest_key, to_mapping

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"
GROUPS = ("data", "augment", "optim", "schedule", "experiment")


def register_schema() -> None:
    """Make the defaults known to Hydra as `schema`, which `conf/config.yaml` starts from.

    As plain values, not as a typed node: Hydra would stop at the first wrong type, `load` reports all.
    """
    ConfigStore.instance().store(name="schema", node=to_mapping(Config()))


def check_command_line(arguments: Sequence[str]) -> list[Config]:
    """Check train.py's arguments as a whole before Hydra, torch or any file is touched.

    Returns:
        The runs asked for: one, or with --multirun one per combination in Hydra's order. Empty when the arguments ask
        for something else than a run (--help, --cfg, --info, --shell-completion).

    Raises:
        ConfigError: every problem found. Hydra's own message for a typo advises `+key`, which would train with the
            default value, so it must never reach the user.
    """
    register_schema()
    flags = get_args_parser().parse_intermixed_args(list(arguments))
    if flags.help or flags.hydra_help or flags.info or flags.shell_completion:
        return []
    parsed, problems = _parse_overrides(flags.overrides)
    for override in parsed:
        problems += _key_problems(override)
        if override.is_sweep_override() and not flags.multirun:
            problems.append(f"{override.input_line}: several values need multirun, python train.py -m ...")
    kept = [override for override in parsed if not _key_problems(override)]
    configs = []
    for words in _combinations(kept):
        try:
            configs.append(_compose(words, flags.config_name))
        except ConfigError as error:
            problems += error.problems
    if not flags.multirun:
        for name in ("nproc", "repeats"):
            if any(getattr(cfg, name) > 1 for cfg in configs):
                other = "torchrun --standalone --nproc-per-node=N train.py ..." if name == "nproc" else "multirun (-m)"
                problems.append(f"{name} is a setting of multirun and has no effect here; use {other}")
        problems += [
            f"{word}: a setting of multirun; use python train.py -m {word}"
            for word in flags.overrides
            if word.startswith(("resume_sweep=", "compare_by="))
        ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return [] if flags.cfg else configs


def _parse_overrides(words: Sequence[str]) -> tuple[list[Override], list[str]]:
    parser = OverridesParser.create()
    parsed, problems = [], []
    for word in words:
        try:
            parsed.append(parser.parse_override(word))
        except HydraException:
            hint = "" if "=" in word else "; settings are written key=value"
            problems.append(f"cannot read '{word}'{hint} (quote a value with spaces or commas: 'key=\"a, b\"')")
    return parsed, problems


def _key_problems(override: Override) -> list[str]:
    key = override.key_or_group
    word = str(override.input_line)
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return []
    if override.is_delete():
        return [f"{word}: a setting cannot be removed; give it another value"]
    if key in GROUPS:
        return _choice_problems(key, override)
    known = setting_fields(Config)
    if key not in known:
        return [f"unknown setting '{key}'{suggest_key(key, [*known, *GROUPS])}"]
    if override.is_add() and not override.is_force_add():
        return [f"{word}: the setting exists, so leave out the '+'"]
    return []


def _choice_problems(group: str, override: Override) -> list[str]:
    choices = group_choices(group)
    chosen = _swept_values(override) if override.is_sweep_override() else [override.value()]
    problems = []
    for value in chosen:
        if isinstance(value, dict):
            problems.append(
                f"{override.input_line}: {group} takes a name; single settings are written {group}.key=value"
            )
        elif not (group == "experiment" and value is None) and str(value) not in choices:
            near = suggest(str(value), choices)
            problems.append(f"{group}={show(value)}: no such choice{near} (there are {', '.join(choices)})")
    return problems


def group_choices(group: str) -> list[str]:
    """The files of `conf/<group>/`, by name."""
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def split_sweep(arguments: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The words of a sweep that was checked already: those of every job, and per key that varies its words.

    Hydra's own options (--config-name and the like) are among the first.
    """
    flags = get_args_parser().parse_intermixed_args(list(arguments))
    fixed = [f"--config-name={flags.config_name}"] if flags.config_name else []
    varying = []
    for override in _parse_overrides(flags.overrides)[0]:
        if override.is_sweep_override():
            varying.append(_axis(override))
        else:
            fixed.append(str(override.input_line))
    return fixed, varying


def _axis(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    as_typed = {"True": "true", "False": "false", "None": "null"}
    return [f"{override.get_key_element()}={as_typed.get(v, v)}" for v in _swept_values(override)]


def _swept_values(override: Override) -> list[str]:
    """The values of `a,b`, `range(...)`, `choice(...)` or, of a group, `glob(...)`.

    Raises:
        ConfigError: an interval, which takes a program that picks values from it.
    """
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(group_choices(override.get_key_element().lstrip("+~")))
    try:
        return list(override.sweep_string_iterator())
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{override.input_line}: list the values, or use range() ({reason})") from None


def _combinations(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """The override words of each job, in the order of Hydra's basic sweeper (the last key varies fastest)."""
    for words in itertools.product(*map(_axis, overrides)):
        yield list(words)


def _compose(words: Sequence[str], config_name: str | None) -> Config:
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
            raw = compose(config_name or "config", overrides=list(words))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).splitlines()[0]) from None
    return load(raw)


def requested_folder(arguments: Sequence[str]) -> Path:
    """Where a run's folder will be made: `hydra.run.dir=` where it is given, else the parent of Hydra's dated ones."""
    given = [word.partition("=")[2].strip("'\"") for word in arguments if word.startswith("hydra.run.dir=")]
    return Path(given[-1]) if given and "$" not in given[-1] else Path("outputs")


def run_folder() -> Path:
    """The folder that Hydra made for this run."""
    return Path(HydraConfig.get().runtime.output_dir)
