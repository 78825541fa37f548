"""A killed parent leaves no child."""

import socket
import subprocess
import sys

from tests.processes import Process, wait_until

POOL = """
import multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor
from cl_train.system.child_process import end_with_parent

def work(number):
    os.write(1, b"%d\\n" % os.getpid())  # in one piece: both workers write to this pipe
    time.sleep(10_000)

with ProcessPoolExecutor(2, multiprocessing.get_context("fork"), initializer=end_with_parent) as pool:
    list(pool.map(work, range(2)))
"""


def test_workers_end_with_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", POOL], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [Process(int(parent.stdout.readline())) for _ in range(2)]
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(worker.is_running() for worker in workers))
    parent.stdout.close()


RANK = """
import os, sys
os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
from cl_train.config.schema import ConfigError
from cl_train.system.child_process import end_with_torchrun
try:
    end_with_torchrun()
except ConfigError:
    sys.exit(2)
"""


def test_a_rank_whose_torchrun_has_ended_ends() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        command = [sys.executable, "-c", RANK, str(server.getsockname()[1])]
        assert subprocess.run(command).returncode == 2, "nobody listens"
        server.listen()
        assert subprocess.run(command).returncode == 0
