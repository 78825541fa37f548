"""cuDNN times its algorithms for a shape, which takes seconds: only for shapes that come again, and
only the ten that it expects to be the fastest."""

from typing import Any

import pytest
import torch

from cl_train.config.schema import Config
from cl_train.data.device import Batch, DeviceFormat
from cl_train.measure.timed_step import CHANNELS_LAST, TimedStep, Workload
from cl_train.step.make import StepSettings
from cl_train.step.precision import BY_NAME, kernel_selection
from cl_train.training import build
from cl_train.training.evaluation import outputs
from tests.cuda_without_gpu.fake_cuda import CUDA
from tests.networks import small

FP32 = BY_NAME["fp32"]
CUDNN = torch.backends.cudnn


def test_not_for_the_last_validation_batch_and_the_image_that_tells_the_classes() -> None:
    searches: list[tuple[int, bool]] = []  # the images of each call, and whether it searches
    model = small(3)
    model.register_forward_pre_hook(
        lambda _, inputs: searches.append((len(inputs[0]), CUDNN.benchmark))
    )
    batches = [Batch(torch.zeros(n, 3, 16, 16), torch.zeros(n)) for n in (4, 4, 3)]
    workload = Workload(4, (3, 16, 16), StepSettings(FP32), torch.device("cpu"))
    with kernel_selection(autotune=True):
        list(outputs(model, batches, FP32))
        assert searches == [(4, True), (4, True), (3, False)]
        searches.clear()
        TimedStep(model, CHANNELS_LAST, workload).warm_up()
        assert set(searches) == {(1, False), (4, True)}


def test_not_for_the_two_images_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled model needs less memory than this eager step, and trains on another shape."""
    tried: list[tuple[int, bool, int]] = []

    def note(model: Any, settings: Any, form: Any, shape: Any, num_classes: int) -> None:
        tried.append((shape[0], CUDNN.benchmark, CUDNN.benchmark_limit))

    monkeypatch.setattr(build, "try_model", note)
    monkeypatch.setattr(CUDNN, "benchmark_limit", 10, raising=False)  # torch's own
    form = DeviceFormat(CUDA, torch.float32, torch.channels_last)
    with kernel_selection(autotune=True):
        for is_compiled in (False, True):
            cfg = Config(batch_size=4, compile=is_compiled)
            build.try_run(cfg, small(3), StepSettings(FP32), form, 3)
    assert tried == [(4, True, 10), (2, False, 10)]
