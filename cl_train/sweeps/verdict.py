"""Read run folders back, decide which may be compared with which, and give the verdict on each
pair. No torch here.
"""

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cl_train.config.schema import LAYOUT_NAMES, Config
from cl_train.config.validation import setting_fields, show
from cl_train.measure.statistics import (
    MIN_WINDOWS,
    Interval,
    interval_of_runs,
    repeats_to_decide,
    verdict_of,
)
from cl_train.sweeps.runs import Run
from cl_train.system.processes import BUSY_PCT, TOO_BUSY_PCT

LOADER_BOUND_PCT = 20.0  # share of the time in which the step waited for its batch
MAX_GAP_H = 12.0  # between the end of one run and the start of the other: machine state may change

_FIELDS = setting_fields(Config)
# Fields of the summary that must be equal, like the settings with affects="speed".
_FACTS = ("precision", "device", "device_name", "world_size")
# Fields that may differ too when runs are compared by a key: they follow from it, or its group sets
# them.
_DEPENDENT = {
    "channels_last": ("conversion", "select"),
    "conversion": ("select",),
    "compile": ("compile_mode",),
    "device": (
        "device_name",
        "precision",
        "environment.cuda",
        "environment.cudnn",
        "environment.driver",
    ),
    "nproc": ("world_size", "global_batch_size"),
    "environment": tuple(
        f"environment.{name}" for name in ("torch", "torchvision", "python", "cuda", "cudnn")
    ),
    "optim.name": ("optim.library", "optim.decay_norm_and_bias"),
    "batch_size": ("global_batch_size",),
}
# Fields with the value that a run used, for settings that can be `auto`.
_OUTCOME = {
    "channels_last": "memory_format",
    "precision": "precision",
    "device": "device",
    "nproc": "world_size",
}
# Fields that the report lists as equal, without the prefix `data.`.
_SHOWN = (
    *_FACTS,
    "compile",
    "batch_size",
    "channels_last",
    "data.name",
    "data.image_size",
    "data.workers",
)


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
    to_decide: str | None = None  # what to do about an undecided pair: a command, and its time

    @property
    def sides(self) -> dict[str, list[Run]]:
        return {self.baseline: self.baseline_runs, self.candidate: self.candidate_runs}

    @property
    def n(self) -> int:
        """Runs per side."""
        return len(self.baseline_runs)

    @property
    def is_disturbed(self) -> bool:
        """Whether there may be no verdict because other processes used the CPU."""
        runs = [*self.baseline_runs, *self.candidate_runs]
        return self.verdict == "not_comparable" and any(run.is_disturbed for run in runs)

    @property
    def words(self) -> str:
        return self.verdict.replace("_", " ")


def compare_runs(runs: Sequence[Run], by: str = "channels_last", looks: int = 1) -> list[Pair]:
    """Pair runs that differ only in `by`. Those without such a partner are paired with others of
    the model, as not comparable. `looks`: see `interval_of_runs`.
    """
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in sorted(runs, key=lambda run: run.times):
        signature = str(sorted(_held_equal(run, by).items()))
        groups.setdefault(signature, {}).setdefault(str(run.settings.get(by)), []).append(run)

    pairs = []
    alone: dict[str, list[tuple[str, list[Run]]]] = {}  # by model
    for group in groups.values():
        value, *others = sorted(group, key=_baseline_first)
        if not others:
            alone.setdefault(str(group[value][0].fact("model")), []).append((value, group[value]))
        for other in others:
            pairs.append(
                compare_pair(*_same_repeats(group[value], group[other]), by=by, looks=looks)
            )
    for sides in alone.values():
        (value, baseline), *candidates = sorted(sides, key=lambda side: _baseline_first(side[0]))
        for other, candidate in candidates:
            if other != value:
                pairs.append(compare_pair(baseline, candidate, by=by))
    return pairs


