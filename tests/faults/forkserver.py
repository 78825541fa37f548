"""Runs of train.py without three seconds of imports each: a server that has imported everything forks them.

A run is a process of its own. The server runs no tensor operation and starts no thread before a fork, so a child
behaves like a fresh interpreter.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


class Run:
    """One run of train.py, in a session of its own."""

    def __init__(self, server: "ForkServer", pid: int, log: Path) -> None:
        self._server, self.pid, self.log = server, pid, log
        self._code: int | None = None

    def send(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def kill_group(self, signum: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signum)

    def wait(self, timeout: float = 300.0) -> int | None:
        """The exit code, -n after signal n; None if it still runs after `timeout` seconds."""
        if self._code is None:
            status = self._server.ask({"wait": self.pid, "timeout": timeout})["status"]
            if status is not None:
                self._code = os.waitstatus_to_exitcode(status)
                self._server.running.discard(self.pid)
        return self._code

    def output(self) -> str:
        return self.log.read_text(errors="replace")


class ForkServer:
    """Context manager around the server process, which starts with the first run."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.running: set[int] = set()  # that nobody has waited for: the id of another may belong to a new process

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait(300)
            self._process.stdout.close()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer

    def _start(self) -> "subprocess.Popen[str]":
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{HERE.parent}:{REPOSITORY}"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # everything is imported: from here on, times are those of runs
        return self._process

    def start(self, words: list[str], log: Path, environment: dict[str, str] | None = None, hook: str = "") -> Run:
        """Run train.py; `hook` is a `module:function` called in the child before it, to plant a fault."""
        return self.call("forkserver:run_script", [str(REPOSITORY / "train.py"), words, hook], log, environment)

    def call(self, function: str, arguments: list[Any], log: Path, environment: dict[str, str] | None = None) -> Run:
        """Run `module:function(*arguments)` in a process of its own."""
        question = {"call": function, "arguments": arguments, "log": str(log), "environment": environment or {}}
        pid = self.ask(question)["pid"]
        self.running.add(pid)
        return Run(self, pid, log)


def serve() -> None:
    import tensorboard.plugins.hparams.api_pb2  # noqa: F401
    import tiny  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    from PIL import Image

    import cl_train.commands.train
    import cl_train.comparison.paired
    import cl_train.training.loop  # noqa: F401
    from cl_train.config.command_line import check_command_line

    Image.init()
    check_command_line([])  # Hydra loads its plugins, and its parsers build their tables
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer = wait_for(question) if "wait" in question else {"pid": fork(question)}
        print(json.dumps(answer), flush=True)


def wait_for(question: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + question["timeout"]
    while True:
        pid, status = os.waitpid(question["wait"], os.WNOHANG)
        if pid:
            return {"status": status}
        if time.monotonic() > deadline:
            return {"status": None}
        time.sleep(0.005)


def fork(question: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        # A shell starts background jobs, such as these tests, with SIGINT ignored; a terminal does not.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, log), (2, log)):
            os.dup2(source, target)
        os.environ.update(question["environment"])
        named(question["call"])(*question["arguments"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)
    return 0


def leave(code: int) -> None:
    """End as the interpreter would: wait for threads that are no daemons (a checkpoint being written), and flush."""
    threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def named(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def run_command(words: list[str]) -> None:
    """As `cl-train word ...`."""
    from cl_train.cli import main

    sys.exit(main(words))


def run_script(path: str, words: list[str], hook: str = "") -> None:
    """As `python path word ...`, after a function without arguments."""
    if hook:
        named(hook)()
    sys.argv = [path, *words]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    serve()
