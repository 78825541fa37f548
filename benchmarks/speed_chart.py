"""Draw the ratio channels_last / contiguous of each model in a benchmark's JSON file, with its 95 % interval.

    python -m benchmarks.speed_chart results/benchmark-28-cpu-torch2.15.json docs/speed.png

Needs matplotlib (`pip install -e .[plot]`).
"""

from __future__ import annotations

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
    pairs: dict[str, dict[str, dict[str, Any]]] = {}
    for result in document["results"]:
        if result["pairs"]:
            pairs.setdefault(result["precision"], {})[result["model"]] = result["pairs"][0]
    first = next(iter(pairs.values()))
    models = sorted(first, key=lambda model: first[model]["ratio"])
    figure, axes = plt.subplots(1, len(pairs), figsize=(9, 1.2 + 0.2 * len(models)), sharey=True, squeeze=False)
    for axis, (precision, by_model) in zip(axes[0], pairs.items(), strict=True):
        axis.axvline(1.0, color="black", linewidth=0.8)
        for row, model in enumerate(models):
            pair = by_model.get(model)
            if pair is not None:
                low, high = pair["ci95"]
                axis.plot([low, high], [row, row], color=COLOURS[pair["verdict"]], linewidth=2, alpha=0.6)
                axis.plot(pair["ratio"], row, "o", color=COLOURS[pair["verdict"]], markersize=5)
        axis.set_xlim(0.6, 1.8)  # wider intervals are clipped: such a model needs more time for a verdict
        axis.set_title(precision)
        axis.set_xlabel("channels_last / contiguous, images per second")
        axis.grid(axis="x", alpha=0.3)
    axes[0][0].set_yticks(range(len(models)), models, fontsize=8)
    settings = document["settings"]
    batch, size = settings["batch_size"][0], settings["image_size"] or 224
    version = document["environment"]["torch"].partition("+")[0]
    figure.suptitle(
        f"Training step on {document['device_name']}, batch {batch}, {size} px, torch {version}", fontsize=10
    )
    handles = [
        plt.Line2D([], [], marker="o", color=COLOURS[verdict]) for verdict in ("faster", "no_difference", "slower")
    ]
    figure.legend(handles, ["faster", "no difference", "slower"], loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text(encoding="utf-8")), target)
