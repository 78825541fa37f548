"""From train.py's arguments to checked settings.

Everything is checked before Hydra starts, torch is imported or a file is created. Hydra's own message for
a typo advises `+key`, which would train with the default value; it is never shown here.
"""

import copy
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cl_train.config.schema import CHOSEN_BY_GROUP, Config, ConfigError, LauncherConfig
from cl_train.config.validation import load, setting_fields, show, suggest, suggest_key, to_mapping

GROUPS = ("data", "augment", "optim", "schedule", "launcher", "experiment")
MULTIRUN_KEYS = ("nproc", "repeats", "resume_sweep", "compare_by")  # and those of `launcher`
HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir")
_FIELDS = setting_fields(Config)
_PACKAGE = Path(__file__).resolve().parents[1]
# An installed wheel holds conf/ in the package, a checkout beside it.
CONF_DIR = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"


class WorkingFolderConf(SearchPathPlugin):
    """Hydra looks into `conf/` of the working folder first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in conf_folders()[:-1]:
            search_path.prepend("working folder", f"file://{folder}", "main")


def conf_folders() -> list[Path]:
    """Where files of settings are searched: `conf/` of the working folder, then the project's own."""
    own = Path.cwd() / "conf"
    return [own, CONF_DIR] if own.is_dir() and own.resolve() != CONF_DIR else [CONF_DIR]


# --- arguments --------------------------------------------------------------------------------------------------------


@dataclass
class CommandLine:
    """A parsed command line of train.py."""

    overrides: list[str] = field(default_factory=list)
    multirun: bool = False
    prints_config: bool = False  # --cfg: print the settings, do not run

    @classmethod
    def parse(cls, words: Iterable[str]) -> "CommandLine":
        """Raises ConfigError: an option that this program does not have."""
        found, rest = cls(), iter(words)
        for word in rest:
            option, equals, value = word.partition("=")
            if not word.startswith("-"):
                found.overrides.append(word)
            elif word in ("-m", "--multirun"):
                found.multirun = True
            elif option in ("-c", "--cfg"):
                found.prints_config = True
                value = value if equals else next(rest, "")
                if value not in ("job", "hydra", "all"):
                    raise ConfigError(f"{option} {value}: write --cfg job")
            else:
                key = option.lstrip("-").replace("-", "_")
                known = typed_keys()
                hint = f"; settings have no dashes: {key}=..." if key in known else suggest_key(key, known)
                raise ConfigError(f"no option {option}{hint} (there are -m, --help and --cfg job)")
        if found.multirun and found.prints_config:
            raise ConfigError("-m cannot be combined with --cfg")
        return found


