"""The page that a sweep ends in: `comparison.{json,md,csv}` and a chart, and the verdict in one sentence."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from cl_train.comparison.pairs import Pair

SCHEMA_VERSION = 1
_COLOURS = {
    "faster": (0, 114, 178),
    "slower": (213, 94, 0),
    "no_difference": (110, 110, 110),
    "not_comparable": (170, 170, 170),
}  # Okabe and Ito 2008: told apart by colour-blind readers too
_WORDS = {name: name.replace("_", " ") for name in _COLOURS}


@dataclass(frozen=True)
class FailedJob:
    """A job of a sweep that did not finish."""

    job: int
    overrides: str
    why: str


@dataclass(frozen=True)
class Comparison:
    """What a report is about; `remarks` are about the whole."""

    pairs: list[Pair]
    failed: list[FailedJob]
    remarks: list[str]


def write_report(comparison: Comparison, folder: Path) -> str:
    """Write `comparison.json`, `.md`, `.csv` and `.png` into `folder`; returns the verdict in one sentence."""
    rows = [_row(pair) for pair in comparison.pairs]
    verdict = verdict_sentence(comparison)
    document = {
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict,
        "pairs": rows,
        "failed": [asdict(job) for job in comparison.failed],
        "remarks": comparison.remarks,
    }
    (folder / "comparison.json").write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "comparison.md").write_text(as_markdown(comparison), encoding="utf-8")
    _write_csv(rows, folder / "comparison.csv")
    draw_chart(comparison.pairs).save(folder / "comparison.png")
    return verdict


def _row(pair: Pair) -> dict[str, Any]:
    interval = pair.interval
    return {
        **pair.held_equal,
        "baseline": pair.baseline,
        "candidate": pair.candidate,
        "speed": "compute" if pair.held_equal.get("data") == "synthetic" else "end_to_end",
        "baseline_images_per_s": _rounded(pair.baseline_images_per_s, 2),
        "candidate_images_per_s": _rounded(pair.candidate_images_per_s, 2),
        "ratio": _rounded(interval.ratio, 4) if interval else None,
        "ci95": [_rounded(interval.low, 4), _rounded(interval.high, 4)] if interval else None,
        "n": interval.n if interval else 0,
        "verdict": pair.verdict,
        "loss_gap": _rounded(pair.loss_gap, 5),
        "bottleneck": pair.bottleneck,
        "baseline_peak_memory_gib": _rounded(pair.baseline_peak_memory_gib, 3),
        "candidate_peak_memory_gib": _rounded(pair.candidate_peak_memory_gib, 3),
        "notes": pair.notes,
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    flat = []
    for row in rows:
        low, high = row["ci95"] or (None, None)
        flat.append({**row, "ci95": low, "ci95_high": high, "notes": " | ".join(row["notes"])})
        flat[-1]["ci95_low"] = flat[-1].pop("ci95")
    with open(path, "w", newline="", encoding="utf-8") as file:
        # Rows have the keys that are equal within their pair: not all the same ones.
        names = dict.fromkeys(name for row in flat for name in row)
        writer = csv.DictWriter(file, fieldnames=list(names) or ["verdict"])
        writer.writeheader()
        writer.writerows(flat)


# --- words ------------------------------------------------------------------------------------------------------------


def verdict_sentence(comparison: Comparison) -> str:
    """What came out, for the console's last line."""
    pairs, failed = comparison.pairs, len(comparison.failed)
    after = f" {failed} job{'s' if failed > 1 else ''} failed." if failed else ""
    if not pairs:
        return f"Nothing to compare: no two runs differ in the layout alone.{after}"
    if len(pairs) == 1:
        return f"{_pair_sentence(pairs[0])}{after}"
    counts = Counter(pair.verdict for pair in pairs)
    listed = []
    for verdict in ("faster", "slower", "no_difference", "not_comparable"):
        if counts[verdict]:
            members = ", ".join(_member(pair, pairs) for pair in pairs if pair.verdict == verdict)
            listed.append(f"{_WORDS[verdict]} in {counts[verdict]} ({members})")
    names = {(pair.candidate, pair.baseline) for pair in pairs}
    subject = "{} against {}".format(*names.pop()) if len(names) == 1 else "The candidates"
    return f"{subject}, {len(pairs)} pairs: {'; '.join(listed)}.{after}"


