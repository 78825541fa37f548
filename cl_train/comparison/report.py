"""The outcome of a comparison: `comparison.json`, `.md`, `.csv`, a chart, a TensorBoard page, and one sentence."""

import csv
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cl_train.comparison.pairs import Pair, Run, compare_pair, compare_runs, read_run
from cl_train.comparison.statistics import Interval
from cl_train.comparison.sweep_plan import Job, problem_of, read_sweep
from cl_train.config.schema import ConfigError
from cl_train.memory_format.audit_report import markdown_table
from cl_train.system.files import safe_name, write_json, write_text

if TYPE_CHECKING:
    from cl_train.memory_format.operator_times import OperatorTimes

SCHEMA_VERSION = 1
EXPLANATION = (
    "images/s: medians of windows after warm-up. Ratio: candidate / baseline. n: runs per side. Loss gap: candidate - "
    "baseline, over the last quarter of the common steps. docs/comparison.md explains verdicts and intervals."
)
# Of the verdicts: green and purple, distinguishable with a colour vision deficiency (ColorBrewer PRGn).
COLOURS = dict(
    faster="#1b7837", slower="#762a83", no_difference="#222222", inconclusive="#808080", not_comparable="#b0b0b0"
)
_TICKS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


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
    """Compare a sweep, a folder of runs, or two or more runs; print the verdict, and write the report to `out`.

    `by` and `out` are by default those of the sweep. `parity_failures`: why runs cannot be compared, by model.
    Raises ConfigError: a folder cannot be read, is named twice, or there are fewer than two runs.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError("a run cannot be compared with itself: a folder is named twice")
    runs, failed, compare_by = _read_jobs(folders[0]) if len(folders) == 1 else (list(map(read_run, folders)), [], None)
    by, out = by or compare_by or "channels_last", out or (folders[0] if compare_by else None)
    for model, why in (parity_failures or {}).items():
        runs = [replace(run, problems=[*run.problems, why]) if run.fact("model") == model else run for run in runs]
    pairs = [compare_pair(*([run] for run in runs), by=by)] if len(folders) == 2 else compare_runs(runs, by)
    report = Report(pairs, failed, by)
    if out:
        write_report(report, out)
    where = f"Report: {out / 'comparison.md'}" if out else "For the report as files: out=FOLDER"
    print(f"{as_markdown(report)}\n{where}" if show_table else f"{verdict_sentence(report)} {where}", flush=True)
    return report


def _read_jobs(folder: Path) -> tuple[list[Run], list[dict[str, Any]], str | None]:
    """The runs of a sweep or of a folder of runs, those that cannot be compared, and the sweep's `compare_by`."""
    runs, failed = [], []
    names = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
    sweep = read_sweep(folder) if (folder / "sweep.json").is_file() else None
    if not sweep and len(names) < 2:
        raise ConfigError(f"{folder}: neither a sweep (sweep.json) nor a folder of two or more runs")
    for job in sweep.jobs if sweep else (Job(number, name, [name]) for number, name in enumerate(names)):
        try:
            if sweep and (problem := problem_of(folder / job.name)):
                raise ConfigError(problem)
            runs.append(replace(read_run(folder / job.name), repeat=job.repeat))
        except ConfigError as error:
            failed.append({"job": job.number, "overrides": " ".join(job.overrides), "why": str(error)})
    return runs, failed, sweep.compare_by if sweep else None


