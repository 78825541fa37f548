"""Worker processes: what happens when they die or hang; none is left over."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from cl_train.data.image_reader import ImageReader
from cl_train.data.workers import WorkerError
from tests.data.image_folders import FLOAT_CHANNELS_LAST, folder_data, train_batches, write_folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("images"), train=53, val=17)


def children():
    """Processes that this one started and that are not gone, except multiprocessing's own server."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {pid for pid in pids if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}


def worker_pids(data):
    return [process.pid for process in data.train_loader._workers.processes]


@pytest.mark.parametrize("beside_another_loader", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_worker_ends_the_epoch_with_its_name(root, beside_another_loader):
    if beside_another_loader:  # its SIGCHLD handler stays installed
        assert len(list(DataLoader(range(4), num_workers=1))) == 4
    data = folder_data(root, workers=2)
    batches = data.train_loader.batches(0)
    next(batches).release()
    while data.train_loader._slots.progress[1, 0] == 0:
        time.sleep(0.01)
    victim = int(data.train_loader._slots.progress[1, 2])
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"was killed by signal 9.*\d+\.jpg \(pid {victim}\)"):
        for host in batches:
            host.release()
    assert time.monotonic() - start < 10
    assert not children()
    assert len(train_batches(data)) == 13, "a new epoch starts new workers"
    data.close()


def replace_reading(monkeypatch, action):
    """Workers that meet image 5 do `action` before they read it."""
    plain = ImageReader.read

    def read(self, row, index, epoch, random_index):
        if index == 5:
            action()
        return plain(self, row, index, epoch, random_index)

    monkeypatch.setattr(ImageReader, "read", read)


def test_a_worker_that_exits_is_named_with_its_last_image(root, monkeypatch):
    replace_reading(monkeypatch, lambda: os._exit(7))
    data = folder_data(root, workers=2)
    last = data.train_loader.reader.name(5)
    with pytest.raises(WorkerError, match=f"exited with 7; the last image it began: {last}"):
        train_batches(data)
    assert not children()


@pytest.mark.slow
def test_a_hanging_worker_is_named_after_the_timeout(root, monkeypatch):
    release = threading.Event()
    replace_reading(monkeypatch, lambda: release.wait(30))
    data = folder_data(root, workers=2, worker_timeout_s=1)
    last = Path(data.train_loader.reader.name(5)).name
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"no loader worker finished an image for 1 s.*{last}.*worker_timeout_s"):
        train_batches(data)
    assert time.monotonic() - start < 10
    release.set()
    assert not children()


def test_our_own_fault_in_a_worker_reaches_the_caller(root, monkeypatch):
    replace_reading(monkeypatch, lambda: 1 / 0)
    data = folder_data(root, workers=2)
    with pytest.raises(WorkerError, match="ZeroDivisionError: division by zero"):
        train_batches(data)
    data.close()
    assert not children()


def test_workers_ignore_the_signals_that_the_parent_handles(root):
    data = folder_data(root, workers=2)
    batches = data.train_loader.batches(0)
    next(batches).release()
    for pid in worker_pids(data):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
    assert sum(1 for host in batches if host.release() is None) == 12
    data.close()


@pytest.mark.parametrize("end", ["whole", "abandoned", "exception"])
def test_nothing_remains(root, end):
    threads, processes, shared = threading.active_count(), children(), os.listdir("/dev/shm")
    data = folder_data(root, workers=2)
    try:
        for number, host in enumerate(data.train_loader.batches(0)):
            host.release()
            if end == "abandoned" and number == 2:
                break
            if end == "exception" and number == 2:
                raise KeyError(number)
    except KeyError:
        pass
    data.close()
    assert children() == processes
    assert threading.active_count() == threads
    assert os.listdir("/dev/shm") == shared


SCRIPT = """
import os, signal, time
from tests.data.image_folders import folder_data
signal.signal(signal.SIGINT, signal.default_int_handler)
data = folder_data({root!r}, workers=2)
batches = data.train_loader.batches(0)
next(batches)
print(os.getpid(), *[process.pid for process in data.train_loader._workers.processes], flush=True)
time.sleep(60)
"""


def alive(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_when_their_parent_is_stopped(root, number):
    command = [sys.executable, "-c", SCRIPT.format(root=str(root))]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pids = [int(word) for word in parent.stdout.readline().split()[1:]]
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    parent.send_signal(number)
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in pids)


def resident_kib(pid="self"):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


@pytest.mark.slow
def test_memory_and_open_files_stay_constant_over_twenty_epochs(root):
    data = folder_data(root, workers=2, batch_size=8)

    def epoch(number):
        for batch in data.train(number, FLOAT_CHANNELS_LAST):
            assert batch.images.shape[0] == 8
        for batch in data.validation(FLOAT_CHANNELS_LAST):
            assert batch.images.dim() == 4

    for number in range(5):
        epoch(number)
    pids = ["self", *worker_pids(data)]
    before = [resident_kib(pid) for pid in pids]
    files = len(os.listdir("/proc/self/fd"))
    for number in range(5, 25):
        epoch(number)
    growth = [resident_kib(pid) - old for pid, old in zip(pids, before, strict=True)]
    assert max(growth) < 8 * 1024, f"KiB grown: {growth}"
    assert len(os.listdir("/proc/self/fd")) == files
    data.close()
