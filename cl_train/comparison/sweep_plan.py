"""The jobs of `python train.py -m ...`: what runs, in which order and folders. `sweep.json` holds this plan.

How a job ended stands in its own folder: see `problem_of`.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from cl_train.comparison.pairs import read_run
from cl_train.comparison.statistics import MIN_WINDOWS
from cl_train.config.command_line import GROUPS, MULTIRUN_KEYS, CommandLine, Composed, compose
from cl_train.config.schema import LAYOUT_NAMES, Config, ConfigError, LauncherConfig
from cl_train.config.validation import from_mapping, setting_fields
from cl_train.data.sample import PATTERNS, SampleSpec
from cl_train.system.files import safe_name, write_json

SCHEMA_VERSION = 2
LOG_NAME = "job.log"  # in the folder of a job, from its start on
_ENDED = "the job ended: "  # a line of that log


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    number: int
    name: str  # of its folder
    overrides: list[str]
    nproc: int = 1
    repeat: int = 1
    group: int = 0  # jobs of a group are compared with each other: they run one after the other in the same place


@dataclass(frozen=True)
class Sweep:
    """The jobs; those of a group are adjacent and in the order in which they run."""

    folder: Path
    compare_by: str
    jobs: list[Job]
    launcher: LauncherConfig
    only_group: int | None = None  # what this process runs; None: all

    @property
    def slurm_name(self) -> str:
        """Slurm's name for the elements of this sweep: nothing else tells them apart after the launcher was killed."""
        return f"cl-train-{hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:12]}"

    def save(self) -> None:
        """Write `sweep.json`, which `resume_sweep` and `compare` read."""
        kept = {"compare_by": self.compare_by, "jobs": list(map(asdict, self.jobs)), "launcher": asdict(self.launcher)}
        write_json(self.folder / "sweep.json", {"schema_version": SCHEMA_VERSION, **kept})

    def missing_groups(self) -> list[list[Job]]:
        """The jobs still to run, by group."""
        jobs = [job for job in self.jobs if self.only_group in (None, job.group) and problem_of(self.folder / job.name)]
        return [list(group) for _, group in itertools.groupby(jobs, key=lambda job: job.group)]


def read_sweep(folder: Path) -> Sweep:
    """The plan of a sweep. Raises ConfigError: the folder has none, or one that cannot be read."""
    try:
        document = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
        known = [item.name for item in fields(Job)]  # an earlier version kept outcomes here too
        jobs = [Job(**{name: values[name] for name in known if name in values}) for values in document["jobs"]]
        launcher = from_mapping(LauncherConfig, document.get("launcher", {}))
        return Sweep(folder, document["compare_by"], jobs, launcher)
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not the folder of a sweep: it has no sweep.json") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder}/sweep.json cannot be read as the record of a sweep: {error!r:.200}") from None


def problem_of(folder: Path) -> str | None:
    """Why the job of this folder is not completed; None if it is, with records that a comparison can read."""
    if not folder.exists():
        return "has not run"
    try:
        run = read_run(folder)
        damage = next((problem for problem in run.problems if "cannot be read" in problem), None)
        if run.summary.get("status") != "completed":
            damage = "no summary.json says that it is completed"
    except ConfigError as error:
        damage = str(error)
    ends = [line.removeprefix(_ENDED) for line in lines_of_log(folder) if line.startswith(_ENDED)]
    how = ends[-1] if ends else "runs, or was killed"
    return damage if damage is None or how == "completed" else how


def write_end(folder: Path, how: str) -> None:
    """Record in the log of a job how its process ended; `problem_of` reads it."""
    with open(folder / LOG_NAME, "a", encoding="utf-8") as log:
        log.write(f"\n{_ENDED}{how}\n")


def lines_of_log(folder: Path) -> list[str]:
    """Those that are not empty."""
    log = folder / LOG_NAME
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return [line.strip() for line in text.splitlines() if line.strip()]


