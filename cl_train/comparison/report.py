"""`comparison.json`, `.md`, `.csv` and a chart, and the verdict in one sentence."""

import csv
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cl_train.comparison.chart import Bar, write_chart
from cl_train.comparison.dashboard import write_dashboard
from cl_train.comparison.pairs import Pair, compare_runs, compare_two, differing
from cl_train.comparison.run_records import Run, read_run
from cl_train.comparison.sweep_plan import Job, problem_of, read_sweep
from cl_train.config.schema import ConfigError
from cl_train.memory_format.audit_report import markdown_table
from cl_train.system.files import write_json, write_text

SCHEMA_VERSION = 1
VERDICTS = ("faster", "slower", "no_difference", "inconclusive", "not_comparable")


@dataclass(frozen=True)
class FailedJob:
    """A job of a sweep that did not finish, or a run folder that cannot be compared."""

    job: int
    overrides: str
    why: str


@dataclass(frozen=True)
class Report:
    """The pairs of a sweep, or of folders that the user named."""

    pairs: list[Pair]
    failed: list[FailedJob] = field(default_factory=list)
    by: str = "channels_last"
    differing: list[str] = field(default_factory=list)  # settings that the runs do not have in common


def compare_folders(
    folders: Sequence[Path],
    by: str | None = None,
    *,
    out: Path | None = None,
    parity_failures: Mapping[str, str] | None = None,
    show_table: bool = False,
) -> Report:
    """Compare a sweep, a folder of runs, or two or more runs; print the verdict, and write the report to `out`.

    `by` and `out` are by default those of the sweep. `parity_failures`: why runs cannot be compared, by model.
    Raises ConfigError: a folder cannot be read, is named twice, or there are fewer than two runs.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("a run cannot be compared with itself: a folder is named twice")
    failed: list[FailedJob] = []
    if len(folders) > 1:
        runs, by = [read_run(folder) for folder in folders], by or "channels_last"
    else:
        jobs, compare_by = _read_jobs(folders[0])
        runs, by, is_sweep = [], by or compare_by, (folders[0] / "sweep.json").is_file()
        for job in jobs:
            try:
                if is_sweep and (problem := problem_of(folders[0] / job.name)):
                    raise ConfigError(problem)
                runs.append(replace(read_run(folders[0] / job.name), repeat=job.repeat))
            except ConfigError as error:
                failed.append(FailedJob(job.number, " ".join(job.overrides), str(error)))
        if is_sweep:
            out = out or folders[0]
    for model, why in (parity_failures or {}).items():
        runs = [replace(run, problems=[*run.problems, why]) if run.fact("model") == model else run for run in runs]
    pairs = [compare_two(runs[0], runs[1], by)] if len(folders) == 2 else compare_runs(runs, by)
    report = Report(pairs, failed, by, differing(runs))
    if out:
        write_report(report, out)
    for missing in failed:
        print(f"not finished: job {missing.job} ({missing.overrides}): {missing.why}")
    where = f"Report: {out / 'comparison.md'}" if out else "For the report as files: out=FOLDER"
    if show_table:
        print(f"{as_markdown(report)}\n{where}", flush=True)
    else:
        print(f"{verdict_sentence(report)} {where}", flush=True)
    return report


def _read_jobs(folder: Path) -> tuple[list[Job], str]:
    """The jobs of a sweep, or one for each run in a folder of runs; and the setting to compare by."""
    if (folder / "sweep.json").is_file():
        sweep = read_sweep(folder)
        return sweep.jobs, sweep.compare_by
    names = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
    if len(names) < 2:
        raise ConfigError(f"{folder}: neither a sweep (sweep.json) nor a folder of two or more runs")
    return [Job(number, name, [name]) for number, name in enumerate(names)], "channels_last"


def write_report(report: Report, folder: Path) -> None:
    """Write all files of the report and its TensorBoard page into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_row(pair) for pair in report.pairs]
    labels = [label_of(pair, report.pairs) for pair in report.pairs]
    failed = [asdict(job) for job in report.failed]
    document = {"schema_version": SCHEMA_VERSION, "verdict": verdict_sentence(report), "pairs": rows, "failed": failed}
    write_json(folder / "comparison.json", document, indent=2)
    _write_csv(rows, folder / "comparison.csv")
    bars = [
        Bar(label, pair.interval, pair.verdict, _words(pair)) for label, pair in zip(labels, report.pairs, strict=True)
    ]
    has_chart = write_chart({"": bars}, _title(report.pairs), _sides(report.pairs), folder / "comparison.png")
    text = as_markdown(report, has_chart=has_chart)
    write_text(folder / "comparison.md", text)
    write_dashboard(report.pairs, labels, text, folder)


def _words(pair: Pair) -> str:
    """The ratio and the verdict, or why there is none."""
    reason = f": {pair.notes[0]}" if pair.verdict == "not_comparable" else ""
    return f"{_ratio(pair)} {pair.verdict.replace('_', ' ')}{reason}"


