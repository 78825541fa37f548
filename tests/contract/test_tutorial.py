"""PyTorch's tutorial "Channels Last Memory Format", section by section: what it states, as
assertions.
"""

import contextlib
import io
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from cl_train.measure import zoo
from cl_train.measure.audit import audit
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import classify, model_memory_format, to_memory_format

N, C, H, W = 10, 3, 32, 32
CONTIGUOUS = (3072, 1024, 32, 1)
CHANNELS_LAST = (3072, 1, 96, 3)


def channels_last():
    return torch.empty(N, C, H, W).to(memory_format=torch.channels_last)


# What is channels last


def test_a_10x3x16x16_batch_has_the_stated_strides():
    x = torch.empty(10, 3, 16, 16, memory_format=torch.channels_last)
    assert x.stride() == (768, 1, 48, 3)
    assert classify(x) == "channels_last"


def test_pixels_are_stored_one_after_the_other():
    x = torch.arange(2 * 3 * 4 * 4.0).view(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert x.flatten().storage_offset() == 0
    memory = torch.as_strided(x, (6,), (1,))
    # R G B of pixel 0, R G B of pixel 1
    assert memory.tolist() == [0.0, 16.0, 32.0, 1.0, 17.0, 33.0]


# Memory format API


def test_each_way_to_make_a_tensor_has_the_stated_strides():
    classic, x = torch.empty(N, C, H, W), channels_last()
    back = torch.contiguous_format
    ways_back = (x.to(memory_format=back), x.contiguous(memory_format=back))
    for number, tensor in enumerate((classic, *ways_back, to_memory_format(x, back))):
        assert tensor.stride() == CONTIGUOUS, number
    made = torch.empty(N, C, H, W, memory_format=torch.channels_last)
    alternatives = (
        classic.contiguous(memory_format=torch.channels_last),
        to_memory_format(classic, torch.channels_last),
    )
    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.int32)
    kinds = [x.to(kind) for kind in ("meta", *dtypes)]
    alike = (torch.empty_like, torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like)
    preserved = (x.clone(), x.float(), *kinds, *(like(x) for like in alike))
    for number, tensor in enumerate((x, made, *alternatives, *preserved)):
        assert tensor.stride() == CHANNELS_LAST, number
    assert x.shape == (10, 3, 32, 32) and classify(x) == "channels_last"
    assert x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


@pytest.mark.parametrize(
    ("shape", "contiguous_gives", "to_gives"),
    [
        ((4, 1, 4, 4), (16, 16, 4, 1), (16, 1, 4, 1)),
        ((4, 8, 1, 1), (8, 1, 1, 1), (8, 1, 8, 8)),
        ((4, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
    ],
    ids=["N1HW", "NC11", "N111 cannot be marked"],
)
def test_one_channel_or_pixel_is_both_formats_at_once_and_only_to_restrides_it(
    shape, contiguous_gives, to_gives
):
    x = torch.empty(shape)
    assert classify(x) == "ambiguous" and x.stride() == contiguous_gives
    assert x.is_contiguous(memory_format=torch.channels_last) and x.is_contiguous()
    assert x.contiguous(memory_format=torch.channels_last).stride() == contiguous_gives
    assert x.to(memory_format=torch.channels_last).stride() == to_gives
    assert to_memory_format(x, torch.channels_last).stride() == to_gives


def test_permute_does_not_carry_the_format_where_it_is_ambiguous():
    plain = torch.empty(4, 5, 6, 3).permute(0, 3, 1, 2)
    assert plain.stride() == torch.empty(4, 3, 5, 6, memory_format=torch.channels_last).stride()
    one_channel = torch.empty(4, 4, 4, 1).permute(0, 3, 1, 2)
    assert classify(one_channel) == "ambiguous"
    contiguous = torch.empty(4, 1, 4, 4).permute(0, 2, 3, 1).permute(0, 3, 1, 2)
    assert contiguous.stride() == (16, 16, 4, 1)  # not what `to` would give
    assert contiguous.to(memory_format=torch.channels_last).stride() == (16, 1, 4, 1)


def test_pointwise_operators_preserve():
    x = channels_last()
    for z in (x + x.clone(), x * 2, x.relu(), torch.where(x > 0, x, -x), x.add_(1)):
        assert z.stride() == CHANNELS_LAST


@pytest.mark.parametrize("weight_last", [False, True])
@pytest.mark.parametrize("input_last", [False, True])
def test_convolutions_are_contiguous_only_where_all_inputs_are(weight_last, input_last):
    model = nn.Conv2d(8, 4, 3)
    x = torch.randint(1, 10, (2, 8, 4, 4), dtype=torch.float32, requires_grad=True)
    if weight_last:
        convert(model)
    if input_last:
        x = x.to(memory_format=torch.channels_last)
    expected = "channels_last" if weight_last or input_last else "contiguous"
    assert classify(model(x)) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_preserves_and_cudnn_convolution_in_half_precision():
    assert channels_last().cuda().stride() == CHANNELS_LAST
    model = nn.Conv2d(8, 4, 3).cuda().half().to(memory_format=torch.channels_last)
    x = torch.randint(1, 10, (2, 8, 4, 4), dtype=torch.float32, requires_grad=True)
    x = x.to(device="cuda", memory_format=torch.channels_last, dtype=torch.float16)
    assert model(x).is_contiguous(memory_format=torch.channels_last)


# Converting existing models


def test_any_model_is_converted_and_propagates_the_format():
    seen = {}
    model = torchvision.models.resnet18()
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.MaxPool2d):
            module.register_forward_hook(
                lambda _, __, out, name=name: seen.__setitem__(name, classify(out))
            )
    assert convert(model).memory_format == torch.channels_last
    model(torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last))
    assert len(seen) == 41 and set(seen.values()) == {"channels_last"}


