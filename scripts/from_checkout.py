"""Runs a command of the package in this checkout: `python scripts/audit.py ...` is `cl-train audit
...`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cl_train.cli import program as run  # noqa: F401
