"""Waiting for other processes, with limits that only a failure reaches."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from cl_train.system import processes

LIMIT_S = 300.0  # of every wait and every program: the machine may be slow and busy


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s"
        time.sleep(0.02)


class Process:
    """Another process, told from a later one with the same id by its start time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = fields_of(pid)[19:20]

    def is_running(self) -> bool:
        """A zombie, which waits for its parent, has ended."""
        fields = fields_of(self.pid)
        return bool(fields) and fields[0] != "Z" and fields[19:20] == self._started

    def has(self, mask: str, signum: int) -> bool:
        """Whether the signal is pending ("ShdPnd": another one of its kind would be lost) or
        ignored ("SigIgn").
        """
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return False
        return bool(int(status.partition(f"{mask}:")[2].split()[0], 16) >> (signum - 1) & 1)


def fields_of(pid: int) -> list[str]:
    """State, parent, group, session, ... of /proc/PID/stat; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def running_processes() -> dict[int, list[str]]:
    """The fields of all that have not ended."""
    found = {int(path.name): fields_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    return {pid: fields for pid, fields in found.items() if fields[:1] not in ([], ["Z"])}


def children_of(pid: int) -> list[int]:
    """In the order of their start."""
    fields_by_pid = running_processes()
    children = [child for child, fields in fields_by_pid.items() if fields[1] == str(pid)]
    return sorted(children, key=lambda child: int(fields_by_pid[child][19]))


def send_and_wait(pid: int, signum: int) -> None:
    """Send a signal, and wait until it is delivered: signals that are pending together are one."""
    os.kill(pid, signum)
    wait_until(lambda: not Process(pid).has("ShdPnd", signum))


def is_signal_received() -> bool:
    """Whether the run in this process has seen a signal."""
    request = processes._active
    return request is not None and (request.stop is not None or request._save)
