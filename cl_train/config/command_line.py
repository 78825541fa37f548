"""From train.py's arguments to checked settings, before torch is imported or a file is created.

Hydra composes the files of `conf/`; a file of `config=` and then the typed settings come on top.
Files that the user names are trusted like a script; what a run left is data.
"""

import argparse
import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cl_train.config.environment import parse_environment
from cl_train.config.fields import FIELDS
from cl_train.config.main_amp import settings_of_main_amp
from cl_train.config.schema import AUTO_REPEATS, CHOSEN_BY_GROUP, SETTINGS_OF_CODE, Config
from cl_train.config.validation import flatten, load, names_code, show, suggest, train_program
from cl_train.config.words import CONF_DIR as CONF_DIR
from cl_train.config.words import (
    GROUPS,
    HYDRA_KEYS,
    TYPED_KEYS,
    alternatives,
    choice_problems,
    chosen_by_group,
    key_problems,
    only_folders,
    parsed,
    quoted,
    settings_folders,
    word_problems,
)
from cl_train.config.words import group_choices as group_choices
from cl_train.errors import ConfigError

MULTIRUN_KEYS = [key.partition(".")[0] for key, item in FIELDS.items() if item.metadata["multirun"]]
_UNUSED_OF_HYDRA = "output launcher sweeper help hydra_help hydra_logging job_logging env"
# Of the run that left a file: how it started, not what it trained.
_HOW_STARTED = ("config", "resume", "overwrite", "environment")


@dataclass(frozen=True)
class CommandLine:
    """A command line of train.py."""

    words: tuple[str, ...]  # key=value
    multirun: bool = False
    printed: bool = False  # --cfg job: print the settings, do not run
    config_dir: Path | None = None  # holds more files of the groups

    @classmethod
    def parse(cls, words: Sequence[str]) -> Self:
        """Raises ConfigError: an option that this program does not have."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("-m", "--multirun", action="store_true")
        parser.add_argument("-c", "--cfg", choices=("job",))
        parser.add_argument("--config-dir")
        try:
            options, settings = parser.parse_known_args(words)
        except argparse.ArgumentError as error:
            raise ConfigError(f"{error}; write --cfg job, or --config-dir=FOLDER") from None
        if unknown := [word.partition("=")[0] for word in settings if word.startswith("-")]:
            raise ConfigError(_unknown_option(unknown[0], settings))
        if options.multirun and options.cfg:
            raise ConfigError("-m cannot be combined with --cfg")
        folder = options.config_dir
        if folder is not None and not (folder and Path(folder).expanduser().is_dir()):
            raise ConfigError(f"--config-dir={folder}: no such folder of experiment/NAME.yaml, ...")
        config_dir = Path(folder).expanduser().absolute() if folder else None
        return cls(tuple(settings), options.multirun, options.cfg is not None, config_dir)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where files of settings are searched."""
        return settings_folders(self.config_dir)


def _unknown_option(option: str, words: Sequence[str]) -> str:
    if settings := settings_of_main_amp(words):
        return f"no option {option}: it is one of apex's main_amp.py; write {' '.join(settings)}"
    key = option.lstrip("-").replace("-", "_")
    is_setting = key in TYPED_KEYS
    hint = f"; settings have no dashes: {key}=..." if is_setting else suggest(key, TYPED_KEYS)
    return f"no option {option}{hint} (there are -m, --help, --cfg job and --config-dir DIR)"


@dataclass(frozen=True)
class Composed:
    """The settings of a run: checked, and as composed, with the names of its folders in `hydra`."""

    cfg: Config
    raw: DictConfig
    words: tuple[str, ...]  # the arguments that give this run alone

    def folder(self, kind: str) -> Path:
        """The folder of the "run" or the "sweep". ConfigError: its name cannot be resolved."""
        try:
            return Path(str(self.raw.hydra[kind].dir))
        except OmegaConfBaseException as error:
            names: Any = OmegaConf.to_container(self.raw.hydra)
            name = names[kind]["dir"]
            raise ConfigError(f"hydra.{kind}.dir={name}: {str(error).splitlines()[0]}") from None


