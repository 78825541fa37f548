"""The loader's memory on CUDA: no batch is written while it is copied to the device."""

import numpy as np
import pytest
import torch

from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data import loader as loader_module
from cl_train.data.device import DeviceFormat, Normalise, to_device
from cl_train.data.loader import BadImages, DataSettings, Done, HostLoader
from cl_train.data.order import SizeSchedule
from cl_train.system.distributed import Dist
from tests.cuda_without_gpu.fake_cuda import CUDA, fake_cuda

SIZE, BATCHES = 8, 12
FORMAT = DeviceFormat(CUDA, torch.float16, torch.channels_last)


class Reader:
    dtype = torch.uint8
    name = str

    def __len__(self):
        return 4 * BATCHES


class InstantWorkers:
    """Fills nothing: tensors without data cannot be read or written."""

    is_running = True

    def __init__(self, *arguments):
        self.tasks = []

    def submit(self, task):
        self.tasks.append(task)

    def result(self):
        return Done(self.tasks.pop().number, [], [])

    skip = drain = close = lambda self: None


class SlotsWithoutData:
    def __init__(self, count):
        self.indices = np.zeros((count, 4), np.int64)
        images = [torch.zeros(4, SIZE, SIZE, 3, dtype=torch.uint8) for _ in range(count)]
        self.memory = [(nhwc.permute(0, 3, 1, 2), torch.zeros(4).long()) for nhwc in images]

    def batch(self, number, image_size):
        return self.memory[number % len(self.memory)]


def loader_of(batch_size, **data):
    settings = DataSettings(DataConfig(**data), AugmentConfig(), batch_size, 0, Dist(0, 1, CUDA))
    bad_images, sizes = BadImages(skip=False, limit=0), SizeSchedule(((0, SIZE),))
    return HostLoader(
        Reader(), sizes, settings, bad_images, order_of=lambda epoch: np.arange(4 * BATCHES)
    )


def errors_of_an_epoch(monkeypatch, workers, copies_under_way):
    monkeypatch.setattr(HostLoader, "_pin", lambda self, slots: None)
    monkeypatch.setattr(loader_module, "Workers", InstantWorkers)
    monkeypatch.setattr(loader_module, "COPIES_UNDER_WAY", copies_under_way)
    loader = loader_of(batch_size=4, workers=workers, prefetch=1)
    tasks = loader._tasks
    loader.start()
    with fake_cuda() as device:
        normalise = Normalise([0.5] * 3, [0.25] * 3, FORMAT)
        torch.cuda.synchronize()
        loader._slots = slots = SlotsWithoutData(loader._slot_count)

        def write(number, epoch, share):
            for memory in slots.batch(number, SIZE):
                device.write_on_host(memory)
            return tasks(number, epoch, share)

        monkeypatch.setattr(loader, "_tasks", write)
        for batch in to_device(loader.batches(), normalise):
            (batch.images * 2).sum()
        return device.errors


@pytest.mark.parametrize("workers", [0, 1, 5])
def test_batches_that_are_being_copied_keep_their_slots(monkeypatch, workers):
    assert errors_of_an_epoch(monkeypatch, workers, loader_module.COPIES_UNDER_WAY) == set()


def test_the_tasks_that_are_submitted_at_once_fit_into_their_pipe():
    for prefetch, workers in ((3, 32), (64, 32), (64, 256)):
        loader = loader_of(batch_size=2048, prefetch=prefetch, workers=workers)
        assert workers <= (loader._ahead + 1) * loader._tasks_per_batch <= 512


@pytest.mark.parametrize("copies_under_way", [0, 1])
def test_planted_a_loader_with_fewer_slots_is_noticed(monkeypatch, copies_under_way):
    errors = errors_of_an_epoch(monkeypatch, 2, copies_under_way)
    assert errors and all("a write of the host" in error for error in errors)
