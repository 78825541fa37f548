"""Read a run folder back, and find what makes its speed unusable. No torch here."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from cl_train.config.schema import ConfigError

# Fields of summary.json and the settings that they report.
_SETTING_OF = {
    "model": "model",
    "channels_last_requested": "channels_last",
    "precision": "precision",
    "compile": "compile",
    "image_size": "data.image_size",
    "seed": "seed",
    "epochs": "epochs",
    "world_size": "nproc",
}
_TEXTS = ("status", "model", "memory_format", "channels_last_requested", "precision", "device", "device_name")
_COUNTS = ("world_size", "global_batch_size", "image_size", "seed", "epochs")
_AMOUNTS = ("data_wait_pct", "peak_memory_gib", "others_pct")
_LARGEST = 1e12  # of any number that is used; beyond it a record is damaged


@dataclass(frozen=True)
class Run:
    """A run folder: settings (flat keys such as `data.workers`), summary, and windows after warm-up."""

    folder: Path
    settings: dict[str, Any]
    summary: dict[str, Any]
    images_per_s: list[float]  # of each window after warm-up
    data_wait_pct: float  # median over those windows
    losses: dict[int, float]  # training loss by step; steps with NaN or Inf are absent
    started_at: float | None = None  # unix time of the first window; None = unknown
    ended_at: float | None = None  # and of the last
    repeat: int | None = None  # number of the repeat in a sweep
    steps: list[int] = field(default_factory=list)  # at which the windows ended
    problems: list[str] = field(default_factory=list)  # why this run cannot be compared with any other

    def fact(self, name: str) -> Any:
        """What the summary reports (`precision=auto` became bf16), else the setting."""
        return self.summary.get(name, self.settings.get(name))

    @property
    def others_pct(self) -> float | None:
        """Share of the machine that other processes took during the run, percent; None = unknown."""
        return self.summary.get("others_pct")


def read_run(folder: Path) -> Run:
    """Read `metrics.jsonl`, and `config.yaml` and `summary.json` where they exist.

    Settings that `config.yaml` lacks are taken from the summary; fields that a record lacks are unknown.

    Raises:
        ConfigError: not a run folder, a damaged file or a value of the wrong type, or no window was finished.
    """
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
        settings = _read_config(folder / "config.yaml")
        summary = _read_summary(folder / "summary.json")
        records, unreadable = _read_records(text)
        windows = [
            _checked_window(record, number) for number, record in records if record.get("kind", "train") == "train"
        ]
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not a run folder: it has no metrics.jsonl") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{folder} cannot be read as a run folder: {reason[:300]}") from None
    if not windows:
        raise ConfigError(f"{folder}: the run ended before its first window of log_every steps")
    measured = [window for window in windows if not window.get("warmup")]
    waits = [window["data_wait_pct"] for window in measured if window.get("data_wait_pct") is not None]
    times = [window["time"] for window in windows if window.get("time") is not None]
    problems = _summary_problems(summary, settings) + _record_problems([record for _, record in records])
    if unreadable:
        problems.append(f"{unreadable} lines of metrics.jsonl cannot be read")
    return Run(
        folder=folder,
        settings={setting: summary[name] for name, setting in _SETTING_OF.items() if summary.get(name) is not None}
        | settings
        | ({"nproc": summary["world_size"]} if summary.get("world_size") else {}),  # config.yaml of a job has 1
        summary=summary,
        images_per_s=[window["images_per_s"] for window in measured],
        data_wait_pct=statistics.median(waits) if waits else summary.get("data_wait_pct") or 0.0,
        losses={window["step"]: window["loss"] for window in windows if _is_number(window.get("loss"), -_LARGEST)},
        started_at=min(times, default=None),
        ended_at=max(times, default=None),
        steps=[window["step"] for window in measured],
        problems=[f"{folder.name}: {problem}" for problem in problems],
    )


def read_runs_inside(folder: Path) -> tuple[list[Run], list[tuple[str, str]]]:
    """The run folders directly inside `folder`, and name and reason of those that cannot be read.

    Raises:
        ConfigError: there is none.
    """
    found = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    if not found:
        raise ConfigError(f"{folder}: neither a sweep (sweep.json) nor a folder of runs (*/metrics.jsonl)")
    runs, unreadable = [], []
    for path in found:
        try:
            runs.append(read_run(path))
        except ConfigError as error:
            unreadable.append((path.name, str(error)))
    return runs, unreadable


def _read_config(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > 9 or isinstance(event, yaml.AliasEvent):  # aliases can expand without limit
            raise ValueError("config.yaml has aliases or deep nesting, which no run writes")
    settings = yaml.safe_load(text) or {}
    if not isinstance(settings, dict):
        raise ValueError("config.yaml has no settings")
    flat = _flat(settings)
    odd = [key for key, value in flat.items() if not f"{key}{value}".isprintable()]
    if odd:
        raise ValueError(f"config.yaml: the value of {odd[0]!r} has control characters")
    return flat


def _flat(values: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _read_summary(path: Path) -> dict[str, Any]:
    """
    Raises:
        ValueError: not an object, or a field that a comparison uses has the wrong type.
    """
    summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(summary, dict):
        raise ValueError("summary.json is not an object")
    environment = summary.get("environment") or {}
    checks = {name: isinstance(summary.get(name, ""), str | None) for name in _TEXTS}
    checks |= {name: str(summary.get(name, "")).isprintable() for name in _TEXTS if checks[name]}
    checks |= {name: summary.get(name) is None or _is_count(summary[name]) for name in _COUNTS}
    checks |= {name: summary.get(name) is None or _is_number(summary[name], 0) for name in _AMOUNTS}
    checks["environment"] = isinstance(environment, dict) and str(environment).isprintable()
    for name, is_valid in checks.items():
        if not is_valid:
            raise ValueError(f"summary.json: {name} is {_shown(summary[name])}")
    return summary


def _read_records(text: str) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """Line numbers and records, and the number of unreadable lines but for the last: a killed run leaves that torn.

    Raises:
        ValueError: a record is not an object.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    records, unreadable = [], 0
    for number, line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            unreadable += number != lines[-1][0]
            continue
        if not isinstance(record, dict):
            raise ValueError(f"metrics.jsonl, line {number} is not a record")
        records.append((number, record))
    return records, unreadable


