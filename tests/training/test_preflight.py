"""The trial before the first step: what it refuses, that a crash is an error, and that it leaves no trace."""

import os
from typing import Any

import pytest
import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.data.device import DeviceFormat
from cl_train.memory_format.crashes import Crash
from cl_train.step.precision import resolve_precision
from cl_train.training import preflight
from cl_train.training.preflight import check_batch_fits, check_runs, trial_step
from cl_train.training.progress import TrainingFault
from tests.networks import small, too_few_outputs

CPU = torch.device("cpu")
FP32 = resolve_precision("fp32", CPU)
FORMAT = DeviceFormat(CPU, torch.float32, torch.channels_last)


class Fails(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raise self.error


class Aborts(nn.Module):
    """As a kernel does that reads beyond its input: in channels_last, while training or in eval mode."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.model, self.aborts_in_training = small(3), training

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not images.is_contiguous() and self.training == self.aborts_in_training:
            os.abort()
        return self.model(images)


def check(model: nn.Module, memory_format: torch.memory_format = torch.channels_last, **given: Any) -> None:
    settings = {"image_size": 32, "num_classes": 3, "training": True, "evaluation": True, **given}
    check_runs(model, FP32, DeviceFormat(CPU, torch.float32, memory_format), **settings)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (Fails(RuntimeError("the first line\nand the second")), ConfigError, "the first line and the second"),
        (Fails(torch.OutOfMemoryError("Tried 20.00 MiB. GPU 0 ...")), TrainingFault, r"20\.00 MiB.*batch_size=auto"),
        (too_few_outputs(3), ConfigError, r"\[2, 2\].* 3 classes"),
        (Aborts(training=True), Crash, r"SIGABRT in the forward pass of the model \(Aborts\)"),
        (Aborts(training=False), Crash, "SIGABRT"),
    ],
)
def test_what_cannot_train_is_refused(model: nn.Module, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check(model)


def test_only_what_the_run_does_is_tried() -> None:
    check(Aborts(training=False), evaluation=False)
    check(Aborts(training=True), training=False)
    check(Aborts(training=True), torch.contiguous_format)


def test_a_trial_leaves_no_trace() -> None:
    model = small(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = torch.get_rng_state()
    trial_step(model, FP32, FORMAT, (2, 3, 32, 32), 3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.parametrize(("compiled", "images"), [(False, 64), (True, 2)])
def test_the_whole_batch_is_tried_on_a_gpu_unless_the_compiled_model_needs_less(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, images: int
) -> None:
    shapes = []
    monkeypatch.setattr(preflight, "trial_step", lambda model, precision, form, shape, classes: shapes.append(shape))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    on_gpu = DeviceFormat(torch.device("cuda", 0), torch.float16, torch.channels_last)
    words: dict[str, Any] = {"batch_size": 64, "image_size": 32, "num_classes": 3, "compiled": compiled}
    check_batch_fits(small(3), resolve_precision("fp16", CPU), on_gpu, **words)
    assert shapes == [(images, 3, 32, 32)]
