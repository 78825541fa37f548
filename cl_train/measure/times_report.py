"""The result of timing operators: calls, rows that sum them up, and what they say."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cl_train.memory_format.audit_report import grouped, short_name
from cl_train.system.tables import markdown_table, two_digits

LAYOUTS = ("contiguous", "channels_last")
PYTHON = "python"
COPY_KIND = "layout copies"
_SHOWN = 12  # rows of a table

Times = np.ndarray[Any, Any]  # milliseconds, [rounds, layouts]


@dataclass(eq=False)
class TimedCall:
    """One operator call; the time of a layout that lacks it is 0."""

    operator: str  # such as aten.convolution.default, or `python`
    direction: str  # forward, backward or update
    module: str
    kind: str
    shapes: str = ""
    source: str = ""
    cause: str = ""  # the line whose contiguous gradient it pays for
    # The first tensors that it reads, by layout: dtype, shape and strides
    inputs: dict[str, list[str]] = field(default_factory=dict)
    gets_contiguous: bool = False  # it reads a contiguous image in the channels_last run
    ms: Times = field(default_factory=lambda: np.zeros((0, 2)))

    @property
    def place(self) -> str:
        return self.module or "(top)"

    def __str__(self) -> str:
        details = "; ".join(filter(None, (self.shapes, self.source)))
        name = short_name(self.operator)
        direction = "" if self.direction in name else f" {self.direction}"
        return f"{name}{direction} of `{self.place}`" + f" ({details})" * bool(details)

    def remedy(self) -> str:
        if self.kind == COPY_KIND:
            return "remove this copy, or keep four dimensions"
        if self.operator == PYTHON:
            return "this is Python code, not an operator"
        if self.cause:
            return f"it pays for the contiguous gradient that {self.cause} creates"
        if self.gets_contiguous:
            return "it gets a contiguous image: see where channels_last is lost"
        return "its kernel is slower: try another batch_size=, precision= or torch"


class Row:
    """Some calls; a positive difference is channels_last's cost."""

    def __init__(self, name: str, calls: list[TimedCall]) -> None:
        self.name, self.calls = name, calls
        ms: Times = np.sum([call.ms for call in calls], axis=0)
        self.contiguous_ms, self.channels_last_ms = np.median(ms, axis=0).tolist()
        ordered = np.sort(ms[:, 1] - ms[:, 0])
        self.difference_ms = float(np.median(ordered))
        # The 95 % interval of the median, by ranks; with fewer than six rounds, their whole range.
        count = len(ordered)
        binomial = np.cumsum([math.comb(count, rank) for rank in range(count)])
        outside = max(sum(binomial <= 0.025 * 2**count), 1)
        low, high = ordered[[outside - 1, -outside]].tolist()
        self.interval_ms: tuple[float, float] = low, high
        # channels_last has: 1, a loss; -1, a gain; 0, neither beyond noise.
        self.sign = int(low > 0) - int(high < 0)

    def to_dict(self) -> dict[str, Any]:
        names = ("contiguous_ms", "channels_last_ms", "difference_ms", "interval_ms")
        values = {name: getattr(self, name) for name in names}
        return {"name": self.name, "calls": len(self.calls), **values}

    def __str__(self) -> str:
        """The milliseconds of a call, or the total of several with the module that differs most."""
        text = f"{two_digits(abs(self.difference_ms))} ms in {self.name}"
        if len(self.calls) == 1:
            return text
        most = max(self.calls, key=lambda call: abs(Row("", [call]).difference_ms))
        return f"a total of {text} (most in `{most.place}`)"


