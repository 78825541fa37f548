"""Writes and reads what a run leaves in its folder, without torch: `metrics.jsonl` and
`summary.json`.

Which windows count is decided here and nowhere else. `summary.json` has the speed of its process; a
comparison takes that of the whole run, in all its processes.
"""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, cast

from cl_train.config.validation import flatten, read_yaml, show
from cl_train.errors import ConfigError
from cl_train.system.files import read_json
from cl_train.system.processes import LOST_PCT

METRICS, SUMMARY, CONFIG = "metrics.jsonl", "summary.json", "config.yaml"
BAD_IMAGES = "bad_images.csv"
FAULTY_SHARE = 0.1  # faulty windows, updates or images: the speed is no longer that of training
# Facts that a resume may change; a comparison refuses runs in which they changed.
MAY_CHANGE = ("memory_format", "precision", "world_size", "device_name")
Record = dict[str, Any]  # a line of metrics.jsonl: of a window, kind "train", or of an evaluation


@dataclass(frozen=True)
class Window:
    """The training between two log lines, over all ranks; a record of kind "train".

    Fields that older records lack have defaults.
    """

    step: int  # the last one of the window
    time: float  # Unix time at which it was logged, seconds
    images_per_s: float
    data_wait_pct: float  # share of the time in which the device had no batch
    epoch: int = 0
    lr: float | None = None
    loss: float = math.nan  # the mean; NaN and Inf are null in the file
    top1: float | None = None  # percent
    top5: float | None = None
    image_size: int | None = None  # pixels
    images: int = 0
    seconds: float = 0.0  # without pauses, such as for a checkpoint
    step_ms: float = math.nan
    host_bound_pct: float = 0.0  # share of the steps before which the device was idle
    warmup: bool = False
    loss_scale: float | None = None
    skipped_steps: int = 0  # since the run began
    skipped_images: int = 0
    peak_memory_gib: float = 0.0
    # `MAY_CHANGE`
    memory_format: str | None = None
    precision: str | None = None
    world_size: int | None = None
    device_name: str | None = None

    @classmethod
    def of(cls, record: Record) -> Self:
        """Raises ValueError: the record is not that of a window."""
        names = [item.name for item in fields(cls) if record.get(item.name) is not None]
        try:
            window = cls(**{name: record[name] for name in names})
            is_valid = 0 < window.images_per_s < math.inf and window.step > 0 and window.time > 0
            is_valid &= window.data_wait_pct >= 0 and isinstance(window.loss, float | int)
        except TypeError:
            is_valid = False
        if not is_valid:
            raise ValueError(f"step {record.get('step')!r:.20} is not a window of training")
        return window

    def to_record(self) -> Record:
        return {"kind": "train", **finite_or_null(asdict(self))}


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run before its first step."""

    command: str
    model: str
    seed: int
    conversion: str
    compile: bool
    cuda_graph: str
    epochs: int
    memory_format: str
    parity: str | None  # of channels_last: passed, off, or "inconclusive: why"
    precision: str
    world_size: int
    global_batch_size: int
    channels_last_requested: str
    device: str
    device_name: str
    data: str
    workers: int
    environment: dict[str, str | None]
    started: str  # of this process; ISO 8601
    git: dict[str, Any]


@dataclass(frozen=True)
class Speed:
    """Throughput and step time over `counted_windows`; None without a window."""

    image_size: int  # of those windows
    # images/s: `end_to_end`; `compute`, the same of synthetic data, else null; `loader`, always
    # null: `cl-train loader_benchmark` measures it
    images_per_s: dict[str, Any]
    step_ms: dict[str, float] | None = None
    data_wait_pct: float | None = None

    @classmethod
    def of(cls, windows: Sequence[Window], image_size: int, *, has_loader: bool = True) -> Self:
        """Returns the speed over the windows that count; without any, `image_size` is used."""
        speeds: dict[str, Any] = {"end_to_end": None, "compute": None, "loader": None}
        if not windows:
            return cls(image_size, speeds)
        counted = counted_windows(windows)
        images_per_s = spread([window.images_per_s for window in counted])
        speeds["end_to_end"] = {name: round(value, 2) for name, value in images_per_s.items()}
        if not has_loader:
            speeds["compute"] = speeds["end_to_end"]
        step_ms = spread([window.step_ms for window in counted])
        seconds = [window.seconds for window in counted]
        wait_pct = statistics.fmean([window.data_wait_pct for window in counted], weights=seconds)
        return cls(
            counted[-1].image_size or image_size,
            speeds,
            {name: round(step_ms[name], 3) for name in ("median", "p95")},
            round(wait_pct, 2),
        )


@dataclass(frozen=True)
class Results:
    """What the run has learned, in all its processes."""

    steps: int
    images_seen: int
    train: dict[str, float | None]
    val: dict[str, Any] | None
    val_average: dict[str, Any] | None  # of the EMA
    best: dict[str, Any] | None
    amp: dict[str, Any]
    skipped_images: int
    resumed_with: list[str] | None  # settings that differed in an earlier process


@dataclass(frozen=True)
class ProcessFacts:
    """Facts of the last process of the run."""

    others_pct: float | None  # share of the cores' time that others used; None: unknown
    lost_pct: float | None  # share of the run's time waiting for a core; None: unknown
    utilisation: dict[str, Any] | None  # as `step.utilisation`
    peak_memory_gib: float
    reserved_memory_gib: float | None  # of a GPU, by torch's allocator
    first_step_s: float | None  # from the start to its end: selecting, compiling
    gpu: dict[str, Any] | None  # as `machine.GpuWatch.worst`; None: unknown, or a CPU
    ended: str
    seconds: float


@dataclass(frozen=True)
class Summary:
    """`summary.json`: percentages are 0 to 100, and what is absent is null."""

    status: str  # completed, interrupted or failed
    facts: RunFacts
    speed: Speed
    results: Results
    process: ProcessFacts
    why: str | None  # why it failed

    def to_dict(self) -> dict[str, Any]:
        content = {"schema_version": 1, "status": self.status, "why": self.why}
        for part in (self.facts, self.speed, self.results, self.process):
            content |= asdict(part)
        return cast(dict[str, Any], finite_or_null(content))


def read_records(folder: Path) -> tuple[list[Record], list[int]]:
    """Returns the records of metrics.jsonl, and the numbers of damaged lines except the last line,
    which a killed process leaves incomplete. Raises OSError, UnicodeDecodeError.
    """
    path = folder / METRICS
    lines = path.read_text(encoding="utf-8").rstrip().splitlines() if path.is_file() else []
    records, damaged = [], []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            damaged += [number] if number < len(lines) else []
            continue
        records.append({"kind": "train"} | record)
    return records, damaged


def windows_of(records: Sequence[Record]) -> list[Window]:
    """Raises ValueError: a record of training is not that of a window."""
    return [Window.of(record) for record in records if record["kind"] == "train"]


def after_warmup(windows: Sequence[Window]) -> list[Window]:
    """The windows after warm-up, or all if there are no others."""
    return [window for window in windows if not window.warmup] or list(windows)


def counted_windows(windows: Sequence[Window]) -> list[Window]:
    """The windows that make a run's speed: those after warm-up, of the last image size that has
    such windows.
    """
    measured = after_warmup(windows)
    return [window for window in measured if window.image_size == measured[-1].image_size]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns median, 5th and 95th percentile (linear interpolation) and number of `values`, one
    per window; there is at least one.
    """
    percentiles = list(values)
    if len(values) > 1:
        percentiles = statistics.quantiles(values, n=20, method="inclusive")
    return {
        "median": statistics.median(values),
        "p5": percentiles[0],
        "p95": percentiles[-1],
        "windows": len(values),
    }


