"""Runs of train.py without three seconds of imports each: multiprocessing's fork server has imported everything.

A run is a process of its own. The server runs no tensor operation and starts no thread before a fork, so a child
behaves like a fresh interpreter.
"""

import contextlib
import importlib
import multiprocessing
import multiprocessing.process
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CONTEXT = multiprocessing.get_context("forkserver")


class Run:
    """One run of `module:function(*arguments)`, in a session of its own."""

    def __init__(self, function: str, arguments: list[Any], log: Path, environment: dict[str, str]) -> None:
        CONTEXT.set_forkserver_preload(["tests.faults.preloaded"])
        self.log, self._process = log, CONTEXT.Process(target=_begin, args=(function, arguments, log, environment))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def send(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 300.0) -> int | None:
        """The exit code, -n after signal n; None if it still runs after `timeout` seconds."""
        self._process.join(timeout)
        return self._process.exitcode

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class ForkServer:
    """The runs of a session; as a context manager it kills those that are left."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_: object) -> None:
        for run in self.runs:
            if run.wait(0) is None:
                run.kill_group()

    def start(self, words: list[str], log: Path, environment: dict[str, str] | None = None, hook: str = "") -> Run:
        """Run train.py; `hook` is a `module:function` called in the child before it, to plant a fault."""
        arguments = [str(REPOSITORY / "train.py"), words, hook]
        return self.call("tests.faults.forkserver:run_script", arguments, log, environment)

    def call(self, function: str, arguments: list[Any], log: Path, environment: dict[str, str] | None = None) -> Run:
        """Run `module:function(*arguments)` in a process of its own."""
        self.runs.append(Run(function, arguments, log, environment or {}))
        return self.runs[-1]


def _begin(function: str, arguments: list[Any], log: Path, environment: dict[str, str]) -> None:
    os.setsid()
    # A shell starts background jobs, such as these tests, with SIGINT ignored; a terminal does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(source, target)
    os.environ.update(environment)
    _named(function)(*arguments)


def _named(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def run_command(words: list[str]) -> None:
    """As `cl-train word ...`."""
    from cl_train.cli import main

    sys.exit(main(words))


def run_script(path: str, words: list[str], hook: str = "") -> None:
    """As `python path word ...`, after a function without arguments."""
    if hook:
        _named(hook)()
    sys.argv = [path, *words]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
