"""Signals set flags; a second one leaves; forked children do not answer for their parent. Real signals throughout."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from cl_train.system.signals import StopRequest

POLITE = """
import signal, sys, time
from cl_train.system.signals import StopRequest
with StopRequest() as request:
    print("ready", flush=True)
    while request.stop is None:
        time.sleep(0.01)
        if request.save_requested:
            print("save", flush=True)
    print("stopping", flush=True)
    time.sleep(float(sys.argv[1]))
sys.exit(128 + request.stop)
"""


def start(linger: float = 0.0, script: str = POLITE) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(linger)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def until(condition: Callable[[], bool], seconds: float = 2.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_one_signal_stops_politely(signum: int, code: int) -> None:
    process = start()
    process.send_signal(signum)
    output, errors = process.communicate(timeout=10)
    assert (process.returncode, output, errors) == (code, "stopping\n", "")


def test_sigusr1_asks_for_a_save_once_and_the_run_goes_on() -> None:
    process = start()
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None and process.stdout.readline() == "save\n"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=10)[0] == "stopping\n"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_second_signal_leaves_at_once(signum: int, code: int) -> None:
    process = start(linger=30)
    process.send_signal(signum)
    assert process.stdout is not None and process.stdout.readline() == "stopping\n"
    time.sleep(0.6)
    before = time.monotonic()
    process.send_signal(signum)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == code and time.monotonic() - before < 1
    assert "second SIG" in errors


STUCK = """
import ctypes, signal
from cl_train.system.signals import StopRequest
with StopRequest():
    print("ready", flush=True)
    # Signals now go to another thread, so that nothing interrupts the call: as in a hung collective.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    ctypes.CDLL(None).sleep(30)
"""


def test_a_second_signal_leaves_even_when_the_main_thread_is_stuck_in_c() -> None:
    process = start(script=STUCK)
    for _ in range(2):
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130


def test_two_sigterms_within_milliseconds_are_one_request() -> None:
    process = start(linger=0.2)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=10)
    assert (process.returncode, output, errors) == (143, "stopping\n", "")


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with StopRequest() as request:
        assert signal.getsignal(signal.SIGTERM) is not before[0]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert until(lambda: request.save_requested)
        assert not request.save_requested
        assert request.stop is None
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_a_forked_worker_dies_of_sigterm_and_leaves_ctrl_c_to_its_parent() -> None:
    with StopRequest() as request:
        child = os.fork()
        if child == 0:
            time.sleep(10)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGINT)
        time.sleep(0.1)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        time.sleep(0.05)
        assert request.stop is None


def test_only_one_at_a_time() -> None:
    with StopRequest(), pytest.raises(AssertionError), StopRequest():
        pass


def test_exit_without_teardown_runs_exit_functions_and_flushes() -> None:
    script = """
import atexit
from cl_train.system.signals import exit_without_teardown
class Slow:
    def __del__(self):
        print("torn down")
slow = Slow()
atexit.register(print, "at exit")
print("buffered", end=" ")
exit_without_teardown(143)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (143, "buffered at exit\n")


def test_a_closed_terminal_is_ignored_under_nohup() -> None:
    process = start(script="import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + POLITE)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=10)[0] == "stopping\n" and process.returncode == 143