def check_command_line(words: Sequence[str]) -> list[Config]:
    """The settings of all of train.py's arguments; see `compose`."""
    return [composed.cfg for composed in compose(CommandLine.parse(words))]


def compose(line: CommandLine) -> list[Composed]:
    """The runs asked for: one, or with --multirun one per combination, the last key varying
    fastest. Raises ConfigError: every problem found.
    """
    problems: list[str] = []
    axes: list[list[str]] = []
    for word in line.words:
        if wrong := word_problems(word, line.folders, line.multirun):
            problems += wrong
        else:
            axes.append(alternatives(word, line.folders))

    runs: list[Composed] = []
    # The runs of a sweep share few choices of groups, and Hydra takes 0.1 s for each.
    files = functools.lru_cache(functools.partial(_compose_files, line.folders))
    for words in itertools.product(*axes):
        try:
            run = _composed(words, line, files)
        except ConfigError as error:
            problems += error.problems
        else:
            runs.append(run)
            problems += _misplaced(run, line)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return runs


def _misplaced(run: Composed, line: CommandLine) -> list[str]:
    """Settings whose place is elsewhere: another command, or the choice of a group."""
    problems = []
    if run.cfg.optim.library == "torch":
        names = [word for word in run.words if "optim.name=" in word]
        problems = [f"{word}: {chosen_by_group(word)}" for word in names]
    for key in () if line.multirun else MULTIRUN_KEYS:
        value = getattr(run.cfg, key)
        if value == getattr(Config(), key):
            continue
        if key == "environment" and parse_environment(value.split(",")).is_current():
            continue  # a job of a sweep
        word = f"{key}={'auto' if (key, value) == ('repeats', AUTO_REPEATS) else value}"
        if key == "launcher":
            word = f"launcher.gpus={','.join(value.gpus)}"
        of_one = "; nproc of one run: torchrun --standalone --nproc-per-node=N train.py ..."
        hint = of_one if key == "nproc" else ""
        problems.append(f"{word}: a setting of multirun, {train_program()} -m {word}{hint}")
    return problems


def _composed(
    words: tuple[str, ...], line: CommandLine, files: Callable[[tuple[str, ...]], DictConfig]
) -> Composed:
    """The settings of the files of the groups, then of the file to start from, then as typed."""
    typed = {parsed(word).key_or_group: parsed(word).value() for word in words}
    path, is_trusted = _start_file(typed)
    start = {} if path is None else _start_settings(path, typed, is_trusted, line.folders)
    chosen = [f"{key}={value}" for key, value in start.items() if key in GROUPS]
    # The images of an own folder are of any size, unlike the sample's.
    if path is None and "data.root" in typed and not typed.keys() & {"data", "experiment"}:
        chosen.append("data=folder")
    chosen += [word for word in words if parsed(word).key_or_group in GROUPS]
    try:
        raw = copy.deepcopy(files(tuple(chosen)))
        for key, value in (*start.items(), *typed.items()):
            if key not in GROUPS:
                OmegaConf.update(raw, key, value, merge=False)
        settings = OmegaConf.masked_copy(raw, [str(key) for key in raw if key != "hydra"])
        plain: Any = OmegaConf.to_container(settings, resolve=True)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"a recipe cannot be read: {_on_one_line(error)}") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).splitlines()[0]) from None

    cfg = load(plain)
    if cfg.overwrite and "overwrite" not in typed:
        raise ConfigError("overwrite=true deletes an earlier run: type it on the command line")
    if path is not None and not is_trusted:
        named = code_named(cfg).items()
        refuse_code(path, [f"{key}={value}" for key, value in named if key not in typed])
    options = [f"--config-dir={line.config_dir}"] if line.config_dir else []
    composed = Composed(cfg, raw, (*options, *words))
    for key in typed.keys() & {*HYDRA_KEYS}:
        composed.folder(key.split(".")[1])
    return composed


