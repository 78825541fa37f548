"""Each operator call is compared by itself: planted kernels are found and named, whatever stands
behind them; sound ones agree in every precision.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cl_train.measure.kernels import KernelCheck, compared, limit_by_shaken
from cl_train.measure.parity import check_parity
from tests.networks import video


class Planted(TorchDispatchMode):
    """`fault` of a result of `operator`, where it reads an image in channels_last."""

    def __init__(self, operator, fault, result=0, when=lambda image: True):
        super().__init__()
        self.operator, self.fault, self.result, self.when = operator, fault, result, when

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        images = [one for one in args if isinstance(one, torch.Tensor) and one.dim() > 3]
        if self.operator in str(function) and any(one.dtype == torch.bfloat16 for one in images):
            returned = computed_in_fp32(function, args)
        else:
            returned = function(*args, **(kwargs or {}))
        converted = [one for one in images if not one.is_contiguous()]
        if self.operator in str(function) and any(map(self.when, converted)):
            results = returned if isinstance(returned, tuple) else (returned,)
            if (right := results[self.result]) is not None:
                right.copy_(self.fault(right))
        return returned


def computed_in_fp32(function, args):
    """Rounded once, as not every CPU's own bf16 kernel is: its error would hide a fault of 2 %."""
    floats = (one.float() if isinstance(one, torch.Tensor) else one for one in args)
    returned = function(*floats)
    if isinstance(returned, torch.Tensor):
        return returned.bfloat16()
    return tuple(None if one is None else one.bfloat16() for one in returned)


class Branch(nn.Module):
    """A residual branch behind a scale of zero, as timm initialises it."""

    def __init__(self, channels=8):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        nn.init.zeros_(self.norm.weight)

    def forward(self, images):
        return images + F.relu(self.norm(self.conv(images)))


def network():
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(3, 2, 1)
    return nn.Sequential(*stem, Branch(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


FAULTS = {
    "flipped": lambda tensor: tensor.flip(-1),
    "shifted": lambda tensor: tensor.roll(1, -1),
    "last column": lambda tensor: F.pad(tensor[..., :-1], (0, 1)),
    "1.02": lambda tensor: 1.02 * tensor,
    "1.6": lambda tensor: 1.6 * tensor,
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("operator", "named"),
    [
        ("convolution.default", "convolution (forward) of 0 (Conv2d)"),
        ("convolution_backward", "convolution_backward (backward) of 4.conv (Conv2d)"),
        ("avg_pool2d_backward", "avg_pool2d_backward (backward) of 3 (AvgPool2d)"),
    ],
)
def test_a_wrong_kernel_is_named_also_behind_a_scale_of_zero(operator, named, fault, precision):
    with Planted(operator, FAULTS[fault]):
        report = check_parity(network(), image_size=32, precision=precision)
    assert report.passed is False and report.first_divergence.startswith(named)


@pytest.mark.parametrize(
    ("operator", "result", "named"),
    [
        ("convolution_backward", 1, "convolution_backward (backward) of 4.conv"),  # of the weight
        ("add.Tensor", 0, "add (forward) of 4"),
        ("threshold_backward", 0, "threshold_backward (backward) of 4"),
    ],
)
def test_every_result_of_a_call_counts(operator, result, named):
    with Planted(operator, lambda tensor: 1.02 * tensor, result):
        report = check_parity(network(), image_size=32)
    assert report.passed is False and report.first_divergence.startswith(named)


@pytest.mark.parametrize(
    ("when", "given", "is_found"),
    [
        (lambda image: len(image) % 2 == 1, {"batch_size": 4}, False),
        (lambda image: len(image) % 2 == 1, {"batch_size": 3}, True),
        (lambda image: image.shape[-1] > 48, {"image_size": 48}, False),
        (lambda image: image.shape[-1] > 48, {"image_size": 64}, True),
        (lambda image: image.dtype == torch.bfloat16, {"precision": "fp32"}, False),
        (lambda image: image.dtype == torch.bfloat16, {"precision": "bf16"}, True),
        (lambda image: not torch.is_grad_enabled(), {"mode": "infer"}, True),
    ],
)
def test_the_batch_the_size_and_the_precision_asked_for_are_compared(when, given, is_found):
    with Planted("convolution.default", FAULTS["shifted"], when=when):
        report = check_parity(network(), **{"image_size": 32} | given)
    assert report.passed is not is_found


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_wrong_convolution_of_videos_is_found(is_wrong):
    with Planted("convolution.default", FAULTS["shifted"], when=lambda video: is_wrong):
        report = check_parity(video(10), image_size=(3, 4, 8, 8), precision="bf16")
    assert report.passed is not is_wrong
    assert not is_wrong or "of 0 (Conv3d)" in str(report)


def test_statistics_that_an_operator_writes_unasked_count():
    class Biased(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            returned = function(*args, **(kwargs or {}))
            if "native_batch_norm.default" in str(function) and not args[0].is_contiguous():
                args[4].mul_(0.999)  # the running variance
            return returned

    with Biased():
        report = check_parity(network(), image_size=16)
    assert report.passed is False and "native_batch_norm (forward)" in report.first_divergence


def test_a_single_number_may_be_exact_by_chance():
    """As the sum that is the gradient of a scale, of one element: timm's hgnetv2 in bf16."""
    one, limit = {"sum": torch.ones(1)}, partial(limit_by_shaken, longest=10_000)
    error, relative = compared({"sum": torch.full((1,), 1.0003)}, one, one, limit)["sum"]
    assert error < 1 and relative == pytest.approx(3e-4, 0.01)
    assert compared({"sum": torch.full((1,), 1.02)}, one, one, limit)["sum"][0] > 1


OPERATORS = {
    "in place": lambda x: x.add_(1).relu_(),
    "out": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "several results": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "list of tensors": lambda x: torch.cat([x, x.flip(3)], 1),
    "gaps in memory": lambda x: x[:, 1:5] * 2,
    "expanded": lambda x: x + x[:, :1].expand_as(x),
    "random": lambda x: F.dropout(x, 0.5, True),
    "random in place": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "whole numbers": lambda x: (x > 0).long(),
    "complex": lambda x: torch.fft.rfft2(x),
    "not finite": lambda x: (x - x) / (x - x),
    "one tensor twice": lambda x: x.mul_(x),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_calls_of_any_form_are_replayed_and_leave_no_trace(name):
    images = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    torch.manual_seed(1)
    expected, check = OPERATORS[name](images.clone()), KernelCheck()
    torch.manual_seed(1)
    with check.watching():
        found = OPERATORS[name](images.clone())
    assert not check.wrong and not check.unchecked and check.calls
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
