"""`comparison.json`, `.md`, `.csv` and a chart, and the verdict in one sentence."""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cl_train.comparison.chart import write_chart
from cl_train.comparison.dashboard import write_dashboard
from cl_train.comparison.pairs import Pair, compare_runs, compare_two, differing
from cl_train.comparison.run_records import read_run
from cl_train.comparison.slurm import allocation_states, record_missing_outcomes
from cl_train.comparison.sweep_plan import Job, read_sweep
from cl_train.config.schema import ConfigError
from cl_train.system.files import write_json, write_text

SCHEMA_VERSION = 1
_VERDICTS = ("faster", "slower", "no_difference", "inconclusive", "not_comparable")


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
    """Compare a sweep, a folder of runs, or the runs named; write the report and print its verdict.

    Args:
        folders: the folder of a sweep or of several runs, or two or more run folders.
        by: the setting to compare by; None = the sweep's own, else channels_last.
        out: where to write the report; None = the folder of the sweep or of the runs, else the last run's.
        parity_failures: why the runs of a model cannot be compared, by model.

    Raises:
        ConfigError: a folder cannot be read, is named twice, or there are fewer than two runs.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("a run cannot be compared with itself: a folder is named twice")
    failed: list[FailedJob] = []
    if len(folders) > 1:
        runs, by = [read_run(folder) for folder in folders], by or "channels_last"
    else:
        jobs, compare_by = _read_jobs(folders[0])
        runs, by = [], by or compare_by
        for job in jobs:
            try:
                if job.status != "completed":
                    raise ConfigError(job.why or job.status)
                runs.append(replace(read_run(folders[0] / job.name), repeat=job.repeat))
            except ConfigError as error:
                failed.append(FailedJob(job.number, " ".join(job.overrides), str(error)))
    for model, why in (parity_failures or {}).items():
        runs = [replace(run, problems=[*run.problems, why]) if run.fact("model") == model else run for run in runs]
    pairs = [compare_two(runs[0], runs[1], by)] if len(folders) == 2 else compare_runs(runs, by)
    report = Report(pairs, failed, by, differing(runs))
    target = out or folders[-1]
    verdict = write_report(report, target)
    for missing in failed:
        print(f"not finished: job {missing.job} ({missing.overrides}): {missing.why}")
    if show_table:
        print((target / "comparison.md").read_text(encoding="utf-8"))
    print(f"{verdict} Report: {target / 'comparison.md'}", flush=True)
    return report


def _read_jobs(folder: Path) -> tuple[list[Job], str]:
    """The jobs of a sweep, or one for each run in a folder of runs; and the setting to compare by."""
    if (folder / "sweep.json").is_file():
        sweep = read_sweep(folder)
        if sweep.allocations and (states := allocation_states(sweep)) is not None:
            record_missing_outcomes(sweep, states)
        return sweep.jobs, sweep.compare_by
    names = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
    if len(names) < 2:
        raise ConfigError(f"{folder}: neither a sweep (sweep.json) nor a folder of two or more runs")
    return [Job(number, name, [name], status="completed") for number, name in enumerate(names)], "channels_last"


def write_report(report: Report, folder: Path) -> str:
    """Write all files of the report and its TensorBoard page into `folder`; returns the verdict in one sentence."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_row(pair) for pair in report.pairs]
    labels = [label_of(pair, report.pairs) for pair in report.pairs]
    verdict = verdict_sentence(report)
    failed = [asdict(job) for job in report.failed]
    document = {"schema_version": SCHEMA_VERSION, "verdict": verdict, "pairs": rows, "failed": failed}
    write_json(folder / "comparison.json", document, indent=2)
    _write_csv(rows, folder / "comparison.csv")
    has_chart = write_chart(report.pairs, labels, folder / "comparison.png")
    text = as_markdown(report, has_chart=has_chart)
    write_text(folder / "comparison.md", text)
    write_dashboard(report.pairs, labels, text, folder)
    return verdict


