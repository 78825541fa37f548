"""Fails if a room holds more text than its budget, `[tool.rooms]` in pyproject.toml, in kB (1,000
bytes).

Bytes are counted, not lines: folding a line does not help a reader. Growth is a decision.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
budgets_kb = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["rooms"]
over = []
for pattern, budget_kb in budgets_kb.items():
    size_kb = sum(path.stat().st_size for path in ROOT.glob(pattern)) / 1000
    print(f"{pattern:30} {size_kb:6.1f} of {budget_kb:6.1f} kB")
    if size_kb > budget_kb:
        over.append(pattern)
sys.exit(f"over budget: {', '.join(over)}" if over else 0)
