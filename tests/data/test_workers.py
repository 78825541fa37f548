"""Worker processes: what happens when they die or hang; none is left."""

import contextlib
import ctypes
import errno
import gc
import itertools
import multiprocessing
import os
import signal
import time
import types
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch

from cl_train.data import workers as data_workers
from cl_train.data.transforms import ImageReader
from cl_train.errors import WorkerError
from tests.data.image_folders import (
    count_silence_from,
    folder_data,
    train_batches,
    val_count,
    write_folder,
)
from tests.data.test_user_dataset import own_data
from tests.processes import LIMIT_S, Process, wait_until


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("images"), train=53, val=17)


@pytest.fixture
def workers():
    """The worker processes of a test that are alive."""
    before = set(multiprocessing.active_children())
    return lambda: [child for child in multiprocessing.active_children() if child not in before]


def kill_and_wait(process):
    """On a busy machine a process can live on for a while after the signal."""
    process.kill()
    assert wait([process.sentinel], LIMIT_S)


def test_a_killed_worker_ends_the_epoch_with_its_name_and_not_the_step(root, workers):
    """The next batch reports it; torch's handler of SIGCHLD would raise anywhere."""
    handler = signal.getsignal(signal.SIGCHLD)
    with contextlib.closing(folder_data(root, workers=2)) as data:
        for epochs_before in (0, 1):
            batches = data.train_loader.batches(0)
            next(batches)
            if epochs_before:
                list(batches)
                batches = data.train_loader.batches(1)
            victim = data.train_loader._pool.processes[0]
            kill_and_wait(victim)
            # The other worker may have filled all slots before this one began.
            message = rf"was killed by signal 9.*(\d+\.jpg|none yet) \(pid {victim.pid}\)"
            with pytest.raises(WorkerError, match=message):
                list(batches)
            wait_until(lambda: not workers())
            assert len(train_batches(data)) == 13, "a new epoch starts new workers"
    assert signal.getsignal(signal.SIGCHLD) is handler


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: os._exit(7), "exited with 7; the last image it began: .*0010.jpg"),
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (
            lambda: os.kill(os.getpid(), signal.SIGSTOP),
            r"no loader worker finished an image for 1 s.*0010.jpg",
        ),
    ],
)
def test_a_worker_that_exits_fails_or_stops_at_an_image_is_named(
    root, workers, monkeypatch, action, message
):
    plain = ImageReader.read

    def read(self, row, index, epoch, random_index):
        if index == 5:
            reach()
            action()
        return plain(self, row, index, epoch, random_index)

    monkeypatch.setattr(ImageReader, "read", read)
    reach = count_silence_from(monkeypatch)
    data = folder_data(root, workers=2)
    with contextlib.closing(data), pytest.raises(WorkerError, match=message):
        train_batches(data)
    wait_until(lambda: not workers())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_workers_that_cannot_all_be_started_are_ended(root, workers, monkeypatch):
    plain = ForkProcess.start

    def start(self):
        if workers():
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        plain(self)

    monkeypatch.setattr(ForkProcess, "start", start)
    with pytest.raises(
        WorkerError, match=r"cannot start 2 loader workers.*temporarily unavailable"
    ):
        train_batches(folder_data(root, workers=2))
    wait_until(lambda: not workers())


def test_workers_are_nice_outlive_an_early_signal_and_leave_no_file(monkeypatch):
    monkeypatch.setattr(gc, "freeze", lambda: os.kill(os.getpid(), signal.SIGTERM))  # as it starts
    files = len(os.listdir("/proc/self/fd"))
    pool = data_workers.Workers(
        [0],
        1,
        str,
        LIMIT_S,
        nice=5,
        batch_size=None,
        collate_fn=lambda _: os.nice(0),
    )
    assert pool.next() == os.nice(0) + 5
    pool.close()
    # a thread of torch closes some
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files)


