"""Fails if a room has more lines than its budget, `[tool.rooms]` in pyproject.toml: growth is a decision."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["rooms"]
    is_over = False
    for pattern, budget in budgets.items():
        files = [path for path in ROOT.glob(pattern) if ".venv" not in path.parts]
        lines = sum(path.read_bytes().count(b"\n") for path in files)
        is_over |= lines > budget
        print(f"{pattern:30} {lines:6} of {budget:6} lines{'   OVER BUDGET' if lines > budget else ''}")
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
