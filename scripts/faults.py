"""Inject the faults of tests/faults with their full counts, and write the table into results/.

    python scripts/faults.py                                              all, about an hour on two cores
    python scripts/faults.py rows=kill_training_run,bit_flip_in_checkpoint counts=quick

Every row injects one kind of fault many times, with real processes and signals; tests/faults/matrix.py has the counts.
Exit codes: 0 every row passed, 1 something was lost, 2 wrong usage.
"""

import json
import logging
import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cl_train.cli import exit_code
from cl_train.config.help import command_help
from cl_train.config.schema import ConfigError, setting
from cl_train.config.validation import settings_from_arguments, suggest
from cl_train.system.files import write_json, write_text

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass
class FaultSettings:
    """Settings of the fault suite."""

    rows: list[str] = setting([], "names of rows; all if empty")
    counts: str = setting("full", "how often each fault is injected", choices=("full", "quick"))
    seed: int = setting(1, "seed of every random choice", minimum=0)
    out: str = setting("", "JSON file to write, and .md beside it; empty = results/faults-<counts>.json")


def run(settings: FaultSettings) -> int:
    sys.path[:0] = [str(REPOSITORY / "tests/faults"), str(REPOSITORY / "tests")]
    from bench import Bench  # type: ignore[import-not-found]
    from forkserver import ForkServer  # type: ignore[import-not-found]
    from matrix import MATRIX  # type: ignore[import-not-found]

    from cl_train.system.environment import git_state

    unknown = [f"rows={name}: no such row{suggest(name, MATRIX)}" for name in settings.rows if name not in MATRIX]
    if unknown:
        raise ConfigError([*unknown, f"there are {', '.join(MATRIX)}"])
    logging.disable(logging.WARNING)
    commit = str(git_state()["commit"] or "")[:7] or None
    path = Path(settings.out or REPOSITORY / f"results/faults-{settings.counts}.json")
    rows = read_rows(path) if settings.rows else {}
    with tempfile.TemporaryDirectory() as folder, ForkServer() as server:
        bench = Bench(server, Path(folder) / "bench", settings.seed)
        for name in settings.rows or MATRIX:
            if settings.counts == "quick" and MATRIX[name].quick is None:
                continue
            print(f"{name} ...", flush=True)
            outcome = run_row(MATRIX[name], bench, settings.counts)
            rows[name] = {
                "row": name,
                "fault": outcome.fault,
                "tried": outcome.tried,
                "survived": outcome.survived,
                "lost": len(outcome.lost),
                "passed": MATRIX[name].passes(outcome),
                "seconds": round(outcome.seconds, 1),
                "seed": outcome.seed,
                "commit": commit,
                "counts": dict(outcome.counts),
                "first_losses": outcome.lost[:5],
            }
            print(f"  {outcome.survived} of {outcome.tried} in {outcome.seconds:.0f} s {outcome.lost[:1]}", flush=True)
            write_table(path, settings, [rows[known] for known in MATRIX if known in rows])
    print(f"table: {path.with_suffix('.md')}")
    return 0 if all(row["passed"] for row in rows.values()) else 1


def run_row(fault: Any, bench: Any, counts: str) -> Any:
    """The outcome; a row that breaks off has lost a try, and the other rows still run."""
    from outcome import Outcome  # type: ignore[import-not-found]

    try:
        return fault.run(bench, counts)
    except Exception as error:
        outcome = Outcome(str(fault.plant.__name__), bench.seed)
        outcome.check(f"{type(error).__name__}: {error}")
        return outcome


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of an earlier table; those named in `rows=` are replaced."""
    if not path.is_file():
        return {}
    return {row["row"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def write_table(path: Path, settings: FaultSettings, rows: list[dict[str, Any]]) -> None:
    """Write the table after each row, so that an interrupted run keeps its results."""
    import torch

    from cl_train.memory_format.audit_report import markdown_table

    versions = {"torch": torch.__version__, "python": platform.python_version()}
    write_json(path, {"counts": settings.counts, "seed": settings.seed, "environment": versions, "rows": rows})
    columns, table = ("row", "fault", "tried", "survived", "lost", "seconds", "commit"), []
    for row in rows:
        details = ", ".join(f"{name} {count:,}" for name, count in row["counts"].items())
        table.append({name: str(row.get(name)) for name in columns} | {"details": details})
    text = (
        f"# Injected faults ({settings.counts} counts, seed {settings.seed})\n\n"
        f"`python scripts/faults.py counts={settings.counts} seed={settings.seed}` with torch {versions['torch']}, "
        f"Python {versions['python']}, on a CPU. A try is lost if the outcome is not exactly the promised one.\n\n"
        f"{markdown_table(table)}\n"
    )
    write_text(path.with_suffix(".md"), text)


def main(words: list[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(command_help("python scripts/faults.py [key=value ...]", __doc__, {"settings": FaultSettings}))
        return 0
    return run(settings_from_arguments(FaultSettings, words))


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
