"""Batches do not depend on who prepares them; workers that die, hang or are left alone; nothing remains."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from cl_train.config.schema import AugmentConfig, ConfigError
from cl_train.data.images import ImageReader
from cl_train.data.workers import WorkerError
from tests.data.image_folders import (
    CPU,
    FLOAT_CHANNELS_LAST,
    DeviceFormat,
    all_pixels,
    folder_data,
    train_batches,
    write_folder,
)

KINDS = [(0, "process"), (1, "process"), (3, "process"), (1, "thread"), (3, "thread")]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("images"), train=53, val=17)


def children():
    """Processes that this one started and that are not gone."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def same(first, second):
    assert len(first) == len(second) > 0
    for (images, targets), (other_images, other_targets) in zip(first, second, strict=True):
        assert torch.equal(images, other_images) and torch.equal(targets, other_targets)


@pytest.mark.parametrize(("workers", "kind"), KINDS)
def test_batches_do_not_depend_on_workers(root, workers, kind):
    reference = train_batches(folder_data(root, batch_size=10), epoch=3)
    data = folder_data(root, batch_size=10, workers=workers, worker_type=kind)
    same(train_batches(data, epoch=3), reference)
    same(train_batches(data, epoch=3), reference)
    data.close()


def test_epochs_and_seeds_differ(root):
    data = folder_data(root)
    other_seed = folder_data(root, seed=1)
    first = all_pixels(train_batches(data, epoch=0))
    assert not torch.equal(first, all_pixels(train_batches(data, epoch=1)))
    assert not torch.equal(first, all_pixels(train_batches(other_seed, epoch=0)))


