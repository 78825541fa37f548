"""Signals set flags; a second one leaves; forked children do not answer for their parent. Real signals throughout."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cl_train.system.signals import StopRequest
from tests.processes import LIMIT_S, Process, send_and_wait, wait_until

POLITE = """
import signal, sys, time
from cl_train.system import signals
from cl_train.system.signals import StopRequest
if len(sys.argv) > 1:
    signals._SAME_REQUEST_S = float(sys.argv[1])
with StopRequest() as request:
    print("ready", flush=True)
    while request.stop is None:
        time.sleep(0.01)
        if request.save_requested:
            print("save", flush=True)
    print("stopping", flush=True)
    sys.stdin.read()  # until the test closes it
sys.exit(128 + request.stop)
"""


def start(*arguments: str, script: str = POLITE) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_one_signal_stops_politely(signum: int, code: int) -> None:
    process = start()
    process.send_signal(signum)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, output) == (code, "stopping\n")
    assert ("Ctrl-C again exits without saving" in errors) == (signum == signal.SIGINT)


def test_sigusr1_asks_for_a_save_once_and_the_run_goes_on() -> None:
    process = start()
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None and process.stdout.readline() == "save\n"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=LIMIT_S)[0] == "stopping\n"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_second_signal_leaves_at_once(signum: int, code: int) -> None:
    """The program waits for its standard input, which stays open."""
    process = start()
    process.send_signal(signum)
    assert process.stdout is not None and process.stdout.readline() == "stopping\n"
    time.sleep(0.6)
    process.send_signal(signum)
    assert process.wait(LIMIT_S) == code
    _, errors = process.communicate()
    assert "second SIG" in errors


STUCK = """
import ctypes, signal
from cl_train.system.signals import StopRequest
with StopRequest():
    print("ready", flush=True)
    # Signals now go to another thread, so that nothing interrupts the call: as in a hung collective.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    ctypes.CDLL(None).sleep(10_000)
"""


def test_a_second_signal_leaves_even_when_the_main_thread_is_stuck_in_c() -> None:
    process = start(script=STUCK)
    send_and_wait(process.pid, signal.SIGINT)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.wait(LIMIT_S)
    process.communicate()
    assert process.returncode == 130


def test_two_sigterms_within_milliseconds_are_one_request() -> None:
    process = start("10_000")
    send_and_wait(process.pid, signal.SIGTERM)
    send_and_wait(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, output, errors) == (143, "stopping\n", "")


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with StopRequest() as request:
        assert signal.getsignal(signal.SIGTERM) is not before[0]
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: request.save_requested)
        assert not request.save_requested
        assert request.stop is None
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_a_forked_worker_dies_of_sigterm_and_leaves_ctrl_c_to_its_parent() -> None:
    with StopRequest() as request:
        child = os.fork()
        if child == 0:
            signal.pause()  # SIGINT, which is ignored, does not end it
            os._exit(0)
        wait_until(lambda: Process(child).ignores(signal.SIGINT))
        send_and_wait(child, signal.SIGINT)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGUSR1)  # comes after what the child would have written to the shared socket
        wait_until(lambda: request.save_requested)
        assert request.stop is None


def test_a_second_ctrl_c_in_a_program_that_goes_on_is_an_exception() -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest(ends_process=False) as request:
        signal.raise_signal(signal.SIGINT)
        wait_until(lambda: request.stop == signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


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
    send_and_wait(process.pid, signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=LIMIT_S)[0] == "stopping\n" and process.returncode == 143
