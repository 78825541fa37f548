"""Runs a command of the package in this checkout."""

import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def run(command: str) -> NoReturn:
    from cl_train.cli import main

    sys.exit(main([command, *sys.argv[1:]]))
