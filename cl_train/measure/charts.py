"""Charts of speed ratios and of operator times; without matplotlib none is drawn. No torch here."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cl_train.measure.statistics import Interval
from cl_train.system.files import replacing

if TYPE_CHECKING:
    from cl_train.measure.times_report import OperatorTimes

# Green and purple are distinguishable with a colour vision deficiency (ColorBrewer PRGn).
COLOURS = {
    "faster": "#1b7837",
    "slower": "#762a83",
    "no_difference": "#222222",
    "inconclusive": "#808080",
    "not_comparable": "#b0b0b0",
}
ARROW_ROOM = 12  # points between an axis and its labels, for arrows of intervals that go on
_TICKS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True)
class Bar:
    """A row of the chart; without an interval it shows only its words."""

    label: str
    interval: Interval | None
    verdict: str
    words: str


def write_chart(
    panels: Mapping[str, Sequence[Bar]], title: str, sides: tuple[str, str], path: Path
) -> bool:
    """Draws panels with the same rows side by side: the speed of `sides[1]` / that of `sides[0]`.

    Returns False if matplotlib is not installed, or there is nothing to draw.
    """
    rows = max(map(len, panels.values()), default=0)
    bars = [bar for panel in panels.values() for bar in panel]
    row_inches = 0.62 if any(bar.words for bar in bars) else 0.25
    figure = _figure(max(7.5, 4.5 * len(panels)), 1.9 + row_inches * rows, title)
    if not rows or figure is None:
        return False
    # The axis shows 1 and all ratios; an interval beyond half or twice its ratio is clipped.
    shown = [bar.interval for bar in bars if bar.interval]
    low = min([0.8, *(max(one.low, one.ratio / 2) for one in shown)]) / 1.15
    high = max([1.25, *(min(one.high, one.ratio * 2) for one in shown)]) * 1.2
    ratio = f"speed of {sides[1]} / speed of {sides[0]} with 95 % interval"
    figure.supxlabel(f"{ratio}; hollow: not decided", fontsize=11)
    columns = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (name, panel) in zip(columns, panels.items(), strict=True):
        axes.set(xscale="log", xlim=(low, high), ylim=(rows - 0.4, -0.6))
        axes.set_title(name, pad=18)
        axes.axvline(1, color="#333333", lw=1.5)
        for verdict, start, end in (("slower", low, 1.0), ("faster", 1.0, high)):
            colour = COLOURS[verdict]
            axes.axvspan(start, end, color=colour, alpha=0.06, lw=0)
            above = {"xycoords": ("data", "axes fraction"), "ha": "center", "color": colour}
            axes.annotate(f"{sides[1]} is {verdict}", (math.sqrt(start * end), 1.01), **above)
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks(range(len(panel)), [textwrap.fill(bar.label, 22) for bar in panel])
        axes.tick_params(axis="y", length=0, pad=ARROW_ROOM)
        axes.spines[["top", "right", "left"]].set_visible(False)
        for row, bar in enumerate(panel):
            middle = math.sqrt(low * high)
            if bar.interval:
                middle = bar.interval.ratio
                colour = COLOURS[bar.verdict]
                _draw_interval(axes, (bar.interval.low, bar.interval.high), row, colour, width=4)
                is_hollow = bar.verdict in ("inconclusive", "not_comparable")
                fill = "white" if is_hollow else colour
                axes.plot(middle, row, "o", color=colour, mfc=fill, mew=2, ms=8)
            words = textwrap.fill(bar.words, 62, max_lines=2, placeholder=" …")
            over_line_at_1 = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            place = {"ha": "center", "va": "bottom"}
            axes.text(middle, row - 0.15, words, fontsize=9, bbox=over_line_at_1, **place)
    _save(figure, path)
    return True


def _draw_interval(
    axes: Any, ends: tuple[float, float], row: int, colour: str, width: float
) -> None:
    """Draws a line, with an arrow at each limit of the axis beyond which it goes on."""
    low, high = axes.get_xlim()
    shown = [min(max(end, low), high) for end in ends]
    axes.plot(shown, (row, row), color=colour, lw=width)
    for end, at, arrow in zip(ends, shown, "<>", strict=True):
        if end != at:
            axes.plot(at, row, arrow, color=colour, ms=2 * width + 4, clip_on=False)


def _figure(width: float, height: float, title: str) -> Any:
    """Returns a figure; None: matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    figure = Figure((width, height), dpi=130, layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure


def _save(figure: Any, path: Path) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix("."))


def write_times_chart(times: "OperatorTimes", title: str, path: Path) -> None:
    """Draws the step by kinds of operators, and the ten largest differences of modules."""
    figure = _figure(10, 4.6, f"{title}\n{times.conclusions()[1]}")
    stacked, differences = figure.subplots(1, 2, width_ratios=(1, 1.3))
    kinds = times.rows(lambda call: call.kind)
    kinds.sort(key=lambda row: -max(row.contiguous_ms, row.channels_last_ms))
    bottom = [0.0, 0.0]
    named = [(row.name, [row]) for row in kinds[:7]]
    for name, rows in [*named, ("other", kinds[7:])]:
        ms = [sum(row.contiguous_ms for row in rows), sum(row.channels_last_ms for row in rows)]
        stacked.bar(("contiguous", "channels_last"), ms, bottom=bottom, label=name, width=0.6)
        bottom = [below + more for below, more in zip(bottom, ms, strict=True)]
    stacked.set_ylabel("milliseconds of a step, by kind of operator")
    outside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    stacked.legend(reverse=True, fontsize=8, frameon=False, **outside)

    modules = times.tables["modules"][:10]
    saved_ms = [-row.difference_ms for row in modules]
    # The bars set the limits: one disturbed row's interval may be a thousand times as wide.
    ends_ms = min([0.0, *saved_ms]), max([0.0, *saved_ms])
    margin_ms = 0.15 * (ends_ms[1] - ends_ms[0]) or 1.0
    differences.set_xlim(ends_ms[0] - margin_ms, ends_ms[1] + margin_ms)
    for y, (row, gain_ms) in enumerate(zip(modules, saved_ms, strict=True)):
        colour = COLOURS["slower" if gain_ms < 0 else "faster"]
        differences.barh(y, gain_ms, color=colour, alpha=1.0 if row.sign else 0.3)
        low, high = row.interval_ms
        _draw_interval(differences, (-high, -low), y, "#333333", width=1.5)
    differences.set_yticks(range(len(modules)), [row.name for row in modules], fontsize=8)
    differences.tick_params(axis="y", pad=ARROW_ROOM)
    differences.invert_yaxis()
    differences.axvline(0, color="#333333", lw=1)
    differences.set_xlabel("ms saved by channels_last\n(below 0: lost; pale: within noise)")
    for axes in (stacked, differences):
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)
