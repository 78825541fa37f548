"""The jobs of `python train.py -m ...`: what runs, in which order and folders, and `sweep.json`, the record of it."""

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cl_train.comparison.statistics import MIN_WINDOWS
from cl_train.config.command_line import GROUPS, MULTIRUN_KEYS, check_command_line, hydra_folder, split_sweep
from cl_train.config.schema import LAYOUT_NAMES, Config, ConfigError, LauncherConfig
from cl_train.config.validation import from_mapping
from cl_train.data.sample import PATTERNS, SampleSpec
from cl_train.system.files import write_json
from cl_train.system.run_folder import safe_name

SCHEMA_VERSION = 1
SLURM_FOLDER = "slurm"  # in the folder of a sweep: logs of allocations and the outcomes of their jobs


@dataclass
class Job:
    """One run of a sweep, and its outcome."""

    number: int
    name: str  # of its folder
    overrides: list[str]
    nproc: int = 1
    repeat: int = 1
    group: int = 0  # jobs of a group are compared with each other: they run one after the other in the same place
    status: str = "pending"  # running, completed, failed, interrupted
    is_started: bool = False  # whether this sweep created its folder
    exit_code: int | None = None
    why: str | None = None
    seconds: float | None = None

    @property
    def has_outcome(self) -> bool:
        return self.status in ("completed", "failed")


@dataclass
class Sweep:
    """The jobs; those of a group are adjacent and in the order in which they run."""

    folder: Path
    compare_by: str
    jobs: list[Job]
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    allocations: dict[str, list[int]] = field(default_factory=dict)  # jobs by Slurm's id: 12, or 12_0

    def save(self) -> None:
        """Write `sweep.json`, which `resume_sweep` and `compare` read."""
        document = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        del document["folder"]
        write_json(self.folder / "sweep.json", document)

    @property
    def slurm_ids(self) -> list[str]:
        """What sbatch returned: the allocations of one submission are elements of one array."""
        return list(dict.fromkeys(allocation.partition("_")[0] for allocation in self.allocations))

    def save_outcome(self, job: Job) -> None:
        """Write the outcome of one job beside `sweep.json`: allocations cannot write the same file."""
        write_json(_outcome_path(self.folder, job), asdict(job))

    def remove_outcomes(self) -> None:
        """Delete the outcomes of an earlier submission; `sweep.json` has them."""
        for job in self.jobs:
            _outcome_path(self.folder, job).unlink(missing_ok=True)

    def pending_groups(self) -> list[list[Job]]:
        """The jobs still to run, by group."""
        pending = [job for job in self.jobs if job.status == "pending"]
        return [list(group) for _, group in itertools.groupby(pending, key=lambda job: job.group)]


def _outcome_path(folder: Path, job: Job) -> Path:
    return folder / SLURM_FOLDER / f"job{job.number}.json"


def plan_sweep(arguments: Sequence[str], runs: Sequence[Config] | None = None) -> Sweep:
    """The jobs of train.py's arguments, or those of the sweep that `resume_sweep=` names.

    Args:
        runs: what `check_command_line` returned for the arguments; None = call it, 0.1 s per run.

    Raises:
        ConfigError: a setting of the sweep itself, runs too short for a comparison, or a folder that is in use.
    """
    fixed, varying = split_sweep(arguments)
    own = [word for word in fixed if _is_own(word)]
    hydra = [word for word in fixed if word.startswith("hydra.")]
    words = [word for word in fixed if word not in (*own, *hydra)]
    problems = []
    for axis in varying:
        if _is_own(axis[0]) and _key(axis[0]) != "nproc":
            problems.append(f"{_key(axis[0])} belongs to the whole sweep and takes one value")
        if len(set(axis)) < len(axis):
            problems.append(f"{_key(axis[0])}: a value is listed twice; repeats=2 runs every job twice")
    if any(_key(word) == "hydra.run.dir" for word in hydra):
        problems.append("hydra.run.dir: each job of a sweep has its own folder; use hydra.sweep.dir=FOLDER")
    if problems:
        raise ConfigError(problems)
    runs = check_command_line(arguments) if runs is None else runs
    settings = runs[0]
    if settings.resume_sweep is not None:
        others = [word for word in own if not word.startswith(("resume_sweep", "launcher"))]
        if words or varying or others:
            raise ConfigError("resume_sweep runs what is missing in a sweep: leave out the other settings")
        sweep = read_sweep(Path(settings.resume_sweep))
        for job in sweep.jobs:
            job.is_started = job.is_started or job.status != "pending"
            if job.status != "completed":
                job.status, job.exit_code, job.why = "pending", None, None
        if any(word.startswith("launcher") for word in own):
            sweep.launcher = settings.launcher
        return sweep
    jobs = _plan_jobs(words, varying, runs)
    folder = hydra_folder(hydra, "sweep")
    if (folder / "sweep.json").is_file():
        raise ConfigError(f"{folder} holds a sweep already: resume_sweep={folder} runs what is missing in it")
    taken = [job.name for job in jobs if (folder / job.name).exists()]
    if taken:
        raise ConfigError(f"{folder / taken[0]} exists already: choose another folder with hydra.sweep.dir=FOLDER")
    return Sweep(folder, settings.compare_by, jobs, settings.launcher)