def _pair_sentence(pair: Pair) -> str:
    what = f"{pair.held_equal.get('model')} ({pair.held_equal.get('precision')})"
    first_note = f": {pair.notes[0]}" if pair.notes else ""
    if pair.verdict == "not_comparable" or pair.interval is None:
        return f"{what}: {pair.candidate} and {pair.baseline} are not comparable{first_note}."
    bounds = f"95 % interval {pair.interval.low:.2f} to {pair.interval.high:.2f}"
    if pair.verdict == "no_difference":
        return f"{what}: no difference shown between {pair.candidate} and {pair.baseline} ({bounds})."
    warning = f" {pair.notes[0]}." if pair.bottleneck == "loader" else ""
    speed = f"{pair.interval.ratio:.2f} times the speed of {pair.baseline}"
    return f"{what}: {pair.candidate} is {pair.verdict}, {speed} ({bounds}).{warning}"


def _member(pair: Pair, pairs: Sequence[Pair]) -> str:
    """A pair by what tells it from the others, with its ratio."""
    label = label_of(pair, pairs)
    shown = pair.verdict != "not_comparable" and pair.interval is not None
    return f"{label} {pair.interval.ratio:.2f}x" if shown and pair.interval else label


def label_of(pair: Pair, pairs: Sequence[Pair]) -> str:
    """The model, and whatever else differs between the pairs."""
    common = [key for key in pair.held_equal if all(key in other.held_equal for other in pairs)]
    varying = [key for key in common if key != "model" and len({str(p.held_equal[key]) for p in pairs}) > 1]
    parts = [str(pair.held_equal.get("model")), *(f"{key}={pair.held_equal[key]}" for key in varying)]
    if len({(other.baseline, other.candidate) for other in pairs}) > 1:
        parts.append(f"{pair.candidate} / {pair.baseline}")
    return " ".join(parts)


def as_markdown(comparison: Comparison) -> str:
    pairs = comparison.pairs
    lines = ["# Comparison", "", verdict_sentence(comparison), ""]
    loader_bound = [pair for pair in pairs if pair.bottleneck == "loader"]
    if loader_bound:
        lines += [
            f"**Loader-bound: {len(loader_bound)} of {len(pairs)} pairs.** Their speeds are largely the loader's.",
            "",
        ]
    if pairs:
        lines += _table(pairs)
        lines += ["![ratio of speeds with 95 % intervals](comparison.png)", ""]
        lines += _equal_for_all(pairs)
        lines += _notes(pairs)
    if comparison.failed:
        lines += ["## Jobs that did not finish", "", "| job | settings | why |", "|---|---|---|"]
        lines += [f"| {job.job} | {_cell(job.overrides)} | {_cell(job.why)} |" for job in comparison.failed]
        lines.append("")
    if comparison.remarks:
        lines += [*(f"- {remark}" for remark in comparison.remarks), ""]
    lines += [
        "Ratio: candidate / baseline, medians of windows after warm-up. Loss gap: candidate - baseline, mean over the "
        "last quarter of equal steps. How intervals and verdicts come about: docs/benchmarks.md.",
        "",
    ]
    return "\n".join(lines)


