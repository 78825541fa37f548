"""The load of other processes on this process's cores: on a busy machine a measured speed is unreliable.

Linux only; imports no torch.
"""

import os
import time
from pathlib import Path

BUSY_PCT = 10.0  # of the cores, used by others: reported with the result
TOO_BUSY_PCT = 25.0  # a speed measured under such load cannot be compared


class MachineLoad:
    """Measures, from construction on, the load on this process's cores, except its own and its descendants' work."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._started_at = time.monotonic()
        self._busy_s = self._all_busy_s()
        self._own_s = _own_cpu_s()

    def others_pct(self) -> float | None:
        """Percent of the cores' time that other processes and other guests of the hypervisor used; None if unknown."""
        before, now = self._busy_s, self._all_busy_s()
        if before is None or now is None:
            return None
        elapsed_s = max(time.monotonic() - self._started_at, 1e-9) * len(self._cores)
        return max(0.0, 100 * (now - before - (_own_cpu_s() - self._own_s)) / elapsed_s)

    def _all_busy_s(self) -> float | None:
        """Seconds since boot in which the cores were not idle."""
        try:
            with open("/proc/stat", encoding="ascii") as file:
                rows = [line.split() for line in file if line.startswith("cpu")]
        except OSError:
            return None
        names = {f"cpu{core}" for core in self._cores}
        # columns: user nice system idle iowait irq softirq steal
        ticks = sum(sum(map(int, row[1:9])) - int(row[4]) - int(row[5]) for row in rows if row[0] in names)
        return ticks / os.sysconf("SC_CLK_TCK") if names else None


def _own_cpu_s() -> float:
    """CPU seconds of this process, its descendants and the children it has waited for; under torchrun of all ranks."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(entry.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))  # utime, stime, and both of children that were waited for
    pending = [os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()]
    total = 0
    while pending:
        pid = pending.pop()
        total += ticks.get(pid, 0)
        pending += children.get(pid, [])
    return total / os.sysconf("SC_CLK_TCK")