@pytest.mark.parametrize("first_batch", [1, 7, 12])
def test_starting_within_an_epoch_gives_the_same_rest(root, first_batch):
    data = folder_data(root, workers=2)
    whole = train_batches(data)
    assert len(whole) == data.batches_per_epoch == 13
    same(train_batches(data, first_batch=first_batch), whole[first_batch:])
    data.close()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_together_see_one_processs_batches(root, world_size):
    whole = train_batches(folder_data(root, batch_size=12))
    ranks = [
        train_batches(folder_data(root, batch_size=12 // world_size, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for number, (images, targets) in enumerate(whole):
        assert torch.equal(torch.cat([rank[number][0] for rank in ranks]), images)
        assert torch.equal(torch.cat([rank[number][1] for rank in ranks]), targets)


@pytest.mark.parametrize("count", [7, 97, 101])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_has_every_image_once(tmp_path, count, world_size):
    root = write_folder(tmp_path, train=12, val=count)
    seen = []
    for rank in range(world_size):
        data = folder_data(root, rank=rank, world_size=world_size)
        batches = [(host.images.clone(), host.targets.clone(), host.release()) for host in data.validation_host()]
        seen += [images[row].numpy().tobytes() for images, _, _ in batches for row in range(len(images))]
        assert data.val_images == count
    assert len(seen) == count and len(set(seen)) == count


def test_labels_belong_to_their_images(root):
    """A crop of the whole image with neither flip nor choice: each row is its file's picture, with its label."""
    whole = AugmentConfig(crop_scale_min=1.0, crop_ratio_min=0.1, crop_ratio_max=10.0, flip=0.0)
    data = folder_data(root, augment=whole, workers=2)
    reader = ImageReader(data._form)
    expected = {}
    row = torch.empty(32, 32, 3, dtype=torch.uint8).permute(2, 0, 1)
    split = data._folder.train
    for index in range(len(split)):
        reader.train(row, split, index, 0, numbers_of=index)
        expected[row.numpy().tobytes()] = int(split.labels[index])
    assert len(expected) == 53
    for images, targets in train_batches(data):
        for image, target in zip(images, targets, strict=True):
            assert expected[image.numpy().tobytes()] == target
    data.close()


def test_validation_in_the_middle_of_an_epoch_disturbs_nothing(root):
    reference = train_batches(folder_data(root))
    data = folder_data(root, workers=2)
    seen = []
    for number, host in enumerate(data.train_host(0)):
        seen.append((host.images.clone(), host.targets.clone()))
        host.release()
        if number == 4:
            assert sum(len(batch.targets) for batch in data.validation(FLOAT_CHANNELS_LAST)) == 17
    same(seen, reference)
    data.close()


@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment"])
def test_policies_are_seeded_per_image_and_leave_the_global_generator_alone(root, policy):
    augment = AugmentConfig(policy=policy, erase=0.5)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    reference = train_batches(folder_data(root, augment=augment))
    assert torch.equal(torch.get_rng_state(), before)
    data = folder_data(root, augment=augment, workers=3)
    same(train_batches(data), reference)
    data.close()
    plain = train_batches(folder_data(root))
    assert not torch.equal(all_pixels(plain), all_pixels(reference))


def test_erasing_takes_the_mean_colour_and_its_probability(root):
    data = folder_data(root, augment=AugmentConfig(erase=1.0), batch_size=50)
    ((images, _),) = train_batches(data)
    mean = torch.tensor([124, 116, 104], dtype=torch.uint8).view(1, 3, 1, 1)
    erased = (images == mean).all(dim=1).flatten(1).sum(dim=1)
    assert (erased >= 0.02 * 32 * 32 * 0.8).all()


def test_threads_refuse_policies_whose_generator_they_would_share(root):
    with pytest.raises(ConfigError, match="worker_type=process"):
        folder_data(root, augment=AugmentConfig(policy="randaugment"), workers=2, worker_type="thread")


@pytest.mark.parametrize(
    "augment", [AugmentConfig(mixup=0.2), AugmentConfig(cutmix=1.0), AugmentConfig(mixup=0.2, cutmix=1.0)]
)
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_mixed_batches_are_seeded_and_keep_the_layout(root, augment, memory_format):
    form = DeviceFormat(CPU, torch.float32, memory_format)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, again = (list(folder_data(root, augment=augment).train(2, form)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    plain = list(folder_data(root).train(2, form))
    for batch, other, unmixed in zip(first, again, plain, strict=True):
        assert torch.equal(batch.images, other.images) and torch.equal(batch.targets, other.targets)
        assert batch.targets.shape == (4, 2) and batch.targets.is_floating_point()
        assert torch.allclose(batch.targets.sum(dim=1), torch.ones(4))
        assert batch.images.is_contiguous(memory_format=memory_format)
        assert unmixed.targets.shape == (4,)
    assert any(not torch.equal(batch.images, unmixed.images) for batch, unmixed in zip(first, plain, strict=True))


def test_a_killed_worker_ends_the_epoch_with_its_name(root):
    data = folder_data(root, workers=2)
    batches = data.train_host(0)
    next(batches).release()
    while data._ring.progress[1, 0] == 0:
        time.sleep(0.01)
    victim = data._pool._processes[1].pid
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"worker 1 \(pid {victim}\) was killed by signal 9.*\d+\.jpg"):
        for host in batches:
            host.release()
    assert time.monotonic() - start < 10
    assert not children()
    assert len(train_batches(data)) == 13, "a new epoch starts new workers"
    data.close()


def replace_training(monkeypatch, action):
    """Workers that meet image 5 do `action` instead of reading it."""
    plain = ImageReader.train

    def train(self, row, split, index, epoch, numbers_of):
        if index == 5:
            action()
        plain(self, row, split, index, epoch, numbers_of)

    monkeypatch.setattr(ImageReader, "train", train)


def test_a_worker_that_exits_is_named_with_its_last_image(root, monkeypatch):
    replace_training(monkeypatch, lambda: os._exit(7))
    data = folder_data(root, workers=2)
    last = os.fsdecode(data._folder.train.path(5))
    with pytest.raises(WorkerError, match=f"exited with 7; the last image it began: {last}"):
        train_batches(data)
    assert not children()


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_hanging_worker_is_named_after_the_timeout(root, monkeypatch, kind):
    release = threading.Event()
    replace_training(monkeypatch, lambda: release.wait(30))
    data = folder_data(root, workers=2, worker_type=kind, worker_timeout_s=1)
    last = Path(os.fsdecode(data._folder.train.path(5))).name
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"no loader worker finished an image for 1 s.*{last}.*worker_timeout_s"):
        train_batches(data)
    assert time.monotonic() - start < 10
    release.set()
    assert not children()


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_our_own_fault_in_a_worker_reaches_the_caller(root, monkeypatch, kind):
    replace_training(monkeypatch, lambda: 1 / 0)
    data = folder_data(root, workers=2, worker_type=kind)
    with pytest.raises(WorkerError, match="ZeroDivisionError: division by zero"):
        train_batches(data)
    data.close()
    assert not children()


def test_workers_ignore_the_signals_that_the_parent_handles(root):
    data = folder_data(root, workers=2)
    batches = data.train_host(0)
    next(batches).release()
    for process in data._pool._processes:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(process.pid, number)
    assert sum(1 for host in batches if host.release() is None) == 12
    data.close()


@pytest.mark.parametrize("kind", ["process", "thread"])
@pytest.mark.parametrize("end", ["whole", "abandoned", "exception"])
def test_nothing_remains(root, kind, end):
    threads, processes, shared = threading.active_count(), children(), os.listdir("/dev/shm")
    data = folder_data(root, workers=2, worker_type=kind)
    try:
        for number, host in enumerate(data.train_host(0)):
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


def test_workers_end_after_each_epoch_if_they_are_not_persistent(root):
    data = folder_data(root, workers=2, persistent_workers=False)
    before = children()
    train_batches(data)
    assert children() == before
    data.close()


SCRIPT = """
import os, signal, time
from tests.data.image_folders import folder_data
signal.signal(signal.SIGINT, signal.default_int_handler)
data = folder_data({root!r}, workers=2)
batches = data.train_host(0)
next(batches)
print(os.getpid(), *[process.pid for process in data._pool._processes], flush=True)
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
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_memory_and_open_files_stay_constant_over_twenty_epochs(root, kind):
    data = folder_data(root, workers=2, worker_type=kind, batch_size=8)

    def epoch(number):
        for batch in data.train(number, FLOAT_CHANNELS_LAST):
            assert batch.images.shape[0] == 8
        for batch in data.validation(FLOAT_CHANNELS_LAST):
            assert batch.images.dim() == 4

    for number in range(5):
        epoch(number)
    pids = ["self", *[process.pid for process in getattr(data._pool, "_processes", [])]]
    before = [resident_kib(pid) for pid in pids]
    files = len(os.listdir("/proc/self/fd"))
    for number in range(5, 25):
        epoch(number)
    growth = [resident_kib(pid) - old for pid, old in zip(pids, before, strict=True)]
    assert max(growth) < 8 * 1024, f"KiB grown: {growth}"
    assert len(os.listdir("/proc/self/fd")) == files
    data.close()
