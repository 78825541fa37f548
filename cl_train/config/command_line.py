"""Turns train.py's arguments into checked settings, before torch is imported or a file is created.

Hydra composes the files of `conf/`; a file of `config=` and then the typed settings come on top.
"""

import argparse
import copy
import functools
import itertools
import operator
import re
from collections.abc import Callable, Sequence
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
from cl_train.config.fields import suggest
from cl_train.config.main_amp import setting_of_flag, settings_of_main_amp
from cl_train.config.removed import removal_of
from cl_train.config.schema import CHOSEN_BY_GROUP, FIELDS, GROUPS, MULTIRUN_KEYS, Config
from cl_train.config.start_file import StartFile, code_named, on_one_line, refuse_code
from cl_train.config.validation import checked_config, show, train_program
from cl_train.errors import ConfigError

HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir")
# What can stand before the `=`.
TYPED_KEYS = [*GROUPS, *(key for key in FIELDS if key not in CHOSEN_BY_GROUP)]
_PACKAGE = Path(__file__).resolve().parents[1]
# An installed wheel holds conf/ in the package, a checkout beside it.
CONF_DIR = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
_UNUSED_OF_HYDRA = "output launcher sweeper help hydra_help hydra_logging job_logging env"


@dataclass(frozen=True)
class CommandLine:
    """A command line of train.py."""

    words: tuple[str, ...]  # key=value
    multirun: bool = False
    printed: bool = False  # --cfg job: print the settings, do not run
    config_dir: Path | None = None  # holds more files of the groups

    @classmethod
    def parse(cls, words: Sequence[str]) -> Self:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("-m", "--multirun", action="store_true")
        parser.add_argument("-c", "--cfg", choices=("job",))
        parser.add_argument("--config-dir")
        try:
            options, settings = parser.parse_known_args(words)
        except argparse.ArgumentError as error:
            raise ConfigError(f"{error}; write --cfg job, or --config-dir=FOLDER") from None
        if unknown := [word for word in settings if word.startswith("-")]:
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
        return settings_folders(self.config_dir)


def _unknown_option(word: str, words: Sequence[str]) -> str:
    option, _, value = word.partition("=")
    if settings := settings_of_main_amp(words):
        return f"no option {option}: it is one of apex's main_amp.py; write {' '.join(settings)}"
    key = setting_of_flag(option) or option.lstrip("-").replace("-", "_")
    hint = suggest(key, TYPED_KEYS)
    if key in TYPED_KEYS:
        hint = f"; settings have no dashes: {key}={value or 'VALUE'}"
    return f"no option {option}{hint} (there are -m, --help, --cfg job and --config-dir DIR)"


@dataclass(frozen=True)
class Composed:
    """The settings of a run: `cfg` is checked; `raw` is as composed, with the names of the run's
    folders in `hydra`.
    """

    cfg: Config
    raw: DictConfig
    words: tuple[str, ...]  # the arguments that give this run alone

    def folder(self, kind: str) -> Path:
        """Returns the folder of the "run" or the "sweep". Raises ConfigError: its name cannot be
        resolved.
        """
        try:
            return Path(str(self.raw.hydra[kind].dir))
        except OmegaConfBaseException as error:
            names: Any = OmegaConf.to_container(self.raw.hydra)
            name = names[kind]["dir"]
            raise ConfigError(f"hydra.{kind}.dir={name}: {str(error).splitlines()[0]}") from None


def check_command_line(words: Sequence[str]) -> list[Config]:
    return [composed.cfg for composed in compose(CommandLine.parse(words))]


def compose(line: CommandLine) -> list[Composed]:
    """Returns the runs asked for: one, or with --multirun one per combination, the last key varying
    fastest. Raises ConfigError: every problem found.
    """
    problems: list[str] = []
    axes: list[list[str]] = []
    for word in line.words:
        try:
            axes.append(_expanded(word, line))
        except ConfigError as error:
            problems += error.problems

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


# --- words ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _parsed(word: str) -> Override:
    if word.startswith("launcher.gpus=") and "[" not in word:
        word = f"launcher.gpus=[{word.partition('=')[2]}]"  # 0,1,2 is a list here, not a sweep
    return OverridesParser.create().parse_override(word)


