"""Status lines at the bottom of a terminal, redrawn in place."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence


class StatusLines:
    """Draws nothing unless standard output is a terminal."""

    def __init__(self) -> None:
        self._count = 0  # of the lines on the screen

    def draw(self, lines: Sequence[str]) -> None:
        """Replace the lines; those that do not fit on the screen are left out."""
        if not sys.stdout.isatty():
            return
        columns, rows = shutil.get_terminal_size()
        lines = [line[: columns - 1] for line in lines[: rows - 2]]
        self._erase()
        self._count = len(lines)
        print("".join(f"{line}\n" for line in lines), end="", flush=True)

    def print(self, line: str) -> None:
        """Print a line that stays. The status lines are drawn again below it by the next `draw`."""
        self._erase()
        print(line, flush=True)

    def _erase(self) -> None:
        if self._count:
            print(f"\x1b[{self._count}F\x1b[J", end="")
        self._count = 0