def finite_or_null(value: Any) -> Any:
    """Replaces NaN and Infinity, which JSON does not have, by null."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


# --- read back ------------------------------------------------------------------------------------


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
    is_damaged: bool = False  # lines of metrics.jsonl cannot be read: see `problems`
    repeat: int | None = None  # number of the repeat in a sweep

    def fact(self, name: str) -> Any:
        """The value in the summary (`precision=auto` became bf16), else the setting."""
        return self.summary.get(name, self.settings.get(name))

    @property
    def window_speeds(self) -> list[float]:
        """Images per second of each window that counts."""
        return [window.images_per_s for window in self.windows]

    @property
    def data_wait_pct(self) -> float:
        return statistics.median(window.data_wait_pct for window in self.windows)

    @property
    def host_bound_pct(self) -> float:
        return statistics.median(window.host_bound_pct for window in self.windows)

    @property
    def windows_after_warmup(self) -> int:
        return sum(not window.warmup for window in self.windows)

    @property
    def lost_pct(self) -> float:
        return self.summary.get("lost_pct", 0.0)

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes took too much of a CPU's time; a GPU's speed suffers less."""
        return self.lost_pct >= LOST_PCT and self.fact("device") == "cpu"

    @property
    def results(self) -> dict[str, float]:
        """Median speed of the windows that count (images/s), accuracy of the last evaluation
        (percent) and memory (GiB); what is unknown is left out.
        """
        results = {"images_per_s": statistics.median(self.window_speeds)}
        for name in ("val.top1", "peak_memory_gib"):
            if name in self.summary:
                results[name.removeprefix("val.")] = self.summary[name]
        return results


