"""Which runs may be compared with which, and the verdict on each pair. No torch here."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cl_train.comparison.run_records import Run
from cl_train.comparison.statistics import SMALLEST_DIFFERENCE, Interval, interval_of_runs, verdict_of
from cl_train.system.machine_load import BUSY_PCT, TOO_BUSY_PCT

LOADER_BOUND_PCT = 20.0  # share of the time in which the step waited for its batch

# Settings that do not change what a step costs: where they differ the speeds still compare, the losses do not.
_OTHER_TRAINING = ("seed", "weights", "epochs", "max_steps", "optim.lr", "optim.momentum", "optim.weight_decay")
_OTHER_TRAINING_GROUPS = ("schedule.", "amp.")
# Settings that change neither.
_BOOKKEEPING = (
    *(
        "nproc",
        "repeats",
        "resume_sweep",
        "compare_by",
        "resume",
        "profile",
        "tensorboard",
        "log_every",
        "warmup_steps",
    ),
    *("evaluate_every", "on_nonfinite", "max_nonfinite", "rank_timeout_s", "data.on_bad_image", "data.max_bad_images"),
)
_BOOKKEEPING_GROUPS = ("checkpoint.",)
# Facts of the summary that a comparison holds equal, beside the settings.
_FACTS = ("precision", "world_size", "device", "device_name", "compile", "image_size", "global_batch_size")
# A fact that is told by a setting, which then names the difference alone.
_TOLD_BY = {"image_size": "data.image_size", "global_batch_size": "batch_size"}
# What differs by definition when runs are compared by a key.
_FOLLOWS = {
    "channels_last": ("memory_format", "conversion", "select"),
    "conversion": ("memory_format", "select"),
    "compile": ("compile_mode",),
    "device": ("device_name", "precision", "environment.cuda", "environment.cudnn", "environment.driver"),
    "nproc": ("world_size", "global_batch_size"),
    "batch_size": ("global_batch_size",),
    "data.image_size": ("image_size",),
}


@dataclass(frozen=True)
class Pair:
    """Runs that differ in one key, `baseline` against `candidate`, and what came of it."""

    held_equal: dict[str, Any]
    baseline: str
    candidate: str
    baseline_images_per_s: float | None
    candidate_images_per_s: float | None
    interval: Interval | None
    verdict: str  # faster, slower, no_difference, not_comparable
    bottleneck: str  # compute or loader
    loss_gap: float | None  # mean of candidate - baseline over the last quarter of equal steps
    baseline_peak_memory_gib: float | None
    candidate_peak_memory_gib: float | None
    notes: list[str]


def compare_runs(
    runs: Sequence[Run], by: str = "channels_last", parity_failures: Mapping[str, str] | None = None
) -> list[Pair]:
    """Pair runs that are equal but for `by`; repeats are paired by their number, else in the order in which they ran.

    What finds no equal partner is paired with the most similar run of its model that is not `by`-equal, so that the
    report can say what differs: such a pair is never comparable. `parity_failures` are messages by model.
    """
    failures = parity_failures or {}
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in sorted(runs, key=lambda run: run.started_at):
        signature = json.dumps(_held_equal(run, by), sort_keys=True, default=str)
        groups.setdefault(signature, {}).setdefault(str(run.settings.get(by)), []).append(run)
    pairs, lonely = [], []
    for group in groups.values():
        values = sorted(group, key=_baseline_first)
        if len(values) == 1:
            lonely.append(group[values[0]])
        for value in values[1:]:
            first, second = _same_repeats(group[values[0]], group[value])
            pairs.append(compare_pair(first, second, by, failures.get(first[0].fact("model"))))
    return pairs + [compare_pair(*couple, by) for couple in _couples(lonely, by)]


def _same_repeats(baseline: list[Run], candidate: list[Run]) -> tuple[list[Run], list[Run]]:
    """The repeats (and seeds) that both sides have: those ran beside each other, which is what cancels drift.

    Where one side's run failed, its partner is left out. Where nothing tells its runs apart, they pair as they ran.
    """
    sides = [{_repeat_of(run): run for run in runs} for runs in (baseline, candidate)]
    common = [key for key in sides[0] if key in sides[1]]
    if not common or len(sides[0]) < len(baseline) or len(sides[1]) < len(candidate):
        return baseline, candidate
    return [sides[0][key] for key in common], [sides[1][key] for key in common]


def _repeat_of(run: Run) -> str:
    return json.dumps([run.repeat, {key: value for key, value in run.settings.items() if _changes_training(key)}])


def _baseline_first(value: str) -> tuple[bool, str]:
    """`false`, fp32 and the like come first: what a reader takes for granted is the baseline."""
    return (value.lower() not in ("false", "fp32"), value)


def _couples(lonely: Sequence[list[Run]], by: str) -> list[tuple[list[Run], list[Run]]]:
    couples = []
    rest = sorted(lonely, key=lambda runs: _baseline_first(str(runs[0].settings.get(by))))
    while rest:
        first = rest.pop(0)
        partners = [
            other
            for other in rest
            if other[0].settings.get(by) != first[0].settings.get(by)
            and other[0].fact("model") == first[0].fact("model")
        ]
        if partners:
            best = min(partners, key=lambda other: len(differences(first[0], other[0], by)))
            rest.remove(best)
            couples.append((first, best))
    return couples


def compare_pair(
    baseline: Sequence[Run], candidate: Sequence[Run], by: str = "channels_last", parity_failure: str | None = None
) -> Pair:
    """The verdict on repeats of one setting against repeats of another.

    Not comparable are: settings that change a step's cost; too few windows; layouts that compute different things
    (`parity_failure`); and a loader-bound pair without a difference, because the loader hides whatever there is.
    """
    count = min(len(baseline), len(candidate))
    first, second = list(baseline[:count]), list(candidate[:count])
    names = _names(first[0], second[0], by)
    obstacles = [_spoken(difference, names) for difference in differences(first[0], second[0], by)]
    interval = None
    try:
        interval = interval_of_runs([run.images_per_s for run in first], [run.images_per_s for run in second])
    except ValueError as error:
        obstacles.append(f"{error}: more steps (epochs, max_steps) or a smaller log_every")
    if parity_failure is not None:
        obstacles.append(parity_failure)
    others_pct = _others_pct([*first, *second])
    if _is_too_busy(first[0], others_pct):
        obstacles.append(f"other processes took up to {others_pct:.0f} % of the cores meanwhile; use a quiet machine")
    waits = [statistics.median(run.data_wait_pct for run in runs) for runs in (first, second)]
    is_loader_bound = max(waits) >= LOADER_BOUND_PCT
    notes = [_loader_note(waits, names)] if is_loader_bound else []
    verdict = "not_comparable" if obstacles or interval is None else verdict_of(interval)
    if is_loader_bound and verdict == "no_difference":
        verdict = "not_comparable"
    return Pair(
        held_equal=_shown(first[0], second[0], by),
        baseline=names[0],
        candidate=names[1],
        baseline_images_per_s=_speed(first),
        candidate_images_per_s=_speed(second),
        interval=interval,
        verdict=verdict,
        bottleneck="loader" if is_loader_bound else "compute",
        loss_gap=_loss_gap(first, second),
        baseline_peak_memory_gib=_median_fact(first, "peak_memory_gib"),
        candidate_peak_memory_gib=_median_fact(second, "peak_memory_gib"),
        notes=[*notes, *obstacles, *_remarks(first, second, by, interval, verdict)],
    )


def differences(first: Run, second: Run, by: str) -> list[tuple[str, Any, Any]]:
    """What differs and changes the cost of a step: (name, value of first, value of second)."""
    one, other = _held_equal(first, by), _held_equal(second, by)
    differing = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    if not (first.summary and second.summary):  # a run that was killed has none, and so tells no facts
        differing = [key for key in differing if key in first.settings or key in second.settings]
    return [(key, one.get(key), other.get(key)) for key in differing if _TOLD_BY.get(key) not in differing]


def _held_equal(run: Run, by: str) -> dict[str, Any]:
    """Everything that must be equal for a speed to be compared."""
    values = {key: value for key, value in run.settings.items() if not _is_free(key)}
    values |= {name: run.summary[name] for name in _FACTS if name in run.summary}
    values |= {f"environment.{name}": value for name, value in (run.summary.get("environment") or {}).items()}
    for key in (by, *_FOLLOWS.get(by, ())):
        values.pop(key, None)
    return values


def _is_free(key: str) -> bool:
    return key in (*_OTHER_TRAINING, *_BOOKKEEPING) or key.startswith((*_OTHER_TRAINING_GROUPS, *_BOOKKEEPING_GROUPS))


_SHOWN = ("precision", "compile", "batch_size", "world_size", "device_name", "channels_last")
_SHOWN_OF_DATA = ("data.name", "data.image_size", "data.workers")


def _shown(first: Run, second: Run, by: str) -> dict[str, Any]:
    """The few of the equal settings that tell one pair from another in a table."""
    models = list(dict.fromkeys([first.fact("model"), second.fact("model")]))
    shown = {"model": " and ".join(map(str, models))}
    for name in (*_SHOWN, *_SHOWN_OF_DATA):
        if name != by and first.fact(name) == second.fact(name):
            shown["data" if name == "data.name" else name.removeprefix("data.")] = first.fact(name)
    return shown


def _names(first: Run, second: Run, by: str) -> tuple[str, str]:
    """`contiguous` and `channels_last` for layouts, else `precision=bf16`."""
    if by != "channels_last":
        return f"{by}={_text(first.settings.get(by))}", f"{by}={_text(second.settings.get(by))}"
    layouts = {"false": "contiguous", "true": "channels_last"}
    asked = [str(run.settings.get(by)).lower() for run in (first, second)]
    names = [
        layouts.get(word, f"auto ({run.fact('memory_format')})")
        for word, run in zip(asked, (first, second), strict=True)
    ]
    return (names[0], names[1]) if names[0] != names[1] else (f"{names[0]} A", f"{names[1]} B")


def _spoken(difference: tuple[str, Any, Any], names: tuple[str, str]) -> str:
    key, first, second = difference
    return f"{key} differs: {_text(first)} ({names[0]}) and {_text(second)} ({names[1]})"


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _others_pct(runs: Sequence[Run]) -> float:
    return max(run.others_pct or 0.0 for run in runs)


def _is_too_busy(run: Run, others_pct: float) -> bool:
    """A GPU's speed depends on free cores less."""
    return others_pct >= TOO_BUSY_PCT and run.fact("device") == "cpu"


