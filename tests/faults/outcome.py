"""What came of a fault that was planted many times."""

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType


@dataclass
class Outcome:
    """One row of the fault matrix. `lost` must end empty; use as a context manager to take the time."""

    row: str
    fault: str
    seed: int
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __enter__(self) -> "Outcome":
        self._started = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.monotonic() - self._started

    def check(self, *problems: str) -> None:
        """One try more; it survived where no problem is given."""
        self.tried += 1
        if any(problems):
            self.lost.append("; ".join(problem for problem in problems if problem))

    @property
    def survived(self) -> int:
        return self.tried - len(self.lost)


@dataclass(frozen=True)
class Place:
    """Where a row works: a folder of its own, and the seed that every random choice comes from."""

    folder: Path
    seed: int
