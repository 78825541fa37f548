"""What a run writes down: console and `train.log`, `metrics.jsonl` (the truth), TensorBoard, `summary.json`.

Rank 0 writes; the other ranks have a tracker whose every method does nothing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from torchvision.utils import make_grid

log = logging.getLogger("cl_train")

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
}


@contextmanager
def logging_to(folder: Path | None) -> Iterator[None]:
    """Log to the console and to `train.log` in `folder`; ranks other than 0 (folder None) only speak of trouble."""
    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(logging.Formatter("%(message)s"))
    handlers: list[logging.Handler] = [console]
    if folder is None:
        console.setLevel(logging.WARNING)
    else:
        to_file = logging.FileHandler(folder / "train.log", encoding="utf-8")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        handlers.append(to_file)
    propagate, log.propagate = log.propagate, False
    log.setLevel(logging.INFO)
    for handler in handlers:
        log.addHandler(handler)
    try:
        yield
    finally:
        log.propagate = propagate
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()


class Tracker:
    """The records of one run.

    Args:
        folder: the run folder; None makes every method do nothing.
        tensorboard: write events into `folder`, so that the run's name in TensorBoard is the folder's.
        resumed_step: where the run starts; records after it are an earlier process's lost work and are dropped, so
            that no chart shows a step twice. 0 for a run that starts afresh.
    """

    def __init__(self, folder: Path | None, *, tensorboard: bool, resumed_step: int) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._metrics_path = folder / "metrics.jsonl" if folder else None
        if folder is None or self._metrics_path is None:
            return
        drop_records_after(self._metrics_path, resumed_step)
        if tensorboard:
            self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1, flush_secs=15)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one record, and its numbers to TensorBoard under `train/...` or `val/...`."""
        if self._metrics_path is None:
            return
        record = {"kind": kind, "step": step, **values, "time": time.time()}
        with open(self._metrics_path, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite_or_null(record)) + "\n")
        if self._writer is None:
            return
        for name, value in values.items():
            if name in TENSORBOARD_TAGS and isinstance(value, int | float):
                tag = TENSORBOARD_TAGS[name]
                self._writer.add_scalar(tag if "/" in tag else f"{kind}/{tag}", value, step)

    def rewind(self, step: int) -> None:
        """The run returned to `step`: what was recorded after it is dropped."""
        if self._metrics_path is not None:
            drop_records_after(self._metrics_path, step)

    def write_config(self, text: str) -> None:
        """`config.yaml`, and the same as text in TensorBoard."""
        if self._folder is None:
            return
        (self._folder / "config.yaml").write_text(text, encoding="utf-8")
        if self._writer is not None:
            self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()))

    def write_images(self, images: torch.Tensor, mean: list[float], std: list[float]) -> None:
        """A grid of up to 32 images of the first augmented batch, float [N,C>=3,H,W] normalised by `mean` and `std`.

        Sync point: copies the images to the host, once per run.
        """
        if self._writer is None:
            return
        colours = images[:32, :3].float().cpu()
        scale, shift = torch.tensor(std).view(1, 3, 1, 1), torch.tensor(mean).view(1, 3, 1, 1)
        grid = make_grid((colours * scale + shift).clamp(0, 1), nrow=8)
        self._writer.add_image("first_batch", grid, 0)

    def write_summary(self, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """`summary.json`, atomically, and the run's row in TensorBoard's HPARAMS and runs table."""
        if self._folder is None:
            return
        path = self._folder / "summary.json"
        temporary = path.with_name(".summary.json.tmp")
        temporary.write_text(json.dumps(finite_or_null(summary), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
        if self._writer is not None and settings:
            self._write_hparams(summary, settings)

    def _write_hparams(self, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Into this run's own events: SummaryWriter.add_hparams would make a second run (pytorch/pytorch#32651)."""
        assert self._writer is not None and self._writer.file_writer is not None
        end_to_end = (summary.get("images_per_s") or {}).get("end_to_end") or {}
        metrics = {
            "summary/images_per_s": end_to_end.get("median"),
            "summary/val_top1": (summary.get("val") or {}).get("top1"),
            "summary/train_loss": (summary.get("train") or {}).get("loss"),
            "summary/peak_memory_gib": summary.get("peak_memory_gib"),
        }
        metrics = {name: value for name, value in metrics.items() if value is not None}
        for part in hparams(dict(settings), metrics):
            self._writer.file_writer.add_summary(part)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, summary.get("steps", 0))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def drop_records_after(path: Path, step: int) -> None:
    """Keep the records of `metrics.jsonl` up to `step`; a torn last line of a killed process goes too."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["step"] <= step and step > 0:
            kept.append(line + "\n")
    temporary = path.with_name(".metrics.jsonl.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


def finite_or_null(value: Any) -> Any:
    """JSON has no NaN or Infinity: they become null."""
    if isinstance(value, Mapping):
        return {key: finite_or_null(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
