"""What a run folder says, read back. No torch here."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cl_train.config.schema import ConfigError


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
    repeat: int | None = None  # which repeat of its settings it is, where a sweep made it

    def fact(self, name: str) -> Any:
        """What the summary found (`precision=auto` became bf16), else what was asked for."""
        return self.summary.get(name, self.settings.get(name))


def read_run(folder: Path) -> Run:
    """Read `metrics.jsonl`, and `config.yaml` and `summary.json` where they are.

    Fields that a record lacks count as unknown, settings that `config.yaml` lacks are taken from the summary.

    Raises:
        ConfigError: not a run folder, a file in it that cannot be read, or a run that never closed a window.
    """
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        summary = _parsed(_text_of(folder / "summary.json"))
        settings = yaml.safe_load(_text_of(folder / "config.yaml")) or {}
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not a run folder: no metrics.jsonl") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder} is not a run folder that can be read: {str(error).splitlines()[0]}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{folder}/config.yaml holds no settings")
    records = [record for record in map(_parsed, lines) if _is_window(record)]
    if not records:
        raise ConfigError(f"{folder}: the run ended before its first window of log_every steps")
    measured = [record for record in records if not record.get("warmup")]
    waits = [record["data_wait_pct"] for record in measured if _is_finite(record.get("data_wait_pct"))]
    return Run(
        folder=folder,
        settings=_settings_of_summary(summary) | _flat(settings),
        summary=summary,
        images_per_s=[record["images_per_s"] for record in measured],
        data_wait_pct=statistics.median(waits) if waits else summary.get("data_wait_pct") or 0.0,
        losses={record["step"]: record["loss"] for record in records if _is_finite(record.get("loss"))},
        started_at=records[0].get("time", 0.0),
    )


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _is_window(record: dict[str, Any]) -> bool:
    return record.get("kind", "train") == "train" and "step" in record and _is_finite(record.get("images_per_s"))


def _is_finite(value: Any) -> bool:
    """A diverged run logs NaN, which no report could hold."""
    return isinstance(value, int | float) and math.isfinite(value)


def _settings_of_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """The settings that a summary tells, by their names in config.yaml."""
    names = {"model": "model", "precision": "precision", "compile": "compile", "image_size": "data.image_size"}
    names |= {"channels_last_requested": "channels_last", "seed": "seed", "epochs": "epochs"}
    return {setting: summary[name] for name, setting in names.items() if name in summary}


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
