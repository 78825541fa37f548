"""The load of others, the memory that is free, and the memory that a step needs."""

import os
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from cl_train.system import machine, processes
from cl_train.system.machine import (
    available_bytes,
    peak_memory_gib,
    peak_memory_of_step_gib,
    reset_peak_memory,
)
from cl_train.system.processes import MachineLoad, own_cpu_s
from tests.processes import wait_until

CPU = torch.device("cpu")


def test_running_children_are_not_other_processes_and_wait_for_a_shared_core():
    """As the kernel counts it."""
    core = min(os.sched_getaffinity(0))
    loop = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    before = own_cpu_s()
    pair = [subprocess.Popen([sys.executable, "-c", loop]) for _ in "ab"]

    def waited_s():
        return sum(waited_s for _, waited_s in processes.thread_times(pair[0].pid).values())

    wait_until(lambda: waited_s() > 0.05 and own_cpu_s() - before >= 0.2)
    for process in pair:
        process.kill()
        process.wait()
    assert processes.thread_times(pair[0].pid) == {}, "it has ended"
    assert own_cpu_s() - before >= 0.2, "it still counts after its end"


def test_others_have_what_is_busy_without_the_own_share(monkeypatch):
    """Two cores, ten seconds: 12 s of work, of which 5 s are this process's own."""
    clocks = [(0.0, 100.0, 30.0), (10.0, 112.0, 35.0), (10.0, 112.0, 50.0)]  # now, busy, own
    monkeypatch.setattr(MachineLoad, "_clocks", Mock(side_effect=clocks))
    load = MachineLoad()
    load._cores = {"cpu0", "cpu1"}
    assert load.others_pct() == pytest.approx(100 * (12 - 5) / 20)
    assert load.others_pct() == 0


def test_what_others_took_is_their_share_of_what_ran_beside_each_thread(monkeypatch):
    """Ten seconds of two cores, of which others used 8 s, this thread 8 s and its worker 4 s."""
    clocks = Mock(side_effect=[(0.0, 100.0, 30.0), *[(10.0, 120.0, 42.0)] * 2])
    monkeypatch.setattr(MachineLoad, "_clocks", clocks)
    pid, worker, throttled = os.getpid(), 7, iter([1.0, 1.5, 1.5])
    times = {None: {pid: (5.0, 1.0)}, pid: {pid: (13.0, 2.2)}, worker: {worker: (4.0, 4.0)}}
    monkeypatch.setattr(processes, "thread_times", lambda pid=None: times[pid])
    monkeypatch.setattr(processes, "throttled_s", lambda: next(throttled))
    monkeypatch.setattr(processes, "cpu_ticks", lambda root: {root: 0, worker: 0})
    load = MachineLoad()
    waited_pct = 12 * 8 / (20 - 8), 40 * 8 / (20 - 4)
    assert load.lost_pct() == pytest.approx((waited_pct[0] + 5, waited_pct[1]))
    load._threads_before = {}
    assert load.lost_pct() is None, "a kernel without the statistics"


def test_free_memory_and_the_peak_of_a_known_allocation():
    def step():
        first = torch.empty(2**22)  # 16 MiB
        del first
        torch.empty(2**21)

    free = available_bytes(CPU)
    assert 0 < free < 2**50
    assert peak_memory_of_step_gib(step, 2**30, CPU) == pytest.approx(1 + 16 / 1024, rel=1e-3)


def test_the_peak_on_a_gpu_is_without_other_models(monkeypatch):
    """3 GiB are allocated between steps, of which the step holds half a GiB."""
    monkeypatch.setattr(machine, "wait_for", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 4 * 2**30)
    cuda = torch.device("cuda", 0)
    assert peak_memory_of_step_gib(lambda: None, 2**29, cuda) == 1.5


# In a process of its own: the heap of one in which other tests ran may have no place for 100 MiB.
FREED_MEMORY = """
import resource, torch
from cl_train.system.machine import keep_freed_memory, release_memory

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(25_600, 1024)  # 100 MiB, of which glibc would map each tensor anew
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory(torch.device("cpu"))
# Small tensors may take the place of the first ones.
assert any(page_faults() < 1000 for _ in range(20))
release_memory()
assert page_faults() > 10_000
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_freed_memory_is_kept_without_page_faults_until_it_is_released():
    subprocess.run([sys.executable, "-c", FREED_MEMORY], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_processes_and_threads_that_end_while_they_are_listed_are_left_out(monkeypatch):
    def ended(path, *args, **options):
        raise ProcessLookupError(3, "No such process", path)

    listed = [str(os.getpid()), "999999999", "self"]
    monkeypatch.setattr(os, "listdir", lambda folder: listed)
    monkeypatch.setattr(os, "stat", ended)  # as of a process that ends after its name is read
    assert list(processes.cpu_ticks(os.getpid())) == [os.getpid()]
    assert processes.thread_times().keys() <= {os.getpid()}
    monkeypatch.setattr(os, "listdir", ended)
    assert processes.thread_times() == {} and processes.cpu_ticks(1) == {1: 0}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_peak_of_a_run_on_a_cpu_is_not_that_of_what_came_before():
    reset_peak_memory(CPU)
    held = peak_memory_gib(CPU)  # other tests of this process may have had more
    torch.ones(2**28)  # 1 GiB
    assert peak_memory_gib(CPU) == pytest.approx(held + 1, abs=0.3)
    reset_peak_memory(CPU)
    assert peak_memory_gib(CPU) == pytest.approx(held, abs=0.3)