def read_run(folder: Path) -> Run:
    """Reads a run from its files; summary.json may be missing.

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
        config = dict(flatten(read_yaml(folder / file)))
        file = SUMMARY
        content = read_json(folder / file) if (folder / file).is_file() else {}
        summary = {name: value for name, value in flatten(content) if value is not None}
    except damage as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{folder}/{file} cannot be read: {reason}") from None
    if not windows:
        raise ConfigError(f"{folder}: the run ended before its first window of log_every steps")

    # config.yaml has nproc=1: torchrun starts the processes.
    settings = config | {"nproc": summary.get("world_size", 1)}
    counted = counted_windows(windows)
    if config.get("data.size_schedule"):  # growing images: the speed is that of the last size
        settings["data.image_size"] = counted[-1].image_size
    problems = [f"{METRICS}, line {number} cannot be read" for number in damaged_lines]
    problems += run_problems(windows, summary)
    evaluations = [record for record in records if record["kind"] == "val"]
    val_losses = {record["step"]: record.get("loss") for record in evaluations}
    times = [window.time for window in windows]
    return Run(
        folder=folder,
        settings=settings,
        summary=summary,
        windows=counted,
        losses={window.step: window.loss for window in windows if abs(window.loss) < 1e12},
        val_losses={step: loss for step, loss in val_losses.items() if loss is not None},
        times=(min(times), max(times)),
        problems=[f"{folder.name}: {problem}" for problem in problems],
        is_damaged=damaged_lines != [],
    )


def run_problems(windows: Sequence[Window], summary: dict[str, Any]) -> Iterator[str]:
    """Yields reasons why the speed of a run is not that of training with its settings."""
    if not summary:
        yield "no summary.json: the run was killed or has not ended"
    elif summary.get("status") not in ("completed", "interrupted", None):
        yield f"status {summary['status']}"
    if summary.get("parity", "passed") != "passed":
        yield f"channels_last was not shown to compute the same (parity: {summary['parity']:.200})"
    if changed := summary.get("resumed_with"):
        yield f"it was resumed with other settings: {show(changed):.300}"

    steps = [window.step for window in windows]
    if steps != sorted(set(steps)):
        yield "a step is recorded twice or out of order"
    for before, after in pairwise(windows):
        for name in MAY_CHANGE:
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
