"""From train.py's arguments to checked settings, before torch is imported or a file is created.

Of Hydra only the composition is used, without Hydra's own node: no launcher, callback, logging or plugin exists in it,
so that a configuration file cannot run code. Hydra's message for a typo advises `+key`, which would train with the
default value; it is never shown here.
"""

import argparse
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cl_train.config.schema import CHOSEN_BY_GROUP, Config, ConfigError
from cl_train.config.validation import flatten, load, parse_yaml, setting_fields, show, suggest

GROUPS = ("data", "augment", "optim", "schedule", "launcher", "experiment")
MULTIRUN_KEYS = ("nproc", "repeats", "resume_sweep", "only_group", "compare_by")  # and those of `launcher`
HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir")
_ONLY = f"only {' and '.join(HYDRA_KEYS)} of Hydra's settings can be set, so that a file of settings cannot run code"
_FIELDS = setting_fields(Config)
TYPED_KEYS = [*GROUPS, *(key for key in _FIELDS if key not in CHOSEN_BY_GROUP)]  # what can stand before the `=`
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
        parser.add_argument("--config-dir", type=lambda text: Path(text or "/dev/null").expanduser().absolute())
        try:
            options, settings = parser.parse_known_args(words)
        except argparse.ArgumentError as error:
            raise ConfigError(f"{error}; write --cfg job, or --config-dir=FOLDER") from None
        for option in (word.partition("=")[0] for word in settings if word.startswith("-")):
            key = option.lstrip("-").replace("-", "_")
            hint = f"; settings have no dashes: {key}=..." if key in TYPED_KEYS else suggest(key, TYPED_KEYS)
            raise ConfigError(f"no option {option}{hint} (there are -m, --help, --cfg job and --config-dir DIR)")
        if options.multirun and options.cfg:
            raise ConfigError("-m cannot be combined with --cfg")
        if options.config_dir and not options.config_dir.is_dir():
            raise ConfigError(f"--config-dir {options.config_dir}: no such folder; it holds experiment/NAME.yaml, ...")
        return cls(tuple(settings), options.multirun, options.cfg is not None, options.config_dir)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where files of settings are searched: --config-dir, `conf/` of the working folder, the project's own."""
        users = (self.config_dir or CONF_DIR, Path.cwd() / "conf")
        return (*(folder for folder in users if folder.is_dir() and folder.resolve() != CONF_DIR), CONF_DIR)


@dataclass(frozen=True)
class Composed:
    """The settings of a run: checked, and as Hydra composed them, with the node `hydra` of their folders."""

    cfg: Config
    raw: DictConfig
    words: tuple[str, ...]  # the arguments that give this run alone

    def folder(self, kind: str) -> Path:
        """The folder of the "run" or the "sweep". Raises ConfigError: its name cannot be resolved."""
        try:
            return Path(str(self.raw.hydra[kind].dir))
        except OmegaConfBaseException as error:
            name = OmegaConf.to_container(self.raw.hydra)[kind]["dir"]  # type: ignore[index, call-overload]
            raise ConfigError(f"hydra.{kind}.dir={name}: {str(error).splitlines()[0]}") from None


def check_command_line(words: Sequence[str]) -> list[Config]:
    """Check all of train.py's arguments before torch is imported or a file is created; see `compose`."""
    return [composed.cfg for composed in compose(CommandLine.parse(words))]


def compose(line: CommandLine) -> list[Composed]:
    """The runs asked for: one, or with --multirun one per combination, of which the last key varies fastest.

    Raises ConfigError: every problem found.
    """
    problems, axes, runs = [], [], []
    for word in line.words:
        found = _word_problems(word, line.folders, line.multirun)
        problems += found
        axes += [] if found else [_alternatives(word, line.folders)]
    for words in itertools.product(*axes):
        try:
            runs.append(run := _composed(words, line))
        except ConfigError as error:
            problems += error.problems
            continue
        if run.cfg.optim.library == "torch":
            problems += [f"{word}: {_chosen_by_group(word)}" for word in words if "optim.name=" in word]
        given = [key for key in (*MULTIRUN_KEYS, "launcher") if getattr(run.cfg, key) != getattr(Config(), key)]
        for key in [] if line.multirun else given:
            shown = f"{key}={run.cfg.launcher.name if key == 'launcher' else getattr(run.cfg, key)}"
            hint = "; nproc of one run: torchrun --standalone --nproc-per-node=N train.py ..." if key == "nproc" else ""
            problems.append(f"{shown}: a setting of multirun, python train.py -m {shown}{hint}")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return runs