def compare_pair(*sides: Sequence[Run], by: str = "channels_last", looks: int = 1) -> Pair:
    """The verdict on repeats of one setting against repeats of another, in either order."""
    count = min(map(len, sides))
    first, second = sorted(
        (list(runs[:count]) for runs in sides),
        key=lambda runs: _baseline_first(str(runs[0].settings.get(by))),
    )
    first, second, left_out = _quiet_repeats(first, second)
    names = _names(first[0], second[0], by)
    equal = [name for name in _SHOWN if name != by and first[0].fact(name) == second[0].fact(name)]
    models = dict.fromkeys(str(runs[0].fact("model")) for runs in (first, second))
    held_equal = {"model": " and ".join(models)} | {
        name.removesuffix(".name").removeprefix("data."): first[0].fact(name) for name in equal
    }

    reasons = list(_obstacles(first, second, by, names))
    interval, needed, verdict = None, None, "not_comparable"
    if all(run.windows_after_warmup >= MIN_WINDOWS for run in [*first, *second]):
        speeds = [run.images_per_s for run in first], [run.images_per_s for run in second]
        interval = interval_of_runs(*speeds, looks=looks)
        if not reasons:
            verdict = verdict_of(interval)
        if verdict == "inconclusive":
            needed = repeats_to_decide(*speeds, looks=looks)

    waits_pct = [statistics.median(run.data_wait_pct for run in runs) for runs in (first, second)]
    is_loader_bound = max(waits_pct) >= LOADER_BOUND_PCT
    if interval and (is_loader_bound or _wait_explains(verdict, *waits_pct)):
        reasons.append(
            f"loader-bound: the step waited for its batch {waits_pct[0]:.0f} % ({names[0]}) and"
            f" {waits_pct[1]:.0f} % ({names[1]}) of the time; use more data.workers, a local disk,"
            " or data=synthetic"
        )
        if verdict not in ("faster", "slower") or _wait_explains(verdict, *waits_pct):
            verdict, needed = "not_comparable", None
    notes = [*reasons, *_remarks(first, second, by)]
    if left_out:
        notes.append(f"{left_out} repeats are left out, because other processes disturbed them")
    if interval and interval.n == 1 and verdict != "not_comparable":
        notes.append(
            "one run per side cannot show how much processes differ: 5 % is assumed; repeats=4"
            " measures it"
        )
    return Pair(
        held_equal,
        *names,
        first,
        second,
        interval,
        verdict,
        "loader" if is_loader_bound else "compute",
        _loss_gap(first, second),
        needed,
        notes,
    )


def _quiet_repeats(first: list[Run], second: list[Run]) -> tuple[list[Run], list[Run], int]:
    """The sides without the repeats that other processes disturbed, and their number, if at least
    two others remain. What others did does not depend on the side.
    """
    quiet = [
        (baseline, candidate)
        for baseline, candidate in zip(first, second, strict=True)
        if not (baseline.is_disturbed or candidate.is_disturbed)
    ]
    left_out = len(first) - len(quiet)
    if len(quiet) < 2 or not left_out:
        return first, second, 0
    return [pair[0] for pair in quiet], [pair[1] for pair in quiet], left_out


def _wait_explains(verdict: str, baseline_wait_pct: float, candidate_wait_pct: float) -> bool:
    """Whether the slower side may be slower because it waited for data, as with a cold disk cache.

    The faster side may well wait more: it is limited by the loader, and would be faster still.
    """
    more_pct = baseline_wait_pct - candidate_wait_pct
    if verdict == "slower":
        more_pct = -more_pct
    return verdict in ("faster", "slower") and more_pct >= LOADER_BOUND_PCT / 2


