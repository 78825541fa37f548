"""The table of a zoo: rows kept in a JSON file as they come, and written as Markdown, CSV and a chart."""

from __future__ import annotations

import csv
import io
import json
import os
from html import escape
from pathlib import Path
from typing import Any

from cl_train.config.schema import ConfigError
from cl_train.memory_format.audit_report import markdown_table

SCHEMA_VERSION = 1
_BAR, _ROW, _LABEL = 420, 18, 190  # pixels


def start(path: Path, look: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    """The table at `path`, to go on with, or a new one.

    Raises:
        ConfigError: the file there was made under other settings, or is no such table.
    """
    fresh = {"schema_version": SCHEMA_VERSION, "look": look, "environment": environment, "rows": []}
    if not path.exists():
        return fresh
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        same = table["schema_version"] == SCHEMA_VERSION and table["look"] == look
        same = same and table["environment"]["torch"] == environment["torch"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not the table of a zoo ({error}); remove it, or give another --out") from error
    if not same:
        raise ConfigError(
            f"{path}: made under other settings ({table['look']}, torch {table['environment']['torch']}); its rows "
            "would not compare with new ones: remove it, or give another --out"
        )
    return dict(table)


def add(path: Path, table: dict[str, Any], row: dict[str, Any]) -> None:
    """Put a row into the table, in the place of one of the same model, and write all files."""
    others = [known for known in table["rows"] if known["model"] != row["model"]]
    table["rows"] = sorted([*others, row], key=lambda known: known["model"])
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {".json": json.dumps(table, indent=1) + "\n", ".md": markdown(table), ".csv": as_csv(table)}
    for suffix, text in {**texts, ".svg": chart(table)}.items():
        temporary = path.with_suffix(suffix + ".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path.with_suffix(suffix))  # a kill leaves the table before this row


def is_done(table: dict[str, Any], model: str) -> bool:
    return any(row["model"] == model and "error" not in row for row in table["rows"])


def markdown(table: dict[str, Any]) -> str:
    look, environment = table["look"], table["environment"]
    speed = "" if look["speed"] else ", without speed"
    return (
        f"# channels_last over a zoo: torch {environment['torch']}, {environment['device_name']}, "
        f"{look['precision']}{speed}\n\n"
        f"Measured by `python scripts/zoo.py{'' if look['speed'] else ' --no-speed'} --precision {look['precision']}`. "
        "parity: forward, loss, gradients and BatchNorm statistics of both "
        "layouts against float64. lost: operators that got channels_last and returned contiguous, with the number of "
        "calls. moved: bytes moved to change the layout, of all bytes of a training step.\n\n"
        f"{markdown_table(_flat_rows(table))}\n"
    )


def as_csv(table: dict[str, Any]) -> str:
    rows = _flat_rows(table)
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat_rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    """One dictionary per row, with the same columns in each, also where a model failed."""
    return [_flat(row, with_speed=table["look"]["speed"]) for row in table["rows"]]


def _flat(row: dict[str, Any], *, with_speed: bool) -> dict[str, Any]:
    audit, parity = row.get("audit", {}), row.get("parity", {})
    flat: dict[str, Any] = {
        "model": row["model"],
        "px": row.get("image_size"),
        "convolutions": row.get("convolutions"),
        "converted": row.get("converted"),
        "parity": {True: "passed", False: "FAILED", None: "not run"}[parity.get("passed")],
        "kept": audit.get("kept"),
        "lost forward": _words(audit.get("lost_forward")),
        "lost backward": _words(audit.get("lost_backward")),
        "restored": audit.get("restored"),
        "moved %": audit.get("moved_pct"),
    }
    for mode in ("train", "infer"):
        speed = row.get(mode, {})
        flat |= {
            f"{mode} contiguous img/s": speed.get("contiguous_images_per_s"),
            f"{mode} channels_last img/s": speed.get("channels_last_images_per_s"),
            f"{mode} ratio": speed.get("ratio"),
            f"{mode} ci95": "-".join(f"{value:.2f}" for value in speed.get("ci95", [])),
            f"{mode} GiB": _memory(speed),
        }
    flat["verdict"] = row.get("verdict") or f"error: {row.get('error')}"
    return {key: value for key, value in flat.items() if with_speed or not key.startswith(("train ", "infer "))}


def _words(counts: dict[str, int] | None) -> str:
    return ", ".join(f"{operator} {count}" for operator, count in (counts or {}).items())


def _memory(speed: dict[str, Any]) -> str:
    values = [speed.get(f"{layout}_peak_memory_gib") for layout in ("contiguous", "channels_last")]
    return " / ".join(f"{value:.2f}" for value in values if value is not None)


def chart(table: dict[str, Any]) -> str:
    """Bars as SVG: the training speed of channels_last over contiguous; without speed, the share of bytes moved."""
    has_speed = any("train" in row for row in table["rows"])
    values = {
        row["model"]: row["train"]["ratio"] if has_speed else row["audit"]["moved_pct"]
        for row in table["rows"]
        if ("train" if has_speed else "audit") in row
    }
    what = "channels_last / contiguous, training images per second" if has_speed else "% of a step's bytes moved"
    top = max([*values.values(), 1.0 if has_speed else 0.1])
    height = _ROW * (len(values) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LABEL + _BAR + 60}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="4" y="14">{escape(what)}</text>',
    ]
    for index, (name, value) in enumerate(values.items()):
        y = _ROW * (index + 1) + 4
        width = round(_BAR * value / top)
        good = value >= 1 if has_speed else value < 1
        colour = "#4878a8" if good else "#b85c4a"
        lines.append(f'<text x="{_LABEL - 6}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        lines.append(f'<rect x="{_LABEL}" y="{y}" width="{width}" height="{_ROW - 4}" fill="{colour}"/>')
        lines.append(f'<text x="{_LABEL + width + 4}" y="{y + 12}">{value:.2f}</text>')
    if has_speed:
        x = _LABEL + round(_BAR / top)
        lines.append(f'<line x1="{x}" y1="{_ROW}" x2="{x}" y2="{height}" stroke="black" stroke-dasharray="3"/>')
    return "\n".join([*lines, "</svg>", ""])
