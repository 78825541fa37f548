"""The records of a run: `metrics.jsonl`, `config.yaml`, `summary.json`. On a full disk they stay in
memory until they can be written.
"""

import csv
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from cl_train.system.files import AppendFile, read_json, retry, write_json, write_text
from cl_train.system.machine import peak_memory_gib
from cl_train.system.run_folder import (
    BAD_IMAGES,
    CONFIG,
    METRICS,
    SUMMARY,
    ProcessFacts,
    Record,
    Results,
    RunFacts,
    Speed,
    Summary,
    Window,
    finite_or_null,
    read_records,
    windows_of,
)
from cl_train.system.tables import write_csv
from cl_train.training.plan import Progress
from cl_train.training.trackers import SHOWN, Trackers


@dataclass(frozen=True)
class RunResult:
    """What `cl_train.train` returns."""

    folder: Path
    summary: dict[str, Any]  # the content of summary.json
    exit_code: int  # 0, or 128 + n if signal n stopped the run

    @property
    def history(self) -> list[Record]:
        """The records of metrics.jsonl: a window per log line, and the evaluations."""
        return read_records(self.folder)[0]

    @property
    def top1(self) -> float | None:
        """Top-1 accuracy, percent of the validation images; None without an evaluation."""
        return (self.summary["val"] or {}).get("top1")

    @property
    def images_per_s(self) -> float | None:
        """The median over the windows that count, with loading; None: nothing was trained."""
        return (self.summary["images_per_s"]["end_to_end"] or {}).get("median")


