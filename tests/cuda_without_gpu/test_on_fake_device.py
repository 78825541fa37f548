"""The real step, copies and recordings on tensors without data: nothing waits or races."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from cl_train.config.schema import FUSED_OPTIMIZERS
from cl_train.data.device import Batch, DeviceFormat, Normalise, RawBatch, to_device
from cl_train.step.backup import BufferBackup
from cl_train.step.cuda_graph import GraphedStep, Recorder
from cl_train.step.optim import set_lr
from cl_train.step.precision import BY_NAME, EMA
from cl_train.step.train_step import Loss, train_step
from tests.cuda_without_gpu.fake_cuda import CUDA, Event, Stream, fake_cuda, without_data
from tests.step.test_train_step import make_parts

# --- no part of a step reads a value of the device: every such read raises ------------------------

BCE = Loss("bce", 0.1, bce_threshold=0.2)  # with MixUp's targets


def run(parts, step=None, micro_steps=1):
    for _ in range(2):
        set_lr(parts.optimizer, 0.1)
        pixels = torch.randn(4, 3, 32, 32, dtype=parts.settings.precision.input_dtype)
        targets = (
            torch.rand(4, 3) if parts.settings.loss == BCE else torch.zeros(4, dtype=torch.int64)
        )
        batch = Batch(pixels.to(memory_format=torch.channels_last), targets)
        (step or partial(train_step, parts))([batch] * micro_steps)


@pytest.mark.parametrize("optimizer", list(FUSED_OPTIMIZERS))
@pytest.mark.parametrize("precision", BY_NAME)
def test_a_step_never_waits(precision, optimizer):
    with without_data():
        smoothed = Loss(label_smoothing=0.1)
        run(make_parts(precision, optimizer=optimizer, clip_norm=1.0, loss=smoothed), micro_steps=2)
        run(make_parts(precision, optimizer=optimizer, loss=BCE))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16_o2"])
def test_what_surrounds_a_step_does_not_wait_either(precision):
    """The average of the weights, statistics at a log line, and the step that will be recorded."""
    with without_data():
        parts = make_parts(precision)
        ema = EMA(parts.wrapped_model, 0.9)
        backup = BufferBackup(model=parts.wrapped_model, average=ema.module)
        run(parts, GraphedStep(parts, Recorder(torch.device("cpu")), warm_up=1), 2)
        ema.update(parts.weights.state_dict())
        backup.keep_or_restore(torch.zeros(()) > 0)


def test_an_optimizer_without_a_fused_kernel_is_documented_to_wait():
    """So a read is found."""
    with without_data(), pytest.raises(DataDependentOutputException):
        run(make_parts("fp32", optimizer="rmsprop"))


# --- streams under torch's race detector: copies to the device and recordings ---------------------


def train_with_to_device(device):
    """An epoch as the loop runs it. The loader fills memory again two batches later."""
    form = DeviceFormat(CUDA, torch.float16, torch.channels_last)
    normalise = Normalise([0.5] * 3, [0.25] * 3, form)
    torch.cuda.synchronize()
    memory = [torch.zeros(4, 8, 8, 3, dtype=torch.uint8) for _ in range(2)]
    slots = [images.permute(0, 3, 1, 2) for images in memory]

    def loader():
        for number in range(6):
            slot = slots[number % len(slots)]
            device.write_on_host(slot)
            yield RawBatch(slot, torch.zeros(4, dtype=torch.int64), number, epoch=0)

    for batch in to_device(loader(), normalise):
        (batch.images * 2).sum()
        del batch
    for slot in slots:  # of the next epoch
        device.write_on_host(slot)


def record_and_replay(device):
    weight = torch.randn(8, 3, 3, 3, device=CUDA).clone()
    recorder = Recorder(CUDA)
    result = recorder.run(lambda: (weight * 2).sum())
    weight.add_(result)
    replay = recorder.record(lambda: (weight * 2).sum())
    weight.add_(replay())


PROGRAMS = [train_with_to_device, record_and_replay]


def test_no_race_and_one_side_stream_for_all_epochs():
    with fake_cuda() as device:
        for program in PROGRAMS * 2:
            program(device)
        assert device.errors == set()
        assert next(device.stream_ids) == 3, "0 is the default; of copies and of recordings"


@pytest.mark.parametrize(
    ("program", "owner", "name", "result", "message"),
    [
        (record_and_replay, Stream, "wait_event", None, "does not wait"),
        (train_with_to_device, torch.Tensor, "record_stream", None, "reuse of memory"),
        (train_with_to_device, Event, "synchronize", None, "a write of the host"),
        (train_with_to_device, Event, "synchronize", None, "does not wait"),
    ],
)
def test_planted_a_missing_wait_is_found(program, owner, name, result, message):
    with fake_cuda() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *arguments: result)
        program(device)
        assert any(message in error for error in device.errors), device.errors
