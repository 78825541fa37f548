"""`cl-train zoo` from a checkout that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cl_train.cli import main

if __name__ == "__main__":
    sys.exit(main(["zoo", *sys.argv[1:]]))
