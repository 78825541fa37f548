"""Draw the ratio channels_last / contiguous of each model in a benchmark's JSON file, with its 95 % interval.

    python -m benchmarks.speed_chart results/benchmark-28-cpu-torch2.15.json docs/speed.png

Needs matplotlib (`pip install -e .[plot]`).
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from cl_train.comparison.chart import Bar, write_chart
from cl_train.comparison.statistics import Interval, verdict_of


def draw(document: dict[str, Any], out: Path) -> None:
    """One panel per precision; models are sorted by the first panel's ratio, largest on top."""
    pairs = {(one["precision"], one["model"]): one["pairs"][0] for one in document["results"] if one["pairs"]}
    precisions = list(dict.fromkeys(precision for precision, _ in pairs))
    models = sorted({model for _, model in pairs}, key=lambda model: -pairs[precisions[0], model]["ratio"])
    panels = {precision: [_bar(model, pairs[precision, model]) for model in models] for precision in precisions}
    settings, version = document["settings"], document["environment"]["torch"].partition("+")[0]
    what = f"batch {settings['batch_size'][0]}, {settings['image_size'] or 224} px, torch {version}"
    title = f"Training step in channels_last against contiguous\n{document['device_name']}, {what}"
    write_chart(panels, title, ("contiguous", "channels_last"), out)


def _bar(model: str, pair: dict[str, Any]) -> Bar:
    """With the verdict of today's rule: files may be older."""
    low, high = pair["ci95"] or (0.0, math.inf)
    interval = Interval(pair["ratio"], low, high, pair["n"])
    verdict = pair["verdict"] if pair["verdict"] == "not_comparable" else verdict_of(interval)
    return Bar(model, interval, verdict, "")


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text(encoding="utf-8")), target)