def _is_own(word: str) -> bool:
    """Whether a setting belongs to the sweep, not to its jobs."""
    return _key(word) in (*MULTIRUN_KEYS, "launcher") or word.startswith("launcher.")


def _key(word: str) -> str:
    return word.partition("=")[0]


def setting_of(word: str) -> str:
    """The setting that `word` sets; optim=adamw sets optim.name."""
    return f"{_key(word)}.name" if _key(word) in GROUPS else _key(word)


def _plan_jobs(fixed: Sequence[str], varying: Sequence[Sequence[str]], runs: Sequence[Config]) -> list[Job]:
    """Order: jobs that differ only in the compared key are adjacent, and their repeats alternate: A B B A A B."""
    settings = runs[0]
    configs = {frozenset(chosen): cfg for chosen, cfg in zip(itertools.product(*varying), runs, strict=True)}
    compared = [axis for axis in varying if setting_of(axis[0]) == settings.compare_by]
    others = [axis for axis in varying if axis not in compared]
    jobs: list[Job] = []
    names: Counter[str] = Counter()
    for number, group in enumerate(itertools.product(*others)):
        chosen = [[*side, *group] for side in itertools.product(*compared)]
        sides = [_plan_job(fixed, words, configs[frozenset(words)]) for words in chosen]
        for repeat in range(1, settings.repeats + 1):
            for job in sides if repeat % 2 else sides[::-1]:
                name = safe_name(f"{job.name}_{repeat}" if settings.repeats > 1 else job.name)
                names[name] += 1
                name += f"-{names[name]}" if names[name] > 1 else ""  # a/b and a_b make the same name
                jobs.append(replace(job, number=len(jobs), name=name, repeat=repeat, group=number))
    return jobs


def _plan_job(fixed: Sequence[str], chosen: Sequence[str], cfg: Config) -> Job:
    if cfg.compare_by in map(setting_of, chosen) and _most_windows(cfg) < MIN_WINDOWS:
        raise ConfigError(
            f"a comparison needs {MIN_WINDOWS} windows of log_every={cfg.log_every} steps after "
            f"warmup_steps={cfg.warmup_steps}, and these runs are too short for them: use more steps (epochs, "
            "max_steps) or a smaller log_every"
        )
    shown = [cfg.model.replace(":", "."), LAYOUT_NAMES.get(cfg.channels_last, cfg.channels_last)]
    for key, _, value in (word.partition("=") for word in chosen):
        if key not in ("model", "channels_last"):
            shown.append(value if key == "precision" else f"{key.rpartition('.')[2]}={value}")
    return Job(0, "_".join(shown), [*fixed, *(word for word in chosen if _key(word) != "nproc")], cfg.nproc)


def _most_windows(cfg: Config) -> int:
    """How many windows after warm-up a run has at most; the number of images is known for some data sets only."""
    sample_images = len(PATTERNS) * SampleSpec.train_per_class
    images = {"synthetic": cfg.data.synthetic_images, "sample": sample_images}.get(cfg.data.name)
    step_images = cfg.global_batch_size or max(1, cfg.batch_size) * cfg.accumulate_steps * cfg.nproc
    epoch_steps = images // step_images if images else cfg.max_steps or 10**9
    last = min(cfg.max_steps or epoch_steps * cfg.epochs, epoch_steps * cfg.epochs)
    last = min(last, cfg.warmup_steps + (MIN_WINDOWS + 1) * cfg.log_every)  # later windows make no difference
    ends = [step for step in range(1, last + 1) if step % cfg.log_every == 0 or step % epoch_steps == 0 or step == last]
    return sum(start >= cfg.warmup_steps for start in [0, *ends[:-1]])


def read_sweep(folder: Path) -> Sweep:
    """The record of a sweep.

    Raises:
        ConfigError: the folder has none, or one that cannot be read.
    """
    try:
        document = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
        jobs = [_read_job(job) for job in document["jobs"]]
        for number, path in enumerate(_outcome_path(folder, job) for job in jobs):
            if path.is_file():
                jobs[number] = _read_job(json.loads(path.read_text(encoding="utf-8")))
        launcher = from_mapping(LauncherConfig, document.get("launcher", {}))
        allocations = {str(one): list(numbers) for one, numbers in document.get("allocations", {}).items()}
        return Sweep(folder, str(document["compare_by"]), jobs, launcher, allocations)
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not the folder of a sweep: it has no sweep.json") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{folder}/sweep.json cannot be read as the record of a sweep: {str(error)[:200]}") from None


def _read_job(values: Mapping[str, Any]) -> Job:
    job = Job(**values)
    is_text = all(isinstance(word, str) for word in job.overrides)
    if type(job.number) is not int or job.name != safe_name(job.name) or not is_text:
        raise ValueError("a job has an impossible name or impossible settings")
    return job
