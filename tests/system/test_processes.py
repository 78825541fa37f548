"""A killed parent leaves no child; signals set flags, a second one leaves. Real processes and
signals throughout.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from cl_train.system.processes import StopRequest
from tests.processes import LIMIT_S, Process, send_and_wait, wait_until

# --- signals --------------------------------------------------------------------------------------

POLITE = """
import signal, sys, time
from cl_train.system import processes
processes._SAME_REQUEST_S = float(sys.argv[1])
with processes.StopRequest() as request:
    print("ready", flush=True)
    while request.stop is None:
        time.sleep(0.01)
        if request.save_requested:
            print("save", flush=True)
    print("stopping", flush=True)
    sys.stdin.read()  # until the test closes it
sys.exit(128 + request.stop)
"""
NOT_UNDER_NOHUP = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"


def start(same_request_s=0.05, script=POLITE):
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(same_request_s)], text=True, **pipes
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_one_signal_stops_politely_and_a_second_one_at_once(signum, code):
    """SIGUSR1 asks for one save, and the program goes on."""
    process = start(script=NOT_UNDER_NOHUP + POLITE)
    for request, answer in ((signal.SIGUSR1, "save\n"), (signum, "stopping\n")):
        process.send_signal(request)
        assert process.stdout.readline() == answer
    time.sleep(0.1)
    process.send_signal(signum)
    assert process.wait(LIMIT_S) == code, "the program waits for its standard input, which is open"
    errors = process.communicate()[1]
    assert "second SIG" in errors
    assert ("Ctrl-C again exits without saving" in errors) == (signum == signal.SIGINT)


def test_two_sigterms_at_once_are_one_and_a_closed_terminal_is_ignored_under_nohup():
    under_nohup = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    process = start(10_000, under_nohup + POLITE)
    for signum in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
        send_and_wait(process.pid, signum)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, output, errors) == (143, "stopping\n", "")


def test_a_forked_worker_dies_of_sigterm_and_leaves_ctrl_c_to_its_parent():
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(signum) for signum in signals]
    with StopRequest() as request:
        child = os.fork()
        if child == 0:
            signal.pause()  # SIGINT, which is ignored, does not end it
            os._exit(0)
        wait_until(lambda: Process(child).has("SigIgn", signal.SIGINT))
        send_and_wait(child, signal.SIGINT)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        signal.raise_signal(signal.SIGUSR1)
        assert request.save_requested and request.stop is None and not request.save_requested
    assert [signal.getsignal(signum) for signum in signals] == before


def test_a_second_ctrl_c_in_a_program_that_goes_on_is_an_exception():
    before = signal.getsignal(signal.SIGINT)  # ignored in a job of a shell's background
    with pytest.raises(KeyboardInterrupt), StopRequest(ends_process=False) as request:
        signal.raise_signal(signal.SIGINT)
        assert request.stop == signal.SIGINT
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


MAP = """
import os, time
from cl_train.system.processes import map_in_processes
def work(item):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(10_000)
list(map_in_processes(work, [1, 2], 2, description="", unit=""))
"""


def test_the_workers_of_a_killed_preparation_end():
    with subprocess.Popen([sys.executable, "-c", MAP], stdout=subprocess.PIPE) as parent:
        workers = [Process(int(parent.stdout.readline())) for _ in "ab"]
        assert all(worker.is_running() for worker in workers)
        parent.kill()
    wait_until(lambda: not any(worker.is_running() for worker in workers))


def test_exit_without_teardown_runs_exit_functions_and_flushes():
    script = """
import atexit
from cl_train.system.processes import exit_without_teardown
slow = type("Slow", (), {"__del__": lambda self: print("torn down")})()
atexit.register(print, "at exit")
print("buffered", end=" ")
exit_without_teardown(143)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (143, "buffered at exit\n")
