"""How much of this process's cores others used meanwhile: on a busy machine a measurement is none. Linux; no torch."""

from __future__ import annotations

import os
import resource
import time

BUSY_PCT = 10.0  # of the cores, used by others: worth a note
TOO_BUSY_PCT = 25.0  # no speed measured on these cores means anything


class MachineLoad:
    """Watch the cores that this process may use, from construction on. Its own and its children's time is not counted.

    Children count when they have ended and were waited for.
    """

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._started_at = time.monotonic()
        self._busy_s = self._all_busy_s()
        self._own_s = _own_cpu_s()

    def others_pct(self) -> float | None:
        """Percent of the cores' time that other processes, and the hypervisor's other guests, took; None if unknown."""
        before, now = self._busy_s, self._all_busy_s()
        if before is None or now is None:
            return None
        elapsed_s = max(time.monotonic() - self._started_at, 1e-9) * len(self._cores)
        return max(0.0, 100 * (now - before - (_own_cpu_s() - self._own_s)) / elapsed_s)

    def _all_busy_s(self) -> float | None:
        """Seconds that the cores were not idle, since boot."""
        try:
            with open("/proc/stat", encoding="ascii") as file:
                rows = [line.split() for line in file if line.startswith("cpu")]
        except OSError:
            return None
        wanted = {f"cpu{core}" for core in self._cores}
        # user nice system idle iowait irq softirq steal: all but idle and iowait
        ticks = sum(sum(map(int, row[1:9])) - int(row[4]) - int(row[5]) for row in rows if row[0] in wanted)
        return ticks / os.sysconf("SC_CLK_TCK") if wanted else None


def _own_cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