@pytest.mark.parametrize("end", ["whole", "abandoned", "exception"])
def test_nothing_remains_and_workers_ignore_the_signals_that_the_parent_handles(root, workers, end):
    pids = set()
    with contextlib.suppress(KeyError), contextlib.closing(folder_data(root, workers=2)) as data:
        for number, _ in enumerate(data.train_loader.batches(0)):
            for worker, signum in itertools.product(
                workers(), (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
            ):
                os.kill(worker.pid, signum)
                pids.add(worker.pid)
            if end == "abandoned" and number == 2:
                break
            if end == "exception" and number == 2:
                raise KeyError(number)
    assert number == (12 if end == "whole" else 2) and len(pids) == 2
    wait_until(lambda: not workers())


def test_the_workers_of_both_splits_can_be_started_in_advance(root, workers):
    with contextlib.closing(folder_data(root, workers=2)) as data:
        data.start()
        started = {process.pid for process in workers()}
        assert len(started) == 4
        assert len(train_batches(data)) == 13 and val_count(data) == 17
        assert {process.pid for process in workers()} == started


def test_memory_is_pinned_after_the_workers_are_forked(root, workers, monkeypatch):
    registered, libc = [], ctypes.CDLL(None, use_errno=True)

    def register(address, size, flags):
        registered.append(address)
        return libc.madvise(
            ctypes.c_void_p(address), ctypes.c_size_t(size), 10
        )  # MADV_DONTFORK, as drivers may do

    cudart = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=registered.remove)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    with contextlib.closing(folder_data(root, workers=2, device=torch.device("cuda"))) as data:
        for _ in range(2):
            assert sum(1 for _ in data.train_loader.batches(0)) == 13 and len(registered) == 2
        kill_and_wait(data.train_loader._pool.processes[0])
        with pytest.raises(WorkerError, match="was killed by signal 9"):
            list(data.train_loader.batches(0))
        assert sum(1 for _ in data.train_loader.batches(0)) == 13 and len(registered) == 2
    assert not registered


def load(make_data, late, pids):
    """A program that loads; with `late` its second worker does not get beyond its start."""
    start, parent = data_workers._start_worker, os.getpid()

    def start_late(*arguments):
        while late and arguments[-1] == 1 and os.getppid() == parent:
            time.sleep(0.01)
        start(*arguments)

    data_workers._start_worker = start_late
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loader = make_data(workers=2).train_loader
    batches = loader.batches(0)
    if late:
        loader.start()
    else:
        next(batches)
    pids.send([process.pid for process in multiprocessing.active_children()])
    time.sleep(10_000)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(("kind", "late"), [("folder", False), ("folder", True), ("own", False)])
def test_workers_end_when_their_parent_is_stopped(root, number, kind, late):
    make_data = partial(folder_data, root) if kind == "folder" else partial(own_data, "Numbers")
    receiver, sender = multiprocessing.Pipe()
    parent = ForkProcess(target=load, args=(make_data, late, sender))
    parent.start()
    assert receiver.poll(LIMIT_S)
    children = [Process(pid) for pid in receiver.recv()]
    assert len(children) == 2 and all(process.is_running() for process in children)
    os.kill(parent.pid, number)
    parent.join(LIMIT_S)
    wait_until(lambda: not any(process.is_running() for process in children))


@pytest.mark.slow
def test_memory_and_open_files_stay_constant_over_twenty_epochs(root, workers):
    def resident_kib(pid):
        return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])

    def epochs(numbers):
        for number in numbers:
            assert len(train_batches(data, number)) == 6 and val_count(data) == 17
        pids = ["self", *(worker.pid for worker in workers())]
        return [resident_kib(pid) for pid in pids], len(os.listdir("/proc/self/fd"))

    with contextlib.closing(folder_data(root, workers=2, batch_size=8)) as data:
        before, files = epochs(range(5))
        after, files_after = epochs(range(5, 25))
    growth = [new - old for new, old in zip(after, before, strict=True)]
    assert max(growth) < 8 * 1024, f"KiB grown: {growth}"
    assert files_after <= files, "other tests' files may be closed meanwhile"