def _table(pairs: Sequence[Pair]) -> list[str]:
    """One row per pair; who is compared stands in the header where it is the same for all."""
    names = {(pair.baseline, pair.candidate) for pair in pairs}
    speeds, memory = "images/s", "peak memory GiB"
    columns = ["", *(["baseline", "candidate"] if len(names) > 1 else [])]
    if len(names) == 1:
        speeds, memory = (f"{what}: {' / '.join(next(iter(names)))}" for what in (speeds, memory))
    columns += [speeds, "ratio [95 %]", "runs each", "verdict", "loss gap", memory, "bottleneck"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for pair in pairs:
        interval = pair.interval
        is_shown = interval is not None and pair.verdict != "not_comparable"
        ratio = f"{interval.ratio:.3f} [{interval.low:.3f}, {interval.high:.3f}]" if interval and is_shown else "-"
        cells = [
            label_of(pair, pairs),
            *([pair.baseline, pair.candidate] if len(names) > 1 else []),
            f"{_number(pair.baseline_images_per_s, 1)} / {_number(pair.candidate_images_per_s, 1)}",
            ratio,
            str(interval.n if interval else 0),
            f"**{_WORDS[pair.verdict]}**",
            "-" if pair.loss_gap is None else f"{pair.loss_gap:+.4f}",
            f"{_number(pair.baseline_peak_memory_gib, 2)} / {_number(pair.candidate_peak_memory_gib, 2)}",
            pair.bottleneck,
        ]
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return [*lines, ""]


def _equal_for_all(pairs: Sequence[Pair]) -> list[str]:
    """What no pair differs in, once, instead of a column each."""
    first = pairs[0].held_equal
    equal = [
        f"{key} {'auto' if value is None else value}"
        for key, value in first.items()
        if all(key in pair.held_equal and pair.held_equal[key] == value for pair in pairs)
    ]
    return [f"Equal for all: {', '.join(equal)}.", ""] if equal else []


def _notes(pairs: Sequence[Pair]) -> list[str]:
    """Under each pair its own notes, first those that hold for all."""
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


# --- the chart --------------------------------------------------------------------------------------------------------

_WIDTH, _MARGIN, _TOP, _ROW, _BOTTOM = 960, 48, 84, 104, 96  # pixels
_TICKS = (0.05, 0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)


def draw_chart(pairs: Sequence[Pair]) -> Image.Image:
    """Per pair, its name and numbers above its interval; the axis is logarithmic, the thick vertical is a ratio of 1.

    Narrow, with large letters: TensorBoard shows it at a third of its size.
    """
    height = _TOP + _ROW * max(1, len(pairs)) + _BOTTOM
    image = Image.new("RGB", (_WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(size=30), ImageFont.load_default(size=26)
    low, high = _range(pairs)

    def x_of(ratio: float) -> float:
        share = math.log(min(max(ratio, low), high) / low) / math.log(high / low)
        return _MARGIN + share * (_WIDTH - 2 * _MARGIN)

    draw.text((_MARGIN, 22), "speed / baseline's speed, 95 % interval", fill="black", font=font)
    axis_y = height - _BOTTOM
    for tick in _ticks(low, high):
        colour = (60, 60, 60) if tick == 1 else (222, 222, 222)
        draw.line([(x_of(tick), _TOP), (x_of(tick), axis_y)], fill=colour, width=3 if tick == 1 else 1)
        draw.text((x_of(tick), axis_y + 8), f"{tick:g}x", fill="black", font=small, anchor="ma")
    draw.text((_MARGIN, axis_y + 50), "slower", fill=_COLOURS["slower"], font=small)
    draw.text((_WIDTH - _MARGIN, axis_y + 50), "faster", fill=_COLOURS["faster"], font=small, anchor="ra")
    for index, pair in enumerate(pairs):
        _draw_pair(draw, pair, label_of(pair, pairs), _TOP + _ROW * index, x_of, (font, small))
    return image


def _draw_pair(
    draw: ImageDraw.ImageDraw, pair: Pair, label: str, top: int, x_of: Callable[[float], float], fonts: tuple[Any, Any]
) -> None:
    colour, words = _COLOURS[pair.verdict], _WORDS[pair.verdict]
    interval = pair.interval if pair.verdict != "not_comparable" else None
    if interval is not None:
        words = f"{interval.ratio:.2f}x [{interval.low:.2f}, {interval.high:.2f}] {words}"
        y = top + 72
        draw.line([(x_of(interval.low), y), (x_of(interval.high), y)], fill=colour, width=8)
        x = x_of(interval.ratio)
        draw.ellipse([x - 14, y - 14, x + 14, y + 14], fill=colour)
    width = draw.textlength(words, font=fonts[1])
    label = _fitted(draw, label, fonts[0], _WIDTH - 2 * _MARGIN - width - 30)
    for text, x, font, anchor, fill in (
        (label, _MARGIN, fonts[0], "la", (0, 0, 0)),
        (words, _WIDTH - _MARGIN, fonts[1], "ra", colour),
    ):
        box = draw.textbbox((x, top + 10), text, font=font, anchor=anchor)
        draw.rectangle([box[0] - 6, box[1] - 2, box[2] + 6, box[3] + 2], fill="white")  # over the grid's lines
        draw.text((x, top + 10), text, fill=fill, font=font, anchor=anchor)


def _fitted(draw: ImageDraw.ImageDraw, text: str, font: Any, width: float) -> str:
    if draw.textlength(text, font=font) <= width:
        return text
    while text and draw.textlength(f"{text}...", font=font) > width:
        text = text[:-1]
    return f"{text}..."


def _range(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Around 1 and all ratios; an interval that reaches beyond half or twice its ratio runs out of the picture."""
    shown = [pair.interval for pair in pairs if pair.interval and pair.verdict != "not_comparable"]
    low = min([0.9, *(max(item.low, item.ratio / 2) for item in shown)])
    high = max([1.12, *(min(item.high, item.ratio * 2) for item in shown)])
    return low / 1.03, high * 1.03


def _ticks(low: float, high: float) -> list[float]:
    """1, and the other round ratios that leave room for their labels."""
    nearest_first = sorted((tick for tick in _TICKS if low <= tick <= high), key=lambda tick: abs(math.log(tick)))
    kept: list[float] = []
    for tick in nearest_first:
        if all(abs(math.log(tick / other)) > 0.11 * math.log(high / low) for other in kept):
            kept.append(tick)
    return sorted(kept)