def _expanded(word: str, line: CommandLine) -> list[str]:
    """Returns the arguments that key=value stands for: one, or one per value of a sweep."""
    try:
        override = _parsed(word)
    except HydraException:
        form = "settings are written key=value, such as model=resnet50"
        quote = "quote a value with spaces or commas: 'key=\"a, b\"'"
        raise ConfigError(f"cannot read '{word}': {form}; {quote}") from None
    if problem := _problem_with(override, word, line.multirun):
        raise ConfigError(f"{word}: {problem}")
    is_sweep = override.is_sweep_override()
    values = _values_of_sweep(override, line.folders) if is_sweep else [str(override.value())]
    found = (_key_problem(override.key_or_group, value, line.folders) for value in values)
    if problems := list(filter(None, found)):
        raise ConfigError(problems)
    return [f"{override.get_key_element()}={each}" for each in values] if is_sweep else [word]


def _problem_with(override: Override, word: str, multirun: bool) -> str | None:
    key, value = override.key_or_group, override.value()
    is_sweep = override.is_sweep_override()
    if override.is_delete():
        return "a setting cannot be removed; give it another value"
    if is_sweep and not multirun:
        return f"several values need multirun, {train_program()} -m ..."
    if key in HYDRA_KEYS and (is_sweep or not value):
        return "needs a folder"
    if key in CHOSEN_BY_GROUP:
        return _chosen_by_group(word)
    if key in (*FIELDS, *HYDRA_KEYS) and word.startswith("+"):
        return "the setting exists, so leave out the '+'"
    if word == "resume=":
        return "the value is empty: give a checkpoint, a run folder or auto"
    return None


def _values_of_sweep(override: Override, folders: Sequence[Path]) -> list[str]:
    value, word = override.value(), override.input_line
    try:
        if isinstance(value, Glob):
            values = value.filter(group_choices(override.key_or_group, folders))
        else:
            values = list(override.sweep_string_iterator())
    except HydraException:
        raise ConfigError(f"{word}: list the values, or use range()") from None
    if not values:
        raise ConfigError(f"{word}: the pattern or the range has no value")
    typed = {"True": "true", "False": "false", "None": "null"}
    # Hydra escapes a colon, which outside of quotes means itself: package.module:function.
    plain = [each if "'" in each or '"' in each else each.replace("\\:", ":") for each in values]
    return [typed.get(each, each) for each in plain]


def _key_problem(key: str, value: str, folders: Sequence[Path]) -> str | None:
    """Returns a message if there is no such setting, or no such choice of a group."""
    if removed := removal_of(key):
        return removed
    if key in GROUPS:
        choices = group_choices(key, folders)
        of_timm = "; of timm optim=timm optim.name=NAME" if key == "optim" else ""
        there_are = f"(there are {', '.join(choices)}{of_timm})"
        what = f"{key}={value}: no such choice{suggest(value, choices)} {there_are}"
        return None if value in choices else what
    if key in FIELDS or key in HYDRA_KEYS:
        return None
    if re.match(r"hydra\b", key):
        return f"{key}: of Hydra's settings only {' and '.join(HYDRA_KEYS)} are used here"
    return f"unknown setting '{key}'{suggest(key, TYPED_KEYS)}"


def _chosen_by_group(word: str) -> str:
    group, _, value = word.partition("=")
    return f"write {group.rpartition('.')[0]}={value}, which also loads the defaults of that choice"


def _misplaced(run: Composed, line: CommandLine) -> list[str]:
    problems = []
    if run.cfg.optim.library == "torch":
        names = [word for word in run.words if word.startswith("optim.name=")]
        problems = [f"{word}: {_chosen_by_group(word)}" for word in names]
    for key in () if line.multirun else MULTIRUN_KEYS:
        value = operator.attrgetter(key)(run.cfg)
        if value == FIELDS[key].default:
            continue
        if key == "environment" and parse_environment(value).is_current():
            continue  # a job of a sweep
        word = f"{key}={FIELDS[key].null_word if value is None else show(value)}"
        once = "torchrun starts the processes of one run" if key == "nproc" else "else leave it out"
        problems.append(f"{word}: a setting of multirun, {train_program()} -m {word} ...; {once}")
    return problems


