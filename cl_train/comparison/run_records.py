"""Read a run folder back, and find what makes its speed unusable. No torch here."""

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from cl_train.config.schema import LAYOUT_NAMES, ConfigError
from cl_train.config.validation import flatten

# Fields of summary.json and the settings that they report.
_SETTING_OF = {name: name for name in ("model", "precision", "compile", "seed", "epochs")}
_SETTING_OF |= {"channels_last_requested": "channels_last", "image_size": "data.image_size"}
_REQUEST_OF = {layout: value for value, layout in LAYOUT_NAMES.items()}


FAULTY_SHARE = 0.1  # of the windows, updates or images of a run: from here on it is not the speed of training


@dataclass(frozen=True)
class Run:
    """A run folder: settings (flat keys such as `data.workers`), summary, and windows after warm-up."""

    folder: Path
    settings: dict[str, Any]
    summary: dict[str, Any]
    images_per_s: list[float]  # of each window after warm-up
    steps: list[int]  # at which these windows ended
    data_wait_pct: float  # median over these windows
    losses: dict[int, float]  # training loss by step, without NaN and Inf
    started_at: float | None  # unix time of the first window, seconds; None = unknown
    ended_at: float | None  # and of the last
    problems: list[str] = field(default_factory=list)  # why this run cannot be compared with any other
    remarks: list[str] = field(default_factory=list)  # what to know about it
    repeat: int | None = None  # number of the repeat in a sweep

    def fact(self, name: str) -> Any:
        """The value in the summary (`precision=auto` became bf16), else the setting."""
        return self.summary.get(name, self.settings.get(name))

    @property
    def median_images_per_s(self) -> float | None:
        """Of the windows after warm-up; None = there are none."""
        return statistics.median(self.images_per_s) if self.images_per_s else None

    @property
    def top1(self) -> float | None:
        """Accuracy of the last evaluation, percent; None = there was none."""
        return (self.summary.get("val") or {}).get("top1")

    @property
    def others_pct(self) -> float | None:
        """Share of the machine that other processes used during the run, percent; None = unknown."""
        return self.summary.get("others_pct")


def read_run(folder: Path) -> Run:
    """A run from its files; config.yaml and summary.json may be missing.

    Raises ConfigError: not a run folder, damaged, or without a window.
    """
    if not (folder / "metrics.jsonl").is_file():  # nor a FIFO, which would block
        raise ConfigError(f"{folder} is not a run folder: it has no file metrics.jsonl")
    try:
        windows, problems = _read_windows((folder / "metrics.jsonl").read_text(encoding="utf-8"))
        config = _read_config(folder / "config.yaml")
        summary = _read_summary(folder / "summary.json")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{folder} cannot be read as a run folder: {reason[:300]}") from None
    if not windows:
        raise ConfigError(f"{folder}: the run ended before its first window of log_every steps")
    settings = {setting: summary[name] for name, setting in _SETTING_OF.items() if name in summary} | config
    if summary.get("world_size"):
        settings["nproc"] = summary["world_size"]  # config.yaml has 1: torchrun starts the processes
    measured = [window for window in windows if not window.get("warmup")]
    if config.get("data.size_schedule") and measured:  # growing images: the speed is that of the last size
        settings["data.image_size"] = measured[-1].get("image_size")
        measured = [window for window in measured if window.get("image_size") == measured[-1].get("image_size")]
    waits_pct = [window["data_wait_pct"] for window in measured if "data_wait_pct" in window]
    times = [window["time"] for window in windows if "time" in window]
    problems += [*_contradictions(summary, config), *_changes(windows)]
    faults = _faults(windows, summary)
    problems += [fault for fault, share in faults.items() if share >= FAULTY_SHARE]
    return Run(
        folder=folder,
        settings=settings,
        summary=summary,
        images_per_s=[window["images_per_s"] for window in measured],
        steps=[window["step"] for window in measured],
        data_wait_pct=statistics.median(waits_pct) if waits_pct else summary.get("data_wait_pct", 0.0),
        losses={window["step"]: window["loss"] for window in windows if _is_loss(window.get("loss"))},
        started_at=min(times, default=None),
        ended_at=max(times, default=None),
        problems=[f"{folder.name}: {problem}" for problem in problems],
        remarks=[f"{folder.name}: {fault}" for fault, share in faults.items() if 0.01 <= share < FAULTY_SHARE],
    )


# --- files ------------------------------------------------------------------------------------------------------------


def _read_config(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if re.search(r"[:\-\[,]\s*\*\w", text):  # aliases can expand without limit, and no run writes any
        raise ValueError("config.yaml has aliases")
    settings = yaml.safe_load(text) or {}
    if not isinstance(settings, dict):
        raise ValueError(f"config.yaml has no settings but {repr(settings)[:80]}")
    flat = dict(flatten(settings))
    if not all(f"{key}{value}".isprintable() for key, value in flat.items()):
        raise ValueError("config.yaml has a setting with control characters")
    return flat


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"summary.json: {error}") from None
    return _checked(summary, _SUMMARY, "summary.json")