def write_report(report: Report, folder: Path) -> None:
    """Write all files of the report and its TensorBoard page into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows, labels = [_row(pair) for pair in report.pairs], _labels(report.pairs)
    document = {"schema_version": SCHEMA_VERSION, "verdict": verdict_sentence(report), "pairs": rows}
    write_json(folder / "comparison.json", document | {"failed": report.failed}, indent=2)
    for row in rows:  # from here on as in comparison.csv
        row["ci95_low"], row["ci95_high"] = row.pop("ci95") or (None, None)
        row["notes"] = " | ".join(row["notes"])
    names = dict.fromkeys(name for row in rows for name in row)  # the rows have different settings in common
    with open(folder / "comparison.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(names) or ["verdict"])
        writer.writeheader()
        writer.writerows(rows)
    bars = []
    for label, pair in zip(labels, report.pairs, strict=True):
        reason = f": {pair.notes[0]}" if pair.verdict == "not_comparable" else ""
        bars.append(Bar(label, pair.interval, pair.verdict, f"{_ratio(pair)} {pair.words}{reason}"))
    sides, equal = _sides(report.pairs), _equal_for_all(report.pairs)
    facts = ", ".join(str(equal[name]) for name in ("model", "precision", "device_name") if equal.get(name))
    title = f"Training speed: {sides[1]} against {sides[0]}\n{facts}"
    has_chart = write_chart({"": bars}, title, sides, folder / "comparison.png")
    text, image = as_markdown(report), "\n![speed ratios with 95 % intervals](comparison.png)\n"
    write_text(folder / "comparison.md", text + image if has_chart else text)
    _write_dashboard(report.pairs, labels, text, folder)


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
    facts = [pair.held_equal | {"baseline": pair.baseline, "candidate": pair.candidate} for pair in pairs]
    common = [key for key in facts[0] if key != "model" and all(key in one for one in facts)] if facts else []
    varying = [key for key in common if len({str(one[key]) for one in facts}) > 1]
    return [" ".join([str(one["model"]), *(f"{key}={one[key]}" for key in varying)]) for one in facts]


def _equal_for_all(pairs: Sequence[Pair]) -> dict[str, Any]:
    first = pairs[0].held_equal if pairs else {}
    return {key: value for key, value in first.items() if all(pair.held_equal.get(key, "-") == value for pair in pairs)}


def verdict_sentence(report: Report) -> str:
    """The outcome, a line for each pair."""
    lines = []
    for label, pair in zip(_labels(report.pairs), report.pairs, strict=True):
        precision, interval = pair.held_equal.get("precision"), pair.interval
        what = f"{label} ({precision})" if precision and "precision=" not in label else label
        if pair.verdict == "not_comparable" or interval is None:
            lines.append(f"{what}: {pair.candidate} and {pair.baseline} are not comparable: {pair.notes[0]}.")
            continue
        ratio = f"{interval.ratio:.2f} times the speed of {pair.baseline}"
        bounds = f"95 % interval {interval.low:.2f} to {interval.high:.2f}"
        needed = f"; about {pair.repeats_to_decide} repeats would decide" if pair.repeats_to_decide else ""
        warning = f" {pair.notes[0]}." if pair.bottleneck == "loader" else ""
        lines.append(f"{what}: {pair.candidate} has {ratio} ({bounds}): {pair.words}{needed}.{warning}")
    if not report.pairs:
        lines = [f"Nothing to compare: no two runs differ only in {report.by}. compare_by=SETTING names another one."]
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
        folders = [f"{side}: {', '.join(run.folder.name for run in runs)}" for side, runs in pairs[0].sides.items()]
        lines += [f"Runs: {'; '.join(folders)}.", ""]
    common = [note for note in pairs[0].notes if all(note in pair.notes for pair in pairs)] if len(pairs) > 1 else []
    notes = [[note for note in pair.notes if note not in common] for pair in pairs]
    for title, group in [("All pairs", common), *zip(labels, notes, strict=True)]:
        lines += [f"**{title}**", "", *(f"- {note}" for note in group), ""] if group else []
    if report.failed:
        failed = [{"job": job["job"], "settings": job["overrides"], "reason": job["why"]} for job in report.failed]
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


def _write_dashboard(pairs: Sequence[Pair], labels: Sequence[str], markdown: str, folder: Path) -> None:
    """A run per side with its medians and ranges over repeats, charts, the page; tags sort behind train/ and val/."""
    from torch.utils.tensorboard import SummaryWriter

    charts: dict[str, dict[str, list[object]]] = {"speed, images/s": {}, "training loss": {}}
    for label, pair in reversed(list(zip(labels, pairs, strict=True))):  # TensorBoard shows the last chart first
        ratio = f" {pair.interval.ratio:.2f}x" if pair.interval and pair.verdict in ("faster", "slower") else ""
        titles = (f"{label}, images/s: {pair.candidate}{ratio} {pair.words}", f"{label}, training loss")
        for chart, kind, title in zip(charts.values(), ("speed", "loss"), titles, strict=True):
            chart[title] = [
                "Margin",
                [f"versus/{kind}/{safe_name(label)}/{part}" for part in ("median", "low", "high")],
            ]
    for side in dict.fromkeys(name for pair in pairs for name in pair.sides):
        with SummaryWriter(str(folder / safe_name(side))) as writer:
            for label, pair in zip(labels, pairs, strict=True):
                runs = pair.sides.get(side, [])
                speeds = [dict(zip(run.steps, run.images_per_s, strict=True)) for run in runs]
                for kind, curves in (("speed", speeds), ("loss", [run.losses for run in runs])):
                    for step in sorted(set.intersection(*map(set, curves))) if curves else ():
                        values = [curve[step] for curve in curves]
                        for part, of in (("median", statistics.median), ("low", min), ("high", max)):
                            writer.add_scalar(f"versus/{kind}/{safe_name(label)}/{part}", of(values), step)
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("comparison", markdown)
        if pairs:
            writer.add_custom_scalars(charts)


# --- charts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A row of the chart; without an interval it shows its words only."""

    label: str
    interval: Interval | None
    verdict: str
    words: str


