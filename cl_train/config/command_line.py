"""From train.py's arguments to checked settings, before torch is imported or a file is created.

Hydra composes the files of `conf/`; a file of `config=` and then the typed settings come on top.
Files that the user names are trusted like a script. What a run left is data: `_start_settings`.
Hydra's message for a typo advises `+key`, which would train with the default value; it is never
shown here.
"""

import argparse
import copy
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cl_train.config.environment import parse_environment
from cl_train.config.main_amp import settings_of_main_amp
from cl_train.config.schema import AUTO_REPEATS, CHOSEN_BY_GROUP, SETTINGS_OF_CODE, Config
from cl_train.config.validation import (
    flatten,
    load,
    names_code,
    setting_fields,
    show,
    suggest,
    train_program,
)
from cl_train.errors import ConfigError

GROUPS = ("data", "augment", "optim", "schedule", "experiment")
MULTIRUN_KEYS = (
    "nproc",
    "environment",
    "repeats",
    "max_repeats",
    "max_reruns",
    "wait_for_quiet_s",
    "time_limit_s",
    "resume_sweep",
    "rerun",
    "compare_by",
    "launcher",
)
HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir")
_UNUSED_OF_HYDRA = (
    "output",
    "launcher",
    "sweeper",
    "help",
    "hydra_help",
    "hydra_logging",
    "job_logging",
    "env",
)
# Of the run that left a file: how it started, not what it trained.
_HOW_STARTED = ("config", "resume", "overwrite", "environment")
_FIELDS = setting_fields(Config)
# What can stand before the `=`.
TYPED_KEYS = [*GROUPS, *(key for key in _FIELDS if key not in CHOSEN_BY_GROUP)]
_PACKAGE = Path(__file__).resolve().parents[1]
# An installed wheel holds conf/ in the package, a checkout beside it.
CONF_DIR = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"


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
            raise ConfigError(
                f"--config-dir={folder}: no such folder; it holds experiment/NAME.yaml, ..."
            )
        config_dir = Path(folder).expanduser().absolute() if folder else None
        return cls(tuple(settings), options.multirun, options.cfg is not None, config_dir)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where files of settings are searched: --config-dir, `conf/` of the working folder, the
        project's own.
        """
        users = (self.config_dir or CONF_DIR, Path.cwd() / "conf")
        return (
            *(folder for folder in users if folder.is_dir() and folder.resolve() != CONF_DIR),
            CONF_DIR,
        )


def _unknown_option(option: str, words: Sequence[str]) -> str:
    if settings := settings_of_main_amp(words):
        return (
            f"no option {option}: it is one of apex's main_amp.py; write {' '.join(settings)} "
            "(an earlier word gives way to a later one)"
        )
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
        """The folder of the "run" or the "sweep".

        Raises ConfigError: its name cannot be resolved.
        """
        try:
            return Path(str(self.raw.hydra[kind].dir))
        except OmegaConfBaseException as error:
            names: Any = OmegaConf.to_container(self.raw.hydra)
            name = names[kind]["dir"]
            raise ConfigError(f"hydra.{kind}.dir={name}: {str(error).splitlines()[0]}") from None


def check_command_line(words: Sequence[str]) -> list[Config]:
    """Check all of train.py's arguments before torch is imported or a file is created; see
    `compose`.
    """
    return [composed.cfg for composed in compose(CommandLine.parse(words))]


def compose(line: CommandLine) -> list[Composed]:
    """The runs asked for: one, or with --multirun one per combination, of which the last key varies
    fastest.

    Raises ConfigError: every problem found.
    """
    problems: list[str] = []
    axes: list[list[str]] = []
    for word in line.words:
        if wrong := _word_problems(word, line.folders, line.multirun):
            problems += wrong
        else:
            axes.append(_alternatives(word, line.folders))

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
        problems = [
            f"{word}: {_chosen_by_group(word)}" for word in run.words if "optim.name=" in word
        ]
    for key in () if line.multirun else MULTIRUN_KEYS:
        value = getattr(run.cfg, key)
        if value == getattr(Config(), key):
            continue
        if key == "environment" and parse_environment(value.split(",")).is_current():
            continue  # a job of a sweep
        word = f"{key}={'auto' if (key, value) == ('repeats', AUTO_REPEATS) else value}"
        if key == "launcher":
            word = f"launcher.gpus={','.join(value.gpus)}"
        hint = ""
        if key == "nproc":
            hint = "; nproc of one run: torchrun --standalone --nproc-per-node=N train.py ..."
        problems.append(f"{word}: a setting of multirun, {train_program()} -m {word}{hint}")
    return problems


# --- words ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _parsed(word: str) -> Override:
    if word.startswith("launcher.gpus=") and "[" not in word:
        word = f"launcher.gpus=[{word.partition('=')[2]}]"  # 0,1,2 is a list here, not a sweep
    return OverridesParser.create().parse_override(word)


def _word_problems(word: str, folders: Sequence[Path], multirun: bool) -> list[str]:
    """What is wrong with key=value, besides the type and the range of the value."""
    try:
        override = _parsed(word)
    except HydraException:
        example = word if re.fullmatch(r"[\w./-]+", word) else "resnet50"
        hint = "" if "=" in word else f"; settings are written key=value, such as model={example}"
        return [f"cannot read '{word}'{hint} (quote a value with spaces or commas: 'key=\"a, b\"')"]
    key, value = override.key_or_group, override.value()
    is_sweep = override.is_sweep_override()
    is_added = override.is_add() and not override.is_force_add()
    for is_wrong, problem in (
        (override.is_delete(), "a setting cannot be removed; give it another value"),
        (is_sweep and not multirun, f"several values need multirun, {train_program()} -m ..."),
        (
            is_sweep and multirun and not _alternatives(word, folders),
            "the pattern or the range has no value",
        ),
        (key == "hydra.sweep.subdir", "the folder of a job is named after its settings"),
        (key in HYDRA_KEYS and (is_sweep or not value), "needs a folder"),
        (re.match(r"hydra\b(?![./]launcher)", key) and key not in HYDRA_KEYS, _only_folders(key)),
        (
            key in GROUPS and isinstance(value, dict),
            f"write {key}=NAME, or {key}.key=value for a single setting",
        ),
        (key in CHOSEN_BY_GROUP, _chosen_by_group(word)),
        (key in _FIELDS and is_added, "the setting exists, so leave out the '+'"),
        (
            word == "resume=",
            "the value is empty: give a checkpoint file, a run folder or auto, or leave it out",
        ),
    ):
        if is_wrong:
            return [f"{word}: {problem}"]
    if key not in GROUPS:
        return _key_problems(key)
    names = [str(value)]
    if is_sweep:
        names = [name.partition("=")[2] for name in _alternatives(word, folders)]
    return [problem for name in names for problem in _choice_problems(key, name, folders)]


def _key_problems(key: str) -> list[str]:
    if key not in _FIELDS and re.match(r"(hydra[./])?launcher\b", key):
        advice = "a sweep on Slurm is one allocation: sbatch scripts/slurm/sweep.sbatch FOLDER ..."
        return [f"{key}: {advice} (docs/clusters.md)"]
    is_known = key in _FIELDS or key in HYDRA_KEYS
    return [] if is_known else [f"unknown setting '{key}'{suggest(key, TYPED_KEYS)}"]


def _choice_problems(group: str, name: str, folders: Sequence[Path]) -> list[str]:
    choices = group_choices(group, folders)
    if name in choices:
        return []
    of_timm = "; of timm optim=timm optim.name=NAME" if group == "optim" else ""
    there_are = f"(there are {', '.join(choices)}{of_timm})"
    return [f"{group}={name}: no such choice{suggest(name, choices)} {there_are}"]


def _only_folders(key: str) -> str:
    return f"of Hydra's settings only {' and '.join(HYDRA_KEYS)} are used here, not {key}"


def _chosen_by_group(word: str) -> str:
    group, _, value = word.partition("=")
    return f"write {group.rpartition('.')[0]}={value}, which also loads the defaults of that choice"


def _alternatives(word: str, folders: Sequence[Path]) -> list[str]:
    """The arguments a word expands to: one, or one per value of `a,b`, `range(...)`, `choice(...)`,
    `glob(...)`.
    """
    override = _parsed(word)
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
    folders = folders or CommandLine(()).folders
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


# --- settings -------------------------------------------------------------------------------------


def _composed(
    words: tuple[str, ...], line: CommandLine, files: Callable[[tuple[str, ...]], DictConfig]
) -> Composed:
    """The settings of the words: of the files of the groups, then of the file that the run starts
    from, then as typed.
    """
    overrides = [_parsed(word) for word in words]
    typed = {override.key_or_group: override.value() for override in overrides}
    path, is_trusted = _start_file(typed)
    start = {} if path is None else _start_settings(path, typed, is_trusted, line.folders)
    chosen = [f"{key}={value}" for key, value in start.items() if key in GROUPS]
    # The images of an own folder are of any size, unlike the sample's.
    if path is None and "data.root" in typed and not typed.keys() & {"data", "experiment"}:
        chosen.append("data=folder")
    chosen += [
        word
        for word, override in zip(words, overrides, strict=True)
        if override.key_or_group in GROUPS
    ]
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
        raise ConfigError(
            "overwrite=true deletes an earlier run: type it, instead of writing it into a file"
        )
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
    # Hydra looks for the main file in the first folder and in its store. In the store it is ours:
    # ./conf/config.yaml may belong to another program.
    ConfigStore.instance().store("cl_train", OmegaConf.load(CONF_DIR / "config.yaml"))
    main, *others = folders
    searched = [quoted(f"file://{folder}") for folder in others]
    # Without Hydra's own launcher, logging and help, whose files take as long as all others.
    unused = [f"~hydra/{group}" for group in _UNUSED_OF_HYDRA]
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
    """The file that the run starts from, and whether the user named it: a file of `config=`. The
    config.yaml of a run is data, of `config=RUN` and of an evaluation, which starts from that of
    the run.
    """
    if typed.get("config") is not None:
        path = Path(str(typed["config"])).expanduser()
        is_trusted = not path.is_dir()
        path = path if is_trusted else path / "config.yaml"
        if not path.is_file():
            raise ConfigError(
                f"config={typed['config']}: no such file, and no run folder with a config.yaml"
            )
        if typed.get("experiment"):
            raise ConfigError(
                "config= and experiment= cannot be combined: both say what the run starts from"
            )
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

    A section of a group says its choice: `optim: adamw`, or `optim: {name: adamw, ...}`. Raises
    ConfigError.
    """
    settings: dict[str, Any] = {}
    for key, value in sorted(flatten(_read(path), _FIELDS)):  # optim.library before optim.name
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
            problems += _choice_problems(key, str(value), folders)
        elif key.startswith("hydra.") and not (is_trusted and key in HYDRA_KEYS):
            problems.append(_only_folders(key))
        else:
            problems += _key_problems(key)
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {_on_one_line(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected settings, key: value")
    return values


def _on_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def code_named(cfg: Config) -> dict[str, str]:
    """The settings that name code of the user's, and their values as they are typed."""
    values = dict(flatten(asdict(cfg), _FIELDS))
    return {key: show(values[key]) for key in SETTINGS_OF_CODE if names_code(values[key])}


def refuse_code(source: Path, words: Sequence[str]) -> None:
    """Raises ConfigError if there are `words`: `source`, which is data, names this code."""
    if words:
        raise ConfigError(
            f"{source} names code, and what a run left never runs any: to run it, repeat "
            + " ".join(words)
        )


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
