"""The result of an audit: operator calls with their outcomes, totals and conclusions."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any, Literal, TypeVar, get_args

from cl_train.system.tables import markdown_table, two_digits

T = TypeVar("T")
Outcome = Literal["kept", "lost", "restored", "created", "inherited", "ambiguous", "contiguous"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


@dataclass
class Origin:
    """The location of a call; a backward call has the location of its forward call."""

    direction: Literal["forward", "backward"]
    module: str = ""
    module_type: str = ""
    source: str = ""
    line: str = ""
    backward_of: str = ""  # in backward the operator of the forward pass


@dataclass(kw_only=True)
class Call(Origin):
    """An operator call of a step, or equal calls of one line of code.

    Outcomes: kept, channels_last in and out; lost, channels_last in and contiguous out, or the
    contiguous gradient of a channels_last activation; restored, contiguous in and channels_last
    out; created, a contiguous gradient that no channels_last tensor was read for: no bytes move;
    inherited, a loss only because it reads a created gradient; ambiguous, by dimensions of size 1;
    contiguous, in and out.
    """

    operator: str
    outcome: Outcome
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    inputs: tuple[str, ...] = ()
    copy: str = ""  # "explicit": the call is a copy; "hidden": its kernel permutes an input
    moved_bytes: int = 0
    cause: str = ""  # the `place` of the call that made one of its inputs contiguous
    contiguous: str = ""  # which of its inputs is, and why, if no loss made it so
    count: int = 1

    @property
    def name(self) -> str:
        return short_name(self.operator)

    @property
    def where(self) -> str:
        return f"{self.source} `{self.line}`" if self.source else "no line of Python"

    @property
    def place(self) -> str:
        return f"{self.name} of `{self.module or '(top)'}` at {self.source or self.where}"

    @property
    def as_cause(self) -> str:
        """Tells those who pay for the contiguous tensor that it made why it is so."""
        where = f"{self.where} ({self.module_type or 'outside the modules'})"
        if self.direction == "forward":
            return f"{where}: its {self.name} writes contiguous"
        of = self.backward_of or "an unknown operator"
        if of == "mean":
            keeping = "x.permute(0, 2, 3, 1).flatten(1, 2).mean(1)"
            of = f"a mean; in your own model, {keeping} keeps it"
        return f"{where}: its backward pass creates a contiguous gradient (of {of})"

    def advice(self) -> str:
        is_mixed = self.cause or any(text.startswith("contiguous") for text in self.inputs)
        if self.module_type == "Parameter":
            return "The parameter is contiguous: its gradient takes the parameter's strides."
        if not self.inputs:
            return "Create it in channels_last: a convolution or a pooling has to convert it."
        if self.name == "copy_":
            return "It writes into a contiguous tensor: make that one with torch.empty_like."
        if self.copy == "explicit" and len(self.shape) > 5:
            return "Cut windows from x.permute(0, 2, 3, 1), where channels stay last."
        if self.copy == "explicit":
            return "Remove this copy (a .contiguous(), a .reshape), unless it is the classifier's."
        if is_mixed:
            of = f", from {self.cause}" if self.cause else ""
            return f"One of its inputs was contiguous already{of}: make that one channels_last."
        if self.name in PRODUCTS:
            return "Exchange and transpose its operands, so that its columns are channels."
        return "This kernel returns contiguous: replace it if the share matters."


@dataclass
class LayoutReport:
    """An audited step. Bytes are those that its operators, without views, read and write."""

    model: str
    model_memory_format: str
    input: str
    precision: str
    device: str
    torch: str
    calls: list[Call] = field(default_factory=list)
    step_bytes: int = 0
    times: Any = None  # the `measure.times_report.OperatorTimes` of both layouts, if measured

    def of(self, outcome: Outcome, direction: str | None = None) -> list[Call]:
        """Returns the calls with this outcome, sorted by the bytes that they moved."""
        directions = ("forward", "backward") if direction is None else (direction,)
        calls = [
            one for one in self.calls if one.outcome == outcome and one.direction in directions
        ]
        return sorted(calls, key=lambda call: -call.moved_bytes * call.count)

    @property
    def totals(self) -> dict[str, int]:
        return {outcome: _count(self.of(outcome)) for outcome in OUTCOMES}

    @property
    def moved_bytes(self) -> int:
        return _moved_bytes(self.calls)

    @property
    def moved_pct(self) -> float:
        return self._pct(self.calls)

    @property
    def paid(self) -> dict[str, list[Call]]:
        """The calls that pay, by place: that of a loss is its own, that of others their cause's."""
        paid = defaultdict[str, list[Call]](list)
        for call in self.of("lost") + self.of("restored") + self.of("inherited"):
            paid[call.place if call.outcome == "lost" else call.cause].append(call)
        return paid

    def headline(self) -> str:
        lost, paid = self.of("lost"), self.paid
        if not lost and self.model_memory_format == "contiguous" and not self.of("kept"):
            return f"{self.model} and its input are contiguous: convert the model first"
        if not lost:
            paying = self._unlost()
            calls = _count(paying)
            converts = "1 call converts" if calls == 1 else f"{calls} calls convert"
            is_much = self._pct(paying) >= 1
            but = f", but {converts} {self._cost(paying)}" if is_much else ""
            return f"{self.model}: no operator loses channels_last{but}"
        paying = [call for place in {call.place for call in lost} for call in paid[place]]
        modules = len({call.module for call in lost})
        number = "1 module; it costs" if modules == 1 else f"{modules} modules; they cost"
        return f"{self.model} loses channels_last in {number} {self._cost(paying)}"

    def losses(self) -> list[dict[str, Any]]:
        """Returns a row for each line of code that loses the format, the most expensive first."""
        rows, paid = [], self.paid
        of_line = attrgetter("operator", "direction", "source", "copy")
        for calls in grouped(self.of("lost"), of_line):
            first, places = calls[0], {call.place for call in calls}
            row = {
                "calls": _count(calls),
                "operator": f"{first.name} ({first.direction})",
                "line": first.where,
                "follows from": first.cause.rpartition(" at ")[2],
                "first module": f"{first.module or '(top)'} {list(first.shape)}",
                "% of bytes": self._pct([call for place in places for call in paid[place]]),
                "copy": first.copy,
                "advice": first.advice(),
            }
            rows.append(row)
        return sorted(rows, key=lambda row: -float(row["% of bytes"]))

    def notes(self) -> list[str]:
        """Says what is paid for contiguous tensors that no loss made, by the line making them."""
        paying = grouped(self._unlost(), attrgetter("contiguous"))
        lines = []
        for calls in sorted(paying, key=lambda calls: -_moved_bytes(calls)):
            first, number, modules = calls[0], _count(calls), len({call.cause for call in calls})
            pays = f"{number} call pays" if number == 1 else f"{number} calls pay"
            where = f" in {modules} modules" if modules > 1 else ""
            if not first.cause:
                where = f", first for {first.name} of {first.module or '(top)'} ({first.direction})"
            lines.append(f"{first.contiguous}{where}; {pays} {self._cost(calls)}")
        return lines

    def _unlost(self) -> list[Call]:
        """Returns the calls that pay for contiguous tensors that no loss made."""
        lost = {call.place for call in self.of("lost")}
        return [
            call
            for call in self.calls
            if call.outcome in ("restored", "inherited") and call.cause not in lost
        ]

    def inherited(self) -> dict[tuple[str, str, str], str]:
        """Returns the lines that create contiguous gradients, by direction, module and operator of
        the calls that pay.
        """
        creators = {call.place: call.where for call in self.of("created")}
        return {
            (call.direction, call.module, call.operator): creators[call.cause]
            for call in self.calls
            if call.cause in creators
        }

    def _pct(self, calls: list[Call]) -> float:
        return 100 * _moved_bytes(calls) / max(self.step_bytes, 1)

    def _cost(self, calls: list[Call]) -> str:
        return f"{two_digits(self._pct(calls))} % of the step's bytes"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values; "kept" and "contiguous" calls appear only in the totals."""
        shown = [outcome for outcome in OUTCOMES if outcome not in ("kept", "contiguous")]
        return {
            "schema_version": 6,
            **vars(self),
            "times": self.times and self.times.to_dict(),
            "totals": self.totals,
            "moved_bytes": self.moved_bytes,
            "moved_pct": round(self.moved_pct, 3),
            "verdict": [self.headline(), *self.notes()],
            "losses": self.losses(),
            "calls": [asdict(call) for outcome in shown for call in self.of(outcome)],
        }

    def __str__(self) -> str:
        totals = [f"{number} {outcome}" for outcome, number in self.totals.items() if number]
        moved = ""
        if self.moved_bytes:
            moved = f"; conversions move {self.moved_pct:.1f} % of the step's bytes"
        where = f"{self.precision} on {self.device}, torch {self.torch}"
        losses = self.losses()
        return "\n".join(
            [
                *(self.times.conclusions() if self.times else ()),
                self.headline(),
                *(["", markdown_table(losses), ""] if losses else []),
                *(f"- {line}" for line in self.notes()),
                f"{self.model} ({self.model_memory_format}), input {self.input}, {where}",
                f"operator calls: {', '.join(totals)}{moved}",
                *(["", self.times.tables_text()] if self.times else []),
            ]
        )


def grouped(items: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    """Returns groups of items with an equal key, in the order of their first items."""
    groups = defaultdict[object, list[T]](list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


def _count(calls: list[Call]) -> int:
    return sum(call.count for call in calls)


def _moved_bytes(calls: list[Call]) -> int:
    return sum(call.moved_bytes * call.count for call in calls)


def short_name(operator: str) -> str:
    return operator.removeprefix("aten.").removesuffix(".default")
