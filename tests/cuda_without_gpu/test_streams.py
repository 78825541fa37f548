"""Streams under torch's race detector: the real copies to the device, recordings and trial step have no race."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from cl_train.data import device as data_device
from cl_train.data.device import DeviceFormat, DevicePrefetcher, Normalise, RawBatch, to_device
from cl_train.memory_format import model_call
from cl_train.step.cuda_graph import Recorder
from cl_train.step.precision import resolve_precision
from cl_train.training.preflight import trial_step
from tests.cuda_without_gpu.fake_cuda import CUDA, Device, Event, Stream, fake_cuda

BATCHES = 6
FORMAT = DeviceFormat(CUDA, torch.float16, torch.channels_last)


def images() -> torch.Tensor:
    return torch.zeros(4, 8, 8, 3, dtype=torch.uint8).permute(0, 3, 1, 2)


def train_with_to_device(device: Device) -> None:
    """An epoch as the loop runs it. The loader fills memory again three batches later."""
    normalise = Normalise([0.5] * 3, [0.25] * 3, FORMAT)
    torch.cuda.synchronize()
    slots = [images() for _ in range(3)]

    def loader() -> Iterator[RawBatch]:
        for number in range(BATCHES):
            device.write_on_host(slots[number % len(slots)])
            yield RawBatch(slots[number % len(slots)], torch.zeros(4, dtype=torch.int64), number, epoch=0)

    for batch in to_device(loader(), normalise):
        (batch.images * 2).sum()
        del batch
    for slot in slots:  # of the next epoch
        device.write_on_host(slot)


def train_with_prefetcher(device: Device) -> None:
    loader = [(images(), torch.zeros(4, dtype=torch.int64), {"id": torch.zeros(4)}) for _ in range(BATCHES)]
    prefetcher = DevicePrefetcher(loader, CUDA, ahead=2)
    torch.cuda.synchronize()
    for pixels, targets, more in prefetcher:
        (pixels * 2).sum() + targets.sum() + more["id"].sum()


def record_and_replay(device: Device) -> None:
    weight = torch.randn(8, 3, 3, 3, device=CUDA).clone()
    recorder = Recorder(CUDA)
    result = recorder.run(lambda: (weight * 2).sum())
    weight.add_(result)
    replay = recorder.record(lambda: (weight * 2).sum())
    weight.add_(replay())


def trial_on_the_recorders_stream(device: Device) -> None:
    """As build.py: the model is converted on the current stream, tried on that of the recording, and then trained.

    Autograd's engine needs a device, so the trial ends with the loss.
    """
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).to(CUDA)
    model.to(memory_format=torch.channels_last)
    recorder = Recorder(CUDA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", nothing)
        patch.setattr(model_call, "random_state_restored", lambda device: nullcontext())
        with recorder.on_stream():
            trial_step(model, resolve_precision("fp16", CUDA), FORMAT, (4, 3, 8, 8), 3)
    for parameter in model.parameters():
        parameter.data.add_(1)


def nothing(*arguments: object) -> None:
    return None


PROGRAMS = [train_with_to_device, train_with_prefetcher, record_and_replay, trial_on_the_recorders_stream]


@pytest.fixture
def cuda() -> Iterator[Device]:
    with fake_cuda() as device:
        yield device


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_race(program: Callable[[Device], None], cuda: Device) -> None:
    program(cuda)
    assert cuda.errors == set()


def test_one_side_stream_for_all_epochs(cuda: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        train_with_to_device(cuda)
        train_with_prefetcher(cuda)
        record_and_replay(cuda)
    assert cuda.made == 2, "one for copies and one for recordings"
    monkeypatch.setattr(data_device, "_side_stream", torch.cuda.Stream)  # planted: a stream per epoch is counted
    for _ in range(3):
        train_with_to_device(cuda)
    assert cuda.made == 5


@pytest.mark.parametrize(
    ("program", "owner", "name", "fault", "message"),
    [
        *((program, Stream, "wait_event", nothing, "race: ") for program in PROGRAMS),
        *((program, torch.Tensor, "record_stream", nothing, "freed without record_stream") for program in PROGRAMS[:2]),
        (train_with_to_device, Event, "query", lambda event: True, "released while it is copied"),
        (train_with_to_device, Event, "synchronize", nothing, "released while it is copied"),
    ],
)
def test_planted_a_missing_wait_is_found(
    program: Callable[[Device], None], owner: Any, name: str, fault: Any, message: str,
    cuda: Device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(owner, name, fault)
    program(cuda)
    assert any(message in error for error in cuda.errors), cuda.errors