def _compose_files(folders: Sequence[Path], words: Sequence[str]) -> DictConfig:
    """What Hydra's composition makes of the chosen files, on top of the defaults of the schema."""
    # From Hydra's store, as ./conf/config.yaml may belong to another program.
    ConfigStore.instance().store("cl_train", OmegaConf.load(CONF_DIR / "config.yaml"))
    main, *others = folders
    searched = [quoted(f"file://{folder}") for folder in others]
    # Without Hydra's own launcher, logging and help, whose files take as long as all others.
    unused = [f"~hydra/{group}" for group in _UNUSED_OF_HYDRA.split()]
    overrides = [*words, *unused, f"hydra.searchpath=[{','.join(searched)}]"]
    callers_hydra = GlobalHydra.instance().hydra  # of a program that uses Hydra itself
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(main), version_base="1.3"):
            composed = hydra.compose("cl_train", overrides, return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = callers_hydra
    of_hydra = OmegaConf.masked_copy(composed.hydra, ["run", "sweep"])
    settings = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    # Plain values: a typed node would stop at the first wrong type, and `load` reports all.
    raw = OmegaConf.unsafe_merge(asdict(Config()), settings, {"hydra": of_hydra})
    assert isinstance(raw, DictConfig)
    return raw


def _start_file(typed: Mapping[str, Any]) -> tuple[Path | None, bool]:
    """The file that the run starts from, and whether it is trusted: a file of `config=` is, but not
    the config.yaml of a run, of `config=RUN` or of an evaluation.
    """
    if typed.get("config") is not None:
        path = Path(str(typed["config"])).expanduser()
        is_trusted = not path.is_dir()
        path = path if is_trusted else path / "config.yaml"
        if not path.is_file():
            what = "no such file, and no run folder with a config.yaml"
            raise ConfigError(f"config={typed['config']}: {what}")
        if typed.get("experiment"):
            raise ConfigError("config= and experiment= cannot be combined: both say where to start")
        return path, is_trusted
    resume = typed.get("resume")
    if typed.get("evaluate_only") is not True or typed.get("experiment") or not resume:
        return None, True
    path = Path(str(typed.get("hydra.run.dir", ".") if resume == "auto" else resume)).expanduser()
    checkpoints = path if path.is_dir() else path.absolute().parent
    run = checkpoints.absolute().parent if checkpoints.name == "checkpoints" else path
    path = run / "config.yaml"
    return (path, False) if path.is_file() else (None, True)


def _start_settings(
    path: Path, typed: Mapping[str, Any], is_trusted: bool, folders: Sequence[Path]
) -> dict[str, Any]:
    """The settings of a file by full key, without what is typed and how its own run started.

    A section of a group says its choice: `optim: adamw`, or `optim: {name: adamw, ...}`.
    """
    settings: dict[str, Any] = {}
    for key, value in sorted(flatten(_read(path), FIELDS)):  # optim.library before optim.name
        group = key.partition(".")[0]
        if key in _HOW_STARTED or typed.keys() & {key, group} or (key in GROUPS and value is None):
            continue
        if key == "weights" and typed.get("evaluate_only"):
            continue
        is_timms = key == "optim.name" and settings.get("optim") == "timm"
        if is_timms or key not in (*CHOSEN_BY_GROUP, "optim.name"):
            settings[key] = value
        elif value != "torch":
            settings[group] = value

    problems = []
    for key, value in settings.items():
        if key in GROUPS:
            problems += choice_problems(key, str(value), folders)
        elif key.startswith("hydra.") and not (is_trusted and key in HYDRA_KEYS):
            problems.append(only_folders(key))
        else:
            problems += key_problems(key)
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {_on_one_line(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected settings, key: value")
    return values


def _on_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def code_named(cfg: Config) -> dict[str, str]:
    """The settings that name code of the user's, and their values as they are typed."""
    values = dict(flatten(asdict(cfg), FIELDS))
    return {key: show(values[key]) for key in SETTINGS_OF_CODE if names_code(values[key])}


def refuse_code(source: Path, words: Sequence[str]) -> None:
    """Raises ConfigError if `source`, which is data, names code: these `words`."""
    if words:
        what = "names code, and what a run left never runs any: to run it, repeat"
        raise ConfigError(f"{source} {what} {' '.join(words)}")
