"""The records of a run: `metrics.jsonl`, TensorBoard events, `config.yaml` and `summary.json`.

Rank 0 writes; the other ranks have a tracker whose methods do nothing. A full disk does not end a run: records stay in
memory until they can be written (see `AppendFile`).
"""

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import hparams, image, scalar, text
from torchvision.utils import make_grid

from cl_train.system.files import AppendFile, retry, write_json, write_text

TENSORBOARD_TAGS = {
    "loss": "loss",
    "top1": "top1",
    "top5": "top5",
    "images_per_s": "throughput/images_per_s",
    "step_ms": "throughput/step_ms",
    "data_wait_pct": "throughput/data_wait_pct",
    "lr": "optim/lr",
    "loss_scale": "optim/loss_scale",
    "skipped_steps": "optim/skipped_steps",
    "peak_memory_gib": "memory/peak_gib",
    "image_size": "data/image_size",
}


class Tracker:
    """Writes the records of one run.

    In a sweep, TensorBoard gets the images of the first job only, and the comparison writes the HPARAMS table.

    Args:
        folder: the run folder; None = do nothing.
        tensorboard: write events directly into `folder`, so that TensorBoard names the run after the folder.
        resumed_step: the step at which the run starts, 0 for a new run. Later records belong to lost work of an earlier
            process and are dropped, so that no chart has duplicate steps.
        is_evaluated: the evaluation after `resumed_step` is part of the resumed state.
    """

    def __init__(self, folder: Path | None, *, tensorboard: bool, resumed_step: int, is_evaluated: bool = True) -> None:
        self._folder = folder
        self._events: _EventFile | None = None
        if folder is None:
            return
        self._metrics = AppendFile(folder / "metrics.jsonl")
        self._in_sweep = (folder.parent / "sweep.json").is_file()
        self._drop_later_records(resumed_step, is_evaluated)
        if tensorboard:
            self._events = _EventFile(folder, purge_step=resumed_step + 1)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one record, and its numbers to TensorBoard as `train/...` or `val/...`."""
        if self._folder is None:
            return
        record = {"kind": kind, "step": step, **values, "time": time.time()}
        self._metrics.append((json.dumps(finite_or_null(record)) + "\n").encode())
        if self._events is not None:
            tags = {name: tag if "/" in tag else f"{kind}/{tag}" for name, tag in TENSORBOARD_TAGS.items()}
            numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
            self._events.add([scalar(tags[name], value) for name, value in numbers.items() if name in tags], step)

    def _drop_later_records(self, step: int, is_evaluated: bool) -> None:
        """Also the evaluation at `step` unless `is_evaluated`: it will be repeated."""

        def is_kept(line: bytes) -> bool:
            record = read_record(line)
            if record is None or not 0 < record["step"] <= step:
                return False
            return record["step"] < step or is_evaluated or record["kind"] == "train"

        path = self._metrics.path
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        write_text(path, b"".join(line for line in lines if is_kept(line)).decode())

    def write_config(self, yaml: str) -> None:
        """`config.yaml`, and the same as text in TensorBoard."""
        if self._folder is None:
            return
        write_text(self._folder / "config.yaml", yaml)
        if self._events is not None:
            self._events.add([text("config", "\n".join(f"    {line}" for line in yaml.splitlines()))])

    def write_images(self, images: torch.Tensor, mean: list[float], std: list[float]) -> None:
        """Show up to 32 training images, float [N, 3, H, W] normalised by `mean` and `std`, in TensorBoard.

        The host waits for the device: the images are copied, once per run.
        """
        if self._events is None or self._folder is None:
            return
        runs_with_events = {path.parent for path in self._folder.parent.glob("*/events.out.tfevents.*")}
        if self._in_sweep and runs_with_events - {self._folder}:
            return
        pixels = images[:32].float().cpu() * torch.tensor(std).view(1, 3, 1, 1) + torch.tensor(mean).view(1, 3, 1, 1)
        self._events.add([image("first_batch", make_grid(pixels.clamp(0, 1), nrow=8), dataformats="CHW")])

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """`summary.json`, after all records.

        Raises OSError: the disk is full or failing.
        """
        if self._folder is None:
            return
        self._metrics.flush()
        if self._events is not None:
            self._events.flush()
        write_json(self._folder / "summary.json", finite_or_null(summary), indent=2)

    def finish(self, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """`write_summary`, repeated on a full disk; before it the run's row in TensorBoard's HPARAMS table.

        Raises OSError: see `retry`.
        """
        if self._events is not None and not self._in_sweep:
            self._events.add_hparams(summary, settings)
        retry(lambda: self.write_summary(summary))


class _EventFile:
    """TensorBoard events, appended in the calling thread: torch's SummaryWriter uses another thread, which loses events
    if the disk is full.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendFile(folder / name)
        self._records = RecordWriter(SimpleNamespace(write=self._file.append))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        # TensorBoard drops the events of earlier files from this step on.
        self._write(Event(wall_time=time.time(), step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, summaries: Iterable[Summary], step: int = 0) -> None:
        values = [value for summary in summaries for value in summary.value]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def flush(self) -> None:
        self._file.flush()

    def add_hparams(self, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Into the run's own events: SummaryWriter.add_hparams would create a second run (pytorch/pytorch#32651)."""
        end_to_end = (summary.get("images_per_s") or {}).get("end_to_end") or {}
        metrics = {
            "summary/images_per_s": end_to_end.get("median"),
            "summary/val_top1": (summary.get("val") or {}).get("top1"),
            "summary/train_loss": (summary.get("train") or {}).get("loss"),
            "summary/peak_memory_gib": summary.get("peak_memory_gib"),
        }
        known = {name: value for name, value in metrics.items() if value is not None}
        for part in hparams(dict(settings), known):
            self.add([part])
        self.add([scalar(name, value) for name, value in known.items()], summary.get("steps", 0))

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, without a last line that a killed process left incomplete."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [record for record in map(read_record, lines) if record is not None]


def read_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int) and "kind" in record
    return record if is_record else None


def finite_or_null(value: Any) -> Any:
    """JSON has no NaN or Infinity: they become null."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)
