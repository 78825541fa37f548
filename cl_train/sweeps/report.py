"""The outcome of a comparison: `comparison.json`, `.md`, `.csv`, a chart, a sentence per pair."""

import re
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from cl_train.config.validation import train_program
from cl_train.errors import ConfigError
from cl_train.measure.charts import Bar, write_chart
from cl_train.measure.statistics import HOST_BOUND
from cl_train.sweeps.job import outcome_of
from cl_train.sweeps.plan import Job, Sweep, read_sweep
from cl_train.sweeps.verdict import Pair, compare_pair, compare_runs
from cl_train.system.files import write_json, write_text
from cl_train.system.processes import with_threads
from cl_train.system.run_folder import Run, read_run
from cl_train.system.tables import counted, markdown_table, write_csv

_COMMAND = re.compile(r"((?:OMP_NUM_THREADS=\d+ )?(?:python train\.py|cl-train) [^;\n]+)")
START_S = 5.0  # a process takes so long before the clock of its run begins
EXPLANATION = (
    "images/s: median of a run's windows after warm-up, and of the runs. Ratio: second side / first"
    " side, geometric means. n: runs per side. Loss gap: second - first, training loss over the"
    " last quarter of the common steps. See docs/comparison.md."
)


@dataclass(frozen=True)
class Report:
    """The pairs of a sweep, or of folders that the user named."""

    pairs: Sequence[Pair]
    failed: Sequence[dict[str, Any]] = ()  # job, overrides and why: as in comparison.json
    by: str = "channels_last"
    sweep: Sweep | None = None
    folder: Path | None = None  # for its files

    @cached_property
    def equal(self) -> dict[str, Any]:
        """What all pairs hold equal."""
        return _common([pair.held_equal for pair in self.pairs])

    @cached_property
    def labels(self) -> list[str]:
        """Labels with each pair's model, and the settings and sides that differ between pairs."""
        facts = [pair.facts for pair in self.pairs]
        keys = set.intersection(*map(set, facts)) if facts else set()
        varying = keys - {"model", *_common(facts)}
        return [
            " ".join([str(one["model"]), *(f"{key}={one[key]}" for key in one if key in varying)])
            for one in facts
        ]

    @cached_property
    def sides(self) -> tuple[str, str]:
        """The names of baseline and candidate if they are the same for all pairs."""
        names = {tuple(pair.sides) for pair in self.pairs}
        baseline, candidate = names.pop() if len(names) == 1 else ("baseline", "candidate")
        return baseline, candidate

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Each pair as in comparison.json; every other form of the report is made from them."""
        return [_row(pair, _to_decide(pair, self)) for pair in self.pairs]

    @property
    def named(self) -> list[tuple[str, Pair, dict[str, Any]]]:
        """Label, pair and row of each pair."""
        return list(zip(self.labels, self.pairs, self.rows, strict=True))


def _common(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the entries that all of these have in common."""
    first = facts[0] if facts else {}
    return {
        key: first[key] for key in first if all(one.get(key, "") == first[key] for one in facts)
    }


def _row(pair: Pair, to_decide: str | None) -> dict[str, Any]:
    def medians(name: str, digits: int) -> Iterator[tuple[str, float | None]]:
        for side, runs in zip(("baseline", "candidate"), pair.sides.values(), strict=True):
            values = [run.results[name] for run in runs if name in run.results]
            yield f"{side}_{name}", round(statistics.median(values), digits) if values else None

    interval = pair.interval.to_dict() if pair.interval else {"ratio": None, "ci95": None}
    return {
        **pair.facts,
        "speed": "compute" if pair.held_equal.get("data") == "synthetic" else "end_to_end",
        **dict(medians("images_per_s", 2)),
        **interval,
        "n": len(pair.runs) // 2,
        "verdict": pair.verdict,
        "repeats_to_decide": pair.repeats_to_decide,
        "to_decide": to_decide,
        "loss_gap": None if pair.loss_gap is None else round(pair.loss_gap, 5),
        **dict(medians("top1", 2)),
        "bottleneck": pair.bottleneck,
        **dict(medians("peak_memory_gib", 3)),
        "notes": pair.notes,
    }


# --- read ---