def _ratio(pair: Pair) -> str:
    if pair.interval is None:
        return "-"
    return f"{'untrusted ' if pair.verdict == 'not_comparable' else ''}{pair.interval}"


def _sides(pairs: Sequence[Pair]) -> tuple[str, str]:
    """The names of baseline and candidate if they are the same for all pairs."""
    names = {(pair.baseline, pair.candidate) for pair in pairs}
    return names.pop() if len(names) == 1 else ("baseline", "candidate")


def _title(pairs: Sequence[Pair]) -> str:
    """What the chart shows, and the model, precision and device if they are the same for all pairs."""
    equal: list[str] = []
    for name in ("model", "precision", "device_name"):
        values = {str(pair.held_equal.get(name)) for pair in pairs}
        equal += values if len(values) == 1 and values != {"None"} else []
    return "Training speed: {1} against {0}\n{2}".format(*_sides(pairs), ", ".join(equal))


def _row(pair: Pair) -> dict[str, Any]:
    """A pair as in comparison.json."""
    interval = pair.interval.to_dict() if pair.interval else {}
    return {
        **pair.held_equal,
        "baseline": pair.baseline,
        "candidate": pair.candidate,
        "speed": "compute" if pair.held_equal.get("data") == "synthetic" else "end_to_end",
        **_both(pair, "images_per_s", lambda run: run.median_images_per_s, 2),
        "ratio": interval.get("ratio"),
        "ci95": interval.get("ci95"),
        "n": len(pair.baseline_runs),
        "verdict": pair.verdict,
        "repeats_to_decide": pair.repeats_to_decide,
        "loss_gap": None if pair.loss_gap is None else round(pair.loss_gap, 5),
        **_both(pair, "top1", lambda run: run.top1, 2),
        "bottleneck": pair.bottleneck,
        **_both(pair, "peak_memory_gib", lambda run: run.summary.get("peak_memory_gib"), 3),
        "notes": pair.notes,
    }


def _both(pair: Pair, name: str, value: Callable[[Run], float | None], digits: int) -> dict[str, float | None]:
    """The medians over the runs of both sides."""
    sides = {"baseline": pair.baseline_runs, "candidate": pair.candidate_runs}
    return {f"{side}_{name}": _median([value(run) for run in runs], digits) for side, runs in sides.items()}


def _median(values: Sequence[float | None], digits: int) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), digits) if known else None


def _write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    flat = []
    for row in rows:
        low, high = row["ci95"] or (None, None)
        cells = {name: value for name, value in row.items() if name != "ci95"}
        flat.append(cells | {"ci95_low": low, "ci95_high": high, "notes": " | ".join(row["notes"])})
    names = dict.fromkeys(name for row in flat for name in row)  # the rows have different settings in common
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(names) or ["verdict"])
        writer.writeheader()
        writer.writerows(flat)


# --- sentences --------------------------------------------------------------------------------------------------------


def verdict_sentence(report: Report) -> str:
    """The outcome, for the last line on the console."""
    pairs, failed = report.pairs, len(report.failed)
    after = f" {failed} job{'s' if failed > 1 else ''} did not finish." if failed else ""
    if not pairs:
        keys = report.differing if report.by not in report.differing else []
        advice = f"; they differ in {', '.join(keys[:3])}: use compare_by={keys[0]}" if keys else ""
        return f"Nothing to compare: no two runs differ only in {report.by}{advice}.{after}"
    if len(pairs) == 1:
        return f"{_pair_sentence(pairs[0])}{after}"
    parts = []
    for verdict in VERDICTS:
        chosen = [pair for pair in pairs if pair.verdict == verdict]
        if chosen:
            parts.append(f"{verdict.replace('_', ' ')} in {len(chosen)} ({_members(chosen, pairs)})")
    baseline, candidate = _sides(pairs)
    return f"Speed of {candidate} against {baseline}, {len(pairs)} pairs: {'; '.join(parts)}.{after}"


def _pair_sentence(pair: Pair) -> str:
    precision, interval = pair.held_equal.get("precision"), pair.interval
    what = f"{pair.held_equal['model']}{f' ({precision})' if precision else ''}"
    if pair.verdict == "not_comparable" or interval is None:
        return f"{what}: the speeds of {pair.candidate} and {pair.baseline} are not comparable: {pair.notes[0]}."
    bounds = f"95 % interval {interval.low:.2f} to {interval.high:.2f}"
    if pair.verdict == "no_difference":
        return f"{what}: no difference in speed between {pair.candidate} and {pair.baseline} ({bounds})."
    if pair.verdict == "inconclusive":
        needed = f"; about {pair.repeats_to_decide} repeats would decide" if pair.repeats_to_decide else ""
        return f"{what}: inconclusive whether {pair.candidate} is faster than {pair.baseline} ({bounds}){needed}."
    warning = f" {pair.notes[0]}." if pair.bottleneck == "loader" else ""
    speed = f"{interval.ratio:.2f} times the speed of {pair.baseline}"
    return f"{what}: {pair.candidate} is {pair.verdict}, {speed} ({bounds}).{warning}"


