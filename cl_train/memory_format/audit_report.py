"""The result of an audit: operator calls with their outcomes, totals and conclusions."""

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any, Literal, get_args

Outcome = Literal["kept", "lost", "restored", "created", "ambiguous", "contiguous"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass
class Origin:
    """The location of a call; a backward call has that of the forward call whose autograd node it belongs to."""

    direction: Literal["forward", "backward"]
    module: str = ""
    module_type: str = ""
    source: str = ""
    line: str = ""


@dataclass(kw_only=True)
class Call(Origin):
    """One operator call of a step; equal calls of one line of code are one entry with their number.

    `outcome`: "kept", channels_last in and out; "lost", channels_last in and contiguous out (in backward also: a
    gradient made contiguous although its activation is channels_last); "restored", contiguous in and channels_last out;
    "created", a gradient that counts as lost but was made without reading a channels_last tensor, which moves no bytes;
    "ambiguous", size-1 dimensions leave both formats possible; "contiguous", in and out.
    `copy`: "explicit", the call is a copy; "hidden", the kernel permutes its input first; "strided", an element-wise
    kernel reads one input with large strides; "", no copy.
    """

    operator: str
    outcome: Outcome
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    inputs: tuple[str, ...] = ()
    copy: str = ""
    moved_bytes: int = 0
    copy_ms: float | None = None
    count: int = 1

    @property
    def name(self) -> str:
        return short_name(self.operator)

    def advice(self) -> str:
        """What to do about a loss."""
        if self.module_type == "Parameter":
            return "The parameter is contiguous and its gradient is not; a gradient takes its parameter's strides."
        if self.copy == "explicit" and self.direction == "forward":
            return "Remove this copy (a .contiguous(), a .reshape); a flatten before the classifier cannot be avoided."
        if any(given.startswith("contiguous") for given in self.inputs):
            return "One of its inputs was contiguous already: see the loss before it."
        return "This kernel returns contiguous: replace it if the share matters."


@dataclass
class LayoutReport:
    """An audited step. Bytes are those read and written by its operators; views are not counted."""

    model: str
    model_memory_format: str
    input: str
    precision: str
    device: str
    torch: str
    calls: list[Call] = field(default_factory=list)
    step_bytes: int = 0
    step_ms: float | None = None
    times: Any = None  # the `operator_times.OperatorTimes` of both layouts, if measured
    compiled: list[dict[str, Any]] = field(default_factory=list)

    def of(self, outcome: Outcome, direction: str | None = None) -> list[Call]:
        """The calls with this outcome, sorted by the bytes that they moved."""
        found = [call for call in self.calls if call.outcome == outcome and direction in (None, call.direction)]
        return sorted(found, key=lambda call: -call.moved_bytes * call.count)

    @property
    def totals(self) -> dict[str, int]:
        """Number of calls by outcome."""
        return {outcome: _count(self.of(outcome)) for outcome in OUTCOMES}

    @property
    def moved_bytes(self) -> int:
        """Bytes copied to change the format."""
        return _total(self.calls, "moved_bytes")

    @property
    def moved_pct(self) -> float:
        """The same as a share of all bytes of the step."""
        return 100 * self.moved_bytes / max(self.step_bytes, 1)

    @property
    def copy_ms(self) -> float | None:
        """Milliseconds of a step spent on such copies; None if not measured."""
        return None if self.step_ms is None else _total(self.calls, "copy_ms")

    def verdict(self) -> list[str]:
        """The conclusions as text, the most expensive loss first."""
        if self.model_memory_format == "contiguous" and not self.of("kept"):
            return ["the model and its input are contiguous, so nothing can be lost; convert the model first"]
        lines = [
            f"{self._cost(calls, f'{calls[0].name} ({calls[0].direction}) returned contiguous')}. {calls[0].advice()}"
            for calls in grouped(self.of("lost"), "operator", "direction", "source", "copy")
        ] or ["no operator loses channels_last"]
        for calls in grouped(self.of("restored"), "copy"):
            lines.append(self._cost(calls, "a contiguous input was converted to channels_last"))
        for calls in grouped(self.of("created"), "operator"):
            what = "(backward) created a contiguous gradient and moved nothing: no loss (as of a mean or a slice)"
            lines.append(f"{_count(calls)} x {calls[0].name} {what}")
        if self.copy_ms is not None and self.step_ms:
            pct = 100 * self.copy_ms / self.step_ms
            lines.append(f"measured: {self.copy_ms:.2f} ms of a step of {self.step_ms:.2f} ms ({pct:.1f} %)")
        return lines

    def _cost(self, calls: list[Call], what: str) -> str:
        """The number of calls, what they cost, and the line of code and the module of the first."""
        first, pct = calls[0], 100 * _total(calls, "moved_bytes") / max(self.step_bytes, 1)
        cost = f"{pct:.1f} % of the step's bytes" + f", {_total(calls, 'copy_ms'):.2g} ms" * (self.step_ms is not None)
        where = f"{first.source} `{first.line}`" if first.source else "no line of Python"
        module = f"{first.module or '(top)'} {list(first.shape)}"
        return f"{_count(calls)} x {what}: {cost}, {first.copy} copy (first at {where} in {module})"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain types. "kept" and "contiguous" calls appear in the totals only."""
        return {
            "schema_version": 3,
            **vars(self),
            "times": self.times and self.times.to_dict(),
            "totals": self.totals,
            "moved_bytes": self.moved_bytes,
            "copy_ms": self.copy_ms,
            "moved_pct": round(self.moved_pct, 3),
            "verdict": self.verdict(),
            "calls": [asdict(call) for outcome in OUTCOMES[1:5] for call in self.of(outcome)],
        }

    def __str__(self) -> str:
        totals = ", ".join(f"{number} {outcome}" for outcome, number in self.totals.items())
        moved = f"; conversions move {self.moved_pct:.1f} % of the step's bytes" * bool(self.moved_bytes)
        where = f"{self.precision} on {self.device}, torch {self.torch}"
        model = f"{self.model} ({self.model_memory_format}), input {self.input}, {where}"
        parts = [model, f"operator calls: {totals}{moved}", *(f"- {line}" for line in self.verdict())]
        if self.compiled:
            parts += ["", "compiled graphs:", "", markdown_table(self.compiled)]
        return "\n".join([*parts, "", str(self.times)] if self.times else parts)


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Rows with equal keys as a Markdown table with aligned columns; empty for no rows."""
    if not rows:
        return ""

    def cell(value: object) -> str:
        text = "" if value is None else str(value)
        if isinstance(value, float):
            text = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"  # not 1.23e+03
        if isinstance(value, tuple):
            text = f"[{', '.join(map(cell, value))}]"
        return text.replace("|", "\\|").replace("\n", " ")

    lines = [list(rows[0]), ["---"] * len(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"| {' | '.join(text.ljust(width) for text, width in zip(line, widths, strict=True))} |" for line in lines
    )


def grouped(calls: list[Call], *fields: str) -> list[list[Call]]:
    """Calls in groups that are equal in these fields, in the order of the first call of each."""
    groups: dict[object, list[Call]] = defaultdict(list)
    for call in calls:
        groups[attrgetter(*fields)(call)].append(call)
    return list(groups.values())


def _count(calls: list[Call]) -> int:
    return sum(call.count for call in calls)


def _total(calls: list[Call], name: str) -> Any:
    return sum((getattr(call, name) or 0) * call.count for call in calls)


def short_name(operator: str) -> str:
    return operator.removeprefix("aten.").removesuffix(".default")