def _loss_gap(first: Sequence[Run], second: Sequence[Run]) -> float | None:
    """The mean of second - first over the last quarter of the common steps of each repeat."""
    gaps = []
    for baseline, candidate in zip(first, second, strict=True):
        steps = sorted(baseline.losses.keys() & candidate.losses.keys())
        last = steps[-max(1, len(steps) // 4) :]
        gaps += [candidate.losses[step] - baseline.losses[step] for step in last]
    return statistics.fmean(gaps) if gaps else None


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
    return [
        (key, one.get(key), other.get(key))
        for key in {**one, **other}
        if one.get(key) != other.get(key)
    ]


def _held_equal(run: Run, by: str) -> dict[str, Any]:
    """Everything that must be equal for speeds to be compared."""
    values = {key: value for key, value in run.settings.items() if _affects(key) == "speed"}
    values |= {
        key: run.summary[key]
        for key in run.summary
        if key in _FACTS or key.startswith("environment")
    }
    return {
        key: value
        for key, value in values.items()
        if key not in (by, "nproc", *_DEPENDENT.get(by, ()))
    }


def _same_repeats(baseline: list[Run], candidate: list[Run]) -> tuple[list[Run], list[Run]]:
    """The repeats and seeds that both sides have; where runs cannot be distinguished, all pair in
    order.
    """
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
    """Sort key: `false` and `fp32` first, then numbers by size, so that the usual value is the
    baseline.
    """
    is_number = value.replace(".", "", 1).isdecimal()
    return value.lower() not in ("false", "fp32"), float(value) if is_number else 0.0, value


def _names(first: Run, second: Run, by: str) -> tuple[str, str]:
    """`contiguous` and `channels_last` for layouts, else `precision=bf16`; equal names are followed
    by the run's.
    """
    layouts = LAYOUT_NAMES if by == "channels_last" else {}
    values = [f"{show(run.settings.get(by)):.200}" for run in (first, second)]
    one, other = (layouts.get(value, f"{by}={value}") for value in values)
    if one != other:
        return one, other
    folders = [run.folder.absolute() for run in (first, second)]
    one, other = (
        f"{one} ({folder.relative_to(os.path.commonpath(folders))})" for folder in folders
    )
    return one, other


def _obstacles(
    first: list[Run], second: list[Run], by: str, names: tuple[str, str]
) -> Iterator[str]:
    """Why the speeds of two sides cannot be compared, one sentence each."""
    sides = (first, second)
    baseline, candidate, runs = first[0], second[0], [*first, *second]
    on_cpu = baseline.fact("device") == "cpu"
    yield from dict.fromkeys(problem for run in runs for problem in run.problems)
    for key, one, other in _differences(baseline, candidate, by):
        yield f"{key} differs: {show(one):.200} ({names[0]}) and {show(other):.200} ({names[1]})"
    unknown = [run.folder.name for run in (baseline, candidate) if by not in run.settings]
    outcome = _OUTCOME.get(by, "")
    used = [{run.summary[outcome] for run in runs if outcome in run.summary} for runs in sides]
    if unknown:
        yield f"{by} of {unknown[0]} is unknown"
    elif mixed := [name for name, values in zip(names, used, strict=True) if len(values) > 1]:
        values = " and ".join(sorted(map(str, used[names.index(mixed[0])])))
        yield f"the repeats of {mixed[0]} ran with different {outcome}: {values}"
    elif baseline.settings[by] != candidate.settings[by] and used[0] and used[0] == used[1]:
        yield f"both sides ran with {outcome} {used[0].pop()}"
    for run in runs:
        if (count := run.windows_after_warmup) < MIN_WINDOWS:
            advice = "use more steps or a smaller log_every"
            name = run.folder.name
            yield f"{name} has {count} windows after warm-up, not {MIN_WINDOWS}: {advice}"
    times = [sorted((one.times, two.times)) for one, two in zip(first, second, strict=True)]
    gap_h = max((later[0] - earlier[1]) / 3600 for earlier, later in times)
    if gap_h > MAX_GAP_H:
        yield f"the runs are {gap_h:.0f} hours apart: repeat them on the same day"
    for before, after in pairwise(sorted(runs, key=lambda run: run.times)):
        # On a CPU the load of other processes is measured; nothing measures who else uses a GPU.
        if after.times[0] < before.times[1] and not on_cpu:
            both = f"{before.folder.name} and {after.folder.name}"
            yield f"{both} ran at the same time, perhaps on the same device: run them in turn"
    for run in runs:
        if others := run.summary.get("gpu.other_processes"):
            yield f"{others} other processes used the GPU of {run.folder.name}"
        if run.summary.get("gpu.is_slowed"):
            yield f"heat or a power brake slowed the GPU of {run.folder.name}: cool it, and repeat"
    busy_pct = [max(run.others_pct for run in side) for side in sides]
    # A GPU's speed suffers less; equal load is no problem.
    if max(busy_pct) >= TOO_BUSY_PCT and (on_cpu or abs(busy_pct[0] - busy_pct[1]) >= TOO_BUSY_PCT):
        loads = f"{busy_pct[0]:.0f} % ({names[0]}) and {busy_pct[1]:.0f} % ({names[1]})"
        yield f"other processes used up to {loads} of the CPU cores"


def _remarks(first: list[Run], second: list[Run], by: str) -> Iterator[str]:
    """Notes that do not prevent a verdict but help to interpret it."""
    baseline, candidate, runs = first[0], second[0], [*first, *second]
    changed = _differing([baseline, candidate])
    if loss_only := [key for key in changed if key != by and _affects(key) == "loss"]:
        yield f"the loss gap is not caused by {by} only; also different: {', '.join(loss_only)}"
    allowed = {key: (baseline.fact(key), candidate.fact(key)) for key in _DEPENDENT.get(by, ())}
    if different := [
        f"{key} ({show(one)} and {show(two)})" for key, (one, two) in allowed.items() if one != two
    ]:
        yield f"also different, which compare_by={by} allows: {', '.join(different)}"
    if by == "channels_last" and baseline.settings.get("compile"):
        yield "compiled: the compiler may use channels_last convolutions on the contiguous side too"
    if any("others_pct" not in run.summary for run in runs):
        yield "how busy the machine was is unknown: summary.json has no others_pct"
    busiest = max(run.others_pct for run in runs)
    if BUSY_PCT <= busiest < TOO_BUSY_PCT:
        yield f"other processes used up to {busiest:.0f} % of the CPU cores during the runs"
    commits = dict.fromkeys(
        str(run.summary["git.commit"])[:10] for run in runs if "git.commit" in run.summary
    )
    if len(commits) > 1:
        yield f"the runs used several commits of the program: {', '.join(commits)}"
    if any(run.summary.get("git.dirty") for run in runs):
        yield "the program had uncommitted changes: whether all runs used the same code is unknown"
    if stopped := [run.folder.name for run in runs if run.summary.get("status") == "interrupted"]:
        yield f"interrupted before the end: {', '.join(stopped)}"
