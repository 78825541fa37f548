"""The outcome of a comparison: `comparison.json`, `.md`, `.csv`, a chart, a TensorBoard page, and
one sentence.
"""

import csv
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from cl_train.config.validation import train_program
from cl_train.errors import ConfigError
from cl_train.measure.charts import Bar, write_chart
from cl_train.sweeps.dashboard import DASHBOARD, write_dashboard
from cl_train.sweeps.job import read_job
from cl_train.sweeps.plan import Job, Sweep, read_sweep
from cl_train.sweeps.runs import Run, read_run
from cl_train.sweeps.verdict import Pair, compare_pair, compare_runs
from cl_train.system.files import write_json, write_text
from cl_train.system.tables import markdown_table

SCHEMA_VERSION = 1
EXPLANATION = (
    "images/s: the median of a run's windows after warm-up, and of the runs. Ratio: speed of"
    " the second side / that of the first. n: runs per side. Loss gap: training loss of the second"
    " side - that of the first, over the last quarter of the common steps. docs/comparison.md"
    " explains verdicts and intervals."
)


@dataclass(frozen=True)
class Report:
    """The pairs of a sweep, or of folders that the user named."""

    pairs: Sequence[Pair]
    failed: Sequence[dict[str, Any]] = ()  # job, overrides and why: as in comparison.json
    by: str = "channels_last"