@dataclass
class OperatorTimes:
    """The calls of a step, and the step without the recorder, in the same rounds."""

    calls: list[TimedCall]
    step_ms: Times

    @property
    def speed_ratio(self) -> float:
        return float(np.median(self.step_ms[:, 0] / self.step_ms[:, 1]))

    @property
    def explained_pct(self) -> float:
        """The share of the step that the calls add up to, for the layout explained worse."""
        calls_ms = np.sum([call.ms for call in self.calls], axis=0)
        shares_pct = np.median(100 * calls_ms / self.step_ms, axis=0).tolist()
        return max(shares_pct, key=lambda pct: abs(pct - 100))

    @property
    def tables(self) -> dict[str, list[Row]]:
        return {
            "kinds": self.rows(lambda call: f"{call.kind} {call.direction}"),
            "modules": self.rows(lambda call: call.place),
            "operators": self.rows(lambda call: call),
        }

    def charge(self, creators: Mapping[tuple[str, str, str], str]) -> None:
        """Charges calls, by direction, module and operator, to the line that makes them pay."""
        for call in self.calls:
            if cause := creators.get((call.direction, call.module, call.operator)):
                # Without the text of the line, which would take half of a table or chart.
                place = cause.partition(" `")[0]
                call.cause, call.kind = cause, f"contiguous gradient of {place}"

    def rows(self, key: Callable[[TimedCall], object]) -> list[Row]:
        """Returns rows of calls by `key`: differences beyond noise first, the largest on top."""
        rows = [Row(str(key(calls[0])), calls) for calls in grouped(self.calls, key)]
        return sorted(rows, key=lambda row: (row.sign == 0, -abs(row.difference_ms)))

    def main_differences(self) -> list[Row]:
        """Returns calls that are a third of their kind's difference, else it, by size."""
        main: list[Row] = []
        for kind in self.rows(lambda call: call.kind):
            calls = [Row(str(call), [call]) for call in kind.calls]
            main += [
                row
                for row in calls
                if row.sign and 3 * abs(row.difference_ms) > abs(kind.difference_ms)
            ] or [kind]
        return sorted(main, key=lambda row: -abs(row.difference_ms))

    def conclusions(self) -> list[str]:
        """Says what is saved and lost, the step's time, how much the rows explain, and advice."""
        main = self.main_differences()
        gained, lost = (
            "; ".join([str(row) for row in main if row.sign == sign][:3]) or "nothing"
            for sign in (-1, 1)
        )
        contiguous_ms, channels_last_ms = np.median(self.step_ms, axis=0)
        steps = f"{contiguous_ms:.4g} ms contiguous and {channels_last_ms:.4g} ms in channels_last"
        explained = f"the rows explain {self.explained_pct:.0f} % of the step"
        explained += f" ({len(self.step_ms)} rounds)"
        if self.explained_pct < 90:
            explained += ", less than 90 %: do not trust them"
        elif self.explained_pct > 110:
            explained += ": the recorder leaves cold caches; trust differences, not sums"
        return [
            f"channels_last saves {gained}. It loses {lost}",
            f"the step takes {steps}: {self.speed_ratio:.2f}x",
            explained,
            *(f"- {line}" for line in self.advice()),
        ]

    def advice(self) -> list[str]:
        """Says what to do about the calls that slow a layout by 1 % of the step, one line each.

        In the contiguous run, only Python code and copies count as faults.
        """
        least_ms = 0.01 * float(np.median(self.step_ms))
        rows = [row for row in self.rows(lambda call: call) if abs(row.difference_ms) > least_ms]
        losses = [row for row in rows if row.sign > 0]
        gains = [row for row in rows if row.sign < 0]
        faults = [row for row in gains if row.calls[0].kind in (COPY_KIND, "Python")]
        return [
            f"{row.name}{slows}: {row.calls[0].remedy()}"
            for rows, slows in ((losses, ""), (faults, " slows the contiguous run"))
            for row in rows[:3]
        ]

    def to_dict(self) -> dict[str, Any]:
        tables = self.tables
        with_inputs = [
            row.to_dict() | {"inputs": row.calls[0].inputs} for row in tables["operators"]
        ]
        return {
            "rounds": len(self.step_ms),
            "step_ms": dict(zip(LAYOUTS, np.median(self.step_ms, axis=0).tolist(), strict=True)),
            "speed_ratio": self.speed_ratio,
            "explained_pct": self.explained_pct,
            "advice": self.advice(),
            **{name: [row.to_dict() for row in rows] for name, rows in tables.items()},
            "operators": with_inputs,
        }

    def tables_text(self) -> str:
        return "\n\n".join(
            f"{name}:\n\n{markdown_table([row.to_dict() for row in rows[:_SHOWN]])}"
            for name, rows in self.tables.items()
        )
