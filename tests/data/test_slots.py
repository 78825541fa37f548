"""The loader's memory on CUDA: no batch is written while it is copied to the device."""

from collections import deque
from itertools import islice

import numpy as np
import pytest
import torch

from cl_train.config.schema import AugmentConfig, DataConfig
from cl_train.data import loader as loader_module
from cl_train.data.bad_images import BadImages
from cl_train.data.device import DeviceFormat, Normalise, to_device
from cl_train.data.loader import DataSettings, Filled, HostLoader
from cl_train.data.order import SizeSchedule
from cl_train.system.distributed import Dist
from tests.cuda_without_gpu.fake_cuda import CUDA, fake_cuda

SIZE, SAMPLES = 8, 288
FORMAT = DeviceFormat(CUDA, torch.float16, torch.channels_last)


class Reader:
    dtype = torch.uint8
    name = str

    def __len__(self):
        return SAMPLES


class InstantWorkers:
    """Sends requests as torch does: the next one just before it returns an item."""

    is_running = True

    def check(self):
        pass

    close = check

    def __init__(self, slots, count, name_of, timeout_s, *, batch_sampler, prefetch_factor, **_):
        self.sent = iter(batch_sampler)
        self.items = deque(islice(self.sent, count * (prefetch_factor or 0)))

    def next(self):
        self.items.append(next(self.sent))
        request = self.items.popleft()
        return Filled(request.number, request.first_row, [], [])


class SlotsWithoutData:
    """Tensors without data cannot be read or written."""

    def __init__(self, reader, slots, rows, *arguments):
        self.memory, self.running = [], np.zeros(2)
        for _ in range(slots):
            images = torch.zeros(rows, SIZE, SIZE, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
            self.memory.append((images, torch.zeros(rows).long()))

    def batch(self, number, image_size):
        return self.memory[number % len(self.memory)]


def loader_of(batch_size, **data):
    settings = DataSettings(DataConfig(**data), AugmentConfig(), batch_size, 0, Dist(0, 1, CUDA))
    bad_images, sizes = BadImages(skip=False, limit=0), SizeSchedule(((0, SIZE),))
    return HostLoader(
        Reader(), sizes, settings, bad_images, order_of=lambda epoch: np.arange(SAMPLES)
    )


def errors_of_an_epoch(monkeypatch, copies_under_way, **settings):
    monkeypatch.setattr(HostLoader, "_pin", lambda self, slots: None)
    monkeypatch.setattr(loader_module, "Workers", InstantWorkers)
    monkeypatch.setattr(loader_module, "SlotDataset", SlotsWithoutData)
    monkeypatch.setattr(loader_module, "COPIES_UNDER_WAY", copies_under_way)
    parts_of = loader_module._parts_of

    def written(*arguments):
        for request in parts_of(*arguments):
            for memory in loader.start()[1].batch(request.number, SIZE):
                device.write_on_host(memory)
            yield request

    monkeypatch.setattr(loader_module, "_parts_of", written)
    loader = loader_of(**settings)
    with fake_cuda() as device:
        normalise = Normalise([0.5] * 3, [0.25] * 3, FORMAT)
        torch.cuda.synchronize()
        for batch in to_device(loader.batches(), normalise):
            (batch.images * 2).sum()
        return device.errors


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 5])
@pytest.mark.parametrize(("batch_size", "prefetch"), [(4, 1), (16, 1), (24, 2)])
def test_batches_that_are_being_copied_keep_their_slots(monkeypatch, workers, batch_size, prefetch):
    settings = {"workers": workers, "batch_size": batch_size, "prefetch": prefetch}
    under_way = loader_module.COPIES_UNDER_WAY
    assert errors_of_an_epoch(monkeypatch, under_way, **settings) == set()


def test_planted_a_loader_with_fewer_slots_is_noticed(monkeypatch):
    settings = {"workers": 2, "batch_size": 4, "prefetch": 1}
    errors = errors_of_an_epoch(monkeypatch, 0, **settings)
    assert errors and all("a write of the host" in error for error in errors)
