"""The result of timing operators: calls, rows that sum them up, and what they say."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cl_train.memory_format.audit_report import grouped, short_name
from cl_train.memory_format.layout import classify
from cl_train.step.utilisation import describe
from cl_train.system.tables import markdown_table, two_digits
from cl_train.system.tensors import tensors_in

LAYOUTS = ("contiguous", "channels_last")
PYTHON = "python"
COPY_KIND = "layout copies"
_SHOWN = 12  # rows of a table

Times = np.ndarray[Any, Any]  # milliseconds, [rounds, layouts]


@dataclass(eq=False)
class TimedCall:
    """One operator call in both layouts; where one lacks it, its time is 0, without arguments."""

    operator: str  # such as aten.convolution.default, or `python`
    direction: str  # forward, backward or update
    module: str
    kind: str
    source: str = ""
    cause: str = ""  # the line whose contiguous gradient it pays for
    # By layout; tensors are on the meta device.
    arguments: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    ms: Times = field(default_factory=lambda: np.zeros((0, 2)))

    @property
    def place(self) -> str:
        return self.module or "(top)"

    @property
    def convolution(self) -> str:
        """What determines a convolution's kernel, its weight first; empty for other operators."""
        arguments = next(iter(self.arguments.values()), ())
        if "convolution" not in self.operator or len(arguments) < 9:
            return ""
        first = "backward" in self.operator  # there the gradient comes before the image
        image, weight, _, stride, _, _, is_transposed, _, groups = arguments[first:][:9]
        sizes = weight.shape[2:], image.shape, stride
        kernel, size, strides = ("x".join(map(str, numbers)) for numbers in sizes)
        channels = image.shape[1]
        out = weight.shape[1] * groups if is_transposed else weight.shape[0]
        grouped = "depthwise " if 1 < groups == channels else f"{groups} groups, " * (groups > 1)
        images = f"images {size}, stride {strides}, {str(image.dtype).removeprefix('torch.')}"
        return f"{grouped}{kernel}, {channels} to {out} channels; {images}"

    @property
    def gets_contiguous(self) -> bool:
        """Whether an image arrives contiguous in the channels_last run: the loss came before it."""
        tensors = tensors_in(self.arguments.get("channels_last"))
        return any(classify(tensor) == "contiguous" for tensor in tensors)

    def __str__(self) -> str:
        details = "; ".join(filter(None, (self.convolution.partition(";")[0], self.source)))
        name = short_name(self.operator)
        direction = "" if self.direction in name else f" {self.direction}"
        return f"{name}{direction} of `{self.place}`" + f" ({details})" * bool(details)

    def remedy(self) -> str:
        if self.kind == COPY_KIND:
            place = self.source or "the operator before it"
            return f"remove the copy at {place}, or keep four dimensions"
        if self.operator == PYTHON:
            place = f"at {self.source}" if self.source else "of the module"
            return f"this is the Python code {place}, not an operator"
        if self.cause:
            return f"it pays for the contiguous gradient that {self.cause} creates"
        if self.gets_contiguous:
            return "it gets a contiguous image: see where channels_last is lost"
        settings = "batch_size=, precision= or torch" if self.convolution else "operator"
        return f"try another {settings}, or send the program of repro=FILE to PyTorch"


class Row:
    """The calls of a kind, a module or a shape; a positive difference is channels_last's cost."""

    def __init__(self, name: str, calls: list[TimedCall], step_ms: float = math.inf) -> None:
        self.name, self.calls = name, calls
        ms: Times = np.sum([call.ms for call in calls], axis=0)
        self.contiguous_ms, self.channels_last_ms = np.median(ms, axis=0).tolist()
        self.share_pct = 100 * self.channels_last_ms / step_ms  # of the step in channels_last
        ordered = np.sort(ms[:, 1] - ms[:, 0])
        self.difference_ms = float(np.median(ordered))
        # 95 % interval of the median, by ranks; with fewer than six rounds their whole range.
        count = len(ordered)
        binomial = np.cumsum([math.comb(count, rank) for rank in range(count)])
        outside = max(sum(binomial <= 0.025 * 2**count), 1)
        low, high = ordered[[outside - 1, -outside]].tolist()
        self.interval_ms: tuple[float, float] = low, high
        self.is_loss, self.is_gain = low > 0, high < 0

    def to_dict(self) -> dict[str, Any]:
        names = ("contiguous_ms", "channels_last_ms", "difference_ms", "interval_ms", "share_pct")
        values = {name: getattr(self, name) for name in names}
        return {"name": self.name, "calls": len(self.calls), **values}


def _difference(row: Row) -> str:
    """The milliseconds of a call, or the total of a kind with the module that differs most."""
    text = f"{two_digits(abs(row.difference_ms))} ms in {row.name}"
    if len(row.calls) == 1:
        return text
    ms = defaultdict[str, float](float)
    for call in row.calls:
        ms[call.place] += abs(Row("", [call]).difference_ms)
    return f"a total of {text} (most in `{max(ms, key=ms.__getitem__)}`)"