def _row(pair: Pair) -> dict[str, Any]:
    runs = {"baseline": pair.baseline_runs, "candidate": pair.candidate_runs}
    speeds = {side: _median([run.median_images_per_s for run in runs[side]], 2) for side in runs}
    memory = {side: _median([run.summary.get("peak_memory_gib") for run in runs[side]], 3) for side in runs}
    interval = pair.interval.to_dict() if pair.interval else {}
    return {
        **pair.held_equal,
        "baseline": pair.baseline,
        "candidate": pair.candidate,
        "speed": "compute" if pair.held_equal.get("data") == "synthetic" else "end_to_end",
        **{f"{side}_images_per_s": value for side, value in speeds.items()},
        "ratio": interval.get("ratio"),
        "ci95": interval.get("ci95"),
        "n": len(pair.baseline_runs),
        "verdict": pair.verdict,
        "loss_gap": None if pair.loss_gap is None else round(pair.loss_gap, 5),
        "bottleneck": pair.bottleneck,
        **{f"{side}_peak_memory_gib": value for side, value in memory.items()},
        "notes": pair.notes,
    }


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
    for verdict in _VERDICTS:
        chosen = [pair for pair in pairs if pair.verdict == verdict]
        if chosen:
            parts.append(f"{verdict.replace('_', ' ')} in {len(chosen)} ({_members(chosen, pairs)})")
    names = {(pair.candidate, pair.baseline) for pair in pairs}
    subject = "{} against {}".format(*names.pop()) if len(names) == 1 else "The candidates"
    return f"{subject}, {len(pairs)} pairs: {'; '.join(parts)}.{after}"


def _pair_sentence(pair: Pair) -> str:
    precision, interval = pair.held_equal.get("precision"), pair.comparable_interval
    what = f"{pair.held_equal['model']}{f' ({precision})' if precision else ''}"
    if interval is None:
        return f"{what}: {pair.candidate} and {pair.baseline} are not comparable: {pair.notes[0]}."
    bounds = f"95 % interval {interval.low:.2f} to {interval.high:.2f}"
    if pair.verdict == "no_difference":
        return f"{what}: no difference between {pair.candidate} and {pair.baseline} ({bounds})."
    if pair.verdict == "inconclusive":
        return f"{what}: inconclusive for {pair.candidate} against {pair.baseline}: {pair.notes[-1]}."
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
        lines += _table(pairs)
        chart = "![speed ratios with 95 % intervals](comparison.png)"
        lines += [chart if has_chart else "For a chart, `pip install 'cl-train[plot]'` and compare again.", ""]
        lines += _equal_for_all(pairs) + _notes(pairs)
    if report.failed:
        lines += ["## Jobs that did not finish", "", "| job | settings | reason |", "|---|---|---|"]
        lines += [f"| {job.job} | {_cell(job.overrides)} | {_cell(job.why)} |" for job in report.failed]
        lines.append("")
    lines += [
        "Ratio: candidate / baseline, medians of windows after warm-up. Loss gap: candidate - baseline, mean over the "
        "last quarter of the common steps. docs/comparison.md explains verdicts and intervals.",
        "",
    ]
    return "\n".join(lines)


def _table(pairs: Sequence[Pair]) -> list[str]:
    """One row per pair; the names of both sides are in the header if they are the same for all."""
    names = {(pair.baseline, pair.candidate) for pair in pairs}
    sides = f": {' / '.join(names.pop())}" if len(names) == 1 else ""
    cells = [_cells(pair, pairs) for pair in pairs]
    titles = [f"images/s{sides}" if title == "images/s" else title for title in cells[0]]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return [*lines, *(f"| {' | '.join(map(_cell, row.values()))} |" for row in cells), ""]


def _cells(pair: Pair, pairs: Sequence[Pair]) -> dict[str, str]:
    """A row of the table by the titles of its columns."""
    row, interval = _row(pair), pair.comparable_interval

    def both(name: str, digits: int) -> str:
        return " / ".join(_number(row[f"{side}_{name}"], digits) for side in ("baseline", "candidate"))

    return {
        "": label_of(pair, pairs),
        "images/s": both("images_per_s", 1),
        "ratio [95 %]": f"{interval.ratio:.3f} [{interval.low:.3f}, {interval.high:.3f}]" if interval else "-",
        "runs per side": str(row["n"]),
        "verdict": f"**{pair.verdict.replace('_', ' ')}**",
        "loss gap": _number(pair.loss_gap, 4),
        "peak memory GiB": both("peak_memory_gib", 2),
        "bottleneck": pair.bottleneck,
    }


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


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
