"""cuDNN times its algorithms for a shape, which takes seconds: only for shapes that come again."""

import pytest
import torch
from torch import nn

from cl_train.data.device import Batch
from cl_train.measure.timed_step import CHANNELS_LAST, TimedStep, Workload
from cl_train.step.make import StepSettings
from cl_train.step.precision import BY_NAME, kernel_selection
from cl_train.training.evaluation import outputs
from tests.networks import small

CPU = torch.device("cpu")


@pytest.fixture
def model() -> nn.Module:
    """Notes the images of each call, and whether kernels are searched for them."""
    network = small(3)
    network.searches: list[tuple[int, bool]] = []  # type: ignore[misc]

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        network.searches.append((len(inputs[0]), torch.backends.cudnn.benchmark))

    network.register_forward_pre_hook(note)
    return network


def test_not_for_the_last_validation_batch(model: nn.Module) -> None:
    batches = [Batch(torch.zeros(n, 3, 16, 16), torch.zeros(n)) for n in (4, 4, 3)]
    with kernel_selection(autotune=True):
        list(outputs(model, batches, BY_NAME["fp32"]))
    assert model.searches == [(4, True), (4, True), (3, False)]


def test_not_for_the_image_that_tells_the_classes(model: nn.Module) -> None:
    workload = Workload(4, (3, 16, 16), StepSettings(BY_NAME["fp32"]), CPU)
    with kernel_selection(autotune=True):
        TimedStep(model, CHANNELS_LAST, workload).warm_up()
    assert set(model.searches) == {(1, False), (4, True)}
