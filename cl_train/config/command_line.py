"""From train.py's arguments to checked settings.

Everything is checked before torch is imported or a file is created. Hydra composes the configuration, and nothing else
of Hydra runs: no launcher, callback, logging or plugin, so that a configuration file cannot run code. Hydra's own
message for a typo advises `+key`, which would train with the default value; it is never shown here.
"""

import functools
import itertools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cl_train.config.schema import CHOSEN_BY_GROUP, Config, ConfigError, LauncherConfig
from cl_train.config.validation import flatten, load, setting_fields, show, suggest, suggest_key, to_mapping

GROUPS = ("data", "augment", "optim", "schedule", "launcher", "experiment")
MULTIRUN_KEYS = ("nproc", "repeats", "resume_sweep", "only_group", "compare_by")  # and those of `launcher`
HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir")
_FIELDS = setting_fields(Config)
_PACKAGE = Path(__file__).resolve().parents[1]
# An installed wheel holds conf/ in the package, a checkout beside it.
CONF_DIR = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"


# --- arguments --------------------------------------------------------------------------------------------------------


@dataclass
class CommandLine:
    """A parsed command line of train.py."""

    overrides: list[str] = field(default_factory=list)
    multirun: bool = False
    printed: str | None = None  # --cfg: print these settings, do not run
    config_dir: Path | None = None  # holds more files of the groups

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
            elif option in ("-c", "--cfg", "--config-dir"):
                value = value if equals else next(rest, "")
                if option == "--config-dir":
                    found.config_dir = Path(value).expanduser().absolute()
                    if not value or not found.config_dir.is_dir():
                        raise ConfigError(
                            f"{option} {value}: no such folder; it holds files such as experiment/mine.yaml"
                        )
                elif value in ("job", "hydra", "all"):
                    found.printed = value
                else:
                    raise ConfigError(f"{option} {value}: write --cfg job")
            else:
                key = option.lstrip("-").replace("-", "_")
                known = typed_keys()
                hint = f"; settings have no dashes: {key}=..." if key in known else suggest_key(key, known)
                raise ConfigError(f"no option {option}{hint} (there are -m, --help, --cfg job and --config-dir DIR)")
        if found.multirun and found.printed:
            raise ConfigError("-m cannot be combined with --cfg")
        return found


def check_command_line(words: Sequence[str]) -> list[Config]:
    """Check all of train.py's arguments before torch is imported or a file is created.

    Returns the runs asked for: one, or with --multirun one per combination in Hydra's order.

    Raises ConfigError: every problem found.
    """
    line = CommandLine.parse(words)
    folders = conf_folders(line.config_dir)
    parsed, problems = _parse_overrides(line.overrides)
    found = [_override_problems(override, line.multirun, folders) for override in parsed]
    problems += itertools.chain(*found)
    valid = [override for override, wrong in zip(parsed, found, strict=True) if not wrong]
    configs = []
    for combination in itertools.product(*(_alternatives(override, folders) for override in valid)):  # as Hydra: the
        try:  # last key varies fastest
            configs.append(cfg := _composed(combination, folders)[0])
            if cfg.optim.library == "torch":
                problems += [_write_group(word) for word in combination if "optim.name=" in word]
            problems += [] if line.multirun else _multirun_problems(cfg)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return configs


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


def _override_problems(override: Override, multirun: bool, folders: tuple[Path, ...]) -> list[str]:
    key, word = override.key_or_group, str(override.input_line)
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return _hydra_problems(override, folders)
    if override.is_delete():
        return [f"{word}: a setting cannot be removed; give it another value"]
    if override.is_sweep_override() and not multirun:
        return [f"{word}: several values need multirun, python train.py -m ..."]
    if key in GROUPS:
        return _choice_problems(key, override, folders)
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


def _hydra_problems(override: Override, folders: tuple[Path, ...]) -> list[str]:
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
        _folder((word,), folders, "run" if key == "hydra.run.dir" else "sweep")
    except ConfigError as error:
        return [f"{word}: {problem}" for problem in error.problems]
    return []


def _choice_problems(group: str, override: Override, folders: tuple[Path, ...]) -> list[str]:
    choices, problems = group_choices(group, folders), []
    for value in _swept_values(override, folders) if override.is_sweep_override() else [override.value()]:
        if isinstance(value, dict):
            problems.append(f"{override.input_line}: write {group}=NAME, or {group}.key=value for a single setting")
        elif not (group == "experiment" and value is None) and str(value) not in choices:
            problems.append(_no_choice(group, value, choices))
    return problems


def _no_choice(group: str, value: object, choices: Sequence[str]) -> str:
    more = "; of timm's, optim=timm optim.name=NAME" if group == "optim" else ""
    return f"{group}={show(value)}: no such choice{suggest(str(value), choices)} (there are {', '.join(choices)}{more})"


