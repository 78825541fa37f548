"""The pass on noise: what it refuses, and that it leaves no trace."""

import pytest
import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.data.batch import DeviceFormat
from cl_train.step.precision import resolve_precision
from cl_train.training import preflight
from cl_train.training.nonfinite import TrainingFault
from cl_train.training.preflight import check_model_trains, trial_step
from tests.networks import small, too_few_outputs

CPU = torch.device("cpu")
FORMAT = DeviceFormat(CPU, torch.float32, torch.channels_last)


class OutOfMemory(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB. GPU 0 has ...")


def check(model: nn.Module, name: str = "tests.networks:small") -> None:
    precision = resolve_precision("fp32", CPU)
    check_model_trains(
        model, precision, FORMAT, model_name=name, batch_size=64, image_size=32, num_classes=3, compiled=False
    )


class TwoLines(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the first line\nand the second")


def test_the_whole_error_of_a_model_is_shown() -> None:
    with pytest.raises(ConfigError, match="the first line and the second"):
        check(TwoLines())


def test_a_batch_that_does_not_fit_is_named() -> None:
    with pytest.raises(TrainingFault, match=r"batch_size=64.*20\.00 MiB.*batch_size=auto"):
        check(OutOfMemory())


@pytest.mark.parametrize(("compiled", "images"), [(False, 64), (True, 2)])
def test_the_whole_batch_is_tried_on_a_gpu_unless_the_compiled_model_needs_less(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, images: int
) -> None:
    shapes = []
    monkeypatch.setattr(preflight, "trial_step", lambda model, precision, form, shape, classes: shapes.append(shape))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    on_gpu = DeviceFormat(torch.device("cuda", 0), torch.float16, torch.channels_last)
    words = {"model_name": "resnet18", "batch_size": 64, "image_size": 32, "num_classes": 3, "compiled": compiled}
    check_model_trains(small(3), resolve_precision("fp16", CPU), on_gpu, **words)  # type: ignore[arg-type]
    assert shapes == [(images, 3, 32, 32)]


def test_a_model_with_too_few_outputs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[2, 2\].* 3 classes"):
        check(too_few_outputs(3))
    check(too_few_outputs(3), "resnet18")  # the zoo's models are not run here


def test_a_trial_step_leaves_no_trace() -> None:
    model = small(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = torch.get_rng_state()
    trial_step(model, resolve_precision("fp32", CPU), FORMAT, (2, 3, 32, 32), 3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), numbers)