def plan_sweep(arguments: Sequence[str], runs: Sequence[Composed] | None = None) -> Sweep:
    """The jobs of train.py's arguments, or those of the sweep that `resume_sweep=` names.

    `runs`: what `compose` returned for the arguments; None = call it, 0.1 s per run. Raises ConfigError: a setting of
    the sweep itself, or a folder that is in use.
    """
    runs = compose(CommandLine.parse(arguments)) if runs is None else runs
    by_place = list(zip(*(run.words for run in runs), strict=True))
    fixed = [words[0] for words in by_place if len(set(words)) == 1]
    varied = {_key(words[0]) for words in by_place if len(set(words)) > 1}
    for_sweep = [word for word in fixed if _is_own(word)]
    words = [word for word in fixed if word not in for_sweep and not word.startswith("hydra.")]
    own = sorted(filter(_is_own, varied - {"nproc"}))
    problems = [f"{key} belongs to the whole sweep and takes one value" for key in own]
    if twice := [words for words, count in Counter(run.words for run in runs).items() if count > 1]:
        problems.append(f"a value is listed twice ({' '.join(twice[0])}); repeats=2 runs every job twice")
    if any(_key(word) == "hydra.run.dir" for word in fixed):
        problems.append("hydra.run.dir: each job of a sweep has its own folder; use hydra.sweep.dir=FOLDER")
    if problems:
        raise ConfigError(problems)
    settings = runs[0].cfg
    if settings.resume_sweep is not None:
        launcher = [word for word in for_sweep if word.startswith("launcher")]
        if words or varied or {_key(word) for word in for_sweep} - {"resume_sweep", "only_group", *map(_key, launcher)}:
            raise ConfigError("resume_sweep runs what is missing in a sweep: leave out the other settings")
        sweep = replace(read_sweep(Path(settings.resume_sweep)), only_group=settings.only_group)
        return replace(sweep, launcher=settings.launcher) if launcher else sweep
    if settings.only_group is not None:
        raise ConfigError("only_group needs resume_sweep=FOLDER")
    jobs = _plan_jobs(words, varied, runs)
    folder = runs[0].folder("sweep")
    if taken := [name for name in ("sweep.json", *(job.name for job in jobs)) if (folder / name).exists()]:
        advice = f"hydra.sweep.dir=FOLDER names another folder, and resume_sweep={folder} continues a sweep"
        raise ConfigError(f"{folder / taken[0]} exists already: {advice}")
    by, keys = settings.compare_by, set(map(_setting_of, varied))
    if keys and by not in keys and keys <= setting_fields(Config).keys():  # not: an experiment
        advice = " or ".join(f"compare_by={key}" for key in sorted(keys))
        print(f"warning: all jobs have the same {by}, so nothing is compared; use {advice}", flush=True)
    elif keys and (few := next((run.cfg for run in runs if _has_few_windows(run.cfg)), None)):
        needed = f"{MIN_WINDOWS} windows of log_every={few.log_every} steps after warmup_steps={few.warmup_steps}"
        print(f"warning: no verdict: it needs {needed}; use more steps or a smaller log_every", flush=True)
    return Sweep(folder, by, jobs, settings.launcher)


def _has_few_windows(cfg: Config) -> bool:
    """Whether a run has too few windows for a verdict; the number of images is known for some data sets only."""
    sample_images = len(PATTERNS) * SampleSpec.train_per_class
    images = {"synthetic": cfg.data.synthetic_images, "sample": sample_images}.get(cfg.data.name)
    step_images = cfg.global_batch_size or max(1, cfg.batch_size) * cfg.accumulate_steps * cfg.nproc
    epoch_steps = images // step_images if images else cfg.max_steps or 10**9
    last = min(cfg.max_steps or epoch_steps * cfg.epochs, epoch_steps * cfg.epochs)
    # A window begins every log_every steps and with each epoch; those after the fourth make no difference.
    steps = range(cfg.warmup_steps, min(last, cfg.warmup_steps + (MIN_WINDOWS + 1) * cfg.log_every))
    return sum(step % cfg.log_every == 0 or step % epoch_steps == 0 for step in steps) < MIN_WINDOWS


def _is_own(word: str) -> bool:
    """Whether a setting, as `key=value` or the key, belongs to the sweep, not to its jobs."""
    return _key(word) in (*MULTIRUN_KEYS, "launcher") or word.startswith("launcher.")


def _key(word: str) -> str:
    return word.partition("=")[0]


def _setting_of(word: str) -> str:
    """The setting that `word` sets; optim=adamw sets optim.name."""
    return f"{_key(word)}.name" if _key(word) in GROUPS else _key(word)


def _plan_jobs(fixed: Sequence[str], varied: Collection[str], runs: Sequence[Composed]) -> list[Job]:
    """Order: jobs that differ only in the compared key are adjacent, and their repeats alternate: A B B A A B."""
    groups: dict[tuple[str, ...], list[Job]] = {}
    for run in runs:
        cfg, chosen = run.cfg, [word for word in run.words if _key(word) in varied]
        others = tuple(word for word in chosen if _setting_of(word) != cfg.compare_by)
        compared = [word for word in chosen if word not in others]
        shown = [cfg.model.replace(":", "."), LAYOUT_NAMES.get(cfg.channels_last, cfg.channels_last)]
        for key, _, value in (word.partition("=") for word in (*compared, *others)):
            if key not in ("model", "channels_last"):
                shown.append(value if key == "precision" else f"{key.rpartition('.')[2]}={value}")
        overrides = [*fixed, *(word for word in (*compared, *others) if _key(word) != "nproc")]
        groups.setdefault(others, []).append(Job(0, "_".join(shown), overrides, cfg.nproc))
    jobs: list[Job] = []
    names: Counter[str] = Counter()
    for number, sides in enumerate(groups.values()):
        for repeat in range(1, runs[0].cfg.repeats + 1):
            for job in sides if repeat % 2 else sides[::-1]:
                name = safe_name(f"{job.name}_{repeat}" if runs[0].cfg.repeats > 1 else job.name)
                names[name] += 1
                name += f"-{names[name]}" if names[name] > 1 else ""  # a/b and a_b make the same name
                jobs.append(replace(job, number=len(jobs), name=name, repeat=repeat, group=number))
    return jobs
