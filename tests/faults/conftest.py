"""The modules of the fault suite import each other by name, and the archives of tests/."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