def check_command_line(words: Sequence[str]) -> list[Config]:
    """Check all of train.py's arguments before Hydra runs, torch is imported or a file is created.

    Returns:
        The runs asked for: one, or with --multirun one per combination in Hydra's order. Empty when the
        arguments ask for something else than a run (--cfg).

    Raises ConfigError: every problem found.
    """
    # `conf/config.yaml` starts from the defaults: plain values, because Hydra would stop at the first wrong type of a
    # typed node, and `load` reports all.
    ConfigStore.instance().store(name="schema", node=to_mapping(Config()))
    Plugins.instance().register(WorkingFolderConf)
    line = CommandLine.parse(words)
    parsed, problems = _parse_overrides(line.overrides)
    found = [_override_problems(override, line.multirun) for override in parsed]
    problems += itertools.chain(*found)
    valid = [override for override, wrong in zip(parsed, found, strict=True) if not wrong]
    configs = []
    for combination in itertools.product(*map(_alternatives, valid)):  # the last key varies fastest, as in Hydra
        try:
            cfg = copy.deepcopy(_composed(combination, (*conf_folders(),)))
            configs.append(cfg)
            problems += [
                _write_group(word) for word in combination if cfg.optim.library == "torch" and "optim.name=" in word
            ]
        except ConfigError as error:
            problems += error.problems
    problems += [problem for cfg in configs if not line.multirun for problem in _multirun_problems(cfg)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return [] if line.prints_config else configs


def _parse_overrides(words: Sequence[str]) -> tuple[list[Override], list[str]]:
    parser = OverridesParser.create()
    parsed, problems = [], []
    for word in words:
        if word.startswith("launcher.gpus=") and "[" not in word:
            word = f"launcher.gpus=[{word.partition('=')[2]}]"  # 0,1,2 is a list here, not a sweep
        try:
            parsed.append(parser.parse_override(word))
        except HydraException:
            hint = "" if "=" in word else "; settings are written key=value"
            problems.append(f"cannot read '{word}'{hint} (quote a value with spaces or commas: 'key=\"a, b\"')")
    return parsed, problems


def _override_problems(override: Override, multirun: bool) -> list[str]:
    key, word = override.key_or_group, str(override.input_line)
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return _hydra_problems(override)
    if override.is_delete():
        return [f"{word}: a setting cannot be removed; give it another value"]
    if override.is_sweep_override() and not multirun:
        return [f"{word}: several values need multirun, python train.py -m ..."]
    if key in GROUPS:
        return _choice_problems(key, override)
    if key in CHOSEN_BY_GROUP:
        return [_write_group(word)]
    if key not in _FIELDS:
        return [f"unknown setting '{key}'{suggest_key(key, typed_keys())}"]
    if override.is_add() and not override.is_force_add():
        return [f"{word}: the setting exists, so leave out the '+'"]
    if key == "resume" and override.value() in ("", None) and word.endswith("="):
        return ["resume= is empty: give a checkpoint file, a run folder or auto, or leave it out"]
    return []


def _write_group(word: str) -> str:
    group, _, value = word.partition("=")
    return f"{word}: write {group.rpartition('.')[0]}={value}, which also loads the defaults of that choice"


def typed_keys() -> list[str]:
    """What can stand before the `=` of a word."""
    return [*GROUPS, *(key for key in _FIELDS if key not in CHOSEN_BY_GROUP)]


def _hydra_problems(override: Override) -> list[str]:
    key, word = override.key_or_group, str(override.input_line)
    if key.startswith(("hydra/launcher", "hydra.launcher")):
        return [f"{word}: Hydra's launchers are not used; launcher=slurm submits the jobs to Slurm"]
    if key == "hydra.sweep.subdir":
        return [f"{word}: the folder of a job is named after its settings"]
    if key not in HYDRA_KEYS:
        return [f"{word}: of Hydra's own settings only {' and '.join(HYDRA_KEYS)} can be set"]
    if override.is_delete() or not override.value():
        return [f"{word}: needs a folder"]
    try:
        hydra_folder([word], "run" if key == "hydra.run.dir" else "sweep")
    except ConfigError as error:
        return [f"{word}: {problem}" for problem in error.problems]
    return []


def _choice_problems(group: str, override: Override) -> list[str]:
    choices, problems = group_choices(group), []
    for value in _swept_values(override) if override.is_sweep_override() else [override.value()]:
        if isinstance(value, dict):
            problems.append(f"{override.input_line}: write {group}=NAME, or {group}.key=value for a single setting")
        elif not (group == "experiment" and value is None) and str(value) not in choices:
            near = suggest(str(value), choices)
            more = "; of timm's, optim=timm optim.name=NAME" if group == "optim" else ""
            problems.append(f"{group}={show(value)}: no such choice{near} (there are {', '.join(choices)}{more})")
    return problems


def _multirun_problems(cfg: Config) -> list[str]:
    given = {key: show(getattr(cfg, key)) for key in MULTIRUN_KEYS if getattr(cfg, key) != getattr(Config, key)}
    given |= {} if cfg.launcher == LauncherConfig() else {"launcher": cfg.launcher.name}
    return [
        f"{key}={value}: a setting of multirun, python train.py -m {key}={value}"
        + ("; for one run use torchrun --standalone --nproc-per-node=N train.py ..." if key == "nproc" else "")
        for key, value in given.items()
    ]


def group_choices(group: str) -> list[str]:
    """The files of `conf/<group>/`, by name."""
    return sorted({path.stem for folder in conf_folders() for path in (folder / group).glob("*.yaml")})


# --- sweeps -----------------------------------------------------------------------------------------------------------


def split_sweep(words: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The overrides of a sweep that was checked already: those of every job, and those of each key that varies."""
    alternatives = [_alternatives(override) for override in _parse_overrides(CommandLine.parse(words).overrides)[0]]
    return [axis[0] for axis in alternatives if len(axis) == 1], [axis for axis in alternatives if len(axis) > 1]


def _alternatives(override: Override) -> list[str]:
    """The arguments an override expands to: one, or one per value for a sweep (`epochs=1,2`)."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    as_typed = {"True": "true", "False": "false", "None": "null"}
    return [f"{override.get_key_element()}={as_typed.get(value, value)}" for value in _swept_values(override)]


def _swept_values(override: Override) -> list[str]:
    """The values of `a,b`, `range(...)`, `choice(...)` or, for a group, `glob(...)`; intervals are refused."""
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(group_choices(override.get_key_element().lstrip("+~")))
    try:
        return list(override.sweep_string_iterator())
    except HydraException:
        raise ConfigError(f"{override.input_line}: list the values, or use range()") from None


# --- composing --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)  # it takes 0.1 s, and launcher.gpus and launcher=slurm ask for each job again
def _composed(words: tuple[str, ...], folders: tuple[Path, ...]) -> Config:
    """The settings that the arguments and the files in `folders`, which are `conf_folders()`, give."""
    return load(_compose(words))


def _compose(words: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """The configuration that Hydra composes from the arguments and the files."""
    try:
        _check_files()
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
            return compose("config", overrides=list(words), return_hydra_config=with_hydra)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(str(error).splitlines()[0]) from None


def _check_files() -> None:
    """Refuse YAML aliases: nested ones expand to any size (a "billion laughs" file), and ${key} does the same job."""
    for folder in conf_folders()[:-1]:
        for path in [folder / "config.yaml", *(file for group in GROUPS for file in (folder / group).glob("*.yaml"))]:
            text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
            if re.search(r"\*\w", text) and any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
                raise ConfigError(f"{path}: YAML aliases (*name) are not supported; refer to a setting as ${{key}}")


def hydra_folder(words: Sequence[str], kind: Literal["run", "sweep"]) -> Path:
    """The folder that Hydra creates for a run or a sweep with these arguments.

    Raises ConfigError: its name cannot be resolved, or a file in conf/ chooses what sweeps do not use.
    """
    hydra = _compose([*words], with_hydra=True).hydra
    if kind == "sweep":
        if not str(hydra.launcher._target_).endswith("BasicLauncher"):
            raise ConfigError("conf/ chooses a hydra/launcher, which is not used; use launcher=slurm for Slurm")
        if "subdir: ${hydra.job.num}\n" not in OmegaConf.to_yaml(hydra.sweep):
            raise ConfigError("conf/ sets hydra.sweep.subdir, but the folder of a job is named after its settings")
    try:
        return Path(str(hydra[kind].dir))
    except OmegaConfBaseException as error:  # its name cannot be resolved
        raise ConfigError(str(error).splitlines()[0]) from None


def quoted(path: Path) -> str:
    """A path as the value of a setting, quoted so that commas and equal signs are literal."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"
