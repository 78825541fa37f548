"""The TensorBoard page of a comparison: both sides of each pair in one chart. Without torch, whose
writer takes seconds to import.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from cl_train.sweeps.verdict import Pair
from cl_train.system.files import safe_name


def write_dashboard(
    pairs: Sequence[Pair], labels: Sequence[str], markdown: str, folder: Path
) -> None:
    """A run per side with its medians and ranges over repeats, charts, the page; tags sort behind
    train/ and val/.
    """
    for side in dict.fromkeys(name for pair in pairs for name in pair.sides):
        with _events(folder / safe_name(side)) as writer:
            for label, pair in zip(labels, pairs, strict=True):
                runs = pair.sides.get(side, [])
                speeds = [dict(zip(run.steps, run.images_per_s, strict=True)) for run in runs]
                _write_range(writer, f"versus/speed/{safe_name(label)}", speeds)
                _write_range(writer, f"versus/loss/{safe_name(label)}", [r.losses for r in runs])
    with _events(folder) as writer:
        text = SummaryMetadata.PluginData(plugin_name="text")
        _write_text(writer, "comparison/text_summary", text, markdown.encode())
        if pairs:
            layout = _layout(pairs, labels).SerializeToString()
            charts = SummaryMetadata.PluginData(plugin_name="custom_scalars")
            _write_text(writer, "custom_scalars__config__", charts, layout)


def _layout(pairs: Sequence[Pair], labels: Sequence[str]) -> layout_pb2.Layout:
    """A chart of speed and one of loss for each pair; TensorBoard shows the last one first."""
    speeds, losses = [], []
    for label, pair in reversed(list(zip(labels, pairs, strict=True))):
        ratio = ""
        if pair.interval and pair.verdict in ("faster", "slower"):
            ratio = f" {pair.interval.ratio:.2f}x"
        title = f"{label}, images/s: {pair.candidate}{ratio} {pair.words}"
        speeds.append(_chart(title, f"versus/speed/{safe_name(label)}"))
        losses.append(_chart(f"{label}, training loss", f"versus/loss/{safe_name(label)}"))
    return layout_pb2.Layout(
        category=[
            layout_pb2.Category(title="speed, images/s", chart=speeds),
            layout_pb2.Category(title="training loss", chart=losses),
        ]
    )


def _chart(title: str, tag: str) -> layout_pb2.Chart:
    series = layout_pb2.MarginChartContent.Series(
        value=f"{tag}/median", lower=f"{tag}/low", upper=f"{tag}/high"
    )
    return layout_pb2.Chart(title=title, margin=layout_pb2.MarginChartContent(series=[series]))


@contextmanager
def _events(folder: Path) -> Iterator[EventFileWriter]:
    writer = EventFileWriter(str(folder))
    try:
        yield writer
    finally:
        writer.close()


def _write_range(writer: EventFileWriter, tag: str, curves: Sequence[dict[int, float]]) -> None:
    """Median, least and most over the runs, at the steps that all of them have."""
    for step in sorted(set.intersection(*map(set, curves))) if curves else ():
        values = [curve[step] for curve in curves]
        for part, reduce in (("median", statistics.median), ("low", min), ("high", max)):
            value = Summary.Value(tag=f"{tag}/{part}", simple_value=reduce(values))
            event = Event(wall_time=time.time(), step=step, summary=Summary(value=[value]))
            writer.add_event(event)


def _write_text(
    writer: EventFileWriter, tag: str, plugin: SummaryMetadata.PluginData, content: bytes
) -> None:
    tensor = TensorProto(dtype=DT_STRING, string_val=[content])
    metadata = SummaryMetadata(plugin_data=plugin)
    value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
    writer.add_event(Event(wall_time=time.time(), step=0, summary=Summary(value=[value])))
