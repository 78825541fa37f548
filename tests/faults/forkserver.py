"""Runs of train.py without three seconds of imports each: multiprocessing's fork server has
imported everything.

The server runs no tensor operation and starts no thread before a fork, so a child behaves like a
fresh interpreter.
"""

import contextlib
import multiprocessing
import multiprocessing.process
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.processes import running_processes

REPOSITORY = Path(__file__).resolve().parents[2]
Function = Callable[[], object]
multiprocessing.set_forkserver_preload(["tests.faults.preloaded"])


class Forked(ForkServerProcess):
    """A process, in a session of its own, that calls a picklable function."""

    def __init__(self, function: Function, log: Path, environment: Mapping[str, str] = {}) -> None:
        super().__init__()
        self.function, self.log, self.environment = function, log, environment
        self.store: object = None  # of ranks, which must live as long as they
        self.start()

    def run(self) -> None:
        """In the child."""
        os.setsid()
        # A shell starts background jobs, such as these tests, with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        multiprocessing.process._parent_process = None
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
            os.dup2(source, target)
        os.environ.update(self.environment)
        self.function()

    def send(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 300.0) -> int | None:
        """The exit code, -n after signal n; None if it still runs after `timeout` seconds."""
        self.join(timeout)
        return self.exitcode

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def session(self) -> list[int]:
        """Its processes that run."""
        return [pid for pid, fields in running_processes().items() if fields[3] == str(self.pid)]


def kill_left() -> None:
    """At the end of the tests; the interpreter would wait for them."""
    for process in multiprocessing.active_children():
        if isinstance(process, Forked):
            process.kill_group()


def train_script(words: list[str], *hooks: Function) -> None:
    """As `python train.py word ...`, after hooks that plant faults."""
    for hook in hooks:
        hook()
    sys.argv = [str(REPOSITORY / "train.py"), *words]
    sys.path.insert(0, str(REPOSITORY))
    runpy.run_path(sys.argv[0], run_name="__main__")