def _loader_note(waits: Sequence[float], names: tuple[str, str]) -> str:
    return (
        f"loader-bound: the step waited for its batch {waits[0]:.0f} % ({names[0]}) and {waits[1]:.0f} % ({names[1]}) "
        "of the time, so the speeds are largely the loader's; more data.workers, a local disk, or data=synthetic"
    )


def _speed(runs: Sequence[Run]) -> float | None:
    medians = [statistics.median(run.images_per_s) for run in runs if run.images_per_s]
    return statistics.median(medians) if medians else None


def _median_fact(runs: Sequence[Run], name: str) -> float | None:
    values = [run.summary[name] for run in runs if run.summary.get(name) is not None]
    return statistics.median(values) if values else None


def _loss_gap(baseline: Sequence[Run], candidate: Sequence[Run]) -> float | None:
    """Mean of candidate - baseline over the last quarter of the steps that both logged, over all pairs of repeats."""
    gaps = []
    for first, second in zip(baseline, candidate, strict=True):
        steps = sorted(first.losses.keys() & second.losses.keys())
        last = steps[-max(1, len(steps) // 4) :] if steps else []
        gaps += [second.losses[step] - first.losses[step] for step in last]
    return statistics.fmean(gaps) if gaps else None


def _remarks(
    baseline: Sequence[Run], candidate: Sequence[Run], by: str, interval: Interval | None, verdict: str
) -> list[str]:
    """What a reader should know about a pair beside its verdict."""
    first, second = baseline[0], candidate[0]
    remarks = []
    other = [
        key for key in first.settings if _changes_training(key) and first.settings[key] != second.settings.get(key)
    ]
    if other:
        remarks.append(f"other training, so the loss gap says nothing about the layout: {', '.join(other)}")
    if by == "channels_last" and first.settings.get(by) == second.settings.get(by):
        remarks.append("both sides have the same layout: what differs is noise")
    elif by == "channels_last" and first.fact("memory_format") == second.fact("memory_format") is not None:
        remarks.append(f"both sides ran {first.fact('memory_format')}")
    if by == "channels_last" and first.settings.get("compile"):
        remarks.append("compiled: the compiler may lay out convolutions channels_last on the contiguous side too")
    if interval is not None and interval.n == 1:
        remarks.append("one run each: the interval allows for drift between them; repeats=3 narrows it")
    if interval is not None and verdict == "no_difference" and interval.width > 5 * SMALLEST_DIFFERENCE:
        remarks.append(f"noisy: anything from {interval.low:.2f} to {interval.high:.2f} fits; more repeats would show")
    others_pct = _others_pct([*baseline, *candidate])
    if others_pct >= BUSY_PCT and not _is_too_busy(first, others_pct):
        remarks.append(f"other processes took up to {others_pct:.0f} % of the cores meanwhile")
    stopped = [run.folder.name for run in [*baseline, *candidate] if run.summary.get("status") != "completed"]
    if stopped:
        remarks.append(f"not run to its end: {', '.join(stopped)}")
    return remarks


def _changes_training(key: str) -> bool:
    return key in _OTHER_TRAINING or key.startswith(_OTHER_TRAINING_GROUPS)
