"""The result of planting one kind of fault many times."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """One row of the fault matrix. As a context manager it measures the time. It passes if nothing was `lost`."""

    fault: str
    seed: int
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def __enter__(self) -> "Outcome":
        self._started = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.monotonic() - self._started

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """One more try, which is lost by the first assertion in the block that fails."""
        self.tried += 1
        try:
            yield
        except AssertionError as error:
            self.lost.append(str(error))

    def check(self, *problems: str) -> None:
        """One more try; it survived if no problem is given."""
        self.tried += 1
        if any(problems):
            self.lost.append("; ".join(problem for problem in problems if problem))

    def slowest(self, what: str, seconds: float) -> None:
        """Keep the largest of all times given for `what`."""
        key = f"slowest {what}, ms"
        self.counts[key] = max(self.counts[key], int(1000 * seconds))

    @property
    def survived(self) -> int:
        return self.tried - len(self.lost)