def write_chart(panels: Mapping[str, Sequence[Bar]], title: str, sides: tuple[str, str], path: Path) -> bool:
    """Draw panels with the same rows side by side, the speed of `sides[1]` / that of `sides[0]` on logarithmic axes.

    Returns False if matplotlib is not installed or there is nothing to draw.
    """
    rows = max(map(len, panels.values()), default=0)
    row_inches = 0.62 if any(bar.words for bars in panels.values() for bar in bars) else 0.25
    figure = _figure(max(7.5, 4.5 * len(panels)), 1.9 + row_inches * rows, title)
    if not rows or figure is None:
        return False
    # 1 and all ratios; an interval that extends beyond half or twice its ratio is clipped.
    shown = [bar.interval for bars in panels.values() for bar in bars if bar.interval]
    low = min([0.8, *(max(one.low, one.ratio / 2) for one in shown)]) / 1.15
    high = max([1.25, *(min(one.high, one.ratio * 2) for one in shown)]) * 1.2
    figure.supxlabel(f"speed of {sides[1]} / speed of {sides[0]} with 95 % interval; hollow: not decided", fontsize=11)
    columns = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, bars) in zip(columns, panels.items(), strict=True):
        axes.set(xscale="log", xlim=(low, high), ylim=(rows - 0.4, -0.6), xlabel=name)
        axes.axvline(1, color="#333333", lw=1.5)
        for verdict, start, end in (("slower", low, 1.0), ("faster", 1.0, high)):
            axes.axvspan(start, end, color=COLOURS[verdict], alpha=0.06, lw=0)
            place = {"xycoords": ("data", "axes fraction"), "ha": "center", "color": COLOURS[verdict]}
            axes.annotate(f"{sides[1]} is {verdict}", (math.sqrt(start * end), 1.01), **place)
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks(range(len(bars)), [textwrap.fill(bar.label, 22) for bar in bars])
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        for row, bar in enumerate(bars):
            colour, middle = COLOURS[bar.verdict], bar.interval.ratio if bar.interval else math.sqrt(low * high)
            if bar.interval:
                hollow = bar.verdict in ("inconclusive", "not_comparable")  # it decides nothing
                axes.plot((max(bar.interval.low, low), min(bar.interval.high, high)), (row, row), color=colour, lw=4)
                axes.plot(middle, row, "o", color=colour, mfc="white" if hollow else colour, mew=2, ms=8)
            words = textwrap.fill(bar.words, 62, max_lines=2)
            axes.text(middle, row - 0.15, words, ha="center", va="bottom", fontsize=9, color="#333333")
    figure.savefig(path)
    return True


def _figure(width: float, height: float, title: str) -> Any:
    """None if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    figure = Figure((width, height), dpi=130, layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure


def write_times_chart(times: "OperatorTimes", title: str, path: Path) -> bool:
    """The step in both layouts, stacked by kind of operator, and the ten largest differences of modules."""
    figure = _figure(10, 4.6, f"{title}\n{times.summary()[1]}")
    if figure is None:
        return False
    stacked, differences = figure.subplots(1, 2, width_ratios=(1, 1.3))
    kinds = sorted(times.rows(lambda call: call.kind), key=lambda row: -max(row.contiguous_ms, row.channels_last_ms))
    stacks = [(row.name, [row]) for row in kinds[:7]] + [("other", kinds[7:])]
    bottom = (0.0, 0.0)
    colours = ["#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#f0e442", "#bbbbbb"]
    for (name, rows), colour in zip(stacks, colours, strict=False):
        ms = sum(row.contiguous_ms for row in rows), sum(row.channels_last_ms for row in rows)
        stacked.bar(("contiguous", "channels_last"), ms, bottom=bottom, label=name, color=colour, width=0.6)
        bottom = bottom[0] + ms[0], bottom[1] + ms[1]
    stacked.set_ylabel("milliseconds of a step, by kind of operator")
    stacked.legend(reverse=True, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    rows = times.tables["modules"][:10]
    for y, row in enumerate(rows):
        colour = COLOURS["slower" if row.difference_ms > 0 else "faster"]
        differences.barh(y, row.difference_ms, color=colour, alpha=1.0 if row.is_loss or row.is_gain else 0.3)
        differences.plot(row.interval_ms, [y, y], color="#333333", lw=1.5)
    differences.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    differences.invert_yaxis()
    differences.axvline(0, color="#333333", lw=1)
    differences.set_xlabel("ms that channels_last costs more (pale: within noise)")
    for axes in (stacked, differences):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return True