@dataclass
class OperatorTimes:
    """The calls of a step, and the whole step without the recorder, in the same rounds."""

    calls: list[TimedCall]
    step_ms: Times
    utilisation: dict[str, Any] | None  # of the faster layout, see `step.utilisation`

    @property
    def speed_ratio(self) -> float:
        return float(np.median(self.step_ms[:, 0] / self.step_ms[:, 1]))

    @property
    def explained_pct(self) -> float:
        """The share of the step that the calls add up to, in the layout that they explain worse."""
        calls_ms = np.sum([call.ms for call in self.calls], axis=0)
        shares_pct = np.median(100 * calls_ms / self.step_ms, axis=0).tolist()
        return max(shares_pct, key=lambda pct: abs(pct - 100))

    @property
    def tables(self) -> dict[str, list[Row]]:
        kinds = self.rows(lambda call: f"{call.kind} {call.direction}")
        kinds.sort(key=lambda row: -max(row.contiguous_ms, row.channels_last_ms))
        return {
            "kinds": kinds,
            "modules": self.rows(lambda call: call.place),
            "operators": self.rows(lambda call: call),
            "convolutions": self.rows(
                lambda call: call.convolution and f"{call.direction}: {call.convolution}"
            ),
        }

    def charge(self, creators: Mapping[tuple[str, str, str], str]) -> None:
        """Charge calls, by direction, module and operator, to the line whose contiguous gradient
        they pay for.
        """
        for call in self.calls:
            if cause := creators.get((call.direction, call.module, call.operator)):
                call.cause, call.kind = cause, f"contiguous gradient of {cause}"

    def rows(self, key: Callable[[TimedCall], object]) -> list[Row]:
        """Calls with a key, grouped by it: differences beyond noise first, the largest on top."""
        step_ms = float(np.median(self.step_ms[:, 1]))
        groups = grouped(filter(key, self.calls), key)
        rows = [Row(str(key(calls[0])), calls, step_ms) for calls in groups]
        return sorted(
            rows, key=lambda row: (not (row.is_loss or row.is_gain), -abs(row.difference_ms))
        )

    def worst(self) -> Row:
        """The call by which channels_last loses most, by itself if one does; if it loses none, that
        which differs most.
        """
        rows = self.rows(lambda call: call.operator != PYTHON and call)
        losses = [row for row in rows if row.is_loss]
        by_itself = [row for row in losses if not row.calls[0].gets_contiguous]
        return (by_itself or losses or rows)[0]

    def main_differences(self, *, is_gain: bool) -> list[Row]:
        """The three rows by which channels_last saves, or loses, most, and its copies: a call that
        is a third of its kind's difference, else the kind.
        """
        main: list[Row] = []
        for kind in self.rows(lambda call: call.kind):
            calls = [Row(str(call), [call]) for call in kind.calls]
            large = [row for row in calls if 3 * abs(row.difference_ms) > abs(kind.difference_ms)]
            for rows in (large, [kind]):
                if counted := [row for row in rows if (row.is_gain if is_gain else row.is_loss)]:
                    main += counted
                    break
        main.sort(key=lambda row: -abs(row.difference_ms))
        copies = [row for row in main[3:] if row.calls[0].kind == COPY_KIND]
        return main[:3] + copies[:1]

    def conclusions(self) -> list[str]:
        """Where channels_last saves and loses time, the step's time, how much the rows explain,
        and advice.
        """
        gained, lost = (
            "; ".join(map(_difference, self.main_differences(is_gain=is_gain))) or "nothing"
            for is_gain in (True, False)
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
            *([describe(self.utilisation)] if self.utilisation else []),
            *(f"- {line}" for line in self.advice()),
        ]

    def advice(self) -> list[str]:
        """What to do about the calls that slow a layout by 1 % of the step, one line each.

        In the contiguous run only Python code and copies are a fault.
        """
        least_ms = 0.01 * float(np.median(self.step_ms))
        rows = [row for row in self.rows(lambda call: call) if abs(row.difference_ms) > least_ms]
        losses = [row for row in rows if row.is_loss]
        faults = [row for row in rows if row.is_gain and row.calls[0].kind in (COPY_KIND, "Python")]
        return [
            f"{row.name}{slows}: {row.calls[0].remedy()}"
            for rows, slows in ((losses, ""), (faults, " slows the contiguous run"))
            for row in rows[:3]
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "rounds": len(self.step_ms),
            "step_ms": dict(zip(LAYOUTS, np.median(self.step_ms, axis=0).tolist(), strict=True)),
            "speed_ratio": self.speed_ratio,
            "explained_pct": self.explained_pct,
            "advice": self.advice(),
            "utilisation": self.utilisation,
            **{name: [row.to_dict() for row in rows] for name, rows in self.tables.items()},
        }

    def tables_text(self) -> str:
        """The first rows of each table, as Markdown."""
        tables = {name: [row.to_dict() for row in rows] for name, rows in self.tables.items()}
        shown = (
            f"{name}:\n\n{markdown_table(rows[:_SHOWN])}" for name, rows in tables.items() if rows
        )
        return "\n\n".join(shown)

    def __str__(self) -> str:
        return "\n".join([*self.conclusions(), "", self.tables_text()])
