"""Draw the ratio channels_last / contiguous of each model in a benchmark's JSON file, with its 95 % interval.

    python -m benchmarks.speed_chart results/benchmark-28-cpu-torch2.15.json docs/speed.png

Needs matplotlib (`pip install -e .[plot]`).
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

COLOURS = {"faster": "#1a7f37", "slower": "#b35900", "no_difference": "#6e7781", "not_comparable": "#d0d7de"}


def draw(document: dict[str, Any], out: Path) -> None:
    """One panel per precision; models are sorted by the first panel's ratio, largest on top."""
    pairs = {(one["precision"], one["model"]): one["pairs"][0] for one in document["results"] if one["pairs"]}
    precisions = list(dict.fromkeys(precision for precision, _ in pairs))
    models = sorted((model for precision, model in pairs if precision == precisions[0]),
                    key=lambda model: pairs[precisions[0], model]["ratio"])  # fmt: skip
    figure, axes = plt.subplots(1, len(precisions), figsize=(9, 1.2 + 0.2 * len(models)), sharey=True, squeeze=False)
    for axis, precision in zip(axes[0], precisions, strict=True):
        axis.axvline(1.0, color="black", linewidth=0.8)
        for row, model in enumerate(models):
            if pair := pairs.get((precision, model)):
                colour = COLOURS[pair["verdict"]]
                axis.plot(pair["ci95"], [row, row], color=colour, linewidth=2, alpha=0.6)
                axis.plot(pair["ratio"], row, "o", color=colour, markersize=5)
        label = "channels_last / contiguous, images per second"
        axis.set(title=precision, xlabel=label, xlim=(0.6, 1.8))  # wider intervals are clipped
        axis.grid(axis="x", alpha=0.3)
    axes[0][0].set_yticks(range(len(models)), models, fontsize=8)
    settings, version = document["settings"], document["environment"]["torch"].partition("+")[0]
    what = f"batch {settings['batch_size'][0]}, {settings['image_size'] or 224} px, torch {version}"
    figure.suptitle(f"Training step on {document['device_name']}, {what}", fontsize=10)
    shown = ["faster", "no_difference", "slower"]
    handles = [plt.Line2D([], [], marker="o", color=COLOURS[verdict]) for verdict in shown]
    labels = [verdict.replace("_", " ") for verdict in shown]
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text(encoding="utf-8")), target)
