"""The jobs of `python train.py -m ...`: what runs, in which order and folders. `sweep.json` holds
this plan, not how a job ended: see `job.outcome_of`.
"""

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, count
from pathlib import Path
from typing import Self

from cl_train.config.command_line import HYDRA_KEYS, Composed, check_command_line, quoted
from cl_train.config.environment import parse_environment
from cl_train.config.schema import (
    FIELDS,
    GROUPS,
    HERE,
    LAYOUT_NAMES,
    MULTIRUN_KEYS,
    SETTINGS_OF_CODE,
    Config,
    LauncherConfig,
)
from cl_train.config.start_file import code_named, refuse_code
from cl_train.config.validation import from_mapping, train_program
from cl_train.errors import ConfigError
from cl_train.system.files import read_json, safe_name, write_json
from cl_train.system.processes import with_threads

# Runs of each side with repeats=auto: processes often have one of two speeds, and two may miss one.
FIRST_LOOK = 4
_OF_JOBS = ("nproc", "environment")  # settings of multirun in which its jobs may differ


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    number: int
    name: str  # also of its folder
    overrides: list[str]
    nproc: int = 1
    environment: str = HERE  # a Python, or variables, of its process
    repeat: int = 1
    # Jobs of a group are compared with each other: they run one after the other in the same place.
    group: int = 0
    on_cpu: bool = False  # device=cpu
    has_loader: bool = True  # images are loaded: not data=synthetic
    code: dict[str, str] = field(default_factory=dict)  # what `resume_sweep=` must be told again


@dataclass(frozen=True)
class Options:
    """The settings of multirun, with their names."""

    repeats: int | None = 1  # None: added until every pair is decided
    max_repeats: int = Config.max_repeats
    time_limit_s: float | None = None
    launcher: LauncherConfig = LauncherConfig()

    @classmethod
    def of(cls, cfg: Config) -> Self:
        return cls(**{item.name: getattr(cfg, item.name) for item in fields(cls)})

    @property
    def looks(self) -> int:
        """How often verdicts are read: with repeats=auto after 4, 6, 8 ... repeats, else once."""
        return max(1, (self.max_repeats - 1) // 2) if self.repeats is None else 1


@dataclass(frozen=True)
class Sweep:
    """The jobs; those of a group are in the order in which they run."""

    folder: Path
    compare_by: str
    jobs: list[Job]
    options: Options = Options()
    looks: int = 1  # how often verdicts are read if repeats are added: see `error_of_look`

    def save(self) -> None:
        """Writes `sweep.json`, which `resume_sweep` and `compare` read."""
        plan = asdict(self)
        del plan["folder"]
        write_json(self.folder / "sweep.json", {"schema_version": 2, **plan})

    def resume_command(self, *words: str, device_name: str = "") -> str:
        """Returns the command that continues the sweep; code that its jobs name must be repeated in
        it.
        """
        code = _words_of(item for job in self.jobs for item in job.code.items())
        words = (f"resume_sweep={self.folder}", *words, *code)
        return with_threads(f"{train_program()} -m {shlex.join(words)}", device_name)

    def groups(self, jobs: Sequence[Job] | None = None) -> list[list[Job]]:
        """Returns all jobs, or the given ones, by group."""
        by_group: dict[int, list[Job]] = {}
        for job in self.jobs if jobs is None else jobs:
            by_group.setdefault(job.group, []).append(job)
        return list(by_group.values())

    def with_repeats(self, count: int, groups: Collection[int] | None = None) -> "Sweep":
        """Returns the sweep with at least `count` repeats of all its groups, or of these. They
        alternate A B B A, so that drift cancels in an even number of them.
        """
        jobs = list(self.jobs)
        for group in self.groups():
            if groups is not None and group[0].group not in groups:
                continue
            sides = [job for job in group if job.repeat == 1]
            last = max(job.repeat for job in group)
            for repeat in range(last + 1, count + 1):
                for job in sides if repeat % 2 else sides[::-1]:
                    name = _free_name(f"{job.name.removesuffix('_1')}_{repeat}", jobs)
                    jobs.append(replace(job, number=len(jobs), name=name, repeat=repeat))
        return replace(self, jobs=jobs)


def _code_of(cfg: Config, environment: str) -> dict[str, str]:
    """Returns the settings that name code, and another environment, as they are typed."""
    other = {} if environment == HERE else {"environment": quoted(environment)}
    return code_named(asdict(cfg)) | other


def _words_of(settings: Iterable[tuple[str, str]]) -> list[str]:
    """Returns key=value,value,... for each key."""
    values: dict[str, list[str]] = {}
    for key, value in dict.fromkeys(settings):
        values.setdefault(key, []).append(value)
    return [f"{key}={','.join(named)}" for key, named in values.items()]


def _free_name(text: str, jobs: Sequence[Job]) -> str:
    """Returns a name of a folder that no other job has: a/b and a_b make the same one."""
    used = {job.name for job in jobs}
    name = safe_name(text)
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(name for name in names if name not in used)


def read_sweep(folder: Path) -> Sweep:
    """Reads the plan of a sweep, whose jobs must stay in its folder. Raises ConfigError."""
    path = folder / "sweep.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is not the folder of a sweep: it has no sweep.json")
    try:
        document = read_json(path)
        jobs = [Job(**values) for values in document["jobs"]]
        # A sweep of an older version has options that were removed.
        kept = {item.name for item in fields(Options)} & document.get("options", {}).keys()
        options = Options.of(from_mapping(Config, {key: document["options"][key] for key in kept}))
        looks = int(document.get("looks", 1))
        if looks < 1 or not jobs or not all(map(_is_plain, jobs)):
            raise ValueError("a job is not as a sweep writes it")
        return Sweep(folder, str(document["compare_by"]), jobs, options, looks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r:.200}") from None


