"""Read run folders back, decide which may be compared with which, and give the verdict on each pair. No torch here."""

import json
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from cl_train.comparison.statistics import MIN_WINDOWS, Interval, interval_of_runs, repeats_to_decide, verdict_of
from cl_train.config.schema import LAYOUT_NAMES, Config, ConfigError
from cl_train.config.validation import flatten, parse_yaml, setting_fields, show
from cl_train.system.processes import BUSY_PCT, TOO_BUSY_PCT

LOADER_BOUND_PCT = 20.0  # share of the time in which the step waited for its batch
MAX_GAP_H = 12.0  # between the end of one run and the start of the other: machine state may change
FAULTY_SHARE = 0.1  # of the windows, updates or images of a run: from here on it is not the speed of training

_FIELDS = setting_fields(Config)
# Fields of the summary that must be equal, like the settings with affects="speed".
_FACTS = ("precision", "device", "device_name", "world_size")
# Fields that may differ too when runs are compared by a key: they follow from it, or its group sets them.
_DEPENDENT = {
    "channels_last": ("conversion", "select"),
    "conversion": ("select",),
    "compile": ("compile_mode",),
    "device": ("device_name", "precision", "environment.cuda", "environment.cudnn", "environment.driver"),
    "nproc": ("world_size", "global_batch_size"),
    "optim.name": ("optim.library", "optim.decay_norm_and_bias"),
    "batch_size": ("global_batch_size",),
}
# Fields with the value that a run used, for settings that can be `auto`.
_OUTCOME = {"channels_last": "memory_format", "precision": "precision", "device": "device", "nproc": "world_size"}
# Fields that the report lists as equal, without the prefix `data.`.
_SHOWN = (*_FACTS, "compile", "batch_size", "channels_last", "data.name", "data.image_size", "data.workers")


@dataclass(frozen=True)
class Run:
    """A run folder: settings and summary with flat keys (`data.workers`, `val.top1`), and windows after warm-up."""

    folder: Path
    settings: dict[str, Any]
    summary: dict[str, Any]  # without nulls
    images_per_s: list[float]  # of each window after warm-up
    steps: list[int]  # at which these windows ended
    data_wait_pct: float  # median over these windows
    losses: dict[int, float]  # training loss by step, without NaN and Inf
    times: tuple[float, float]  # unix time of the first and the last window, seconds
    problems: list[str]  # why this run cannot be compared with any other
    repeat: int | None = None  # number of the repeat in a sweep

    def fact(self, name: str) -> Any:
        """The value in the summary (`precision=auto` became bf16), else the setting."""
        return self.summary.get(name, self.settings.get(name))

    @property
    def results(self) -> dict[str, float | None]:
        """Median speed after warm-up (images/s), accuracy of the last evaluation (percent), memory; None = unknown."""
        speed = statistics.median(self.images_per_s) if self.images_per_s else None
        top1, memory_gib = self.summary.get("val.top1"), self.summary.get("peak_memory_gib")
        return {"images_per_s": speed, "top1": top1, "peak_memory_gib": memory_gib}


@dataclass(frozen=True)
class Pair:
    """Runs that differ in one key, `baseline` against `candidate`, and the verdict."""

    held_equal: dict[str, Any]
    baseline: str
    candidate: str
    baseline_runs: list[Run]
    candidate_runs: list[Run]
    interval: Interval | None
    verdict: str  # faster, slower, no_difference, inconclusive or not_comparable
    bottleneck: str  # compute or loader
    loss_gap: float | None  # mean of candidate - baseline over the last quarter of the common steps
    repeats_to_decide: int | None  # runs per side that would probably decide an inconclusive pair
    notes: list[str]  # the first one is the reason if the verdict is not_comparable

    @property
    def sides(self) -> dict[str, list[Run]]:
        return {self.baseline: self.baseline_runs, self.candidate: self.candidate_runs}

    @property
    def words(self) -> str:
        return self.verdict.replace("_", " ")


