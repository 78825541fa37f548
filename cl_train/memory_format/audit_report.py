"""What an audit found: every operator call with its outcome, sums per operator and module, and a verdict in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["kept", "lost", "restored", "ambiguous", "contiguous"]
OUTCOMES: tuple[Outcome, ...] = ("kept", "lost", "restored", "ambiguous", "contiguous")
TOLD: tuple[Outcome, ...] = ("lost", "restored", "ambiguous")
GRADIENTS = "accumulating gradients"  # in the place of a line of code
SCHEMA_VERSION = 1


@dataclass
class Call:
    """One operator call of a step; equal calls of one line of code are counted, not repeated.

    `outcome`: "kept", channels_last in and out; "lost", channels_last in, contiguous out (in backward also: a gradient
    made contiguous where the activation is channels_last); "restored", something contiguous in, channels_last out;
    "ambiguous", size-1 dimensions leave it open; "contiguous", contiguous in and out.
    `copy`: how the bytes moved. "explicit", the call is a copy; "hidden", the kernel permutes its input first;
    "strided", an element-wise kernel reads one input across the grain; "" nothing moved.
    """

    operator: str
    direction: Literal["forward", "backward"]
    outcome: Outcome
    module: str
    module_type: str
    source: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    inputs: tuple[str, ...]
    copy: Literal["", "explicit", "hidden", "strided"] = ""
    moved_bytes: int = 0
    copy_ms: float | None = None
    count: int = 1

    def key(self) -> tuple[object, ...]:
        return (
            self.operator, self.direction, self.outcome, self.module, self.source, self.shape, self.dtype, self.inputs
        )  # fmt: skip


@dataclass(frozen=True)
class Surrounding:
    """The layout of something around the model: a batch, a gradient, optimizer state, an average."""

    what: str
    outcome: Literal["kept", "lost", "ambiguous", "contiguous"]
    detail: str


@dataclass
class LayoutReport:
    """An audited step. Bytes count reads and writes of every operator that is no view."""

    model: str
    model_memory_format: str
    input: str
    precision: str
    device: str
    torch: str
    calls: list[Call] = field(default_factory=list)
    step_bytes: int = 0
    step_ms: float | None = None
    surroundings: list[Surrounding] = field(default_factory=list)
    compiled: list[dict[str, Any]] = field(default_factory=list)

    def of(self, outcome: Outcome, direction: str | None = None) -> list[Call]:
        """The calls with this outcome, those that moved most first."""
        found = [call for call in self.calls if call.outcome == outcome and direction in (None, call.direction)]
        return sorted(found, key=lambda call: -call.moved_bytes * call.count)

    @property
    def totals(self) -> dict[str, int]:
        counts = Counter[str]()
        for call in self.calls:
            counts[call.outcome] += call.count
        return {outcome: counts[outcome] for outcome in OUTCOMES}

    @property
    def moved_bytes(self) -> int:
        return sum(call.moved_bytes * call.count for call in self.calls)

    @property
    def moved_pct(self) -> float:
        """Bytes moved to change layouts, as a share of all bytes of the step."""
        return 100 * self.moved_bytes / self.step_bytes if self.step_bytes else 0.0

    @property
    def copy_ms(self) -> float | None:
        """Milliseconds of a step that such copies take, each measured alone; None when not measured."""
        if self.step_ms is None:
            return None
        return sum(call.copy_ms * call.count for call in self.calls if call.copy_ms is not None)

    def per_operator(self) -> list[dict[str, Any]]:
        return _sums(self.calls, lambda call: {"operator": call.operator, "direction": call.direction})

    def per_module(self) -> list[dict[str, Any]]:
        return _sums(self.calls, lambda call: {"module": call.module, "module_type": call.module_type})

    def losers(self) -> list[str]:
        """Operators that lost the layout, without repetition, those that moved most first."""
        return list(dict.fromkeys(_short(call.operator) for call in self.of("lost")))

    def verdict(self) -> list[str]:
        """What to conclude, in words, worst first."""
        if self.model_memory_format == "contiguous" and not self.of("kept"):
            return ["the model and its input are contiguous: there is no channels_last to lose; convert it first"]
        lines = []
        for direction in ("forward", "backward"):
            lost = self.of("lost", direction)
            for operator in dict.fromkeys(call.operator for call in lost):
                lines.append(self._loss_line(direction, [call for call in lost if call.operator == operator]))
        restored = self.of("restored")
        if restored:
            calls = "1 call" if _count(restored) == 1 else f"{_count(restored)} calls"
            lines.append(
                f"{calls} met a contiguous tensor and returned channels_last: {self._share(restored)} to permute it "
                f"({_places(restored)})"
            )
        if not self.of("lost"):
            lines.insert(0, "no operator loses channels_last" + ("" if restored else ", and none has to restore it"))
        if self.copy_ms is not None and self.step_ms:
            pct = 100 * self.copy_ms / self.step_ms
            lines.append(f"together {self.copy_ms:.2f} ms of a step of {self.step_ms:.2f} ms ({pct:.1f} %), measured")
        return lines

    def _loss_line(self, direction: str, calls: list[Call]) -> str:
        name = _short(calls[0].operator)
        what = "returns" if _count(calls) == 1 else "return"
        return (
            f"{_count(calls)} x {name} ({direction}) {what} contiguous: {self._share(calls)} "
            f"({_places(calls)}). {_advice(calls[0])}"
        )

    def _share(self, calls: list[Call]) -> str:
        moved = sum(call.moved_bytes * call.count for call in calls)
        pct = 100 * moved / self.step_bytes if self.step_bytes else 0.0
        return f"{pct:.1f} % of the step's bytes"

    def to_json(self) -> dict[str, Any]:
        """The whole report as plain types. `kept` and `contiguous` calls appear in the sums only."""
        told = [call for outcome in TOLD for call in self.of(outcome)]
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "model_memory_format": self.model_memory_format,
            "input": self.input,
            "precision": self.precision,
            "device": self.device,
            "torch": self.torch,
            "totals": self.totals,
            "step_bytes": self.step_bytes,
            "moved_bytes": self.moved_bytes,
            "moved_pct": round(self.moved_pct, 3),
            "step_ms": self.step_ms,
            "copy_ms": self.copy_ms,
            "verdict": self.verdict(),
            "calls": [asdict(call) for call in told],
            "per_operator": self.per_operator(),
            "per_module": [row for row in self.per_module() if row["lost"] or row["restored"]],
            "surroundings": [asdict(item) for item in self.surroundings],
            "compiled": self.compiled,
        }

    def __str__(self) -> str:
        totals = ", ".join(f"{number} {outcome}" for outcome, number in self.totals.items())
        parts = [
            f"{self.model} ({self.model_memory_format}), input {self.input}, {self.precision} on {self.device}, "
            f"torch {self.torch}",
            f"operator calls: {totals}",
            *(f"- {line}" for line in self.verdict()),
        ]
        for outcome in TOLD[:2]:
            calls = self.of(outcome)
            if calls:
                parts += ["", f"{outcome}:", _call_table(calls)]
        changed = [row for row in self.per_operator() if row["lost"] or row["restored"]]
        if changed:
            parts += ["", "per operator:", text_table(changed)]
        if self.surroundings:
            parts += ["", "around the model:", text_table([asdict(item) for item in self.surroundings])]
        if self.compiled:
            parts += ["", "compiled graphs:", text_table(self.compiled)]
        return "\n".join(parts)


def text_table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as aligned columns."""
    if not rows:
        return ""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join(lines)


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as a Markdown table."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _call_table(calls: list[Call]) -> str:
    """One row for each operator on each line of code."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    modules: dict[tuple[str, ...], list[str]] = {}
    for call in calls:
        key: tuple[str, ...] = (call.operator, call.direction, call.source, call.line, call.copy)
        row = rows.setdefault(key, {"count": 0, "operator": _short(call.operator), "direction": call.direction})
        row["count"] += call.count
        row["MiB"] = row.get("MiB", 0.0) + call.moved_bytes * call.count / 2**20
        row["ms"] = row.get("ms", 0.0) + (call.copy_ms or 0.0) * call.count
        modules.setdefault(key, []).append(f"{call.module or '(top)'} {list(call.shape)}")
    for key, row in rows.items():
        more = f" and {len(modules[key]) - 1} more" if len(modules[key]) > 1 else ""
        row |= {"copy": key[4], "module": modules[key][0] + more, "source": key[2], "line": key[3]}
    return text_table(list(rows.values()))


def _sums(calls: Iterable[Call], key: Callable[[Call], dict[str, Any]]) -> list[dict[str, Any]]:
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for call in calls:
        row = key(call)
        row = sums.setdefault(tuple(row.values()), {**row, **dict.fromkeys(OUTCOMES, 0), "moved_bytes": 0})
        row[call.outcome] += call.count
        row["moved_bytes"] += call.moved_bytes * call.count
    return sorted(sums.values(), key=lambda row: (-row["moved_bytes"], -row["lost"]))


def _count(calls: list[Call]) -> int:
    return sum(call.count for call in calls)


def _places(calls: list[Call]) -> str:
    """The lines of code, with the first module that runs each."""
    modules: dict[str, list[str]] = {}
    for call in calls:
        modules.setdefault(call.source or "no line of Python", []).append(call.module or "(top)")
    places = [
        f"{source} in {names[0]}" + (f" and {len(set(names)) - 1} more" if len(set(names)) > 1 else "")
        for source, names in modules.items()
    ]
    more = f"; and {len(places) - 2} more lines" if len(places) > 2 else ""
    return "; ".join(places[:2]) + more


def _short(operator: str) -> str:
    return operator.removeprefix("aten.").removesuffix(".default")


def _advice(call: Call) -> str:
    """What to do about a loss; the first rule that fits."""
    name, line = _short(call.operator), call.line
    if "flatten(" in line or any(words in line for words in ("size(0), -1", "shape[0], -1", "start_dim=1")):
        return "The one copy before a classifier: once a step, and unavoidable."
    if call.source == GRADIENTS:
        return "The parameter is contiguous and its gradient is not: copied, as a gradient has its parameter's strides."
    if call.copy == "explicit" and any("regrouped" in tensor for tensor in call.inputs):
        return (
            "Channels regrouped through five dimensions are copied in that order; F.channel_shuffle keeps the layout."
        )
    if ".contiguous(" in line:
        return "Remove this .contiguous(), or give it memory_format=torch.channels_last."
    if call.copy == "explicit":
        return "A reshape that cannot be a view copies; keep four dimensions, or call .to(memory_format=...) behind it."
    if name.startswith("cat"):
        return "cat returns channels_last where all its inputs are: one was contiguous, look for the loss before it."
    if "norm" in name:
        return "This kernel returns contiguous: leave the convolutions next to it contiguous (conversion=select)."
    if call.direction == "backward" and not call.moved_bytes:
        return "Made from a broadcast gradient, such as a mean's: what it costs is paid by the operator that meets it."
    if call.direction == "backward":
        return "It met a gradient that was contiguous already: look for the loss behind it."
    return "No channels_last output here: where the share matters, replace it, or leave its neighbours contiguous."
