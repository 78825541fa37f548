"""Which runs may be compared with which, and the verdict on each pair.

`interval_of_runs` and `verdict_of` of measure/statistics.py turn the speeds into a verdict; this
module finds what forbids a comparison (`_obstacles`) or explains a verdict (`_remarks`).
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cl_train.config.schema import LAYOUT_NAMES, affects
from cl_train.config.validation import show
from cl_train.measure.statistics import (
    HOST_BOUND,
    MIN_WINDOWS,
    Interval,
    are_host_bound,
    interval_of_runs,
    repeats_to_decide,
    verdict_of,
)
from cl_train.system.processes import BUSY_PCT, LOST_PCT
from cl_train.system.run_folder import Run
from cl_train.system.tables import counted

LOADER_BOUND_PCT = 20.0  # share of the time in which the step waited for its batch
MAX_GAP_H = 12.0  # from the end of one run to the start of the other: the machine may change

# Fields of the summary that must be equal, like the settings with affects="speed".
_FACTS = ("precision", "device", "device_name", "world_size")
_CUDA = ("environment.cuda", "environment.cudnn")
# Fields that may differ too when runs are compared by a key: they follow from it.
_DEPENDENT = {
    "channels_last": ("conversion", "select"),
    "conversion": ("select",),
    "device": ("device_name", "precision", *_CUDA, "environment.driver"),
    "nproc": ("world_size", "global_batch_size"),
    "environment": ("environment.torch", "environment.torchvision", "environment.python", *_CUDA),
    "optim.name": ("optim.library", "optim.decay_norm_and_bias"),
    "batch_size": ("global_batch_size",),
}
# Where the summary has the value that a run used, for settings that can be `auto`.
_OUTCOME = {
    "channels_last": "memory_format",
    "precision": "precision",
    "device": "device",
    "nproc": "world_size",
}
_DATA = ("data.name", "data.image_size", "data.workers")
_SHOWN = (*_FACTS, "compile", "batch_size", "channels_last", *_DATA)  # in the report, if equal


@dataclass(frozen=True)
class Pair:
    """Runs that differ in one key, and the verdict on the candidate against the baseline."""

    held_equal: dict[str, Any]
    sides: dict[str, list[Run]]  # by name: the baseline, then the candidate
    interval: Interval | None
    verdict: str  # faster, slower, no_difference, inconclusive or not_comparable
    bottleneck: str  # compute, loader or host
    loss_gap: float | None  # mean of candidate - baseline over the last quarter of the common steps
    repeats_to_decide: int | None  # runs per side that would probably decide an inconclusive pair
    notes: list[str]  # the first one is the reason if the verdict is not_comparable
    is_disturbed: bool  # more runs may get a verdict: only other processes prevent it

    @property
    def facts(self) -> dict[str, Any]:
        """What the sides have in common, and their names."""
        return self.held_equal | dict(zip(("baseline", "candidate"), self.sides, strict=True))

    @property
    def runs(self) -> list[Run]:
        return [run for runs in self.sides.values() for run in runs]

    @property
    def words(self) -> str:
        return self.verdict.replace("_", " ")

    @property
    def ratio(self) -> str:
        """The ratio with its interval."""
        untrusted = "untrusted " if self.verdict == "not_comparable" else ""
        return f"{untrusted}{self.interval}" if self.interval else "-"


def compare_runs(runs: Sequence[Run], by: str = "channels_last", looks: int = 1) -> list[Pair]:
    """Pairs runs that differ only in `by`. Runs without such a partner are paired with others of
    the model, as not comparable. `looks`: see `interval_of_runs`.
    """
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in sorted(runs, key=lambda run: run.times):
        equal = str(sorted(_held_equal(run, by).items()))
        groups.setdefault(equal, {}).setdefault(_value(run, by), []).append(run)

    pairs = []
    alone: dict[str, list[list[Run]]] = {}  # repeats of one value, by model
    for group in groups.values():
        first, *others = _baseline_first(group.values(), by)
        pairs += [compare_pair(first, other, by, looks) for other in others]
        if not others:
            alone.setdefault(str(first[0].fact("model")), []).append(first)
    for repeats in alone.values():
        first, *others = _baseline_first(repeats, by)
        for one in others:
            value = _value(one[0], by)
            partners = [side for side in (first, others[-1]) if _value(side[0], by) != value]
            pairs += [compare_pair(partner, one, by) for partner in partners[:1]]
    return pairs


def compare_pair(
    one: list[Run], other: list[Run], by: str = "channels_last", looks: int = 1
) -> Pair:
    """Returns the verdict on repeats of one setting against repeats of another, in either order."""
    repeats = _repeats(*_baseline_first((one, other), by))
    # This favours no side: what other processes do does not depend on it.
    quiet = [pair for pair in repeats if not any(run.is_disturbed for run in pair)]
    left_out = len(repeats) - len(quiet) if len(quiet) >= 2 else 0
    first, second = map(list, zip(*(quiet if left_out else repeats), strict=True))
    sides = dict(zip(_names(first[0], second[0], by), (first, second), strict=True))

    notes = list(_obstacles(sides, by))
    is_disturbed = len(notes) == 1 and any(run.is_disturbed for run in [*first, *second])
    speeds = [run.window_speeds for run in first], [run.window_speeds for run in second]
    is_host_bound = are_host_bound(run.host_bound_pct for run in [*first, *second])
    interval, verdict = None, "not_comparable"
    if all(run.windows_after_warmup >= MIN_WINDOWS for run in [*first, *second]):
        interval = interval_of_runs(*speeds, looks=looks)
        verdict = verdict if notes else verdict_of(interval, is_host_bound=is_host_bound)

    waits_pct = [statistics.median(run.data_wait_pct for run in runs) for runs in sides.values()]
    is_loader_bound = max(waits_pct) >= LOADER_BOUND_PCT
    if is_host_bound:
        notes.append(HOST_BOUND)
    is_explained = _waiting_explains(verdict, *waits_pct)
    verdict = "not_comparable" if is_explained else verdict
    if is_loader_bound or is_explained:
        waits = _of_both([f"{pct:.0f} %" for pct in waits_pct], sides)
        advice = "use more data.workers, a local disk, or data=synthetic"
        notes.append(f"loader-bound: the step waited for its batch {waits}; {advice}")

    notes += _remarks(sides, by)
    if left_out:
        notes.append(f"left out, because other processes disturbed them: {left_out} of the repeats")
    if len(first) == 1 and verdict != "not_comparable":
        assumed = "one run per side cannot show how much processes differ: 5 % is assumed"
        notes.append(f"{assumed}; repeats=4 measures it")
    return Pair(
        _shown_equal(first[0], second[0], by),
        sides,
        interval,
        verdict,
        "loader" if is_loader_bound else "host" if is_host_bound else "compute",
        _loss_gap(first, second),
        repeats_to_decide(*speeds, looks=looks) if verdict == "inconclusive" else None,
        notes,
        is_disturbed,
    )


def _waiting_explains(verdict: str, baseline_pct: float, candidate_pct: float) -> bool:
    """Whether the verdict may come from waiting for data: the slower side waited longer, or the
    loader hid a difference. (If the faster side waits more, it would be faster still.)
    """
    if verdict not in ("faster", "slower"):
        return max(baseline_pct, candidate_pct) >= LOADER_BOUND_PCT
    longer_pct = candidate_pct - baseline_pct
    return (longer_pct if verdict == "slower" else -longer_pct) >= LOADER_BOUND_PCT / 2


def _value(run: Run, by: str) -> str:
    return str(run.settings.get(by))


def _baseline_first(sides: Iterable[list[Run]], by: str) -> list[list[Run]]:
    """Sorts `false` and `fp32` first, then numbers by size: the usual value is the baseline."""

    def place(repeats: Sequence[Run]) -> tuple[bool, float, str]:
        value = _value(repeats[0], by)
        is_number = value.replace(".", "", 1).isdecimal()
        return value.lower() not in ("false", "fp32"), float(value) if is_number else 0.0, value

    return sorted(sides, key=place)


def _names(first: Run, second: Run, by: str) -> tuple[str, str]:
    """Returns `contiguous` and `channels_last` for layouts, else such as `precision=bf16`. Equal
    values get the folder, too.
    """
    layouts = LAYOUT_NAMES if by == "channels_last" else {}
    values = [f"{show(run.settings.get(by)):.200}" for run in (first, second)]
    one, other = (layouts.get(value, f"{by}={value}") for value in values)
    if one != other:
        return one, other
    return f"{one} ({first.folder})", f"{other} ({second.folder})"


def _of_both(values: Sequence[str], sides: dict[str, list[Run]]) -> str:
    return " and ".join(f"{value} ({name})" for value, name in zip(values, sides, strict=True))


def _repeats(baseline: Sequence[Run], candidate: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pairs runs of the same repeat and seed, or in their order if they cannot be distinguished."""
    keys = {*_differing(baseline), *_differing(candidate)}
    sides = [
        {str([run.repeat, *(run.settings.get(key) for key in keys)]): run for run in runs}
        for runs in (baseline, candidate)
    ]
    pairs = [(run, sides[1][key]) for key, run in sides[0].items() if key in sides[1]]
    is_unique = len(sides[0]) == len(baseline) and len(sides[1]) == len(candidate)
    return pairs if pairs and is_unique else list(zip(baseline, candidate, strict=False))


