"""`pytest tests/faults --full` injects the faults with their full counts, and writes the table into results/.

The modules of the fault suite import each other by name, and the archives of tests/.
"""

import platform
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/faults"), str(ROOT / "tests")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="inject every fault with its full count; -k NAME: some rows")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the rows that ran with full counts; rows of an earlier table that did not run now are kept."""
    full_rows = getattr(sys.modules.get("test_faults"), "full_rows", {})
    if not full_rows:
        return
    import json

    import torch
    from matrix import MATRIX

    from cl_train.memory_format.audit_report import markdown_table
    from cl_train.system.files import write_json, write_text

    path = ROOT / "results/faults-full.json"
    rows = {row["row"]: row for row in json.loads(path.read_text())["rows"]} if path.is_file() else {}
    rows |= full_rows
    kept = [rows[name] for name in MATRIX if name in rows]
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    write_json(path, {"counts": "full", "environment": versions, "rows": kept})
    columns, table = ("row", "fault", "tried", "survived", "lost", "seconds", "commit"), []
    for row in kept:
        details = ", ".join(f"{name} {count:,}" for name, count in row["counts"].items())
        table.append({name: str(row.get(name)) for name in columns} | {"details": details})
    text = (
        "# Injected faults, full counts\n\n"
        f"`bash scripts/test.sh --faults` with torch {versions['torch']}, Python {versions['python']}, on a CPU. A try "
        f"is lost if the outcome is not exactly the promised one.\n\n{markdown_table(table)}\n"
    )
    write_text(path.with_suffix(".md"), text)
