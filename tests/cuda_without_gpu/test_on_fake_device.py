"""The real step, copies and models on tensors without data: nothing waits, races, or loses its
layout or dtype.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cl_train.config.schema import FUSED_OPTIMIZERS, Config, DataConfig
from cl_train.data import device as data_device
from cl_train.data.device import (
    Batch,
    DeviceFormat,
    DevicePrefetcher,
    Normalise,
    RawBatch,
    to_device,
)
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import classify
from cl_train.models.sources import build_model
from cl_train.step import train_step as step_module
from cl_train.step.backup import BufferBackup
from cl_train.step.cuda_graph import GraphedStep, Recorder
from cl_train.step.make import StepSettings
from cl_train.step.optim import set_lr
from cl_train.step.precision import BY_NAME, EMA, autocast, cast_model, kernel_selection
from cl_train.step.train_step import Loss, StepParts, train_step
from cl_train.training import build
from cl_train.training.build import try_run
from tests.cuda_without_gpu.fake_cuda import CUDA, Device, Event, Stream, fake_cuda, without_data
from tests.step.test_train_step import make_parts

CPU = torch.device("cpu")

# --- no part of a step reads a value of the device: every such read raises ------------------------

LOSSES = [Loss(label_smoothing=0.1), Loss("bce", 0.1, bce_threshold=0.2)]  # and MixUp's targets


def run(
    parts: StepParts, step: Callable[[list[Batch]], object] | None = None, micro_steps: int = 1
) -> None:
    for _ in range(2):
        set_lr(parts.optimizer, 0.1)
        pixels = torch.randn(4, 3, 32, 32).to(
            parts.precision.input_dtype, memory_format=torch.channels_last
        )
        targets = torch.rand(4, 3) if parts.loss == LOSSES[1] else torch.zeros(4, dtype=torch.int64)
        (step or partial(train_step, parts))([Batch(pixels, targets)] * micro_steps)


@pytest.mark.parametrize("optimizer", list(FUSED_OPTIMIZERS))
@pytest.mark.parametrize("precision", BY_NAME)
def test_a_step_never_waits(precision: str, optimizer: str) -> None:
    """With and without clipping, in one and two micro-steps, with each loss."""
    for clip_norm, micro_steps, loss in ((1.0, 2, LOSSES[0]), (None, 1, LOSSES[1])):
        with without_data():
            run(
                replace(make_parts(precision, optimizer=optimizer, clip_norm=clip_norm), loss=loss),
                None,
                micro_steps,
            )


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16_o2"])
def test_what_surrounds_a_step_does_not_wait_either(precision: str) -> None:
    """The average of the weights, the statistics at a log line, and the step that will be a CUDA
    graph.
    """
    with without_data():
        parts = make_parts(precision)
        ema = EMA(parts.model, 0.9)
        backup = BufferBackup(model=parts.model, average=ema.module)
        run(parts, GraphedStep(parts, Recorder(CPU), warm_up=1), 2)
        ema.update(parts.weights.state_dict())
        backup.settle(torch.zeros(()) > 0)


def reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, after which the host reads a value of its result."""

    def planted(*arguments: Any) -> Any:
        result = function(*arguments)
        tree_leaves(result)[-1].sum().item()
        return result

    return planted


