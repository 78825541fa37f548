"""Draw the ratio channels_last / contiguous of each model in a benchmark's JSON file, with its 95 %
interval.

    python -m benchmarks.speed_chart results/benchmark-28-cpu-torch2.15.json docs/speed.png

Needs matplotlib (`pip install -e .[plot]`).
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from cl_train.measure.charts import Bar, write_chart
from cl_train.measure.statistics import Interval, verdict_of


def draw(document: dict[str, Any], out: Path) -> None:
    """One panel per precision; models are sorted by the first panel's ratio, largest on top."""
    panels: dict[str, list[Bar]] = {}
    for one in document["results"]:
        for pair in one["pairs"][:1]:
            low, high = pair["ci95"] or (0.0, math.inf)
            interval = Interval(pair["ratio"], low, high, pair["n"])
            verdict = (
                pair["verdict"] if pair["verdict"] == "not_comparable" else verdict_of(interval)
            )  # today's rule
            panels.setdefault(one["precision"], []).append(Bar(one["model"], interval, verdict, ""))
    ratios = {bar.label: bar.interval.ratio for bar in next(iter(panels.values())) if bar.interval}
    panels = {
        name: sorted(bars, key=lambda bar: -ratios[bar.label]) for name, bars in panels.items()
    }
    settings, version = document["settings"], document["environment"]["torch"].partition("+")[0]
    what = f"batch {settings['batch_size'][0]}, {settings['image_size'] or 224} px, torch {version}"
    title = f"Training step in channels_last against contiguous\n{document['device_name']}, {what}"
    write_chart(panels, title, ("contiguous", "channels_last"), out)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text(encoding="utf-8")), target)
