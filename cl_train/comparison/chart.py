"""`comparison.png`: the speed ratio of each pair with its interval. Needs matplotlib, the extra `plot`."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cl_train.comparison.pairs import Pair

# Okabe and Ito 2008: distinguishable with a colour vision deficiency
COLOURS = {
    "faster": "#0072b2",
    "slower": "#d55e00",
    "no_difference": "#6e6e6e",
    "inconclusive": "#8a6d3b",
    "not_comparable": "#444444",
}
_TICKS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


def write_chart(pairs: Sequence[Pair], labels: Sequence[str], path: Path) -> bool:
    """Draw one row per pair on a logarithmic axis; returns False if matplotlib is not installed or there is no pair."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    if not pairs:
        return False
    sides = {(pair.baseline, pair.candidate) for pair in pairs}
    baseline, candidate = sides.pop() if len(sides) == 1 else ("baseline", "candidate")
    low, high = _limits(pairs)
    figure = Figure(figsize=(7.5, 1.9 + 0.62 * len(pairs)), dpi=130, layout="constrained")
    figure.suptitle(_title(pairs, baseline, candidate), fontsize=13, fontweight="bold")
    axes = figure.subplots()
    axes.set(xscale="log", xlim=(low, high), ylim=(len(pairs) - 0.4, -0.6))
    axes.set_xlabel(f"speed of {candidate} / speed of {baseline}, with 95 % interval")
    axes.axvline(1, color="#333333", lw=1.5)
    for verdict, start, end in (("slower", low, 1.0), ("faster", 1.0, high)):
        axes.axvspan(start, end, color=COLOURS[verdict], alpha=0.06, lw=0)
        words, x = f"{candidate} is {verdict}", math.sqrt(start * end)
        axes.annotate(words, (x, 1.02), xycoords=("data", "axes fraction"), ha="center", color=COLOURS[verdict])
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(pairs)), [textwrap.fill(label, 20) for label in labels], fontsize=11)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    plain = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    for row, pair in enumerate(pairs):
        interval, colour = pair.comparable_interval, COLOURS[pair.verdict]
        style: dict[str, Any] = {"ha": "center", "color": colour, "bbox": plain}
        if interval is None:
            reason = textwrap.fill(f"not comparable: {pair.notes[0]}", 62, max_lines=2)
            axes.text(math.sqrt(low * high), row, reason, va="center", fontsize=9, **style)
            continue
        axes.plot([max(interval.low, low), min(interval.high, high)], [row, row], color=colour, lw=5)
        axes.plot([interval.ratio], [row], "o", color=colour, markersize=11)
        words = f"{interval.ratio:.2f}x [{interval.low:.2f}, {interval.high:.2f}] {pair.verdict.replace('_', ' ')}"
        axes.text(interval.ratio, row - 0.2, words, va="bottom", **style)
    figure.savefig(path)
    return True


def _title(pairs: Sequence[Pair], baseline: str, candidate: str) -> str:
    """Names of both sides, and the model, precision and device if they are the same for all pairs."""
    equal: list[str] = []
    for name in ("model", "precision", "device_name"):
        values = {str(pair.held_equal.get(name)) for pair in pairs}
        equal += values if len(values) == 1 and values != {"None"} else []
    return f"{candidate} against {baseline}\n{', '.join(equal)}"


def _limits(pairs: Sequence[Pair]) -> tuple[float, float]:
    """1 and all ratios; an interval that extends beyond half or twice its ratio is clipped."""
    shown = [pair.comparable_interval for pair in pairs if pair.comparable_interval]
    low = min([0.8, *(max(interval.low, interval.ratio / 2) for interval in shown)])
    high = max([1.25, *(min(interval.high, interval.ratio * 2) for interval in shown)])
    return low / 1.15, high * 1.2