def read_run(folder: Path) -> Run:
    """A run from its files; summary.json may be missing.

    Raises ConfigError: not a run folder, damaged, or without a window.
    """
    file = "metrics.jsonl"
    if not (folder / file).is_file():  # nor a FIFO, which would block
        raise ConfigError(f"{folder} is not a run folder: it has no file {file}")
    try:
        windows, problems = _read_windows((folder / file).read_text(encoding="utf-8"))
        file = "config.yaml"
        config = dict(flatten(parse_yaml((folder / file).read_text(encoding="utf-8"))))
        file, summary = "summary.json", {}
        if (folder / file).exists():
            leaves = flatten(json.loads((folder / file).read_text(encoding="utf-8")))
            summary = {name: value for name, value in leaves if value is not None}
    except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder}/{file} cannot be read: {' '.join(str(error).split())[:300]}") from None
    if not windows:
        raise ConfigError(f"{folder}: the run ended before its first window of log_every steps")
    if not summary:
        problems.append("no summary.json: the run was killed or has not ended")
    elif summary.get("status") not in ("completed", "interrupted", None):
        problems.append(f"status {summary['status']}")
    steps = [window["step"] for window in windows]
    if steps != sorted(set(steps)):
        problems.append("a step is recorded twice or out of order")
    for before, after in pairwise(windows):
        for name in ("memory_format", "precision", "world_size", "device_name"):
            if name in before and name in after and before[name] != after[name]:
                problems.append(f"{name} changed at step {after['step']}: {before[name]} before, {after[name]} after")
    nonfinite = sum(not math.isfinite(window["loss"]) for window in windows)
    skipped, skipped_images = summary.get("amp.skipped_steps", 0), summary.get("skipped_images", 0)
    images = summary.get("images_seen") or steps[-1] * summary.get("global_batch_size", 1)
    for count, total, fault in (
        (nonfinite, len(windows), "windows have a loss that is not finite"),
        (skipped, steps[-1], "updates were skipped, because gradients overflowed"),
        (skipped_images, images, "images were skipped"),
    ):
        if count >= FAULTY_SHARE * max(1, total):
            problems.append(f"{count} of {total} {fault}")
    settings = config | {"nproc": summary.get("world_size", 1)}  # config.yaml has 1: torchrun starts the processes
    measured = [window for window in windows if not window.get("warmup")]
    if config.get("data.size_schedule") and measured:  # growing images: the speed is that of the last size
        settings["data.image_size"] = measured[-1].get("image_size")
        measured = [window for window in measured if window.get("image_size") == measured[-1].get("image_size")]
    times = [window["time"] for window in windows]
    return Run(
        folder=folder,
        settings=settings,
        summary=summary,
        images_per_s=[window["images_per_s"] for window in measured],
        steps=[window["step"] for window in measured],
        data_wait_pct=statistics.median(window["data_wait_pct"] for window in measured) if measured else 0.0,
        losses={window["step"]: window["loss"] for window in windows if abs(window["loss"]) < 1e12},
        times=(min(times), max(times)),
        problems=[f"{folder.name}: {problem}" for problem in problems],
    )