def _multirun_problems(cfg: Config) -> list[str]:
    given = {key: show(getattr(cfg, key)) for key in MULTIRUN_KEYS if getattr(cfg, key) != getattr(Config, key)}
    given |= {} if cfg.launcher == LauncherConfig() else {"launcher": cfg.launcher.name}
    return [
        f"{key}={value}: a setting of multirun, python train.py -m {key}={value}"
        + ("; for one run use torchrun --standalone --nproc-per-node=N train.py ..." if key == "nproc" else "")
        for key, value in given.items()
    ]


# --- sweeps -----------------------------------------------------------------------------------------------------------


def split_sweep(words: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The words of a sweep that was checked already: those of every job, and those of each key that varies."""
    line = CommandLine.parse(words)
    folders = conf_folders(line.config_dir)
    axes = [_alternatives(override, folders) for override in _parse_overrides(line.overrides)[0]]
    fixed = [f"--config-dir={line.config_dir}"] if line.config_dir else []
    return fixed + [axis[0] for axis in axes if len(axis) == 1], [axis for axis in axes if len(axis) > 1]


def _alternatives(override: Override, folders: tuple[Path, ...]) -> list[str]:
    """The arguments an override expands to: one, or one per value for a sweep (`epochs=1,2`)."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    as_typed = {"True": "true", "False": "false", "None": "null"}
    return [f"{override.get_key_element()}={as_typed.get(v, v)}" for v in _swept_values(override, folders)]


def _swept_values(override: Override, folders: tuple[Path, ...]) -> list[str]:
    """The values of `a,b`, `range(...)`, `choice(...)` or, for a group, `glob(...)`; intervals are refused."""
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(group_choices(override.get_key_element().lstrip("+~"), folders))
    try:
        return list(override.sweep_string_iterator())
    except HydraException:
        raise ConfigError(f"{override.input_line}: list the values, or use range()") from None


# --- files ------------------------------------------------------------------------------------------------------------


def conf_folders(config_dir: Path | None = None) -> tuple[Path, ...]:
    """Where files of settings are searched: --config-dir, `conf/` of the working folder, then the project's own."""
    users = [folder for folder in (config_dir, Path.cwd() / "conf") if folder and folder.is_dir()]
    return (*(folder for folder in dict.fromkeys(users) if folder.resolve() != CONF_DIR), CONF_DIR)


def group_choices(group: str, folders: Sequence[Path] | None = None) -> list[str]:
    """The files of `conf/<group>/`, by name."""
    return sorted({path.stem for folder in folders or conf_folders() for path in (folder / group).glob("*.yaml")})


class UserFiles(FileConfigSource):
    """The user's files of settings, which `_read_settings` accepts."""

    @staticmethod
    def scheme() -> str:
        return "user"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path) / self._normalize_file_name(config_path)
        if config_path.partition("/")[0] == "hydra":
            raise ConfigError(f"{path}: {_ONLY}")
        _read_settings(path)
        return super().load_config(config_path)


_ONLY = f"a file of settings can set only {' and '.join(HYDRA_KEYS)} of Hydra, so that it cannot run code"


def _read_settings(path: Path) -> dict[str, Any]:
    """The content of a user's file: YAML that sets no more of Hydra than the command line may, and names no code.

    Aliases are refused, because nested ones expand to any size (a "billion laughs" file); ${key} does the same job.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ConfigError(f"{path}: YAML aliases (*name) are not supported; refer to a setting as ${{key}}")
        values = yaml.safe_load(text) or {}
    except (OSError, UnicodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected settings, key: value")
    keys = [key for key, _ in flatten(values)]
    if code := [key for key in keys if re.search(r"(^|\.)_\w*_(\.|$)", key)]:
        raise ConfigError(f"{path}: {code[0]} is no setting; a file of settings cannot name code to run")
    placed = re.findall(r"^\s*#\s*@package\s.*", text, flags=re.MULTILINE)
    set_keys = {key for key in keys if key.partition(".")[0] == "hydra"} - {*HYDRA_KEYS}
    if set_keys or "hydra" in f"{placed} {values.get('defaults')}":
        raise ConfigError(f"{path}: {_ONLY}")
    return values


def _start_file(typed: Mapping[str, Any]) -> Path | None:
    """The file of `config=`; an evaluation of a run starts from that run's."""
    given = typed.get("config")
    if given is not None:
        path = Path(str(given)).expanduser()
        path = path / "config.yaml" if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(f"config={given}: no such file, and no run folder with a config.yaml")
        return path
    if typed.get("evaluate_only") is not True or typed.get("experiment") or not typed.get("resume"):
        return None
    run = Path(str(typed.get("hydra.run.dir", ".") if typed["resume"] == "auto" else typed["resume"])).expanduser()
    candidates = (folder / "config.yaml" for folder in (run, run.parent.parent, run.parent))
    return next((path for path in candidates if path.is_file()), None)


