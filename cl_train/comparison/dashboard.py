"""The comparison in TensorBoard: one aggregate run per side, charts per model, a table of runs, and the report."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from cl_train.comparison.pairs import Pair
from cl_train.comparison.run_records import Run
from cl_train.system.run_folder import safe_name

PARTS = ("median", "low", "high")


def write_dashboard(pairs: Sequence[Pair], labels: Sequence[str], markdown: str, folder: Path) -> None:
    """Into `folder`, a subfolder per side and, for HParams, one per run; tags sort behind train/ and val/."""
    import numpy as np
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    layout: dict[str, dict[str, list[object]]] = {"speed, images/s": {}, "training loss": {}}
    for label, pair in reversed(list(zip(labels, pairs, strict=True))):  # TensorBoard shows the last chart first
        ratio = f" {pair.interval.ratio:.2f}x" if pair.interval and pair.verdict in ("faster", "slower") else ""
        verdict = f"{pair.candidate}{ratio} {pair.verdict.replace('_', ' ')}"
        for category, kind, title in zip(
            layout, ("speed", "loss"), (f"{label}, images/s: {verdict}", f"{label}, training loss"), strict=True
        ):
            layout[category][title] = ["Margin", [f"versus/{kind}/{safe_name(label)}/{part}" for part in PARTS]]
    for side in dict.fromkeys(name for pair in pairs for name in (pair.baseline, pair.candidate)):
        with SummaryWriter(str(folder / safe_name(side))) as writer:
            for label, pair in zip(labels, pairs, strict=True):
                runs = {pair.baseline: pair.baseline_runs, pair.candidate: pair.candidate_runs}.get(side)
                for kind, points in (("speed", _speed_bands(runs)), ("loss", _loss_bands(runs))) if runs else ():
                    for step, values in points:
                        band = statistics.median(values), min(values), max(values)
                        for part, value in zip(PARTS, band, strict=True):
                            writer.add_scalar(f"versus/{kind}/{safe_name(label)}/{part}", value, step)
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("comparison", "\n".join(line for line in markdown.splitlines() if not line.startswith("![")))
        if pairs:
            writer.add_custom_scalars(layout)
        if (folder / "comparison.png").is_file():
            with Image.open(folder / "comparison.png", formats=("PNG",)) as chart:
                writer.add_image("versus/chart", np.asarray(chart.convert("RGB")), dataformats="HWC")
    _write_hparams(pairs, folder)


def _write_hparams(pairs: Sequence[Pair], folder: Path) -> None:
    """The settings that vary and the results of each run: the same columns for all, an unknown cell is empty."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    rows: dict[Path, tuple[Run, float | None]] = {}
    for pair in pairs:
        ratio = pair.comparable_interval.ratio if pair.comparable_interval else None
        rows |= {run.folder: (run, ratio) for run in pair.candidate_runs}
        rows |= {run.folder: (run, ratio and 1.0) for run in pair.baseline_runs}
    keys = dict.fromkeys(key for run, _ in rows.values() for key in run.settings)
    varying = [key for key in keys if len({str(run.settings.get(key)) for run, _ in rows.values()}) > 1]
    for run, speed_up in rows.values():
        metrics = {
            "whole_run/top1": run.top1,
            "whole_run/images_per_s": run.median_images_per_s,
            "whole_run/speed_up": speed_up,
            "whole_run/train_loss": run.losses[max(run.losses)] if run.losses else None,
            "whole_run/peak_memory_gib": run.summary.get("peak_memory_gib"),
        }
        with SummaryWriter(str(folder / run.folder.name)) as writer:  # in a sweep the run's own folder
            settings = {key: str(run.settings.get(key)) for key in varying}
            for part in hparams(settings, dict.fromkeys(metrics, 0.0)):
                writer.file_writer.add_summary(part)  # add_hparams would make a run of its own
            for name, value in metrics.items():
                if value is not None:
                    writer.add_scalar(name, value, max(run.steps, default=0))


def _speed_bands(runs: Sequence[Run]) -> Iterator[tuple[int, list[float]]]:
    """Per window the speeds of all runs, with the two windows before and after it."""
    for index, step in enumerate(runs[0].steps):
        yield step, [speed for run in runs for speed in run.images_per_s[max(0, index - 2) : index + 3]]


def _loss_bands(runs: Sequence[Run]) -> Iterator[tuple[int, list[float]]]:
    for step in sorted(set.intersection(*(set(run.losses) for run in runs))):
        yield step, [run.losses[step] for run in runs]