@functools.lru_cache(maxsize=4096)
def _parsed(word: str) -> Override:
    if word.startswith("launcher.gpus=") and "[" not in word:
        word = f"launcher.gpus=[{word.partition('=')[2]}]"  # 0,1,2 is a list here, not a sweep
    return OverridesParser.create().parse_override(word)


def _word_problems(word: str, folders: Sequence[Path], multirun: bool = False) -> list[str]:
    """What is wrong with key=value, besides the type and the range of the value."""
    try:
        override = _parsed(word)
    except HydraException:
        hint = "" if "=" in word else "; settings are written key=value"
        return [f"cannot read '{word}'{hint} (quote a value with spaces or commas: 'key=\"a, b\"')"]
    key, value, is_sweep = override.key_or_group, override.value(), override.is_sweep_override()
    is_added = override.is_add() and not override.is_force_add()
    for is_wrong, problem in (
        (override.is_delete(), "a setting cannot be removed; give it another value"),
        (is_sweep and not multirun, "several values need multirun, python train.py -m ..."),
        (is_sweep and multirun and not _alternatives(word, folders), "the pattern or the range has no value"),
        (re.match("hydra[./]launcher", key), "Hydra's launchers are not used; launcher=slurm submits jobs to Slurm"),
        (key == "hydra.sweep.subdir", "the folder of a job is named after its settings"),
        (key in HYDRA_KEYS and (is_sweep or not value), "needs a folder"),
        (key not in HYDRA_KEYS and re.match(r"hydra\b", key), _ONLY),
        (key in GROUPS and isinstance(value, dict), f"write {key}=NAME, or {key}.key=value for a single setting"),
        (key in CHOSEN_BY_GROUP, _chosen_by_group(word)),
        (key in _FIELDS and is_added, "the setting exists, so leave out the '+'"),
        (word == "resume=", "the value is empty: give a checkpoint file, a run folder or auto, or leave it out"),
    ):
        if is_wrong:
            return [f"{word}: {problem}"]
    if key in GROUPS:
        choices = group_choices(key, folders)
        names = [name.partition("=")[2] for name in _alternatives(word, folders)] if is_sweep else [str(value)]
        more = f"(there are {', '.join(choices)}{'; of timm optim=timm optim.name=NAME' if key == 'optim' else ''})"
        return [f"{key}={x}: no such choice{suggest(x, choices)} {more}" for x in names if x not in choices]
    is_known = key in _FIELDS or key in HYDRA_KEYS
    return [] if is_known else [f"unknown setting '{key}'{suggest(key, TYPED_KEYS)}"]


def _chosen_by_group(word: str) -> str:
    group, _, value = word.partition("=")
    return f"write {group.rpartition('.')[0]}={value}, which also loads the defaults of that choice"


def _alternatives(word: str, folders: Sequence[Path]) -> list[str]:
    """The arguments a word expands to: one, or one per value of `a,b`, `range(...)`, `choice(...)`, `glob(...)`."""
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


class UserFiles(FileConfigSource):
    """The user's files of settings, which `_read_settings` accepts."""

    @staticmethod
    def scheme() -> str:
        return "user"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path) / self._normalize_file_name(config_path)
        _read_settings(path)
        return super().load_config(config_path)


def _read_settings(path: Path) -> dict[str, Any]:
    """The content of a user's file: YAML that sets no more of Hydra than the command line may, and names no code."""
    try:
        text = path.read_text(encoding="utf-8")
        values = parse_yaml(text) or {}
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
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
    if typed.get("config") is not None:
        path = Path(str(typed["config"])).expanduser()
        path = path / "config.yaml" if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(f"config={typed['config']}: no such file, and no run folder with a config.yaml")
        return path
    if typed.get("evaluate_only") is not True or typed.get("experiment") or not typed.get("resume"):
        return None
    run = Path(str(typed.get("hydra.run.dir", ".") if typed["resume"] == "auto" else typed["resume"])).expanduser()
    candidates = (folder / "config.yaml" for folder in (run, run.parent.parent, run.parent))
    return next((path for path in candidates if path.is_file()), None)