@pytest.mark.parametrize("name", ["logits_of", "loss_of", "labels_and_top5", "update_weights"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_planted_a_read_is_found(
    precision: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model's output, in the loss, in the accuracy, in the update."""
    monkeypatch.setattr(step_module, name, reading(getattr(step_module, name)))
    with without_data(), pytest.raises(DataDependentOutputException):
        run(make_parts(precision))


def test_an_optimizer_without_a_fused_kernel_is_documented_to_wait() -> None:
    with without_data(), pytest.raises(DataDependentOutputException):
        run(make_parts("fp32", optimizer="rmsprop"))


# --- streams under torch's race detector: copies to the device, recordings and the trial step -----

FORMAT = DeviceFormat(CUDA, torch.float16, torch.channels_last)


def images() -> torch.Tensor:
    return torch.zeros(4, 8, 8, 3, dtype=torch.uint8).permute(0, 3, 1, 2)


def train_with_to_device(device: Device) -> None:
    """An epoch as the loop runs it. The loader fills memory again three batches later."""
    normalise = Normalise([0.5] * 3, [0.25] * 3, FORMAT)
    torch.cuda.synchronize()
    slots = [images() for _ in range(3)]

    def loader() -> Iterator[RawBatch]:
        for number in range(6):
            device.write_on_host(slots[number % len(slots)])
            yield RawBatch(
                slots[number % len(slots)], torch.zeros(4, dtype=torch.int64), number, epoch=0
            )

    for batch in to_device(loader(), normalise):
        (batch.images * 2).sum()
        del batch
    for slot in slots:  # of the next epoch
        device.write_on_host(slot)


def train_with_prefetcher(device: Device) -> None:
    loader = [(images(), torch.zeros(4, dtype=torch.int64), {"id": torch.zeros(4)})] * 6
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
    """As build.py: the model is converted on the current stream, tried on that of the recording,
    and then trained.

    Autograd's engine needs a device, so the trial ends with the loss.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    ).to(CUDA)
    model.to(memory_format=torch.channels_last)
    tried: list[tuple[int, bool]] = []
    hook = model.register_forward_pre_hook(
        lambda _, args: tried.append((len(args[0]), torch.backends.cudnn.benchmark))
    )
    recorder, cfg = Recorder(CUDA), Config(batch_size=4, data=DataConfig(image_size=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "train_step", forward_only)
        patch.setattr(build, "random_state_restored", lambda device: nullcontext())
        with recorder.on_stream(), kernel_selection(autotune=True):
            for compiled in (False, True):
                settings = StepSettings(BY_NAME["fp16"], compile=compiled)
                try_run(replace(cfg, compile=compiled), model, settings, FORMAT, 3)
    hook.remove()
    # A compiled model needs less memory than this eager step, and trains on another shape.
    assert tried == [(4, True), (2, False)], "images, and whether kernels are searched for them"
    for parameter in model.parameters():
        parameter.data.add_(1)


def forward_only(parts: StepParts, micro_batches: list[Batch]) -> None:
    with autocast(parts.precision, parts.device):
        parts.model(micro_batches[0].images)


def nothing(*arguments: object) -> None:
    return None


@pytest.fixture
def cuda() -> Iterator[Device]:
    with fake_cuda() as device:
        yield device


PROGRAMS = [
    train_with_to_device,
    train_with_prefetcher,
    record_and_replay,
    trial_on_the_recorders_stream,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_race(program: Callable[[Device], None], cuda: Device) -> None:
    program(cuda)
    assert cuda.errors == set()


def test_one_side_stream_for_all_epochs(cuda: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in PROGRAMS[:3] * 2:
        program(cuda)
    assert next(cuda.stream_ids) == 3, "0 is the default; one for copies and one for recordings"
    monkeypatch.setattr(
        data_device, "_side_stream", torch.cuda.Stream
    )  # planted: a stream per epoch is counted
    for _ in range(3):
        train_with_to_device(cuda)
    assert next(cuda.stream_ids) == 7


@pytest.mark.parametrize(
    ("program", "owner", "name", "fault", "message"),
    [
        *((program, Stream, "wait_event", nothing, "race: ") for program in PROGRAMS),
        *(
            (program, torch.Tensor, "record_stream", nothing, "freed without record_stream")
            for program in PROGRAMS[:2]
        ),
        (train_with_to_device, Event, "query", lambda event: True, "released while it is copied"),
        (train_with_to_device, Event, "synchronize", nothing, "released while it is copied"),
    ],
)
def test_planted_a_missing_wait_is_found(
    program: Any,
    owner: Any,
    name: str,
    fault: Any,
    message: str,
    cuda: Device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, fault)
    program(cuda)
    assert any(message in error for error in cuda.errors), cuda.errors


# --- every convolution of a zoo model gets channels_last half-precision input and weight ----------

SLOW = (
    "alexnet",
    "resnet18",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "mnasnet0_5",
)
SLOW += ("efficientnet_b0", "convnext_tiny")
HALF = (torch.float16, torch.bfloat16)


class Convolutions(TorchDispatchMode):
    """What each convolution got, and what it should not have got."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.problems = 0, set[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), words: Any = None
    ) -> Any:
        of_convolution = arguments[:2] if function is torch.ops.aten.convolution.default else ()
        for name, tensor in zip(("input", "weight"), of_convolution, strict=False):
            self.count += 1
            if tensor.dtype not in HALF or not tensor.is_cuda:
                self.problems.add(f"{name} is {tensor.dtype} on {tensor.device}")
            if classify(tensor) not in ("channels_last", "ambiguous"):
                self.problems.add(f"{name} is {classify(tensor)}")
        return function(*arguments, **(words or {}))


def problems_of(model: nn.Module, precision_name: str) -> set[str]:
    """Of one forward pass in training; the model is on cuda:0 and converted."""
    precision = BY_NAME[precision_name]
    cast_model(model, precision)
    pixels = torch.randn(2, 3, 64, 64, device=CUDA).to(
        precision.input_dtype, memory_format=torch.channels_last
    )
    with Convolutions() as convolutions, autocast(precision, CUDA):
        output = model(pixels)
    assert convolutions.count and output.dtype in HALF
    return convolutions.problems


@pytest.mark.parametrize(
    "name", ["squeezenet1_1", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_every_convolution_of_a_zoo_model(name: str) -> None:
    model = build_model(name, num_classes=10)
    convert(model)
    with fake_cuda(watched=False):
        model.to(CUDA)
        for precision in ("bf16", "fp16"):
            assert problems_of(model, precision) == set(), precision


class InFloat32(nn.Conv2d):
    """A module that leaves autocast."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            return super().forward(images.float()).mean((2, 3)).half()


def test_planted_a_leak_is_found() -> None:
    for model, problems in (
        (
            InFloat32(3, 8, 3),
            {"input is torch.float32 on cuda:0", "weight is torch.float32 on cuda:0"},
        ),
        (
            build_model("shufflenet_v2_x0_5", num_classes=10),
            {"input is contiguous"},
        ),  # its channel shuffle
    ):
        convert(model)
        with fake_cuda(watched=False):
            assert problems_of(model.to(CUDA), "fp16") == problems