def compare_folders(
    folders: Sequence[Path],
    by: str | None = None,
    *,
    out: Path | None = None,
    show_table: bool = False,
) -> Report:
    """Compares a sweep, a folder of runs, or two or more runs; prints the verdict, and writes the
    report to `out`. `by` and `out` are by default those of the sweep.

    Raises ConfigError: a folder cannot be read, is named twice, or there are fewer than two runs.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("a run cannot be compared with itself: a folder is named twice")
    if len(folders) == 1:
        report = read_report(folders[0], by)
    else:
        by = by or "channels_last"
        runs = [read_run(folder) for folder in folders]
        # Two runs are a pair also if they differ in more.
        is_pair = len(runs) == 2
        pairs = [compare_pair(runs[:1], runs[1:], by)] if is_pair else compare_runs(runs, by)
        report = Report(pairs, by=by)

    report = replace(report, folder=out or report.folder)
    where = "For the report as files: out=FOLDER"
    if report.folder:
        write_comparison(report, report.folder)
        where = f"Report: {report.folder / 'comparison.md'}"
    text = as_markdown(report) if show_table else verdict_sentence(report)
    print(text, where, sep="\n", flush=True)
    return report


def read_report(folder: Path, by: str | None = None) -> Report:
    """Returns the report of a sweep or of a folder of runs. `by` is by default the sweep's."""
    names = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
    sweep = read_sweep(folder) if (folder / "sweep.json").is_file() else None
    if not sweep and len(names) < 2:
        what = "neither a sweep (sweep.json) nor a folder of two or more runs"
        raise ConfigError(f"{folder}: {what if folder.exists() else 'no such folder'}")
    jobs = sweep.jobs if sweep else [Job(n, name, [name]) for n, name in enumerate(names)]
    runs, failed = [], []
    for job in jobs:
        try:
            run = outcome_of(folder / job.name) if sweep else read_run(folder / job.name)
        except ConfigError as error:
            run = str(error)
        if isinstance(run, Run):
            runs.append(replace(run, repeat=job.repeat))
        else:
            overrides = " ".join(job.overrides)
            failed.append({"job": job.number, "overrides": overrides, "why": run})
    by = by or (sweep.compare_by if sweep else "channels_last")
    pairs = compare_runs(runs, by, sweep.looks if sweep else 1)
    return Report(pairs, failed, by, sweep, folder if sweep else None)


# --- what would decide a pair ---


def _to_decide(pair: Pair, report: Report) -> str | None:
    """Returns the command that probably decides the pair, and its time; None if it is decided."""
    sweep, count = report.sweep, pair.repeats_to_decide
    is_recorded = report.by != "environment"  # which may be the number of threads
    device_name = str(pair.runs[0].fact("device_name")) if is_recorded else ""
    words = [f"repeats={count or 'auto'}"]
    # repeats=N adds them to the decided pairs too.
    all_undecided = all(other.verdict == "inconclusive" for other in report.pairs)
    if sweep and (sweep.options.repeats is None or not all_undecided):
        needed = count or len(pair.runs)  # twice those of a side
        words = ["repeats=auto", f"max_repeats={max(needed, sweep.options.max_repeats)}"]
    if sweep and pair.is_disturbed:
        command = sweep.resume_command(*words, device_name=device_name)
        again = f"{_duration(pair.runs, 4)} for 2 more repeats: {command}"
        here = (
            f"; on this one: {benchmark_command(pair.runs[0])}"
            if report.by == "channels_last"
            else ""
        )
        return f"on a quieter machine, {again}{here}"

    values = [str(runs[0].settings.get(report.by)) for runs in pair.sides.values()]
    if pair.verdict != "inconclusive" or values[0] == values[1]:
        return None
    if pair.bottleneck == "host":
        return f"first: {HOST_BOUND}"
    what = "not even 100 repeats would decide it at this spread; a quieter machine may"
    if count:
        more = 2 * count - (len(pair.runs) if sweep else 0)
        what = f"{_duration(pair.runs, more)} for about {count} repeats"
    if report.by == "channels_last":
        what = f"the step alone, in a minute: {benchmark_command(pair.runs[0])}; whole runs, {what}"
    if sweep:
        return f"{what}: {sweep.resume_command(*words, device_name=device_name)}"
    if report.by != "channels_last":
        words.append(f"compare_by={report.by}")
    words = [f"config={pair.runs[0].folder}", f"{report.by}={','.join(values)}", *words]
    command = f"{train_program()} -m {shlex.join(words)}"
    return f"{what}: {with_threads(command, device_name)}"


def benchmark_command(run: Run) -> str:
    """Returns the command that compares the layouts of the run although other processes run."""
    words = [f"config={run.folder}", f"model={run.fact('model')}"]
    return f"OMP_NUM_THREADS=1 cl-train benchmark {shlex.join(words)}"


def _duration(runs: Sequence[Run], count: int) -> str:
    """Returns in words the time of `count` jobs like these."""
    seconds = START_S + statistics.fmean(run.summary.get("seconds", 0.0) for run in runs)
    return f"about {timedelta(seconds=round(count * seconds))}"


# --- written and printed ---


