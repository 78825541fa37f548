"""The comparison in TensorBoard: one aggregate run per side, charts per model, a table of runs, and the report."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cl_train.comparison.pairs import Pair
from cl_train.comparison.run_records import Run
from cl_train.system.run_folder import safe_name

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Point = tuple[int, float, float, float]  # step, median, lowest, highest


def write_dashboard(pairs: Sequence[Pair], labels: Sequence[str], markdown: str, folder: Path) -> None:
    """Write TensorBoard events into `folder`, into one subfolder per side, and into one per run for HParams.

    A subfolder has the run's name: of a sweep that is the run's own folder. `labels` name the pairs.
    """
    import numpy as np
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    tags = [safe_name(label) for label in labels]
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("comparison", "\n".join(line for line in markdown.splitlines() if not line.startswith("![")))
        if pairs:
            writer.add_custom_scalars(_layout(labels, tags))
        if (folder / "comparison.png").is_file():
            with Image.open(folder / "comparison.png", formats=("PNG",)) as chart:
                writer.add_image("comparison", np.asarray(chart.convert("RGB")), dataformats="HWC")
        _write_table(pairs, folder, writer)
    sides = dict.fromkeys(name for pair in pairs for name in (pair.baseline, pair.candidate))
    for side in sides:
        with SummaryWriter(str(folder / safe_name(side))) as writer:
            for tag, pair in zip(tags, pairs, strict=True):
                if side in (pair.baseline, pair.candidate):
                    runs = pair.baseline_runs if side == pair.baseline else pair.candidate_runs
                    _write_margin(writer, f"speed/{tag}", _speed_points(runs))
                    _write_margin(writer, f"loss/{tag}", _loss_points(runs))


def _layout(labels: Sequence[str], tags: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    titles = {"speed": "images/s, median and range", "loss": "training loss, median and range"}
    return {
        name: {
            f"{label}: {title}": ["Margin", [f"{name}/{tag}/{part}" for part in ("median", "low", "high")]]
            for label, tag in zip(labels, tags, strict=True)
        }
        for name, title in titles.items()
    }


def _write_margin(writer: SummaryWriter, tag: str, points: Iterator[Point]) -> None:
    for step, *values in points:
        for part, value in zip(("median", "low", "high"), values, strict=True):
            writer.add_scalar(f"{tag}/{part}", value, step)


def _speed_points(runs: Sequence[Run]) -> Iterator[Point]:
    """Per window: median and range over all runs and the two neighbours to either side."""
    count = min(len(run.images_per_s) for run in runs)
    for index, step in enumerate(runs[0].steps[:count]):
        near = [value for run in runs for value in run.images_per_s[max(0, index - 2) : min(index + 3, count)]]
        yield step, statistics.median(near), min(near), max(near)


def _loss_points(runs: Sequence[Run]) -> Iterator[Point]:
    for step in sorted(set.intersection(*(set(run.losses) for run in runs))):
        losses = [run.losses[step] for run in runs]
        yield step, statistics.median(losses), min(losses), max(losses)


def _write_table(pairs: Sequence[Pair], folder: Path, root: SummaryWriter) -> None:
    """HParams: one row per run with the settings that vary, its speed and its speed-up over the baseline."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    rows: dict[Path, tuple[Run, float | None]] = {}
    for pair in pairs:
        ratio = pair.interval.ratio if pair.interval and pair.is_comparable else None
        rows |= {run.folder: (run, ratio) for run in pair.candidate_runs}
        rows |= {run.folder: (run, ratio and 1.0) for run in pair.baseline_runs}
    settings = [run.settings for run, _ in rows.values()]
    varying = [key for key in settings[0] if len({str(each.get(key)) for each in settings}) > 1] if settings else []
    for number, (run, speed_up) in enumerate(rows.values()):
        metrics = {"summary/speed_up": speed_up, "summary/images_per_s": statistics.median(run.images_per_s or [0.0])}
        metrics["summary/train_loss"] = run.losses[max(run.losses)] if run.losses else None
        experiment, start, end = hparams({key: str(run.settings.get(key)) for key in varying}, metrics)
        if number == 0:  # the columns of the whole table
            assert root.file_writer is not None
            root.file_writer.add_summary(experiment)
        with SummaryWriter(str(folder / run.folder.name)) as writer:
            assert writer.file_writer is not None
            writer.file_writer.add_summary(start)
            writer.file_writer.add_summary(end)
            for name, value in metrics.items():
                if value is not None:
                    writer.add_scalar(name, value, 0)
