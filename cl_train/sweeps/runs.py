"""Run folders read back: settings, summary, the windows that count, and what is wrong."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from cl_train.config.validation import flatten, show
from cl_train.errors import ConfigError
from cl_train.system.processes import TOO_BUSY_PCT
from cl_train.system.run_folder import (
    CONFIG,
    METRICS,
    SUMMARY,
    Window,
    read_records,
    read_summary,
    windows_of,
    windows_that_count,
)

FAULTY_SHARE = 0.1  # of windows, updates or images: the speed is no longer that of training


@dataclass(frozen=True)
class Run:
    """A run folder: settings and summary with flat keys (`data.workers`, `val.top1`), and the
    windows that count.
    """

    folder: Path
    settings: dict[str, Any]
    summary: dict[str, Any]  # without nulls
    windows: list[Window]
    losses: dict[int, float]  # training loss by step, without NaN and Inf
    val_losses: dict[int, float]  # the same of the evaluations
    times: tuple[float, float]  # unix time of the first and the last window, seconds
    problems: list[str]  # why this run cannot be compared with any other
    repeat: int | None = None  # number of the repeat in a sweep

    def fact(self, name: str) -> Any:
        """The value in the summary (`precision=auto` became bf16), else the setting."""
        return self.summary.get(name, self.settings.get(name))

    @property
    def images_per_s(self) -> list[float]:
        return [window.images_per_s for window in self.windows]

    @property
    def steps(self) -> list[int]:
        """The times at which the windows ended."""
        return [window.step for window in self.windows]

    @property
    def data_wait_pct(self) -> float:
        return statistics.median(window.data_wait_pct for window in self.windows)

    @property
    def windows_after_warmup(self) -> int:
        return sum(not window.warmup for window in self.windows)

    @property
    def others_pct(self) -> float:
        return self.summary.get("others_pct", 0.0)

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes took too much of the CPU; a GPU's speed suffers less."""
        return self.others_pct >= TOO_BUSY_PCT and self.fact("device") == "cpu"

    @property
    def results(self) -> dict[str, float]:
        """Median speed of the windows that count (images/s), accuracy of the last evaluation
        (percent), memory; without what is unknown.
        """
        results = {"images_per_s": statistics.median(self.images_per_s)}
        for name in ("val.top1", "peak_memory_gib"):
            if name in self.summary:
                results[name.removeprefix("val.")] = self.summary[name]
        return results


def read_run(folder: Path) -> Run:
    """A run from its files; summary.json may be missing.

    Raises ConfigError: not a run folder, damaged, or without a window.
    """
    file = METRICS
    if not (folder / file).is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no file {file}")
    damage = (OSError, AttributeError, LookupError, TypeError, ValueError)
    try:
        records, damaged_lines = read_records(folder)
        windows = windows_of(records)
        file = CONFIG
        config = dict(flatten(yaml.safe_load((folder / file).read_text(encoding="utf-8"))))
        file = SUMMARY
        leaves = flatten(read_summary(folder))
        summary = {name: value for name, value in leaves if value is not None}
    except (*damage, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{folder}/{file} cannot be read: {reason}") from None
    if not windows:
        raise ConfigError(f"{folder}: the run ended before its first window of log_every steps")

    # config.yaml has nproc=1: torchrun starts the processes.
    settings = config | {"nproc": summary.get("world_size", 1)}
    counted = windows_that_count(windows)
    if config.get("data.size_schedule"):  # growing images: the speed is that of the last size
        settings["data.image_size"] = counted[-1].image_size
    problems = [f"{METRICS}, line {number} cannot be read" for number in damaged_lines]
    problems += run_problems(windows, summary)
    evaluations = [record for record in records if record["kind"] == "val"]
    times = [window.time for window in windows]
    return Run(
        folder=folder,
        settings=settings,
        summary=summary,
        windows=counted,
        losses={window.step: window.loss for window in windows if abs(window.loss) < 1e12},
        val_losses={
            record["step"]: record["loss"]
            for record in evaluations
            if record.get("loss") is not None
        },
        times=(min(times), max(times)),
        problems=[f"{folder.name}: {problem}" for problem in problems],
    )


def run_problems(windows: Sequence[Window], summary: dict[str, Any]) -> Iterator[str]:
    """Why the speed of a run is not that of training with its settings."""
    if not summary:
        yield "no summary.json: the run was killed or has not ended"
    elif summary.get("status") not in ("completed", "interrupted", None):
        yield f"status {summary['status']}"
    if changed := summary.get("resumed_with"):
        yield f"it was resumed with other settings: {show(changed):.300}"

    steps = [window.step for window in windows]
    if steps != sorted(set(steps)):
        yield "a step is recorded twice or out of order"
    for before, after in pairwise(windows):
        for name in ("memory_format", "precision", "world_size", "device_name"):
            values = getattr(before, name), getattr(after, name)
            if None not in values and values[0] != values[1]:
                yield f"{name} changed at step {after.step}: {values[0]} before, {values[1]} after"

    images = summary.get("images_seen") or steps[-1] * summary.get("global_batch_size", 1)
    nonfinite = sum(not math.isfinite(window.loss) for window in windows)
    skipped_steps = summary.get("amp.skipped_steps", 0)
    overflowed = "updates were skipped, because gradients overflowed"
    for count, total, fault in (
        (nonfinite, len(windows), "windows have a loss that is not finite"),
        (skipped_steps, steps[-1], overflowed),
        (summary.get("skipped_images", 0), images, "images were skipped"),
    ):
        if count >= FAULTY_SHARE * max(1, total):
            yield f"{count} of {total} {fault}"