def _read_windows(text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The records of training, and the unreadable lines but for the last, which a killed process leaves incomplete."""
    lines = text.rstrip().splitlines()
    windows, problems = [], []
    for number, line in enumerate(lines, start=1):
        where = f"metrics.jsonl, line {number}"
        try:
            record = json.loads(line) if line.strip() else {"kind": None}
        except (ValueError, RecursionError):
            problems += [f"{where} cannot be read"] if number < len(lines) else []
            continue
        if isinstance(record, dict) and "loss" in record and record["loss"] is None:
            record["loss"] = math.nan  # which JSON does not have
        if not isinstance(record, dict) or record.get("kind", "train") == "train":
            windows.append(_checked(record, _WINDOW, where, required=("step", "images_per_s")))
    return windows, problems


# --- types ------------------------------------------------------------------------------------------------------------

Rule = Callable[[Any], bool]


def _number(low: float = 0.0, high: float = 1e12, kind: Any = int | float) -> Rule:
    return lambda value: isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


_count, _amount, _is_loss = _number(kind=int), _number(), _number(-1e12)
_WINDOW: dict[str, Rule] = {
    "step": _count,
    "image_size": _count,
    "images_per_s": _number(1e-9),
    "data_wait_pct": _number(high=100.0),
    "time": _amount,
    "warmup": lambda value: isinstance(value, bool),
    "loss": lambda value: isinstance(value, int | float),  # also NaN
}
_SUMMARY: dict[str, Rule] = {
    **dict.fromkeys(("status", "model", "memory_format", "channels_last_requested"), _is_text),
    **dict.fromkeys(("precision", "device", "device_name"), _is_text),
    **dict.fromkeys(("world_size", "global_batch_size", "image_size", "seed", "epochs"), _count),
    **dict.fromkeys(("data_wait_pct", "peak_memory_gib", "others_pct"), _amount),
    **dict.fromkeys(("images_seen", "skipped_images"), _count),
    "amp": lambda value: isinstance(value, dict) and _count(value.get("skipped_steps") or 0),
    "git": lambda value: isinstance(value, dict),
    "val": lambda value: isinstance(value, dict) and _amount(value.get("top1") or 0),
    "environment": lambda value: isinstance(value, dict) and all(map(_is_text, map(str, [*value, *value.values()]))),
}


def _checked(document: Any, rules: Mapping[str, Rule], where: str, required: Sequence[str] = ()) -> dict[str, Any]:
    """The document without nulls, which mean unknown; ValueError names a value of the wrong type or size."""
    if not isinstance(document, dict):
        raise ValueError(f"{where} is {repr(document)[:80]}")
    known = {name: value for name, value in document.items() if value is not None}
    for name, is_valid in rules.items():
        if (name in known or name in required) and not is_valid(known.get(name)):
            raise ValueError(f"{where}: {name} is {repr(known.get(name))[:80]}")
    return known


# --- problems ---------------------------------------------------------------------------------------------------------


def _contradictions(summary: dict[str, Any], config: dict[str, Any]) -> Iterator[str]:
    """A run that failed or was killed, and records that contradict the settings."""
    if not summary:
        yield "no summary.json: the run was killed or has not ended"
    elif (status := summary.get("status")) not in ("completed", "interrupted", None):
        yield f"status {status}"
    reported = [(name, setting, summary.get(name)) for name, setting in _SETTING_OF.items()]
    reported.append(("memory_format", "channels_last", _REQUEST_OF.get(str(summary.get("memory_format")))))
    for name, setting, value in reported:
        asked = None if name == "image_size" and config.get("data.size_schedule") else config.get(setting)
        if None not in (asked, value) and str(asked).lower() not in ("auto", str(value).lower()):
            yield f"config.yaml has {setting}={asked}, summary.json has {name} {summary[name]}"


def _faults(windows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> dict[str, float]:
    """What a run did instead of training, with the share of the windows, updates or images."""
    nonfinite = sum(not abs(window["loss"]) < math.inf for window in windows if "loss" in window)
    steps, skipped = windows[-1]["step"], summary.get("amp", {}).get("skipped_steps") or 0
    images = summary.get("images_seen") or steps * summary.get("global_batch_size", 1)
    skipped_images = summary.get("skipped_images", 0)
    return {
        f"the loss of {nonfinite} of {len(windows)} windows is not finite": nonfinite / len(windows),
        f"{skipped} of {steps} updates were skipped, because gradients overflowed": skipped / max(1, steps),
        f"{skipped_images} of {images} images were skipped": skipped_images / max(1, images),
    }


def _changes(windows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Two processes wrote at the same time, or the run was resumed in another way."""
    repeated = [after["step"] for before, after in pairwise(windows) if after["step"] <= before["step"]]
    if repeated:
        yield f"step {repeated[0]} is recorded twice or out of order"
    for before, after in pairwise(windows):
        for name in ("memory_format", "precision", "world_size", "device_name"):
            if name in before and name in after and before[name] != after[name]:
                values = f"{repr(before[name])[:80]} before, {repr(after[name])[:80]} after"
                yield f"{name} changed at step {after['step']}: {values}"