def _is_plain(job: Job) -> bool:
    """Whether a job stays in its folder of the sweep and is one run."""
    are_numbers = min(job.number, job.nproc - 1, job.repeat, job.group) >= 0
    own = re.compile(r"[+~]*hydra|-m|--multirun")
    is_one_run = isinstance(job.overrides, list) and not any(map(own.match, job.overrides))
    is_named = all(isinstance(value, str) for value in job.code.values())
    return safe_name(job.name) == job.name and are_numbers and is_one_run and is_named


# --- planning ---


def plan_sweep(runs: Sequence[Composed]) -> Sweep:
    """Plans the jobs of these runs, or those of the sweep that `resume_sweep=` names.

    Raises ConfigError.
    """
    columns = [*zip(*(run.words for run in runs), strict=True)]
    fixed = [words[0] for words in columns if len({*words}) == 1]
    varied = {_key(words[0]) for words in columns if len({*words}) > 1}
    if problems := [*_problems(fixed, varied, runs)]:
        raise ConfigError(problems)

    cfg = runs[0].cfg
    typed = {*MULTIRUN_KEYS} & {*map(_key, fixed)}
    words = [word for word in fixed if _key(word) not in (*MULTIRUN_KEYS, *HYDRA_KEYS)]
    if cfg.resume_sweep is not None:
        others = {*map(_key, words), *varied} - {*SETTINGS_OF_CODE, "environment"}
        if others or typed & {"compare_by", "nproc"}:
            raise ConfigError(
                "resume_sweep runs what is missing in a sweep, with its settings: only repeats,"
                " max_repeats, time_limit_s and launcher.gpus can be added"
            )
        sweep = read_sweep(Path(cfg.resume_sweep))
        _refuse_code_that_is_not_typed(sweep, [run.cfg for run in runs])
        return _resumed(sweep, cfg, typed)
    if "max_repeats" in typed and cfg.repeats is not None:
        raise ConfigError("max_repeats needs repeats=auto")

    options, folder = Options.of(cfg), runs[0].folder("sweep")
    jobs = _first_jobs(words, varied, runs)
    sweep = Sweep(folder, cfg.compare_by, jobs, options, options.looks)
    sweep = sweep.with_repeats(options.repeats or min(FIRST_LOOK, options.max_repeats))
    names = ("sweep.json", *(job.name for job in sweep.jobs))
    if clashes := [name for name in names if (folder / name).exists()]:
        advice = f"hydra.sweep.dir=FOLDER names another folder, and resume_sweep={folder} continues"
        raise ConfigError(f"{folder / clashes[0]} exists already: {advice} a sweep")
    if why := _why_no_verdict(set(map(_setting_of, varied)), cfg.compare_by):
        print(f"warning: {why}", flush=True)
    return sweep


