"""The TensorBoard page of a comparison: each side is a run, with one colour and one name.
Without torch, whose writer takes seconds to import.
"""

import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from cl_train.sweeps.verdict import Pair
from cl_train.system.files import safe_name

# Apart from the events of the jobs: TensorBoard has seven colours, and gives them to runs in turn.
DASHBOARD = "tensorboard"


def write_dashboard(
    pairs: Sequence[Pair], labels: Sequence[str], markdown: str, folder: Path
) -> None:
    """Write medians and ranges over the runs of each side, a layout of charts and the page into
    `folder/tensorboard`, in place of an earlier report's.
    """
    dashboard = folder / DASHBOARD
    for earlier in dashboard.glob("*/events.out.tfevents.*"):
        earlier.unlink()
    names = [safe_name(label) for label in labels]
    for number, side in enumerate(dict.fromkeys(side for pair in pairs for side in pair.sides)):
        with closing(EventFileWriter(str(dashboard / safe_name(side)))) as writer:
            for name, pair in zip(names, pairs, strict=True):
                runs = pair.sides.get(side, [])
                speeds = [
                    {window.step: window.images_per_s for window in run.windows} for run in runs
                ]
                training = [run.losses for run in runs]
                validation = [run.val_losses for run in runs]
                _write_curve(writer, f"images_per_s/{name}", speeds, statistics.median)
                _write_curve(writer, f"spread/{name}/low", speeds, min)
                _write_curve(writer, f"spread/{name}/high", speeds, max)
                _write_curve(writer, f"loss/{name}/training", training, statistics.median)
                _write_curve(writer, f"loss/{name}/validation", validation, statistics.median)
            if number == 0:  # TensorBoard shows them beside all runs
                layout = _layout(pairs, labels, names).SerializeToString()
                _write_bytes(writer, "comparison/text_summary", "text", markdown.encode())
                _write_bytes(writer, "custom_scalars__config__", "custom_scalars", layout)


def _layout(
    pairs: Sequence[Pair], labels: Sequence[str], names: Sequence[str]
) -> layout_pb2.Layout:
    """Describes for each pair a chart of speed, with its range, and one of both losses."""
    speeds: list[layout_pb2.Chart] = []
    losses: list[layout_pb2.Chart] = []
    for label, name, pair in zip(labels, names, pairs, strict=True):
        series = layout_pb2.MarginChartContent.Series(
            value=f"images_per_s/{name}", lower=f"spread/{name}/low", upper=f"spread/{name}/high"
        )
        margin = layout_pb2.MarginChartContent(series=[series])
        title = f"{label}, images/s: {list(pair.sides)[1]} {pair.interval or ''} {pair.words}"
        # TensorBoard shows the last of these charts first.
        speeds.insert(0, layout_pb2.Chart(title=title, margin=margin))

        tags = [f"^{re.escape(f'loss/{name}/{kind}')}$" for kind in ("training", "validation")]
        lines = layout_pb2.MultilineChartContent(tag=tags)
        title = f"{label}, loss in training and validation"
        losses.append(layout_pb2.Chart(title=title, multiline=lines))
    charts = {"images/s": speeds, "loss": losses}
    categories = [layout_pb2.Category(title=name, chart=c) for name, c in charts.items()]
    return layout_pb2.Layout(category=categories)


def _write_curve(
    writer: EventFileWriter,
    tag: str,
    curves: Sequence[dict[int, float]],
    reduce: Callable[[Iterable[float]], float],
) -> None:
    """The median, least or most over the runs, at the steps that all have."""
    for step in sorted(set.intersection(*map(set, curves))) if curves else ():
        value = Summary.Value(tag=tag, simple_value=reduce(curve[step] for curve in curves))
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))


def _write_bytes(writer: EventFileWriter, tag: str, plugin: str, content: bytes) -> None:
    tensor = TensorProto(dtype=DT_STRING, string_val=[content])
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))
    value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
    writer.add_event(Event(wall_time=time.time(), step=0, summary=Summary(value=[value])))