def write_comparison(report: Report, folder: Path) -> None:
    """Writes all files of the report into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "schema_version": 1,
        "verdict": verdict_sentence(report),
        "pairs": report.rows,
        "failed": report.failed,
    }
    write_json(folder / "comparison.json", document, indent=2)
    cells = []  # a number, or a text, in each
    for row in report.rows:
        low, high = row["ci95"] or (None, None)
        cell = row | {"notes": " | ".join(row["notes"]), "ci95_low": low, "ci95_high": high}
        cells.append({key: value for key, value in cell.items() if key != "ci95"})
    write_csv(folder / "comparison.csv", cells, [] if cells else ["verdict"])

    bars = []
    for label, pair, _ in report.named:
        if pair.verdict == "not_comparable":  # its ratio says nothing
            why = "busy machine" if pair.is_disturbed else pair.notes[0]
            bars.append(Bar(label, None, pair.verdict, f"{pair.words}: {why}"))
        else:
            bars.append(Bar(label, pair.interval, pair.verdict, f"{pair.ratio} {pair.words}"))
    baseline, candidate = report.sides
    keys = [key for key in ("model", "precision", "device_name") if key in report.equal]
    facts = ", ".join(str(report.equal[key]) for key in keys)
    title = f"Training speed: {candidate} against {baseline}\n{facts}"
    has_chart = write_chart({"": bars}, title, report.sides, folder / "comparison.png")

    image = "\n![speed ratios with 95 % intervals](comparison.png)\n" if has_chart else ""
    write_text(folder / "comparison.md", as_markdown(report) + image)


def verdict_sentence(report: Report) -> str:
    """Returns the outcome, a line for each pair."""
    lines = []
    for label, pair, row in report.named:
        precision, interval = pair.held_equal.get("precision"), pair.interval
        what = f"{label} ({precision})" if precision and "precision=" not in label else label
        next_step = f" To decide it, {row['to_decide']}" if row["to_decide"] else ""
        baseline, candidate = pair.sides
        if pair.verdict == "not_comparable" or interval is None:
            outcome = f"{candidate} and {baseline} are not comparable: {pair.notes[0]}."
        else:
            bounds = "interval unknown"
            if interval.bounds:
                bounds = f"95 % interval {interval.low:.2f} to {interval.high:.2f}"
            ratio = f"{interval.ratio:.2f} times the speed of {baseline} ({bounds})"
            outcome = f"{candidate} has {ratio}: {pair.words}."
            outcome += f" {pair.notes[0]}." if pair.bottleneck == "loader" else ""
        lines.append(f"{what}: {outcome}{next_step}")
    if not report.pairs:
        lines = [f"Nothing to compare: no two finished runs differ only in {report.by}."]
        if not report.failed:
            lines[-1] += " compare_by=SETTING names another one."
    if failed := len(report.failed):
        lines[-1] += f" {counted(failed, 'job')} did not finish."
    return "\n".join(lines)


def as_markdown(report: Report) -> str:
    """Returns the page `comparison.md`, without the chart."""
    # Each line becomes a paragraph, and a command becomes code.
    sentences = _COMMAND.sub(r"`\1`", verdict_sentence(report)).splitlines()
    paragraphs = ["# Comparison", *sentences, markdown_table(_table(report))]
    if report.pairs:
        paragraphs.append(f"In the table: {' / '.join(report.sides)}.")
        shown = [
            f"{key} {'auto' if value is None else value}" for key, value in report.equal.items()
        ]
        paragraphs.append(f"Equal for all: {', '.join(shown)}.")
    by_note: dict[str, list[str]] = {}
    for label, pair, _ in report.named:
        for note in pair.notes:
            by_note.setdefault(note, []).append(label)
    notes = [f"- {', '.join(concerned)}: {note}" for note, concerned in by_note.items()]
    paragraphs.append("\n".join(notes))
    count = len(report.pairs)
    decided = sum(pair.verdict in ("faster", "slower") for pair in report.pairs)
    if decided > 1:
        wrong = f"up to {0.05 * count:.1f} of these {count} pairs"
        paragraphs.append(
            f"{decided} differences are reported. Where two sides are equal, chance makes one in"
            f" 5 % of the comparisons: expect {wrong} to be wrong if nothing differs."
        )
    if report.failed:
        paragraphs += ["## Jobs that did not finish", markdown_table(list(report.failed))]
    return "\n\n".join([*filter(None, paragraphs), EXPLANATION, ""])


def loss_gap(pair: Pair) -> str:
    if pair.loss_gap is None:
        return "-"
    return f"{pair.loss_gap:.4f}" if abs(pair.loss_gap) >= 1e-4 else "< 0.0001"


def _table(report: Report) -> list[dict[str, str]]:
    """Returns rows of cells by the titles of their columns."""

    def both(row: dict[str, Any], name: str, digits: int) -> str:
        values = row[f"baseline_{name}"], row[f"candidate_{name}"]
        return " / ".join("-" if value is None else f"{value:.{digits}f}" for value in values)

    return [
        {
            "": label,
            "images/s": both(row, "images_per_s", 1),
            "ratio [95 %]": pair.ratio,
            "n": str(row["n"]),
            "verdict": f"**{pair.words}**",
            "top-1 %": both(row, "top1", 2),
            "loss gap": loss_gap(pair),
        }
        for label, pair, row in report.named
    ]