def _members(chosen: Sequence[Pair], pairs: Sequence[Pair]) -> str:
    """Comparable pairs with their ratios; the others grouped by the reason why they are not."""
    ratios, by_reason = [], dict[str, list[str]]()
    for pair in chosen:
        if pair.comparable_interval:
            ratios.append(f"{label_of(pair, pairs)} {pair.comparable_interval.ratio:.2f}x")
        else:
            by_reason.setdefault(pair.notes[0], []).append(label_of(pair, pairs))
    return ", ".join(ratios) or "; ".join(f"{', '.join(labels)}: {reason}" for reason, labels in by_reason.items())


def label_of(pair: Pair, pairs: Sequence[Pair]) -> str:
    """The model, and the settings that differ between the pairs."""
    common = [key for key in pair.held_equal if all(key in other.held_equal for other in pairs)]
    varying = [key for key in common if key != "model" and len({str(p.held_equal[key]) for p in pairs}) > 1]
    parts = [str(pair.held_equal["model"]), *(f"{key}={pair.held_equal[key]}" for key in varying)]
    if len({(other.baseline, other.candidate) for other in pairs}) > 1:
        parts.append(f"{pair.candidate} / {pair.baseline}")
    return " ".join(parts)


def as_markdown(report: Report, *, has_chart: bool = False) -> str:
    pairs = report.pairs
    lines = ["# Comparison", "", verdict_sentence(report), ""]
    if pairs:
        lines += [markdown_table([_cells(pair, pairs) for pair in pairs]), ""]
        lines += ["![speed ratios with 95 % intervals](comparison.png)", ""] if has_chart else []
        lines += _equal_for_all(pairs) + _runs(pairs) + _notes(pairs)
    if report.failed:
        failed = [{"job": job.job, "settings": job.overrides, "reason": job.why} for job in report.failed]
        lines += ["## Jobs that did not finish", "", markdown_table(failed), ""]
    lines += [
        "images/s: medians of windows after warm-up. Ratio: candidate / baseline with its 95 % interval. n: runs per "
        "side. Loss gap: candidate - baseline, mean over the last quarter of the common steps. "
        "docs/comparison.md explains verdicts and intervals.",
        "",
    ]
    return "\n".join(lines)


def _cells(pair: Pair, pairs: Sequence[Pair]) -> dict[str, str]:
    """A row of the table by the titles of its columns."""
    row = _row(pair)

    def both(name: str, digits: int) -> str:
        return " / ".join(_number(row[f"{side}_{name}"], digits) for side in ("baseline", "candidate"))

    has_top1 = any(run.top1 is not None for pair in pairs for run in [*pair.baseline_runs, *pair.candidate_runs])
    return {
        "": label_of(pair, pairs),
        f"images/s: {' / '.join(_sides(pairs))}": both("images_per_s", 1),
        "ratio [95 %]": _ratio(pair),
        "n": str(row["n"]),
        "verdict": f"**{pair.verdict.replace('_', ' ')}**",
        **({"top-1 %": both("top1", 2)} if has_top1 else {}),
        "loss gap": _number(pair.loss_gap, 4),
        "peak memory GiB": both("peak_memory_gib", 2),
        "bottleneck": pair.bottleneck,
    }


def _runs(pairs: Sequence[Pair]) -> list[str]:
    """The folders of two sides that are not jobs of a sweep."""
    if len(pairs) != 1 or pairs[0].baseline_runs[0].repeat is not None:
        return []
    sides = ((pairs[0].baseline, pairs[0].baseline_runs), (pairs[0].candidate, pairs[0].candidate_runs))
    folders = [f"{side}: {', '.join(run.folder.name for run in runs)}" for side, runs in sides]
    return [f"Runs: {'; '.join(folders)}.", ""]


def _equal_for_all(pairs: Sequence[Pair]) -> list[str]:
    equal = [
        f"{key} {'auto' if value is None else value}"
        for key, value in pairs[0].held_equal.items()
        if all(pair.held_equal.get(key, "differs") == value for pair in pairs)
    ]
    return [f"Equal for all: {', '.join(equal)}.", ""] if equal else []


def _notes(pairs: Sequence[Pair]) -> list[str]:
    """The notes that all pairs have in common, then the others of each pair."""
    common = [note for note in pairs[0].notes if all(note in pair.notes for pair in pairs)] if len(pairs) > 1 else []
    sections = [("All pairs", common)]
    sections += [(label_of(pair, pairs), [note for note in pair.notes if note not in common]) for pair in pairs]
    lines = []
    for title, notes in sections:
        lines += [f"**{title}**", "", *(f"- {note}" for note in notes), ""] if notes else []
    return lines


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
