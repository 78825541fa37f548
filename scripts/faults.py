"""Run the fault matrix in full and write its table into results/.

    python scripts/faults.py                          all rows, about 45 minutes on two cores
    python scripts/faults.py rows=R1,R2 counts=quick  some rows, with the counts of the ordinary tests

Every row plants one kind of fault many times, with real processes and signals; tests/faults/matrix.py says how often.
Exit codes: 0 every row passed, 1 something was lost, 2 wrong usage.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cl_train.config.schema import ConfigError, setting
from cl_train.config.validation import settings_from_arguments, stop_with

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass
class FaultSettings:
    """Which rows, how often, from which seed."""

    rows: list[str] = setting([], "rows of tests/faults/matrix.py, such as R1,R2; all when empty")
    counts: str = setting("full", "how often each fault is planted", choices=("full", "quick"))
    seed: int = setting(1, "of every random choice", minimum=0)
    name: str = setting("", "of the files in results/; empty = faults-<counts>")


def main(settings: FaultSettings) -> int:
    sys.path[:0] = [str(REPOSITORY / "tests/faults"), str(REPOSITORY / "tests")]
    from forkserver import ForkServer  # type: ignore[import-not-found]
    from matrix import MATRIX, passes  # type: ignore[import-not-found]
    from run_faults import Bench  # type: ignore[import-not-found]

    unknown = [name for name in settings.rows if name not in MATRIX]
    if unknown:
        raise ConfigError(f"rows={','.join(unknown)}: no such row (there are {', '.join(MATRIX)})")
    logging.disable(logging.WARNING)
    name = settings.name or f"faults-{settings.counts}"
    path = REPOSITORY / "results" / f"{name}.json"
    done = earlier_rows(path, settings)
    with tempfile.TemporaryDirectory() as folder, ForkServer() as server:
        bench = Bench(server, Path(folder) / "bench")
        for name in settings.rows or MATRIX:
            row = MATRIX[name]
            place = Path(folder) / name
            place.mkdir()
            print(f"{name} ...", flush=True)
            outcome = (row.full if settings.counts == "full" else row.quick)(bench, place, settings.seed)
            done[name] = {
                "row": name,
                "fault": outcome.fault,
                "tried": outcome.tried,
                "survived": outcome.survived,
                "lost": len(outcome.lost),
                "passed": passes(name, outcome),
                "seconds": round(outcome.seconds, 1),
                "seed": outcome.seed,
                "counts": dict(outcome.counts),
                "first_losses": outcome.lost[:5],
            }
            print(f"  {outcome.survived} of {outcome.tried} in {outcome.seconds:.0f} s {outcome.lost[:1]}", flush=True)
            write(path, settings, [done[known] for known in MATRIX if known in done])
    print(f"table: {path.with_suffix('.md')}")
    return 0 if all(row["passed"] for row in done.values()) else 1


def earlier_rows(path: Path, settings: FaultSettings) -> dict[str, dict[str, Any]]:
    """With `rows=` the other rows of the same table stay as they are."""
    if not settings.rows or not path.is_file():
        return {}
    return {row["row"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def write(path: Path, settings: FaultSettings, rows: list[dict[str, Any]]) -> None:
    """After each row, so that an interrupted run leaves what it found."""
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout
    environment = {"torch": torch.__version__, "python": platform.python_version(), "commit": commit.strip()}
    document = {"counts": settings.counts, "seed": settings.seed, "environment": environment, "rows": rows}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    lines = [
        f"# Faults planted ({settings.counts} counts, seed {settings.seed})",
        "",
        f"`python scripts/faults.py counts={settings.counts} seed={settings.seed}` with torch {environment['torch']}, "
        f"Python {environment['python']}, CPU. A try is lost when anything but the promised outcome came of it.",
        "",
        "| row | fault | tried | survived | lost | seconds | details |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        details = ", ".join(f"{name} {count:,}" for name, count in row["counts"].items())
        lines.append(
            f"| {row['row']} | {row['fault']} | {row['tried']:,} | {row['survived']:,} | {row['lost']:,} "
            f"| {row['seconds']:.0f} | {details} |"
        )
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"usage: faults.py [key=value ...]\n\n{__doc__}")
        for field in dataclasses.fields(FaultSettings):
            print(f"  {field.name}: {field.metadata['help']}")
        sys.exit(0)
    try:
        sys.exit(main(settings_from_arguments(FaultSettings, sys.argv[1:])))
    except ConfigError as error:
        stop_with(error)
