"""The TensorBoard page of a comparison: each side is a run, with one colour and one name.

Not in `sweeps/`, because torch's SummaryWriter needs torch.
"""

import itertools
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from cl_train.sweeps.report import Report, as_markdown, loss_gap
from cl_train.system.files import refuse_link, safe_name
from cl_train.system.run_folder import Run


def write_dashboard(report: Report) -> None:
    """Writes medians and ranges over the runs of each side, a layout of charts and the report
    beside the report's files, instead of an earlier report's, and prints how to see them.
    """
    if report.folder is None:
        return
    from torch.utils.tensorboard import SummaryWriter

    # Apart from the events of the jobs: TensorBoard has seven colours, given to runs in turn.
    folder = report.folder / "tensorboard"
    for earlier in refuse_link(folder).glob("*/events.out.tfevents.*"):
        if not earlier.parent.is_symlink():
            earlier.unlink()
    names = [safe_name(label) for label in report.labels]
    sides = dict.fromkeys(side for pair in report.pairs for side in pair.sides)
    for number, side in enumerate(sides):
        with SummaryWriter(str(refuse_link(folder / safe_name(side)))) as writer:
            for name, pair in zip(names, report.pairs, strict=True):
                for tag, step, value in _points(name, pair.sides.get(side, [])):
                    writer.add_scalar(tag, value, step)
            writer.add_hparams({report.by: side}, dict(_results(report, side)), run_name=".")
            if number == 0:  # TensorBoard shows them beside all runs
                writer.add_text("comparison", as_markdown(report))
                writer.add_custom_scalars(_layout(report, names))
    if report.pairs:
        print(f"Curves: {shlex.join(['tensorboard', '--logdir', str(folder)])}", flush=True)


def _points(name: str, runs: Sequence[Run]) -> Iterator[tuple[str, int, float]]:
    """Yields tag, step and value: median, least or most of the runs, at the steps that all have."""
    speeds = [{window.step: window.images_per_s for window in run.windows} for run in runs]
    reductions: list[tuple[str, list[dict[int, float]], Callable[[Iterable[float]], float]]] = [
        (f"images_per_s/{name}", speeds, statistics.median),
        (f"spread/{name}/low", speeds, min),
        (f"spread/{name}/high", speeds, max),
        (f"loss/{name}/training", [run.losses for run in runs], statistics.median),
        (f"loss/{name}/validation", [run.val_losses for run in runs], statistics.median),
    ]
    for tag, curves, reduce in reductions if runs else ():
        for step in sorted(set.intersection(*map(set, curves))):
            yield tag, step, reduce(curve[step] for curve in curves)


def _results(report: Report, side: str) -> Iterator[tuple[str, float]]:
    """Yields tag and value of each pair; speeds only if comparable."""
    for label, pair, row in report.named:
        kinds = ["top1"] if pair.verdict == "not_comparable" else ["images_per_s", "top1"]
        for name, of_row in zip(pair.sides, ("baseline", "candidate"), strict=True):
            for what in kinds:
                value = row[f"{of_row}_{what}"]
                if name == side and value is not None:
                    yield f"whole_run/{safe_name(label)}/{what}", value


def _layout(report: Report, names: Sequence[str]) -> dict[str, dict[str, list[object]]]:
    """Returns per pair a chart of speed with its range, and one of each loss: colours are sides."""
    kinds = ("training", "validation")
    charts: dict[str, dict[str, list[object]]] = {"images/s": {}}
    charts |= {f"loss in {kind}": {} for kind in kinds}
    rows = list(zip(report.labels, names, report.pairs, strict=True))
    for label, name, pair in reversed(rows):  # TensorBoard shows the last of these charts first
        title = f"{label}, images/s: {list(pair.sides)[1]} {pair.ratio} {pair.words}"
        tags = [f"images_per_s/{name}", f"spread/{name}/low", f"spread/{name}/high"]
        charts["images/s"][title] = ["Margin", tags]
    for (label, name, pair), kind in itertools.product(rows, kinds):
        gap = f": {loss_gap(pair)} between the sides" if kind == "training" else ""
        tag = f"^{re.escape(f'loss/{name}/{kind}')}$"
        charts[f"loss in {kind}"][f"{label}, loss in {kind}{gap}"] = ["Multiline", [tag]]
    return charts
