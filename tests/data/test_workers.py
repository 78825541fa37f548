"""Worker processes: what happens when they die or hang; none is left over."""

import contextlib
import errno
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from cl_train.config.schema import ConfigError
from cl_train.data import workers as data_workers
from cl_train.data.transforms import ImageReader
from cl_train.data.workers import WorkerError, Workers
from tests.data.image_folders import FLOAT_CHANNELS_LAST, folder_data, train_batches, write_folder
from tests.processes import LIMIT_S, Process, wait_until


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("images"), train=53, val=17)


@pytest.fixture
def workers(monkeypatch):
    """The worker processes that a test starts."""
    processes, plain = [], Workers._start

    def start(self):
        received = plain(self)
        processes.extend(self.processes)
        return received

    monkeypatch.setattr(Workers, "_start", start)
    return processes


def have_ended(workers):
    return bool(workers) and not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("beside_another_loader", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_worker_ends_the_epoch_with_its_name(root, workers, beside_another_loader):
    if beside_another_loader:  # its SIGCHLD handler stays installed
        assert len(list(DataLoader(range(4), num_workers=1))) == 4
    data = folder_data(root, workers=2)
    batches = data.train_loader.batches(0)
    next(batches)
    wait_until(lambda: data.train_loader._workers.progress[1, 0] > 0)
    victim = int(data.train_loader._workers.progress[1, 2])
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"was killed by signal 9.*\d+\.jpg \(pid {victim}\)"):
        list(batches)
    wait_until(lambda: have_ended(workers))
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


def test_a_worker_that_exits_is_named_with_its_last_image(root, workers, monkeypatch):
    replace_reading(monkeypatch, lambda: os._exit(7))
    data = folder_data(root, workers=2)
    last = data.train_loader.reader.name(5)
    with pytest.raises(WorkerError, match=f"exited with 7; the last image it began: {last}"):
        train_batches(data)
    wait_until(lambda: have_ended(workers))


@pytest.mark.slow
def test_a_hanging_worker_is_named_after_the_timeout(root, workers, monkeypatch):
    """The clock stands still until the worker hangs, which would not end by itself."""
    replace_reading(monkeypatch, lambda: time.sleep(10_000))
    data = folder_data(root, workers=2, worker_timeout_s=1)
    last = Path(data.train_loader.reader.name(5)).name
    seconds = itertools.count()

    def clock():
        return 2.0 * next(seconds) if 5 in data.train_loader._workers.progress[:, 1] else 0.0

    monkeypatch.setattr(data_workers, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    with pytest.raises(WorkerError, match=rf"no loader worker finished an image for 1 s.*{last}.*worker_timeout_s"):
        train_batches(data)
    wait_until(lambda: have_ended(workers))


def test_workers_that_cannot_all_be_started_are_ended(root, monkeypatch, capsys):
    plain, started = ForkProcess.start, []

    def start(self):
        if started:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        plain(self)
        started.append(self)

    monkeypatch.setattr(ForkProcess, "start", start)
    with pytest.raises(WorkerError, match=r"cannot start 2 loader workers.*temporarily unavailable"):
        train_batches(folder_data(root, workers=2))
    wait_until(lambda: have_ended(started))
    gc.collect()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"resource.getrlimit": (48, 4096)}, "ulimit -n"),
    ],
)
def test_too_few_resources_for_the_workers_are_refused_at_once(root, monkeypatch, limits, named):
    ((name, found),) = limits.items()
    monkeypatch.setattr(f"cl_train.data.loader.{name}", lambda *_: found)
    with pytest.raises(ConfigError, match=named):
        folder_data(root, workers=6)
    assert folder_data(root, workers=0).train_images == 53


def test_our_own_fault_in_a_worker_reaches_the_caller(root, workers, monkeypatch):
    replace_reading(monkeypatch, lambda: 1 / 0)
    data = folder_data(root, workers=2)
    with pytest.raises(WorkerError, match="ZeroDivisionError: division by zero"):
        train_batches(data)
    data.close()
    wait_until(lambda: have_ended(workers))


def test_workers_ignore_the_signals_that_the_parent_handles(root, workers):
    data = folder_data(root, workers=2)
    batches = data.train_loader.batches(0)
    next(batches)
    for worker in workers:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(worker.pid, number)
    assert len(list(batches)) == 12
    data.close()


def shared_files(workers):
    """The files in shared memory of this process and of its workers; other programs have theirs there too."""
    pids = [str(os.getpid()), *(str(worker.pid) for worker in workers)]
    return {name for name in os.listdir("/dev/shm") if set(pids) & set(re.split(r"\D+", name))}


@pytest.mark.parametrize("end", ["whole", "abandoned", "exception"])
def test_nothing_remains(root, workers, end):
    threads, shared = set(threading.enumerate()), shared_files(workers)
    data = folder_data(root, workers=2)
    try:
        for number, _ in enumerate(data.train_loader.batches(0)):
            if end == "abandoned" and number == 2:
                break
            if end == "exception" and number == 2:
                raise KeyError(number)
    except KeyError:
        pass
    data.close()
    wait_until(lambda: have_ended(workers))
    wait_until(lambda: set(threading.enumerate()) <= threads)  # close() does not join the feeders of torch's queues
    assert shared_files(workers) <= shared


SCRIPT = """
import os, signal, time
from tests.data.image_folders import folder_data
signal.signal(signal.SIGINT, signal.default_int_handler)
for _ in range({parents}):
    if os.fork() == 0:
        data = folder_data({root!r}, workers=2)
        batches = data.train_loader.batches(0)
        next(batches)
        pids = [os.getpid(), *[process.pid for process in data.train_loader._workers.processes]]
        os.write(1, (" ".join(map(str, pids)) + "\\n").encode())
        time.sleep(10_000)
time.sleep(10_000)
"""
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


@pytest.mark.slow
def test_workers_end_when_their_parent_is_stopped(root):
    program = SCRIPT.format(root=str(root), parents=len(STOP_SIGNALS))
    starter = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    families = [[int(pid) for pid in starter.stdout.readline().split()] for _ in STOP_SIGNALS]
    for number, (parent, *children) in zip(STOP_SIGNALS, families, strict=True):
        processes = [Process(pid) for pid in (parent, *children)]
        assert len(children) == 2 and all(process.is_running() for process in processes)
        os.kill(parent, number)
        wait_until(lambda: not any(process.is_running() for process in processes))  # noqa: B023
    starter.kill()
    starter.wait(LIMIT_S)
    starter.stdout.close()


def resident_kib(pid="self"):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def open_files():
    """What the descriptors of this process refer to; pipes and sockets have numbers."""
    files = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of the listing itself
            files[os.readlink(f"/proc/self/fd/{descriptor}")] += 1
    return files


@pytest.mark.slow
def test_memory_and_open_files_stay_constant_over_twenty_epochs(root, workers):
    data = folder_data(root, workers=2, batch_size=8)

    def epoch(number):
        for batch in data.train(number, FLOAT_CHANNELS_LAST):
            assert batch.images.shape[0] == 8
        for batch in data.validation(FLOAT_CHANNELS_LAST):
            assert batch.images.dim() == 4

    for number in range(5):
        epoch(number)
    pids = ["self", *(worker.pid for worker in workers)]
    before = [resident_kib(pid) for pid in pids]
    files = open_files()
    for number in range(5, 25):
        epoch(number)
    growth = [resident_kib(pid) - old for pid, old in zip(pids, before, strict=True)]
    assert max(growth) < 8 * 1024, f"KiB grown: {growth}"
    assert open_files() <= files, "other tests' files may be closed meanwhile"
    data.close()
