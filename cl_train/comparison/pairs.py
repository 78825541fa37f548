"""Which runs may be compared with which, and the verdict on each pair. No torch here."""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cl_train.comparison.run_records import Run
from cl_train.comparison.statistics import MIN_WINDOWS, Interval, interval_of_runs, repeats_to_decide, verdict_of
from cl_train.config.schema import LAYOUT_NAMES, Config
from cl_train.config.validation import setting_fields, show
from cl_train.system.machine_load import BUSY_PCT, TOO_BUSY_PCT

LOADER_BOUND_PCT = 20.0  # share of the time in which the step waited for its batch
MAX_GAP_H = 12.0  # between the end of one run and the start of the other: machine state may change

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
_SHOWN = [
    *("precision", "device", "compile", "batch_size", "world_size", "device_name", "channels_last"),
    *("data.name", "data.image_size", "data.workers"),
]


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
    notes: list[str]  # the first one is the reason if the verdict is not_comparable

    @property
    def repeats_to_decide(self) -> int | None:
        """Runs per side that would probably decide an inconclusive pair."""
        return repeats_to_decide(self.interval) if self.interval and self.verdict == "inconclusive" else None

    @property
    def comparable_interval(self) -> Interval | None:
        """The interval, but None if the runs are not comparable."""
        return None if self.verdict == "not_comparable" else self.interval


def compare_runs(runs: Sequence[Run], by: str = "channels_last") -> list[Pair]:
    """Pair runs that differ only in `by`; one without a partner, with the most similar run, as not comparable."""
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in sorted(runs, key=lambda run: run.started_at or 0.0):
        signature = json.dumps(_held_equal(run, by), sort_keys=True, default=str)
        groups.setdefault(signature, {}).setdefault(str(run.settings.get(by)), []).append(run)
    pairs, single = [], []
    for group in groups.values():
        baseline, *candidates = [group[value] for value in sorted(group, key=_baseline_first)]
        if not candidates:
            single.append(baseline)
        pairs += [compare_pair(*_same_repeats(baseline, candidate), by) for candidate in candidates]
    single.sort(key=lambda runs: _baseline_first(str(runs[0].settings.get(by))))
    while single:
        baseline = single.pop(0)
        value, model = baseline[0].settings.get(by), baseline[0].fact("model")
        partners = [runs for runs in single if runs[0].settings.get(by) != value and runs[0].fact("model") == model]
        if partners:
            nearest = min(partners, key=lambda runs: len(_differences(baseline[0], runs[0], by)))
            single.remove(nearest)
            pairs.append(compare_pair(baseline, nearest, by))
    return pairs


def compare_two(first: Run, second: Run, by: str) -> Pair:
    """Two runs named by the user always form a pair; `_baseline_first` decides which is the baseline."""
    baseline, candidate = sorted((first, second), key=lambda run: _baseline_first(str(run.settings.get(by))))
    return compare_pair([baseline], [candidate], by)


def compare_pair(baseline: Sequence[Run], candidate: Sequence[Run], by: str = "channels_last") -> Pair:
    """The verdict on repeats of one setting against repeats of another; a loader can mask a difference."""
    count = min(len(baseline), len(candidate))
    first, second = list(baseline[:count]), list(candidate[:count])
    names = _names(first[0], second[0], by)
    reasons = list(_obstacles(first, second, by, names))
    interval = None
    if all(len(run.images_per_s) >= MIN_WINDOWS for run in [*first, *second]):
        interval = interval_of_runs([run.images_per_s for run in first], [run.images_per_s for run in second])
    verdict = "not_comparable" if reasons or interval is None else verdict_of(interval)
    waits_pct = [statistics.median(run.data_wait_pct for run in runs) for runs in (first, second)]
    is_loader_bound = max(waits_pct) >= LOADER_BOUND_PCT
    if is_loader_bound:
        reasons.append(
            f"loader-bound: the step waited for its batch {waits_pct[0]:.0f} % ({names[0]}) and {waits_pct[1]:.0f} % "
            f"({names[1]}) of the time; use more data.workers, a local disk, or data=synthetic"
        )
        verdict = "not_comparable" if verdict in ("no_difference", "inconclusive") else verdict
    return Pair(
        held_equal=_shown(first[0], second[0], by),
        baseline=names[0],
        candidate=names[1],
        baseline_runs=first,
        candidate_runs=second,
        interval=interval,
        verdict=verdict,
        bottleneck="loader" if is_loader_bound else "compute",
        loss_gap=_loss_gap(first, second),
        notes=[*reasons, *_remarks(first, second, by, interval, verdict)],
    )


