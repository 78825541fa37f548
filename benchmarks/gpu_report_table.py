"""The Markdown of a GPU report."""

from __future__ import annotations

from typing import Any


def as_markdown(report: dict[str, Any]) -> str:
    """The machine, one table of speeds, and what was and was not run."""
    lines = ["# GPU report", ""]
    machine = next((row for row in report["rows"] if row["group"] == "environment"), None)
    if machine is not None:
        versions = ", ".join(f"{name} {value}" for name, value in machine["environment"].items() if value)
        lines += [
            f"{machine['device']}, {machine['cores']} cores. {versions}.",
            f"Measured: copy {machine['copy_bytes_per_s'] / 1e12:.3f} TB/s (read + written), "
            f"matmul {machine['matmul_flops_per_s'] / 1e12:.1f} TFLOP/s; shares of the roofline refer to these.",
            "",
        ]
    lines += [
        "| model | precision | batch | way | images/s | ms/step | ratio [95 %] | to | % of roofline | GiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(row) for row in report["rows"] if "images_per_s" in row]
    lines += ["", "| group | outcome |", "|---|---|"]
    lines += [f"| {name} | {outcome} |" for name, outcome in report["groups"].items()]
    lines += [f"| {row['group']} | {row['outcome']} |" for row in report["rows"] if "outcome" in row]
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> str:
    peak_gib = row.get("peak_memory_gib")
    ratio = "" if row.get("ratio") is None else f"{row['ratio']:.3f}"
    if row.get("ci95"):
        ratio += f" [{row['ci95'][0]:.3f}, {row['ci95'][1]:.3f}]"
    shares = [row.get(f"pct_of_{pattern}_roofline") for pattern in ("eager", "fused")]
    cells = [
        *(row["model"], row["precision"], row["batch_size"], row["way"]),
        *(f"{row['images_per_s']:.1f}", f"{row['step_ms']:.2f}", ratio, row.get("versus", "")),
        ", ".join("" if share is None else f"{share:.1f}" for share in shares),
        "" if peak_gib is None else f"{peak_gib:.2f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"
