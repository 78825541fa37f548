"""Zoo models on CUDA tensors without data: every convolution gets channels_last half-precision input and weight."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import classify
from cl_train.models.sources import build_model
from cl_train.step.precision import autocast, cast_model, resolve_precision
from tests.cuda_without_gpu.fake_cuda import CUDA, fake_cuda

QUICK = ("squeezenet1_1", "alexnet", "resnet18")
SLOW = (
    *("mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "efficientnet_b0", "mnasnet0_5", "regnet_y_400mf"),
    "convnext_tiny",
)
HALF = (torch.float16, torch.bfloat16)


class Convolutions(TorchDispatchMode):
    """What each convolution got that it should not get."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.problems = 0, set[str]()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), words: Any = None) -> Any:
        if function is torch.ops.aten.convolution.default:
            self.count += 1
            for name, tensor in zip(("input", "weight"), arguments, strict=False):
                if tensor.dtype not in HALF or not tensor.is_cuda:
                    self.problems.add(f"{name} is {tensor.dtype} on {tensor.device}")
                if classify(tensor) not in ("channels_last", "ambiguous"):
                    self.problems.add(f"{name} is {classify(tensor)}")
        return function(*arguments, **(words or {}))


def problems_of(model: nn.Module, precision_name: str) -> set[str]:
    """Of one forward pass in training; the model is on cuda:0 and converted."""
    precision = resolve_precision(precision_name, CUDA)
    cast_model(model, precision)
    images = torch.randn(2, 3, 64, 64, device=CUDA).to(precision.input_dtype, memory_format=torch.channels_last)
    with Convolutions() as convolutions, autocast(precision, CUDA):
        output = model(images)
    assert convolutions.count and output.dtype in HALF
    return convolutions.problems


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_convolution_of_a_zoo_model(name: str) -> None:
    model = build_model(name, num_classes=10)
    convert(model)
    with fake_cuda(watched=False):
        model.to(CUDA)
        for precision in ("bf16", "fp16"):
            assert problems_of(model, precision) == set(), precision


class LosesPrecision(nn.Module):
    """A model that leaves autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            return self.second(self.first(images.float())).mean((2, 3)).half()


class LosesLayout(LosesPrecision):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(images).contiguous()).mean((2, 3))


@pytest.mark.parametrize(
    ("planted", "expected"),
    [(LosesPrecision, {"input is torch.float32 on cuda:0", "weight is torch.float32 on cuda:0"}),
     (LosesLayout, {"input is contiguous"}),
     (lambda: build_model("shufflenet_v2_x0_5", num_classes=10), {"input is contiguous"})],  # its channel shuffle
)  # fmt: skip
def test_planted_a_leak_is_found(planted: Callable[[], nn.Module], expected: set[str]) -> None:
    model = planted()
    convert(model)
    with fake_cuda(watched=False):
        assert problems_of(model.to(CUDA), "fp16") == expected