def differing(runs: Sequence[Run]) -> list[str]:
    """The settings with an effect on speed or loss that the runs do not have in common."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if _affects(key) != "nothing")
    return [key for key in keys if len({str(run.settings.get(key)) for run in runs}) > 1]


def _affects(key: str) -> str:
    """As in `schema.setting`; an unknown setting may affect the speed."""
    return str(_FIELDS[key].metadata["affects"]) if key in _FIELDS else "speed"


def _differences(first: Run, second: Run, by: str) -> list[tuple[str, Any, Any]]:
    """Differences that affect the speed: (name, value of first, value of second)."""
    one, other = _held_equal(first, by), _held_equal(second, by)
    return [(key, one.get(key), other.get(key)) for key in {**one, **other} if one.get(key) != other.get(key)]


def _held_equal(run: Run, by: str) -> dict[str, Any]:
    """Everything that must be equal for speeds to be compared."""
    values = {key: value for key, value in run.settings.items() if _affects(key) == "speed"}
    values |= {name: run.summary[name] for name in _FACTS if name in run.summary}
    if "batch_size" not in values:
        values["global_batch_size"] = run.summary.get("global_batch_size")
    values |= {f"environment.{name}": value for name, value in run.summary.get("environment", {}).items()}
    return {key: value for key, value in values.items() if key not in (by, "nproc", *_DEPENDENT.get(by, ()))}


def _shown(first: Run, second: Run, by: str) -> dict[str, Any]:
    """The few of the equal settings that distinguish one pair from another in a table."""
    shown = {"model": " and ".join(dict.fromkeys(str(run.fact("model")) for run in (first, second)))}
    equal = [name for name in _SHOWN if name != by and first.fact(name) == second.fact(name)]
    return shown | {name.removesuffix(".name").removeprefix("data."): first.fact(name) for name in equal}


def _same_repeats(baseline: list[Run], candidate: list[Run]) -> tuple[list[Run], list[Run]]:
    """The repeats and seeds that both sides have; where runs cannot be distinguished, all pair in order."""
    keys = {*differing(baseline), *differing(candidate)}
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
    depth = -1 if first.folder.name != second.folder.name else -2
    names = ["/".join(run.folder.absolute().parts[depth:]) for run in (first, second)]
    return f"{one} ({names[0]})", f"{other} ({names[1]})"


# --- notes of the report ---------------------------------------------------------------------------------------------


def _obstacles(first: list[Run], second: list[Run], by: str, names: tuple[str, str]) -> Iterator[str]:
    """Why the speeds of two sides cannot be compared, one sentence each."""
    baseline, candidate, runs = first[0], second[0], [*first, *second]
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
            yield (
                f"{run.folder.name} has {count} windows after warm-up, not {MIN_WINDOWS}: use more steps or a smaller "
                "log_every"
            )
    gap_h = max(_gap_h(one, other) for one, other in zip(first, second, strict=True))
    if gap_h > MAX_GAP_H:
        yield f"the runs are {gap_h:.0f} hours apart: repeat them on the same day"
    # On a CPU the load of other processes is measured; nothing measures who else uses a GPU.
    if (overlap := _overlap(runs)) and baseline.fact("device") != "cpu":
        yield f"{overlap[0]} and {overlap[1]} ran at the same time, perhaps on the same device: run them in turn"
    one, other = (max(run.others_pct or 0.0 for run in side) for side in (first, second))
    on_cpu = baseline.fact("device") == "cpu"  # a GPU's speed suffers less; equal load is no problem
    if max(one, other) >= TOO_BUSY_PCT and (on_cpu or abs(one - other) >= TOO_BUSY_PCT):
        yield f"other processes used up to {one:.0f} % ({names[0]}) and {other:.0f} % ({names[1]}) of the CPU cores"


def _gap_h(one: Run, other: Run) -> float:
    """Hours between the end of the earlier run and the start of the later one; 0 if unknown."""
    times = sorted((run.started_at, run.ended_at) for run in (one, other) if run.started_at and run.ended_at)
    return max(0.0, times[1][0] - times[0][1]) / 3600 if len(times) == 2 else 0.0


def _overlap(runs: Sequence[Run]) -> tuple[str, str] | None:
    """The names of two runs that overlapped in time."""
    known = sorted((run.started_at, run.ended_at, run.folder.name) for run in runs if run.started_at and run.ended_at)
    return next(((one[2], other[2]) for one, other in pairwise(known) if other[0] < one[1]), None)


def _remarks(first: list[Run], second: list[Run], by: str, interval: Interval | None, verdict: str) -> Iterator[str]:
    """Notes that do not prevent a verdict but help to interpret it."""
    baseline, candidate, runs = first[0], second[0], [*first, *second]
    changed = differing([baseline, candidate])
    if loss_only := [key for key in changed if key != by and _affects(key) == "loss"]:
        yield f"the loss gap is not caused by {by} only; also different: {', '.join(loss_only)}"
    if dependent := [key for key in changed if key in _DEPENDENT.get(by, ())]:
        yield f"also different, which compare_by={by} allows: {', '.join(dependent)}"
    if baseline.settings.get(by) == candidate.settings.get(by):
        yield f"both sides have the same {by}"
    if by == "channels_last" and baseline.settings.get("compile"):
        yield "compiled: the compiler may use channels_last convolutions on the contiguous side too"
    if any(run.others_pct is None for run in runs):
        yield "how busy the machine was is unknown: summary.json has no others_pct"
    busiest = max(run.others_pct or 0.0 for run in runs)
    if BUSY_PCT <= busiest < TOO_BUSY_PCT:
        yield f"other processes used up to {busiest:.0f} % of the CPU cores during the runs"
    if (overlap := _overlap(runs)) and baseline.fact("device") == "cpu":
        yield f"{overlap[0]} and {overlap[1]} ran at the same time"
    yield from dict.fromkeys(remark for run in runs for remark in run.remarks)
    code = [(run.summary.get("git") or {}) for run in runs]
    if len(commits := dict.fromkeys(str(git["commit"])[:10] for git in code if git.get("commit"))) > 1:
        yield f"the runs used several commits of the program: {', '.join(commits)}"
    if any(git.get("dirty") for git in code):
        yield "the program had uncommitted changes: whether all runs used the same code is unknown"
    if stopped := [run.folder.name for run in runs if run.summary.get("status") == "interrupted"]:
        yield f"interrupted before the end: {', '.join(stopped)}"
    if interval is None or verdict == "not_comparable":
        return
    if interval.n == 1:
        yield "one run per side cannot show how much processes differ: 5 % is assumed; repeats=3 measures it"
    if verdict == "inconclusive":
        needed = repeats_to_decide(interval) or "over 100"
        yield f"any ratio from {interval.low:.2f} to {interval.high:.2f} is possible; {needed} repeats would decide it"


def _loss_gap(first: Sequence[Run], second: Sequence[Run]) -> float | None:
    """Mean of candidate - baseline over the last quarter of the steps that both logged, over all pairs of repeats."""
    gaps = []
    for one, other in zip(first, second, strict=True):
        steps = sorted(one.losses.keys() & other.losses.keys())
        last = steps[-max(1, len(steps) // 4) :] if steps else []
        gaps += [other.losses[step] - one.losses[step] for step in last]
    return statistics.fmean(gaps) if gaps else None