def _checked_window(record: dict[str, Any], number: int) -> dict[str, Any]:
    valid = {
        "step": _is_count(record.get("step")),
        "images_per_s": _is_number(record.get("images_per_s"), 1e-9),
        "data_wait_pct": record.get("data_wait_pct") is None or _is_number(record["data_wait_pct"], 0, 100),
        "time": record.get("time") is None or _is_number(record["time"], 0),
        "warmup": isinstance(record.get("warmup"), bool | None),
        "loss": isinstance(record.get("loss"), int | float | None),
    }
    for name, is_valid in valid.items():
        if not is_valid:
            raise ValueError(f"metrics.jsonl, line {number}: {name} is {_shown(record.get(name))}")
    return record


def _is_number(value: Any, lowest: float, highest: float = _LARGEST) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and lowest <= value <= highest


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value, 0)


def _shown(value: Any) -> str:
    return repr(value)[:80]


def _summary_problems(summary: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """A run that failed or was killed, and facts that contradict the settings."""
    if not summary:
        return ["no summary.json: the run was killed or has not ended"]
    problems = []
    if summary.get("status") not in ("completed", "interrupted", None):
        problems.append(f"status {summary['status']}")
    pairs = [(name, setting, summary.get(name)) for name, setting in _SETTING_OF.items() if setting != "nproc"]
    layout = {"contiguous": "false", "channels_last": "true"}.get(str(summary.get("memory_format")))
    pairs.append(("memory_format", "channels_last", layout))
    for name, setting, value in pairs:
        asked = settings.get(setting)
        if None not in (asked, value) and _word(asked) not in ("auto", _word(value)):
            problems.append(f"config.yaml has {setting}={_word(asked)}, summary.json has {name} {summary[name]}")
    return problems


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _record_problems(records: Sequence[dict[str, Any]]) -> list[str]:
    """Two processes wrote at once, or the run was resumed with other settings."""
    steps = [record["step"] for record in records if record.get("kind", "train") == "train"]
    problems = []
    repeated = [later for earlier, later in pairwise(steps) if later <= earlier]
    if repeated:
        problems.append(f"step {repeated[0]} is recorded twice or out of order")
    starts = [record for record in records if record.get("kind") == "start"]
    for before, after in pairwise(starts):
        changed = [name for name in before if name not in ("time", "step") and before[name] != after.get(name)]
        problems += [
            f"{name} changed at step {_shown(after.get('step'))}: {_shown(before[name])} before, "
            f"{_shown(after.get(name))} after"
            for name in changed
        ]
    return problems
