"""No part of a step reads a value of the device: on tensors without data every such read raises."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from cl_train.data.device import Batch
from cl_train.memory_format.model_call import BufferBackup
from cl_train.step import train_step as step_module
from cl_train.step.cuda_graph import GraphedStep, Recorder
from cl_train.step.optim import set_lr
from cl_train.step.precision import BY_NAME, EMA
from cl_train.step.train_step import Loss, StepParts, StepResult, train_step
from tests.cuda_without_gpu.fake_cuda import without_data
from tests.networks import small
from tests.step.test_train_step import make_parts

CPU = torch.device("cpu")
LOSSES = [
    (Loss(), torch.int64),
    (Loss(label_smoothing=0.1), torch.int64),
    (Loss("bce", 0.1, bce_threshold=0.2), torch.float32),  # MixUp's targets
]


def parts_of(precision: str, optimizer: str = "sgd", clip_norm: float | None = None, loss: Loss = Loss()) -> StepParts:  # noqa: B008
    parts = make_parts(precision, optimizer=optimizer, clip_norm=clip_norm)
    return StepParts(**{**vars(parts), "loss": loss})


def batch_of(parts: StepParts, targets: torch.dtype = torch.int64) -> Batch:
    images = torch.randn(4, 3, 32, 32).to(parts.precision.input_dtype, memory_format=torch.channels_last)
    return Batch(images, torch.rand(4, 3) if targets == torch.float32 else torch.zeros(4, dtype=targets))


def run(parts: StepParts, step: Callable[[list[Batch]], StepResult], micro_steps: int, targets: torch.dtype) -> None:
    for _ in range(2):
        set_lr(parts.optimizer, 0.1)
        step([batch_of(parts, targets) for _ in range(micro_steps)])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", BY_NAME)
def test_a_step_never_waits(precision: str, optimizer: str) -> None:
    """With and without clipping, in one and two micro-steps, with each loss."""
    for (clip_norm, micro_steps), (loss, targets) in zip(((None, 1), (1.0, 2), (None, 2)), LOSSES, strict=True):
        with without_data():
            parts = parts_of(precision, optimizer, clip_norm, loss)
            run(parts, lambda batches, parts=parts: train_step(parts, batches), micro_steps, targets)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16_o2"])
def test_what_surrounds_a_step_does_not_wait_either(precision: str) -> None:
    """The average of the weights, the statistics at a log line, and the step that will be a CUDA graph."""
    with without_data():
        parts = parts_of(precision)
        ema = EMA(parts.model, 0.9)
        backup = BufferBackup(parts.model, ema.module)
        run(parts, GraphedStep(parts, Recorder(CPU), warm_up=1), 2, torch.int64)
        ema.update(parts.masters.state_dict())
        backup.settle(torch.zeros(()) > 0)


def test_an_optimizer_without_a_fused_kernel_is_documented_to_wait() -> None:
    with without_data(), pytest.raises(DataDependentOutputException):
        parts = parts_of("fp32", "rmsprop")
        run(parts, lambda batches: train_step(parts, batches), 1, torch.int64)


def plant_in_accuracy(parts: StepParts, patch: pytest.MonkeyPatch) -> StepParts:
    best = step_module.labels_and_top5
    patch.setattr(step_module, "labels_and_top5", lambda logits, y: best(logits[: int(logits.abs().sum().item())], y))
    return parts


def plant_in_model(parts: StepParts, patch: pytest.MonkeyPatch) -> StepParts:
    class Peeking(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images if images.sum() > 0 else -images

    return StepParts(**{**vars(parts), "model": nn.Sequential(Peeking(), small(3))})


def plant_in_loss(parts: StepParts, patch: pytest.MonkeyPatch) -> StepParts:
    return StepParts(**{**vars(parts), "loss": lambda logits, y: logits.sum() / float(logits.detach().max())})


def plant_in_update(parts: StepParts, patch: pytest.MonkeyPatch) -> StepParts:
    update = step_module.update_weights
    patch.setattr(step_module, "update_weights", lambda parts: torch.tensor(update(parts).tolist()))
    return parts


@pytest.mark.parametrize("plant", [plant_in_accuracy, plant_in_model, plant_in_loss, plant_in_update])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_planted_a_read_is_found(
    precision: str,
    plant: Callable[[StepParts, pytest.MonkeyPatch], StepParts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with without_data(), pytest.raises(DataDependentOutputException):
        parts = plant(parts_of(precision), monkeypatch)
        run(parts, lambda batches: train_step(parts, batches), 1, torch.int64)