# --- composing --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)  # it takes 0.1 s, and launcher.gpus and launcher=slurm ask for each job again
def _composed(words: tuple[str, ...], folders: tuple[Path, ...]) -> tuple[Config, DictConfig]:
    """The settings that the words and the files in `folders` give, checked and as Hydra composed them.

    The file of `config=` is applied between the files and the words. A group that a word chooses replaces its section.
    """
    typed = {override.key_or_group: override.value() for override in _parse_overrides(words)[0]}
    start = _start_file(typed)
    values = _start_values(start, typed) if start else {}
    choices = _start_choices(values, folders)
    if "data.root" in typed and not typed.keys() & {"data", "config", "experiment"}:
        choices = ["data=folder"]  # whose images are of any size, unlike the sample's
    raw = _compose([*choices, *words], folders)
    sections = {key: value for key, value in values.items() if key not in GROUPS or isinstance(value, dict)}
    for key, value in flatten(sections, _FIELDS):
        if key not in typed:
            OmegaConf.update(raw, key, value)
    return load(OmegaConf.masked_copy(raw, [str(key) for key in raw if key != "hydra"])), raw


def _start_values(path: Path, typed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the file of `config=`, without those that say how its run started. Raises ConfigError."""
    if typed.get("experiment"):
        raise ConfigError("config= and experiment= cannot be combined: both say what the run starts from")
    values = _read_settings(path)
    problems = [
        f"{path}: unknown setting '{key}'{suggest_key(str(key), typed_keys())}"
        for key, _ in flatten(values, _FIELDS)
        if key not in (*_FIELDS, *GROUPS, *HYDRA_KEYS) or key == "experiment"
    ]
    if problems:
        raise ConfigError(problems)
    how_started = ("config", "resume", "overwrite", *(["weights"] if typed.get("evaluate_only") else []))
    return {key: value for key, value in values.items() if key not in typed and key not in how_started}


def _start_choices(values: Mapping[str, Any], folders: tuple[Path, ...]) -> list[str]:
    """The choices that the sections of a file mean: `optim: adamw`, or `optim: {name: adamw, ...}`."""
    words = []
    for group, section in ((group, values[group]) for group in GROUPS if group in values):
        name = section
        if isinstance(section, dict):
            name = "timm" if section.get("library") == "timm" else section.get("name")
        choices = group_choices(group, folders)
        if name is not None and str(name) not in choices:
            raise ConfigError(_no_choice(group, name, choices))
        words += [f"{group}={name}"] if name is not None else []
    return words


class UserFolders(SearchPathPlugin):
    """Hydra looks into the user's folders first."""

    folders: tuple[Path, ...] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in self.folders:
            search_path.prepend("user", f"{UserFiles.scheme()}://{folder}", "main")


def _compose(words: Sequence[str], folders: tuple[Path, ...]) -> DictConfig:
    """What Hydra composes from the words and the files. Of its node `hydra` only the folders are used."""
    _prepare_hydra()
    UserFolders.folders = folders[-2::-1]
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
            return compose("config", overrides=list(words), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).splitlines()[0]) from None


@functools.cache
def _prepare_hydra() -> None:
    """Hydra imports every module `hydra_plugins.*`, also of the working folder; none is used here."""
    plugins = sys.modules.get("hydra_plugins")
    sys.modules["hydra_plugins"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        for plugin in (UserFiles, UserFolders):
            Plugins.instance().register(plugin)
    finally:
        if plugins is None:
            del sys.modules["hydra_plugins"]
        else:
            sys.modules["hydra_plugins"] = plugins
    # `conf/config.yaml` starts from the defaults: plain values, because Hydra would stop at the first wrong type of a
    # typed node, and `load` reports all.
    ConfigStore.instance().store(name="schema", node=to_mapping(Config()))


def forget_files() -> None:
    """Read the files again: a program that composes several runs may have changed them."""
    _composed.cache_clear()


def hydra_folder(words: Sequence[str], kind: Literal["run", "sweep"]) -> Path:
    """The folder of a run or a sweep with these arguments. Raises ConfigError: its name cannot be resolved."""
    line = CommandLine.parse(words)
    return _folder(tuple(line.overrides), conf_folders(line.config_dir), kind)


def _folder(words: tuple[str, ...], folders: tuple[Path, ...], kind: Literal["run", "sweep"]) -> Path:
    try:
        return Path(str(_composed(words, folders)[1].hydra[kind].dir))
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from None


def composed_text(words: Sequence[str]) -> str:
    """What `--cfg` prints: the settings as YAML."""
    line = CommandLine.parse(words)
    raw = _composed(tuple(line.overrides), conf_folders(line.config_dir))[1]
    keys = [str(key) for key in raw if line.printed == "all" or (key == "hydra") == (line.printed == "hydra")]
    return OmegaConf.to_yaml(OmegaConf.masked_copy(raw, keys))


def quoted(path: Path | str) -> str:
    """A text as the value of a setting, quoted so that commas and equal signs are literal."""
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"
