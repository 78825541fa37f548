"""A killed parent leaves no child."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

POOL = """
import multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor
from cl_train.system.child_process import end_with_parent

def work(number):
    os.write(1, b"%d\\n" % os.getpid())  # in one piece: both workers write to this pipe
    time.sleep(60)

with ProcessPoolExecutor(2, multiprocessing.get_context("fork"), initializer=end_with_parent) as pool:
    list(pool.map(work, range(2)))
"""


def test_workers_end_with_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", POOL], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(is_running(pid) for pid in workers):
        time.sleep(0.02)
    parent.stdout.close()
    assert not any(is_running(pid) for pid in workers)


def is_running(pid: int) -> bool:
    """Zombies, which wait for init, have ended."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert subprocess.run([sys.executable, "-c", RANK, port]).returncode == 0
    assert subprocess.run([sys.executable, "-c", RANK, port]).returncode == 2
