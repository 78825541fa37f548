"""What a run folder says, read back. No torch here."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cl_train.config import ConfigError


@dataclass(frozen=True)
class Run:
    """What a run folder says, with the settings flat (`data.workers`)."""

    folder: Path
    settings: dict[str, Any]
    summary: dict[str, Any]
    images_per_s: list[float]  # of each window after warm-up
    data_wait_pct: float  # median over those windows
    losses: dict[int, float]  # training loss by step
    started_at: float  # unix time of the first window
    others_pct: float | None = None  # share of the cores that other processes took, where the launcher saw to it

    def fact(self, name: str) -> Any:
        """What the summary found (`precision=auto` became bf16), else what was asked for."""
        return self.summary.get(name, self.settings.get(name))


def read_run(folder: Path) -> Run:
    """Read `config.yaml`, `metrics.jsonl` and, where the run got so far, `summary.json`.

    Raises:
        ConfigError: not a run folder, or a run that never closed a window.
    """
    try:
        settings = _flat(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{folder} is not a run folder: no {Path(error.filename).name}") from None
    records = [record for record in map(_parsed, lines) if record.get("kind") == "train"]
    if not records:
        raise ConfigError(f"{folder}: the run ended before its first window of log_every steps")
    measured = [record for record in records if not record["warmup"]]
    summary_path = folder / "summary.json"
    return Run(
        folder=folder,
        settings=settings,
        summary=_parsed(summary_path.read_text(encoding="utf-8")) if summary_path.is_file() else {},
        images_per_s=[record["images_per_s"] for record in measured],
        data_wait_pct=statistics.median(record["data_wait_pct"] for record in measured) if measured else math.nan,
        losses={record["step"]: record["loss"] for record in records if record["loss"] is not None},
        started_at=records[0]["time"],
    )


def _parsed(text: str) -> dict[str, Any]:
    """A killed run leaves a torn last line."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