def as_word(value: Any) -> str:
    """Returns a Python value as it is typed after the `=`."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_word, value))}]"
    if isinstance(value, float):
        return repr(float(value))  # NumPy's too
    return quoted(value) if isinstance(value, str | Path) else show(value)


def quoted(path: Path | str) -> str:
    """Returns a text quoted as the value of a setting: commas and equal signs are literal."""

    # Hydra reads a backslash as an escape only before a quote or the end.
    def doubled(match: re.Match[str]) -> str:
        return 2 * match[1] + (match[2] and "\\'")

    return "'" + re.sub(r"(\\*)('|\Z)", doubled, str(path)) + "'"


# --- files ----------------------------------------------------------------------------------------


def settings_folders(config_dir: Path | None = None) -> tuple[Path, ...]:
    """Returns the folders that hold settings: --config-dir, `conf/` of the working folder, and that
    of the project.
    """
    users = (config_dir or CONF_DIR, Path.cwd() / "conf")
    own = [folder for folder in users if folder.is_dir() and folder.resolve() != CONF_DIR]
    return (*own, CONF_DIR)


def group_choices(group: str, folders: Sequence[Path] = ()) -> list[str]:
    """Returns the names of the files in `conf/<group>/`."""
    folders = folders or settings_folders()
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def _composed(
    words: tuple[str, ...], line: CommandLine, files: Callable[[tuple[str, ...]], DictConfig]
) -> Composed:
    """Composes a run from the files of the groups, the file to start from, and what is typed, each
    on top of the former.
    """
    typed = {_parsed(word).key_or_group: _parsed(word).value() for word in words}
    start = StartFile.of(typed)
    from_file = {} if start is None else start.settings(typed)
    found = (_key_problem(key, str(value), line.folders) for key, value in from_file.items())
    if start is not None and (wrong := list(filter(None, found))):
        raise ConfigError([f"{start.path}: {problem}" for problem in wrong])
    chosen = [f"{key}={value}" for key, value in from_file.items() if key in GROUPS]
    # Images in a folder of the user's have any size, unlike the sample's.
    if start is None and "data.root" in typed and not typed.keys() & {"data", "experiment"}:
        chosen.append("data=folder")
    chosen += [word for word in words if _parsed(word).key_or_group in GROUPS]
    try:
        raw = copy.deepcopy(files(tuple(chosen)))
        for key, value in (*from_file.items(), *typed.items()):
            if key not in GROUPS:
                OmegaConf.update(raw, key, value, merge=False)
        plain: Any = OmegaConf.to_container(without_hydra(raw), resolve=True)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"a recipe cannot be read: {on_one_line(error)}") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).splitlines()[0]) from None

    cfg = checked_config(plain)
    if cfg.overwrite and "overwrite" not in typed:
        raise ConfigError("overwrite=true deletes an earlier run: type it on the command line")
    if start is not None and not start.is_trusted:
        named = code_named(asdict(cfg)).items()
        refuse_code(start.path, [f"{key}={value}" for key, value in named if key not in typed])
    options = [f"--config-dir={line.config_dir}"] if line.config_dir else []
    composed = Composed(cfg, raw, (*options, *words))
    for key in typed.keys() & {*HYDRA_KEYS}:
        composed.folder(key.split(".")[1])
    return composed


def _compose_files(folders: Sequence[Path], words: Sequence[str]) -> DictConfig:
    """Returns what Hydra composes from the chosen files, on top of the defaults of the schema."""
    # Through Hydra's store: ./conf/config.yaml may belong to another program.
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
    OmegaConf.register_new_resolver("epoch_at", epoch_at, replace=True)
    of_hydra = OmegaConf.masked_copy(composed.hydra, ["run", "sweep"])
    # Plain values: a typed node would stop at the first wrong type, not report all.
    raw = OmegaConf.unsafe_merge(asdict(Config()), without_hydra(composed), {"hydra": of_hydra})
    assert isinstance(raw, DictConfig)
    return raw


def epoch_at(share: float, epochs: Any) -> int:
    """Returns the last epoch of this share of the run: `${epoch_at:0.75,${epochs}}` in a recipe."""
    return round(share * epochs) - 1 if isinstance(epochs, int) else 0  # checked later


def without_hydra(raw: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(raw, [str(key) for key in raw if key != "hydra"])
