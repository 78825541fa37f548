"""Locks name their holder, end with their process, and are not inherited by forked workers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cl_train.system import locks
from cl_train.system.locks import LockHeld, lock_file

HOLD = """
import os, sys, time
from cl_train.system.locks import lock_file
with lock_file(sys.argv[1]):
    if os.fork() == 0:  # a worker that outlives its parent
        time.sleep(10_000)
    print("held", flush=True)
    time.sleep(10_000)
"""


def hold(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    return process


def test_the_holder_is_named_and_a_killed_one_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = hold(path)
    try:
        with pytest.raises(LockHeld, match=f"process {first.pid} on "), lock_file(path):
            pass
        first.kill()
        first.wait()
        with lock_file(path):
            os.killpg(first.pid, 0)  # the forked worker still lives
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.stdout.close()  # type: ignore[union-attr]
    with lock_file(path):
        pass
    assert path.read_bytes() == b""


def test_who_waits_says_for_whom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    first = hold(path)
    pauses = []

    def end_the_holder(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            first.kill()
            first.wait()

    clock = SimpleNamespace(monotonic=time.monotonic, strftime=time.strftime, sleep=end_the_holder)
    monkeypatch.setattr(locks, "time", clock)
    try:
        with lock_file(path, waiting_for="the sample data"):
            assert len(pauses) == 2
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.stdout.close()  # type: ignore[union-attr]
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert all(part in message for part in ("the sample data", str(first.pid), str(path)))


def test_a_lock_that_cannot_be_made_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError), lock_file(tmp_path / "none" / "lock"):
        pass
