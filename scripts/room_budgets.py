"""Fails if a room has more lines than its budget, `[tool.rooms]` in pyproject.toml: growth is a decision."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
over = []
for pattern, budget in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["rooms"].items():
    lines = sum(path.read_bytes().count(b"\n") for path in ROOT.glob(pattern))
    print(f"{pattern:30} {lines:6} of {budget:6} lines")
    over += [pattern] if lines > budget else []
sys.exit(f"over budget: {', '.join(over)}" if over else 0)