def _read_windows(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of training, and the unreadable lines but for the last, which a killed process leaves incomplete."""
    lines = text.rstrip().splitlines()
    windows, problems = [], []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            problems += [f"metrics.jsonl, line {number} cannot be read"] if number < len(lines) else []
            continue
        if record.get("kind", "train") == "train":
            if not (record.keys() >= {"step", "time", "data_wait_pct"} and 0 < record["images_per_s"] < math.inf):
                raise ValueError(f"line {number} is not a window of training")
            record["loss"] = math.nan if record.get("loss") is None else record["loss"]  # JSON has no NaN
            windows.append(record)
    return windows, problems


def compare_runs(runs: Sequence[Run], by: str = "channels_last") -> list[Pair]:
    """Pair runs that differ only in `by`; one without a partner, with the most similar run, as not comparable."""
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in sorted(runs, key=lambda run: run.times):
        signature = str(sorted(_held_equal(run, by).items()))
        groups.setdefault(signature, {}).setdefault(str(run.settings.get(by)), []).append(run)
    pairs, single = [], []
    for group in groups.values():
        baseline, *candidates = [group[value] for value in sorted(group, key=_baseline_first)]
        if not candidates:
            single.append(baseline)
        pairs += [compare_pair(*_same_repeats(baseline, candidate), by=by) for candidate in candidates]
    single.sort(key=lambda runs: _baseline_first(str(runs[0].settings.get(by))))
    while single:
        baseline = single.pop(0)
        value, model = baseline[0].settings.get(by), baseline[0].fact("model")
        partners = [runs for runs in single if runs[0].settings.get(by) != value and runs[0].fact("model") == model]
        if partners:
            nearest = min(partners, key=lambda runs: len(_differences(baseline[0], runs[0], by)))
            single.remove(nearest)
            pairs.append(compare_pair(baseline, nearest, by=by))
    return pairs


def compare_pair(*sides: Sequence[Run], by: str = "channels_last") -> Pair:
    """The verdict on repeats of one setting against repeats of another, in either order."""
    count = min(map(len, sides))
    first, second = sorted(
        (list(runs[:count]) for runs in sides), key=lambda runs: _baseline_first(str(runs[0].settings.get(by)))
    )
    names = _names(first[0], second[0], by)
    equal = [name for name in _SHOWN if name != by and first[0].fact(name) == second[0].fact(name)]
    held_equal = {"model": " and ".join(dict.fromkeys(str(runs[0].fact("model")) for runs in (first, second)))}
    held_equal |= {name.removesuffix(".name").removeprefix("data."): first[0].fact(name) for name in equal}
    reasons = list(_obstacles(first, second, by, names))
    interval, verdict = None, "not_comparable"
    if all(len(run.images_per_s) >= MIN_WINDOWS for run in [*first, *second]):
        interval = interval_of_runs(*([run.images_per_s for run in runs] for runs in (first, second)))
        verdict = "not_comparable" if reasons else verdict_of(interval)
    waits_pct = [statistics.median(run.data_wait_pct for run in runs) for runs in (first, second)]
    is_loader_bound = max(waits_pct) >= LOADER_BOUND_PCT
    if is_loader_bound:
        reasons.append(
            f"loader-bound: the step waited for its batch {waits_pct[0]:.0f} % ({names[0]}) and {waits_pct[1]:.0f} % "
            f"({names[1]}) of the time; use more data.workers, a local disk, or data=synthetic"
        )
        verdict = "not_comparable" if verdict in ("no_difference", "inconclusive") else verdict
    notes = [*reasons, *_remarks(first, second, by)]
    if interval and interval.n == 1 and verdict != "not_comparable":
        notes.append("one run per side cannot show how much processes differ: 5 % is assumed; repeats=3 measures it")
    needed = repeats_to_decide(interval) if interval and verdict == "inconclusive" else None
    gaps = []
    for one, other in zip(first, second, strict=True):
        steps = sorted(one.losses.keys() & other.losses.keys())
        gaps += [other.losses[step] - one.losses[step] for step in steps[-max(1, len(steps) // 4) :]]
    loss_gap, bottleneck = statistics.fmean(gaps) if gaps else None, "loader" if is_loader_bound else "compute"
    return Pair(held_equal, *names, first, second, interval, verdict, bottleneck, loss_gap, needed, notes)


def _affects(key: str) -> str:
    """As in `schema.setting`; an unknown setting may affect the speed."""
    return str(_FIELDS[key].metadata["affects"]) if key in _FIELDS else "speed"


def _differing(runs: Sequence[Run]) -> list[str]:
    """The settings with an effect on speed or loss that the runs do not have in common."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if _affects(key) != "nothing")
    return [key for key in keys if len({str(run.settings.get(key)) for run in runs}) > 1]


def _differences(first: Run, second: Run, by: str) -> list[tuple[str, Any, Any]]:
    """Differences that affect the speed: (name, value of first, value of second)."""
    one, other = _held_equal(first, by), _held_equal(second, by)
    return [(key, one.get(key), other.get(key)) for key in {**one, **other} if one.get(key) != other.get(key)]


def _held_equal(run: Run, by: str) -> dict[str, Any]:
    """Everything that must be equal for speeds to be compared."""
    values = {key: value for key, value in run.settings.items() if _affects(key) == "speed"}
    values |= {key: run.summary[key] for key in run.summary if key in _FACTS or key.startswith("environment")}
    return {key: value for key, value in values.items() if key not in (by, "nproc", *_DEPENDENT.get(by, ()))}


def _same_repeats(baseline: list[Run], candidate: list[Run]) -> tuple[list[Run], list[Run]]:
    """The repeats and seeds that both sides have; where runs cannot be distinguished, all pair in order."""
    keys = {*_differing(baseline), *_differing(candidate)}
    one, other = (
        {str([run.repeat, *(run.settings.get(key) for key in keys)]): run for run in runs}
        for runs in (baseline, candidate)
    )
    common = [key for key in one if key in other]
    if not common or len(one) < len(baseline) or len(other) < len(candidate):
        return baseline, candidate
    return [one[key] for key in common], [other[key] for key in common]


def _baseline_first(value: str) -> tuple[bool, float, str]:
    """Sort key: `false` and `fp32` first, then numbers by size, so that the usual value is the baseline."""
    is_number = value.replace(".", "", 1).isdecimal()
    return value.lower() not in ("false", "fp32"), float(value) if is_number else 0.0, value


def _names(first: Run, second: Run, by: str) -> tuple[str, str]:
    """`contiguous` and `channels_last` for layouts, else `precision=bf16`; equal names are followed by the run's."""
    layouts = LAYOUT_NAMES if by == "channels_last" else {}
    values = [f"{show(run.settings.get(by)):.200}" for run in (first, second)]
    one, other = (layouts.get(value, f"{by}={value}") for value in values)
    if one != other:
        return one, other
    folders = [run.folder.absolute() for run in (first, second)]
    one, other = (f"{one} ({folder.relative_to(os.path.commonpath(folders))})" for folder in folders)
    return one, other


def _obstacles(first: list[Run], second: list[Run], by: str, names: tuple[str, str]) -> Iterator[str]:
    """Why the speeds of two sides cannot be compared, one sentence each."""
    baseline, candidate, runs = first[0], second[0], [*first, *second]
    on_cpu = baseline.fact("device") == "cpu"
    yield from dict.fromkeys(problem for run in runs for problem in run.problems)
    for key, one, other in _differences(baseline, candidate, by):
        yield f"{key} differs: {show(one):.200} ({names[0]}) and {show(other):.200} ({names[1]})"
    used = [run.summary.get(_OUTCOME.get(by, "")) for run in (baseline, candidate)]
    if unknown := [run.folder.name for run in (baseline, candidate) if by not in run.settings]:
        yield f"{by} of {unknown[0]} is unknown"
    elif baseline.settings[by] != candidate.settings[by] and used[0] is not None and used[0] == used[1]:
        yield f"both sides ran with {_OUTCOME[by]} {used[0]}"
    for run in runs:
        if (count := len(run.images_per_s)) < MIN_WINDOWS:
            advice = "use more steps or a smaller log_every"
            yield f"{run.folder.name} has {count} windows after warm-up, not {MIN_WINDOWS}: {advice}"
    times = [sorted((one.times, two.times)) for one, two in zip(first, second, strict=True)]
    gap_h = max((later[0] - earlier[1]) / 3600 for earlier, later in times)
    if gap_h > MAX_GAP_H:
        yield f"the runs are {gap_h:.0f} hours apart: repeat them on the same day"
    for before, after in pairwise(sorted(runs, key=lambda run: run.times)):
        # On a CPU the load of other processes is measured; nothing measures who else uses a GPU.
        if after.times[0] < before.times[1] and not on_cpu:
            both = f"{before.folder.name} and {after.folder.name}"
            yield f"{both} ran at the same time, perhaps on the same device: run them in turn"
    one, other = (max(run.summary.get("others_pct", 0.0) for run in side) for side in (first, second))
    # A GPU's speed suffers less; equal load is no problem.
    if max(one, other) >= TOO_BUSY_PCT and (on_cpu or abs(one - other) >= TOO_BUSY_PCT):
        yield f"other processes used up to {one:.0f} % ({names[0]}) and {other:.0f} % ({names[1]}) of the CPU cores"


def _remarks(first: list[Run], second: list[Run], by: str) -> Iterator[str]:
    """Notes that do not prevent a verdict but help to interpret it."""
    baseline, candidate, runs = first[0], second[0], [*first, *second]
    changed = _differing([baseline, candidate])
    if loss_only := [key for key in changed if key != by and _affects(key) == "loss"]:
        yield f"the loss gap is not caused by {by} only; also different: {', '.join(loss_only)}"
    if dependent := [key for key in changed if key in _DEPENDENT.get(by, ())]:
        yield f"also different, which compare_by={by} allows: {', '.join(dependent)}"
    if by == "channels_last" and baseline.settings.get("compile"):
        yield "compiled: the compiler may use channels_last convolutions on the contiguous side too"
    if any("others_pct" not in run.summary for run in runs):
        yield "how busy the machine was is unknown: summary.json has no others_pct"
    busiest = max(run.summary.get("others_pct", 0.0) for run in runs)
    if BUSY_PCT <= busiest < TOO_BUSY_PCT:
        yield f"other processes used up to {busiest:.0f} % of the CPU cores during the runs"
    commits = dict.fromkeys(str(run.summary["git.commit"])[:10] for run in runs if "git.commit" in run.summary)
    if len(commits) > 1:
        yield f"the runs used several commits of the program: {', '.join(commits)}"
    if any(run.summary.get("git.dirty") for run in runs):
        yield "the program had uncommitted changes: whether all runs used the same code is unknown"
    if stopped := [run.folder.name for run in runs if run.summary.get("status") == "interrupted"]:
        yield f"interrupted before the end: {', '.join(stopped)}"