def _loss_gap(first: Sequence[Run], second: Sequence[Run]) -> float | None:
    gaps = []
    for baseline, candidate in zip(first, second, strict=True):
        steps = sorted(baseline.losses.keys() & candidate.losses.keys())
        last = steps[-max(1, len(steps) // 4) :]
        gaps += [candidate.losses[step] - baseline.losses[step] for step in last]
    return statistics.fmean(gaps) if gaps else None


def _differing(runs: Sequence[Run]) -> list[str]:
    """Returns the settings with an effect on speed or loss that the runs do not have in common."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if affects(key) != "nothing")
    return [key for key in keys if len({str(run.settings.get(key)) for run in runs}) > 1]


def _held_equal(run: Run, by: str) -> dict[str, Any]:
    """Returns everything that must be equal for speeds to be compared."""
    settings = {key: value for key, value in run.settings.items() if affects(key) == "speed"}
    facts = {
        key: value
        for key, value in run.summary.items()
        if key in _FACTS or key.startswith("environment")
    }
    allowed = (by, "nproc", *_DEPENDENT.get(by, ()))
    return {key: value for key, value in (settings | facts).items() if key not in allowed}


def _shown_equal(first: Run, second: Run, by: str) -> dict[str, Any]:
    """Returns what the report lists as equal, without the prefix `data.`."""
    models = dict.fromkeys(str(run.fact("model")) for run in (first, second))
    return {"model": " and ".join(models)} | {
        name.removesuffix(".name").removeprefix("data."): first.fact(name)
        for name in _SHOWN
        if name != by and first.fact(name) == second.fact(name)
    }


def _obstacles(sides: dict[str, list[Run]], by: str) -> Iterator[str]:
    """Yields reasons why the speeds of two sides cannot be compared, one sentence each."""
    first, second = sides.values()
    baseline, candidate, runs = first[0], second[0], [*first, *second]
    on_cpu = baseline.fact("device") == "cpu"
    yield from dict.fromkeys(problem for run in runs for problem in run.problems)

    one, other = _held_equal(baseline, by), _held_equal(candidate, by)
    for key in {**one, **other}:
        if one.get(key) != other.get(key):
            values = [f"{show(held.get(key)):.200}" for held in (one, other)]
            yield f"{key} differs: {_of_both(values, sides)}"
    for run in (baseline, candidate):
        if by not in run.settings:
            yield f"{by} of {run.folder.name} is unknown"
    outcome = _OUTCOME.get(by, "")
    used = [{run.summary.get(outcome) for run in side} - {None} for side in (first, second)]
    ran_with = " and ".join(sorted(map(str, used[0] | used[1])))
    if max(map(len, used)) > 1:
        yield f"the repeats of one side ran with different {outcome}: {ran_with}"
    elif _value(baseline, by) != _value(candidate, by) and used[0] & used[1]:
        yield f"both sides ran with {outcome} {ran_with}"

    if few := next(filter(None, map(too_few_windows, runs)), None):
        yield few
    times = [sorted((one.times, two.times)) for one, two in zip(first, second, strict=True)]
    gap_h = max((later[0] - earlier[1]) / 3600 for earlier, later in times)
    if gap_h > MAX_GAP_H:
        yield f"the runs are {gap_h:.0f} hours apart: repeat them on the same day"
    for before, after in pairwise(sorted(runs, key=lambda run: run.times)):
        # What others take of a CPU is measured; nothing measures who else uses a GPU.
        if after.times[0] < before.times[1] and not on_cpu:
            both_ran = f"{before.folder.name} and {after.folder.name} ran at the same time"
            yield f"{both_ran}, perhaps on the same device: run them in turn"

    for run in runs:
        if others := run.summary.get("gpu.other_processes"):
            yield f"{others} other processes used the GPU of {run.folder.name}"
        if run.summary.get("gpu.is_slowed"):
            yield f"heat or a power brake slowed the GPU of {run.folder.name}: cool it, and repeat"
    lost_pct = [max(run.lost_pct for run in side) for side in (first, second)]
    # A GPU's speed suffers less; equal losses are no problem.
    if max(lost_pct) >= LOST_PCT and (on_cpu or abs(lost_pct[0] - lost_pct[1]) >= LOST_PCT):
        shares = _of_both([f"{pct:.0f} %" for pct in lost_pct], sides)
        yield f"other processes took up to {shares} of the time: the runs waited for a core"


def too_few_windows(run: Run) -> str | None:
    """Returns why a run is too short for a verdict and the setting that makes it long enough, or
    None.
    """
    if (count := run.windows_after_warmup) >= MIN_WINDOWS:
        return None
    few = f"{run.folder.name} has {counted(count, 'window')} after warm-up, not {MIN_WINDOWS}"
    steps, epochs = run.fact("steps"), run.fact("epochs")
    warmup, log_every = run.settings.get("warmup_steps"), run.settings.get("log_every")
    if not (steps and epochs and log_every) or warmup is None:
        return f"{few}: use more steps or a smaller log_every"
    # An epoch ends a window, too.
    epoch_steps = math.ceil(steps / epochs)
    needed = warmup + MIN_WINDOWS * min(log_every, epoch_steps)
    advice = f"epochs={math.ceil(needed / epoch_steps)}"
    if run.settings.get("max_steps"):
        advice = f"max_steps={needed}"
    if (shorter := (steps - warmup) // MIN_WINDOWS) >= 1:
        advice += f" or log_every={shorter}"
    return f"{few}: use {advice}"


def _remarks(sides: dict[str, list[Run]], by: str) -> Iterator[str]:
    """Yields notes that do not prevent a verdict but help to interpret it."""
    first, second = sides.values()
    baseline, candidate, runs = first[0], second[0], [*first, *second]
    changed = [key for key in _differing([baseline, candidate]) if key != by]
    if of_loss := [key for key in changed if affects(key) == "loss"]:
        yield f"the loss gap is not caused by {by} only; also different: {', '.join(of_loss)}"
    allowed = {key: (baseline.fact(key), candidate.fact(key)) for key in _DEPENDENT.get(by, ())}
    if different := [
        f"{key} ({show(one)} and {show(two)})" for key, (one, two) in allowed.items() if one != two
    ]:
        yield f"also different, which compare_by={by} allows: {', '.join(different)}"
    if by == "channels_last" and baseline.settings.get("compile"):
        yield "compiled: the compiler may use channels_last on the contiguous side too"
    if any("lost_pct" not in run.summary for run in runs):
        yield "what other processes took from the runs is unknown: summary.json has no lost_pct"
    busiest = max(run.summary.get("others_pct", 0.0) for run in runs)
    if busiest >= BUSY_PCT:
        yield f"other processes used up to {busiest:.0f} % of the CPU cores during the runs"
    commits = {run.summary.get("git.commit") for run in runs} - {None}
    if len(commits) > 1 or any(run.summary.get("git.dirty") for run in runs):
        yield "the runs may have used different code: several commits, or uncommitted changes"
    if stopped := [run.folder.name for run in runs if run.summary.get("status") == "interrupted"]:
        yield f"interrupted before the end: {', '.join(stopped)}"
