"""The comparison in TensorBoard: one aggregate run per side, charts per model, a table of runs, and the report."""

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from cl_train.comparison.pairs import Pair
from cl_train.comparison.run_records import Run
from cl_train.system.run_folder import safe_name

PARTS = ("median", "low", "high")


def write_dashboard(pairs: Sequence[Pair], labels: Sequence[str], markdown: str, folder: Path) -> None:
    """Write TensorBoard events into `folder`, into one subfolder per side, and into one per run for HParams.

    A subfolder has the run's name: in a sweep that is the run's own folder. `labels` name the pairs.
    """
    import numpy as np
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    layout: dict[str, dict[str, list[object]]] = {"speed, images/s": {}, "training loss": {}}
    for label, pair in zip(labels, pairs, strict=True):
        ratio = f"{pair.comparable_interval.ratio:.2f}x, " if pair.comparable_interval else ""
        title = f"{label}: {pair.candidate} {ratio}{pair.verdict.replace('_', ' ')}"
        for category, kind in zip(layout, ("speed", "loss"), strict=True):
            layout[category][title] = ["Margin", [f"sides/{kind}/{safe_name(label)}/{part}" for part in PARTS]]
    for side in dict.fromkeys(name for pair in pairs for name in (pair.baseline, pair.candidate)):
        _list_first(folder / safe_name(side))
        with SummaryWriter(str(folder / safe_name(side))) as writer:
            for label, pair in zip(labels, pairs, strict=True):
                runs = {pair.baseline: pair.baseline_runs, pair.candidate: pair.candidate_runs}.get(side)
                for kind, points in (("speed", _speed_bands(runs)), ("loss", _loss_bands(runs))) if runs else ():
                    for step, values in points:
                        band = statistics.median(values), min(values), max(values)
                        for part, value in zip(PARTS, band, strict=True):
                            writer.add_scalar(f"sides/{kind}/{safe_name(label)}/{part}", value, step)
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("comparison", "\n".join(line for line in markdown.splitlines() if not line.startswith("![")))
        if pairs:
            writer.add_custom_scalars(layout)
        if (folder / "comparison.png").is_file():
            with Image.open(folder / "comparison.png", formats=("PNG",)) as chart:
                writer.add_image("comparison", np.asarray(chart.convert("RGB")), dataformats="HWC")
        for run, settings, metrics in _table(pairs):
            writer.add_hparams(settings, metrics, run_name=run.folder.name, global_step=0)


def _list_first(folder: Path) -> None:
    """TensorBoard orders and colours runs by the time of their first event; list the sides before the jobs."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(exist_ok=True)
    with open(folder / "events.out.tfevents.0000000000.first", "wb") as file:
        RecordWriter(file).write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())


def _speed_bands(runs: Sequence[Run]) -> Iterator[tuple[int, list[float]]]:
    """Per window the speeds of all runs, with the two windows before and after it."""
    for index, step in enumerate(runs[0].steps):
        yield step, [speed for run in runs for speed in run.images_per_s[max(0, index - 2) : index + 3]]


def _loss_bands(runs: Sequence[Run]) -> Iterator[tuple[int, list[float]]]:
    for step in sorted(set.intersection(*(set(run.losses) for run in runs))):
        yield step, [run.losses[step] for run in runs]


def _table(pairs: Sequence[Pair]) -> Iterator[tuple[Run, dict[str, str], dict[str, float]]]:
    """HParams of each run: the settings that vary, its speed, and its speed-up over the baseline; NaN = unknown."""
    rows: dict[Path, tuple[Run, float | None]] = {}
    for pair in pairs:
        ratio = pair.comparable_interval.ratio if pair.comparable_interval else None
        rows |= {run.folder: (run, ratio) for run in pair.candidate_runs}
        rows |= {run.folder: (run, ratio and 1.0) for run in pair.baseline_runs}
    keys = dict.fromkeys(key for run, _ in rows.values() for key in run.settings)
    varying = [key for key in keys if len({str(run.settings.get(key)) for run, _ in rows.values()}) > 1]
    for run, speed_up in rows.values():
        metrics = {
            "summary/speed_up": speed_up,
            "summary/images_per_s": run.median_images_per_s,
            "summary/train_loss": run.losses[max(run.losses)] if run.losses else None,
            "summary/peak_memory_gib": run.summary.get("peak_memory_gib"),
        }
        known = {name: math.nan if value is None else value for name, value in metrics.items()}
        yield run, {key: str(run.settings.get(key)) for key in varying}, known