def test_converted_weights_restore_the_format_of_a_contiguous_input():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    convert(model, "conv")
    assert classify(model(torch.randn(2, 3, 8, 8))) == "channels_last"


def test_the_checker_raised_at_the_first_loss_and_the_audit_tells_all():
    """What the tutorial's `check_wrapper` stopped at is one of the losses in the audit."""
    layers = [(nn.Conv2d(channels, 8, 3), nn.InstanceNorm2d(8)) for channels in (3, 8)]
    model = nn.Sequential(*layers[0], *layers[1])
    convert(model)
    x = torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)
    lost = audit(model, x).of("lost", "forward")
    assert {call.module for call in lost} == {"1", "3"}
    with Checker() as checker:
        model(x)
    assert checker.lost[0] == "instance_norm"


class Checker(TorchFunctionMode):
    """The tutorial's idea, without its patches: the functions whose output is no longer
    channels_last.
    """

    def __init__(self):
        super().__init__()
        self.lost = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        was = any(isinstance(a, torch.Tensor) and classify(a) == "channels_last" for a in args)
        is_image = isinstance(result, torch.Tensor) and result.dim() == 4
        if was and is_image and classify(result) == "contiguous":
            self.lost.append((resolve_name(function) or str(function)).rpartition(".")[2])
        return result


def test_the_tutorials_list_has_28_models_that_torchvision_knows():
    assert len(set(zoo.TUTORIAL)) == 28
    assert set(zoo.TUTORIAL) <= set(torchvision.models.list_models())


# What the tutorial names first as its losses; the operators that lose the layout in each of the 28.
FORWARD_LOSSES = {"alexnet": {"clone"}, "vgg": {"clone"}, "shufflenet": {"clone", "cat"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.TUTORIAL)
def test_the_28_models_are_converted_and_lose_only_what_is_known(name):
    torch.manual_seed(0)
    with torch.device("meta"):
        model = torchvision.models.get_model(name, num_classes=10)
    model = _without_large_layers(model).to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            nn.init.normal_(tensor, std=0.02) if tensor.dim() > 1 else nn.init.ones_(tensor)
    convert(model)
    assert model_memory_format(model) == "channels_last"
    x = torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last)
    report = audit(model, x, name=name)
    expected = next((lost for family, lost in FORWARD_LOSSES.items() if family in name), set())
    found = {call.operator.split(".")[1] for call in report.of("lost", "forward")}
    assert found == expected, report
    assert report.totals["kept"] > 10


def _without_large_layers(model):
    """AlexNet's and VGG's first Linear layers, 100 million weights without a layout, made thin."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and child.in_features * child.out_features > 1e6:
                inputs, outputs = child.in_features, child.out_features
                thin = nn.Linear(inputs, 8) if inputs > 4096 else nn.Linear(8, outputs)
                setattr(module, name, thin)
    return model


# docs/channels_last.md


def test_the_one_liners_of_the_documentation_print_what_it_says():
    page = Path(__file__).resolve().parents[2] / "docs/channels_last.md"
    lines = page.read_text().splitlines()
    quoted = [(line, after) for line, after in pairwise(lines) if line.startswith("    python -c ")]
    assert len(quoted) >= 4
    for line, after in quoted:
        code = line.partition('"')[2].rpartition('"')[0]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, {})
        if after.startswith("    # "):
            shown = after.removeprefix("    # ").removesuffix(" ...")
            assert out.getvalue().startswith(shown), line