def compare_folders(
    folders: Sequence[Path],
    by: str | None = None,
    *,
    out: Path | None = None,
    parity_failures: Mapping[str, str] | None = None,
    show_table: bool = False,
) -> Report:
    """Compare a sweep, a folder of runs, or two or more runs; print the verdict, and write the
    report to `out`.

    `by` and `out` are by default those of the sweep. `parity_failures`: why runs cannot be
    compared, by model. Raises ConfigError: a folder cannot be read, is named twice, or there are
    fewer than two runs.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("a run cannot be compared with itself: a folder is named twice")
    if len(folders) == 1:
        pairs, failed, sweep = read_pairs(folders[0], by, parity_failures or {})
        by = by or (sweep.compare_by if sweep else "channels_last")
        out = out or (folders[0] if sweep else None)
    else:
        failed, by = [], by or "channels_last"
        runs = _with_parity(map(read_run, folders), parity_failures or {})
        together = len(runs) == 2  # also if they differ in more than `by`
        pairs = [compare_pair(runs[:1], runs[1:], by=by)] if together else compare_runs(runs, by)
        pairs = [replace(pair, to_decide=_more_runs(pair, by)) for pair in pairs]
    report = Report(pairs, failed, by)
    if out:
        write_report(report, out)
    where = "For the report as files: out=FOLDER"
    if out:
        where = f"Report: {out / 'comparison.md'}"
    if out and pairs:
        where += f"\nCurves: {shlex.join(['tensorboard', '--logdir', str(out / DASHBOARD)])}"
    print(
        as_markdown(report) if show_table else verdict_sentence(report), where, sep="\n", flush=True
    )
    return report


def read_pairs(
    folder: Path, by: str | None = None, parity_failures: Mapping[str, str] | None = None
) -> tuple[list[Pair], list[dict[str, Any]], Sweep | None]:
    """The pairs of a sweep or of a folder of runs, the jobs that cannot be compared as in
    comparison.json, and the sweep. `by` is by default the sweep's.
    """
    names = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
    sweep = read_sweep(folder) if (folder / "sweep.json").is_file() else None
    if not sweep and len(names) < 2:
        raise ConfigError(
            f"{folder}: neither a sweep (sweep.json) nor a folder of two or more runs"
        )
    jobs = sweep.jobs if sweep else [Job(n, name, [name]) for n, name in enumerate(names)]
    runs, failed = [], []
    for job in jobs:
        try:
            run = read_job(folder / job.name) if sweep else read_run(folder / job.name)
            runs.append(replace(run, repeat=job.repeat))
        except ConfigError as error:
            overrides = " ".join(job.overrides)
            failed.append({"job": job.number, "overrides": overrides, "why": str(error)})
    by = by or (sweep.compare_by if sweep else "channels_last")
    runs = _with_parity(runs, parity_failures or {})
    pairs = compare_runs(runs, by, sweep.looks if sweep else 1)
    if sweep:
        undecided = [pair for pair in pairs if pair.verdict == "inconclusive"]
        shares_all = len(undecided) == len(pairs)
        pairs = [replace(p, to_decide=_more_of_sweep(p, sweep, shares_all)) for p in pairs]
    return pairs, failed, sweep


def _with_parity(runs: Iterable[Run], failures: Mapping[str, str]) -> list[Run]:
    """The runs, of which those of a model in `failures` cannot be compared."""
    return [
        replace(run, problems=[*run.problems, failures[model]])
        if (model := run.fact("model")) in failures
        else run
        for run in runs
    ]


def _more_of_sweep(pair: Pair, sweep: Sweep, all_undecided: bool) -> str | None:
    """The command that probably decides the pair, and its time; None if none does."""
    runs = [*pair.baseline_runs, *pair.candidate_runs]
    if pair.is_disturbed:
        noisy = [run for run in runs if run.is_disturbed]
        command = sweep.resume_command("rerun=noisy")
        return f"on a quieter machine, {_duration(noisy, len(noisy))}: {command}"
    if pair.verdict != "inconclusive":
        return None
    count = pair.repeats_to_decide
    if count is None:
        why = (
            "not even 100 repeats would decide it at this spread; a quieter machine or longer runs"
        )
        return f"{why} may: {sweep.resume_command('rerun=noisy', 'repeats=auto')}"
    takes = _duration(runs, len(runs) // pair.n * (count - pair.n))
    # repeats=N adds them to the decided pairs too.
    word = f"repeats={count}" if all_undecided else "repeats=auto"
    return f"about {count} repeats decide it, {takes}: {sweep.resume_command(word)}"


def _more_runs(pair: Pair, by: str) -> str | None:
    """As `_more_of_sweep`, for runs that are not of a sweep."""
    values = [str(runs[0].settings.get(by)) for runs in (pair.baseline_runs, pair.candidate_runs)]
    if pair.verdict != "inconclusive" or values[0] == values[1]:
        return None
    count = pair.repeats_to_decide or 12
    compared = "" if by == "channels_last" else f" compare_by={by}"
    config = shlex.quote(f"config={pair.baseline_runs[0].folder}")
    takes = _duration([*pair.baseline_runs, *pair.candidate_runs], 2 * count)
    command = f"{train_program()} -m {config} {by}={','.join(values)}{compared} repeats={count}"
    return f"about {count} repeats decide it, {takes}: {command}"


def _duration(runs: Sequence[Run], count: int) -> str:
    """The time of `count` runs like these."""
    seconds = [run.summary.get("seconds", run.times[1] - run.times[0]) for run in runs]
    return f"about {timedelta(seconds=round(count * statistics.fmean(seconds)))} (h:mm:ss)"


def write_report(report: Report, folder: Path) -> None:
    """Write all files of the report and its TensorBoard page into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, labels = [_row(pair) for pair in report.pairs], _labels(report.pairs)
    document = {
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict_sentence(report),
        "pairs": rows,
    }
    write_json(folder / "comparison.json", document | {"failed": report.failed}, indent=2)
    for row in rows:  # from here on as in comparison.csv
        row["ci95_low"], row["ci95_high"] = row.pop("ci95") or (None, None)
        row["notes"] = " | ".join(row["notes"])
    names = dict.fromkeys(
        name for row in rows for name in row
    )  # the rows have different settings in common
    with open(folder / "comparison.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(names) or ["verdict"])
        writer.writeheader()
        writer.writerows(rows)
    bars = []
    for label, pair in zip(labels, report.pairs, strict=True):
        reason = f": {pair.notes[0]}" if pair.verdict == "not_comparable" else ""
        bars.append(Bar(label, pair.interval, pair.verdict, f"{_ratio(pair)} {pair.words}{reason}"))
    sides, equal = _sides(report.pairs), _equal_for_all(report.pairs)
    facts = ", ".join(
        str(equal[name]) for name in ("model", "precision", "device_name") if equal.get(name)
    )
    title = f"Training speed: {sides[1]} against {sides[0]}\n{facts}"
    has_chart = write_chart({"": bars}, title, sides, folder / "comparison.png")
    text, image = as_markdown(report), "\n![speed ratios with 95 % intervals](comparison.png)\n"
    write_text(folder / "comparison.md", text + image if has_chart else text)
    write_dashboard(report.pairs, labels, text, folder)


def _row(pair: Pair) -> dict[str, Any]:
    """A pair as in comparison.json."""

    def medians(name: str, digits: int) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for side, runs in (("baseline", pair.baseline_runs), ("candidate", pair.candidate_runs)):
            known = [value for run in runs if (value := run.results[name]) is not None]
            found[f"{side}_{name}"] = round(statistics.median(known), digits) if known else None
        return found

    interval = pair.interval.to_dict() if pair.interval else {"ratio": None, "ci95": None}
    return {
        **pair.held_equal,
        "baseline": pair.baseline,
        "candidate": pair.candidate,
        "speed": "compute" if pair.held_equal.get("data") == "synthetic" else "end_to_end",
        **medians("images_per_s", 2),
        **interval,
        "n": len(pair.baseline_runs),
        "verdict": pair.verdict,
        "repeats_to_decide": pair.repeats_to_decide,
        "to_decide": pair.to_decide,
        "loss_gap": None if pair.loss_gap is None else round(pair.loss_gap, 5),
        **medians("top1", 2),
        "bottleneck": pair.bottleneck,
        **medians("peak_memory_gib", 3),
        "notes": pair.notes,
    }


def _sides(pairs: Sequence[Pair]) -> tuple[str, str]:
    """The names of baseline and candidate if they are the same for all pairs."""
    names = {(pair.baseline, pair.candidate) for pair in pairs}
    return names.pop() if len(names) == 1 else ("baseline", "candidate")


def _labels(pairs: Sequence[Pair]) -> list[str]:
    """For each pair the model, and the settings and sides that differ between the pairs."""
    facts = [
        pair.held_equal | {"baseline": pair.baseline, "candidate": pair.candidate} for pair in pairs
    ]
    common = (
        [key for key in facts[0] if key != "model" and all(key in one for one in facts)]
        if facts
        else []
    )
    varying = [key for key in common if len({str(one[key]) for one in facts}) > 1]
    return [
        " ".join([str(one["model"]), *(f"{key}={one[key]}" for key in varying)]) for one in facts
    ]


def _equal_for_all(pairs: Sequence[Pair]) -> dict[str, Any]:
    first = pairs[0].held_equal if pairs else {}
    return {
        key: value
        for key, value in first.items()
        if all(pair.held_equal.get(key, "-") == value for pair in pairs)
    }


def verdict_sentence(report: Report) -> str:
    """The outcome, a line for each pair."""
    lines = []
    for label, pair in zip(_labels(report.pairs), report.pairs, strict=True):
        precision, interval = pair.held_equal.get("precision"), pair.interval
        what = f"{label} ({precision})" if precision and "precision=" not in label else label
        next_step = f" To decide it, {pair.to_decide}" if pair.to_decide else ""
        if pair.verdict == "not_comparable" or interval is None:
            sides = f"{pair.candidate} and {pair.baseline}"
            lines.append(f"{what}: {sides} are not comparable: {pair.notes[0]}.{next_step}")
            continue
        ratio = f"{interval.ratio:.2f} times the speed of {pair.baseline}"
        bounds = f"95 % interval {interval.low:.2f} to {interval.high:.2f}"
        warning = f" {pair.notes[0]}." if pair.bottleneck == "loader" else ""
        line = f"{what}: {pair.candidate} has {ratio} ({bounds}): {pair.words}.{warning}"
        lines.append(line + next_step)
    if not report.pairs:
        lines = [
            f"Nothing to compare: no two runs differ only in {report.by}; compare_by=SETTING"
            " names another one."
        ]
    if failed := len(report.failed):
        lines[-1] += f" {failed} job{'s' if failed > 1 else ''} did not finish."
    return "\n".join(lines)


def as_markdown(report: Report) -> str:
    """The page `comparison.md`, without the chart."""
    pairs, labels = report.pairs, _labels(report.pairs)
    lines = ["# Comparison", "", verdict_sentence(report), ""]
    lines += [markdown_table(_table(pairs, labels)), ""] if pairs else []
    if equal := _equal_for_all(pairs):
        shown = [f"{key} {'auto' if value is None else value}" for key, value in equal.items()]
        lines += [f"Equal for all: {', '.join(shown)}.", ""]
    if len(pairs) == 1 and pairs[0].baseline_runs[0].repeat is None:  # not the jobs of a sweep
        folders = [
            f"{side}: {', '.join(run.folder.name for run in runs)}"
            for side, runs in pairs[0].sides.items()
        ]
        lines += [f"Runs: {'; '.join(folders)}.", ""]
    common = (
        [note for note in pairs[0].notes if all(note in pair.notes for pair in pairs)]
        if len(pairs) > 1
        else []
    )
    notes = [[note for note in pair.notes if note not in common] for pair in pairs]
    for title, group in [("All pairs", common), *zip(labels, notes, strict=True)]:
        lines += [f"**{title}**", "", *(f"- {note}" for note in group), ""] if group else []
    if (decided := sum(pair.verdict in ("faster", "slower") for pair in pairs)) > 1:
        expected = f"up to {0.05 * len(pairs):.1f} of these {len(pairs)} pairs"
        lines += [
            f"{decided} differences are reported. Where two sides are equal, chance makes one in"
            f" 5 % of the comparisons: expect {expected} to be wrong if nothing differs.",
            "",
        ]
    if report.failed:
        failed = [
            {"job": job["job"], "settings": job["overrides"], "reason": job["why"]}
            for job in report.failed
        ]
        lines += ["## Jobs that did not finish", "", markdown_table(failed), ""]
    return "\n".join([*lines, EXPLANATION, ""])


def _table(pairs: Sequence[Pair], labels: Sequence[str]) -> list[dict[str, str]]:
    """Cells by the titles of their columns."""

    def both(row: dict[str, Any], name: str, digits: int) -> str:
        values = row[f"baseline_{name}"], row[f"candidate_{name}"]
        return " / ".join("-" if value is None else f"{value:.{digits}f}" for value in values)

    return [
        {
            "": label,
            f"images/s: {' / '.join(_sides(pairs))}": both(row, "images_per_s", 1),
            "ratio [95 %]": _ratio(pair),
            "n": str(row["n"]),
            "verdict": f"**{pair.words}**",
            "top-1 %": both(row, "top1", 2),
            "loss gap": "-" if pair.loss_gap is None else f"{pair.loss_gap:.4f}",
            "peak memory GiB": both(row, "peak_memory_gib", 2),
            "bottleneck": pair.bottleneck,
        }
        for label, pair, row in zip(labels, pairs, map(_row, pairs), strict=True)
    ]


def _ratio(pair: Pair) -> str:
    untrusted = "untrusted " if pair.verdict == "not_comparable" else ""
    return f"{untrusted}{pair.interval}" if pair.interval else "-"