def _start_words(typed: Mapping[str, Any], folders: Sequence[Path]) -> list[str]:
    """The file that the run starts from as words, without what is typed and how its own run started.

    A section of a group says its choice: `optim: adamw`, or `optim: {name: adamw, ...}`. Raises ConfigError.
    """
    path = _start_file(typed)
    if path is None:
        # The images of an own folder are of any size, unlike the sample's.
        is_own_folder = "data.root" in typed and not typed.keys() & {"data", "experiment"}
        return ["data=folder"] if is_own_folder else []
    if typed.get("experiment"):
        raise ConfigError("config= and experiment= cannot be combined: both say what the run starts from")
    values = _read_settings(path)
    how_started = ("config", "resume", "overwrite", *(["weights"] if typed.get("evaluate_only") else []))
    words = []
    for key, value in sorted(flatten(values, _FIELDS)):  # optim.library before optim.name
        group = key.partition(".")[0]
        if key in how_started or typed.keys() & {key, group} or (key in GROUPS and value is None):
            continue
        if key == "optim.name" and "optim=timm" not in words:
            words.append(f"{group}={value}")
        elif key in CHOSEN_BY_GROUP:
            words += [f"{group}={value}"] if value != "torch" else []
        else:
            words.append(f"{key}={as_word(value)}")
    if problems := [f"{path}: {problem}" for word in words for problem in _word_problems(word, folders)]:
        raise ConfigError(problems)
    return words


def _composed(words: Sequence[str], line: CommandLine) -> Composed:
    """The settings that the words and the files of the line give. The file of `config=` is between them."""
    typed = {override.key_or_group: override.value() for override in map(_parsed, words)}
    try:
        raw = _compose_files([*_start_words(typed, line.folders), *words], line.folders)
        nodes = {str(key): raw[key] for key in raw if key != "hydra"}
        plain = {k: OmegaConf.to_container(v, resolve=True) if OmegaConf.is_config(v) else v for k, v in nodes.items()}
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error).splitlines()[0]) from None
    options = [f"--config-dir={line.config_dir}"] if line.config_dir else []
    composed = Composed(load(plain), raw, (*options, *words))
    for key in typed.keys() & {*HYDRA_KEYS}:
        composed.folder(key.split(".")[1])
    return composed


def _compose_files(words: Sequence[str], folders: Sequence[Path]) -> DictConfig:
    """What Hydra's composition makes of the words and the files."""
    # Hydra's public `compose` would import every module `hydra_plugins.*`, also of the working folder.
    for source in (UserFiles, FileConfigSource, StructuredConfigSource):
        SourcesRegistry.instance().register(source)
    setup_globals()
    version.setbase("1.3")
    ConfigStore.instance().store(name="schema", node={})  # the defaults are added below: Hydra copies its nodes often
    path = ConfigSearchPathImpl()
    for folder in folders[:-1]:
        path.append("user", f"user://{folder}")
    path.append("main", f"file://{folders[-1]}")
    path.append("schema", "structured://")
    loader = ConfigLoaderImpl(path)
    files, overrides = CachingConfigRepository(loader.repository), [*map(_parsed, words)]
    defaults = create_defaults_list(files, "config", overrides, prepend_hydra=False, skip_missing=False)
    given = loader._compose_config_from_defaults_list(defaults.defaults, files)
    # Plain values, because Hydra would stop at the first wrong type of a typed node, and `load` reports all.
    raw = OmegaConf.unsafe_merge(asdict(Config()), given)
    assert isinstance(raw, DictConfig)
    OmegaConf.set_struct(raw, True)
    loader._apply_overrides_to_config(defaults.config_overrides, raw)
    return raw


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
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + (found[2] and "\\'"), str(path)) + "'"