def _problems(
    fixed: Sequence[str], varied: Collection[str], runs: Sequence[Composed]
) -> Iterator[str]:
    for key in sorted({*varied} & {*MULTIRUN_KEYS} - {*_OF_JOBS}):
        yield f"{key} belongs to the whole sweep and takes one value"
    [(words, times)] = Counter(run.words for run in runs).most_common(1)
    if times > 1:
        yield f"a value is listed twice ({' '.join(words)}); repeats=2 runs every job twice"
    if "hydra.run.dir" in map(_key, fixed):
        each = "each job of a sweep has its own folder"
        yield f"hydra.run.dir: {each}; use hydra.sweep.dir=FOLDER"


def _why_no_verdict(varied: set[str], by: str) -> str | None:
    if by in varied or not varied <= FIELDS.keys():
        return None
    two = "channels_last=true,false" if by == "channels_last" else f"two values of {by}"
    advice = " or ".join(f"compare_by={key}" for key in sorted(varied)) or two
    return f"all jobs have the same {by}, so nothing is compared; use {advice}"


def _refuse_code_that_is_not_typed(sweep: Sweep, typed: Sequence[Config]) -> None:
    """Raises ConfigError if jobs of the sweep name code that is not typed: a sweep that somebody
    left is data.
    """
    repeated = {item for cfg in typed for item in _code_of(cfg, cfg.environment).items()}
    named: set[tuple[str, str]] = set()
    for words, environment in {(tuple(job.overrides), job.environment) for job in sweep.jobs}:
        for cfg in check_command_line(words):
            named |= _code_of(cfg, environment).items()
    refuse_code(sweep.folder, _words_of(sorted(named - repeated)))


def _resumed(sweep: Sweep, cfg: Config, typed: Collection[str]) -> Sweep:
    keys = {key.partition(".")[0] for key in typed} & {item.name for item in fields(Options)}
    options = replace(sweep.options, **{key: getattr(cfg, key) for key in keys})
    before = max(job.repeat for job in sweep.jobs)
    looks, count = max(sweep.looks, options.looks), options.repeats
    if count is None:
        count = max(FIRST_LOOK, before + before % 2)  # repeats=auto adds them in pairs
    elif count > before:
        looks = sweep.looks + 1
    elif "repeats" in keys:
        raise ConfigError(f"repeats={count}: {sweep.folder} has {before} already")
    return replace(sweep, options=options, looks=looks).with_repeats(count)


def _key(word: str) -> str:
    return word.partition("=")[0]


def _setting_of(word: str) -> str:
    """Returns the setting that `word` sets; optim=adamw sets optim.name."""
    return f"{_key(word)}.name" if _key(word) in GROUPS else _key(word)


def _first_jobs(
    fixed: Sequence[str], varied: Collection[str], runs: Sequence[Composed]
) -> list[Job]:
    """Returns a job for each run; those that differ only in the compared key form a group."""
    by_group: dict[tuple[str, ...], list[tuple[Config, list[str]]]] = {}
    for run in runs:
        chosen = [word for word in run.words if _key(word) in varied]
        others = tuple(word for word in chosen if _setting_of(word) != run.cfg.compare_by)
        compared = [word for word in chosen if word not in others]
        by_group.setdefault(others, []).append((run.cfg, [*compared, *others]))

    jobs: list[Job] = []
    for group, sides in enumerate(by_group.values()):
        for cfg, words in sides:
            parse_environment(cfg.environment)
            job = Job(
                number=len(jobs),
                name=_free_name(_name(cfg, words), jobs),
                overrides=[*fixed, *(word for word in words if _key(word) not in _OF_JOBS)],
                nproc=cfg.nproc,
                environment=cfg.environment,
                group=group,
                on_cpu=cfg.device == "cpu",
                has_loader=cfg.data.name != "synthetic",
                code=_code_of(cfg, cfg.environment),
            )
            jobs.append(job)
    return jobs


def _name(cfg: Config, words: Sequence[str]) -> str:
    shown = [cfg.model.replace(":", "."), LAYOUT_NAMES.get(cfg.channels_last, cfg.channels_last)]
    for key, _, value in (word.partition("=") for word in words):
        if key not in ("model", "channels_last"):
            shown.append(value if key == "precision" else f"{key.rpartition('.')[2]}={value}")
    return "_".join(shown) + ("" if cfg.repeats == 1 else "_1")
