"""Rows of records as a table of text, or as a CSV file."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cl_train.system.files import write_text


def write_csv(path: Path, rows: Sequence[dict[str, Any]], header: Sequence[str] = ()) -> None:
    """Writes `rows`; the columns are `header`, then whatever else a row has."""
    names = dict.fromkeys([*header, *(name for row in rows for name in row)])
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(names))
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def counted(count: int, noun: str) -> str:
    """1 class, 2 classes, 1,200 images."""
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def two_digits(value: float) -> str:
    """Rounds to two digits: 110 and 0.53, where `.2g` has 1.1e+02."""
    return f"{float(f'{value:.2g}'):g}"


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Rows with equal keys; empty for no rows."""
    if not rows:
        return ""

    def cell(value: object) -> str:
        text = "" if value is None else str(value)
        if isinstance(value, float):
            text = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"  # not 1.23e+03
        if isinstance(value, tuple):
            text = f"[{', '.join(map(cell, value))}]"
        return text.replace("|", "\\|").replace("\n", " ")

    lines = [
        list(rows[0]),
        ["---"] * len(rows[0]),
        *([cell(value) for value in row.values()] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"| {' | '.join(text.ljust(width) for text, width in zip(line, widths, strict=True))} |"
        for line in lines
    )