class Records:
    """The records of a run; without a `folder` (ranks other than 0) they are kept, not written. A
    resumed run drops the records of lost work, and of an evaluation that it will repeat.
    """

    def __init__(
        self,
        folder: Path | None,
        config: dict[str, Any],
        trackers: Trackers,
        facts: RunFacts,
        progress: Progress,
    ) -> None:
        self.facts, self.config = facts, config
        self._folder = folder
        self._trackers = trackers
        self._progress = progress
        self._earlier: list[Record] = []  # of earlier processes
        self._new: list[Record] = []  # of this process
        if folder is None:
            return

        step, is_evaluated = progress.step, progress.closed_step == progress.step
        self._earlier = [
            record
            for record in read_records(folder)[0]
            if 0 < record["step"] < step
            or (record["step"] == step > 0 and (is_evaluated or record["kind"] == "train"))
        ]
        self._metrics = AppendFile(folder / METRICS)
        lines = [json.dumps(record) + "\n" for record in self._earlier]
        write_text(self._metrics.path, "".join(lines))
        write_text(folder / CONFIG, yaml.safe_dump(config, sort_keys=False))

    def append(self, record: Record) -> None:
        self._new.append(record)
        if self._folder is not None:
            self._metrics.append((json.dumps(record) + "\n").encode())
            self._trackers.send(record)

    def show(self, images: torch.Tensor) -> None:
        """Sends the first images of a batch to TensorBoard; the host waits for the device."""
        if self._folder is not None:
            self._trackers.send({"kind": "images", "step": 0, "images": images[:SHOWN].cpu()})

    def write_evaluation(self, kind: str, values: Mapping[str, Any]) -> None:
        place = {"kind": kind, "step": self._progress.step, "epoch": self._progress.epoch}
        self.append(finite_or_null({**place, **values, "time": time.time()}))

    def write_bad_images(self, reasons: Mapping[str, str]) -> int:
        """Writes `bad_images.csv`, with those of earlier processes; returns how many there are."""
        if self._folder is None:
            return 0
        path, earlier = self._folder / BAD_IMAGES, dict[str, str]()
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines(True)
            read = csv.DictReader(lines)
            earlier = {row["file"]: row["reason"] for row in read if {"file", "reason"} <= {*row}}
        everything = earlier | dict(reasons)
        rows = [{"file": name, "reason": everything[name]} for name in sorted(everything)]
        with suppress(OSError):  # a full disk
            if reasons:
                write_csv(path, rows)
        return len(rows)

    def seconds(self) -> float:
        started = datetime.fromisoformat(self.facts.started)
        return (datetime.now().astimezone() - started).total_seconds()

    def completed(self) -> dict[str, Any] | None:
        """The summary of an earlier process that completed the run; None if there is none."""
        summary = self._summary_before()
        is_whole = summary.get("status") == "completed"
        return summary if is_whole and summary.get("steps") == self._progress.step else None

    def _summary_before(self) -> dict[str, Any]:
        """The summary in the folder; empty if there is none, or a power cut left it empty."""
        try:
            return dict(read_json(self._folder / SUMMARY)) if self._folder else {}
        except (OSError, ValueError):
            return {}

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self._new if record["kind"] == kind]

    def finish(
        self,
        status: str,
        *,
        why: str | None = None,
        utilisation: Callable[[Speed], dict[str, Any] | None] | None = None,
        skipped_images: int = 0,
        others_pct: float | None = None,
        lost_pct: tuple[float, float] | None = None,
        first_step_s: float | None = None,
        gpu: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Writes and returns `summary.json`. It describes this process or, if that had nothing left
        to train, the whole run.

        lost_pct: of the time of the run's threads, and of its workers, whose loss counts only as
        far as the step waited for its batch. Raises OSError: the disk stays full (see `retry`).
        """
        everything = self._earlier + self._new
        records = self._new if status == "failed" or self.of_kind("train") else everything
        windows, facts = windows_of(records), self.facts
        has_loader = facts.data != "synthetic"
        speed = Speed.of(windows, self.config["data"]["image_size"], has_loader=has_loader)
        peak_gib = peak_memory_gib(torch.device(facts.device))
        lost = lost_pct and min(100.0, lost_pct[0] + min(lost_pct[1], speed.data_wait_pct or 0.0))
        process = ProcessFacts(
            others_pct=self._of_all_processes("others_pct", others_pct),
            lost_pct=self._of_all_processes("lost_pct", lost),
            utilisation=utilisation(speed) if utilisation and windows else None,
            peak_memory_gib=round(max([peak_gib, *(w.peak_memory_gib for w in windows)]), 4),
            # 0 without a GPU.
            reserved_memory_gib=round(torch.cuda.max_memory_reserved() / 2**30, 4) or None,
            first_step_s=first_step_s,
            gpu=gpu,
            ended=datetime.now().astimezone().isoformat(timespec="seconds"),
            seconds=round(self.seconds(), 1),
        )
        results = self._results(records, windows, skipped_images)
        summary = Summary(status, facts, speed, results, process, why).to_dict()
        if self._folder is None:
            return summary

        path = self._folder / SUMMARY
        self._trackers.send({"kind": "end", "step": self._progress.step, "summary": summary})

        def write() -> None:
            self._metrics.flush()
            write_json(path, summary, indent=2)

        write() if status == "failed" else retry(write)
        return summary

    def _results(
        self, records: Sequence[Record], windows: Sequence[Window], skipped_images: int
    ) -> Results:
        progress, last = self._progress, windows[-1] if windows else None
        scale = last.loss_scale if last else None
        return Results(
            steps=progress.step,
            images_seen=progress.images_seen,
            train={"loss": last.loss if last else None},
            val=last_evaluation(records, "val"),
            val_average=last_evaluation(records, "val_average"),
            best=self._best(),
            amp={"scale": scale, "skipped_steps": progress.skipped_steps},
            skipped_images=skipped_images,
            resumed_with=progress.resumed_with or None,
        )

    def _best(self) -> dict[str, Any] | None:
        """The best evaluation of the whole run, in any folder, with the value of `best_by`."""
        best, by = self._progress.best, self.config["best_by"]
        if best is None:
            return None
        values = {"top1": best["top1"], "epoch": best["epoch"]}
        is_top1 = by in (None, "top1")
        return values if is_top1 else values | {by: abs(self._progress.best_score)}

    def _of_all_processes(self, name: str, pct: float | None) -> float | None:
        """Returns the maximum over the processes of this run, of which `pct` is this one's; None if
        one of them was killed, and so left no summary.
        """
        if self._folder is None or not any(r["kind"] == "train" for r in self._earlier):
            return pct
        earlier = self._summary_before()
        is_known = earlier.get("steps") == self._earlier[-1]["step"]
        before_pct = earlier.get(name) if is_known else None
        return None if before_pct is None or pct is None else max(before_pct, pct)


def last_evaluation(records: Sequence[Record], kind: str) -> dict[str, Any] | None:
    for record in reversed(records):
        if record["kind"] == kind:
            place = ("kind", "step", "epoch", "time")
            return {name: record[name] for name in record if name not in place}
    return None
