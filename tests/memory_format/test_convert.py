"""Converting models: strides, identity of parameters, sharing, reversal, gradients."""

import copy
import warnings

import pytest
import torch
import torchvision
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import convert_conv2d_weight_memory_format
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.testing._internal.two_tensor import TwoTensor

from cl_train.config.validation import checked_config
from cl_train.data.device import Batch
from cl_train.errors import ConfigError
from cl_train.memory_format.convert import convert, layout_of
from cl_train.memory_format.layout import classify, model_memory_format, to_memory_format
from cl_train.step.precision import resolve_precision
from cl_train.system.distributed import Dist
from tests.networks import state_of
from tests.ranks import group_of_one

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.jit and of process groups
CHANNELS_LAST, CPU = torch.channels_last, torch.device("cpu")


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1))


def strides(model):
    return {name: tensor.stride() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(2, 3, 1, 1), "ambiguous"),
        (torch.empty(2, 3, 1, 1, memory_format=CHANNELS_LAST), "ambiguous"),
        (torch.empty(1, 3, 4, 4), "contiguous"),
        (torch.empty(2, 3, 4, 1), "contiguous"),
        (torch.empty(0, 3, 4, 4), "ambiguous"),
        (torch.empty(2, 8, 4, 4, memory_format=CHANNELS_LAST).chunk(2, dim=1)[1], "channels_last"),
        (torch.empty(2, 8, 4, 4).chunk(2, dim=1)[1], "contiguous"),
        (torch.empty(2, 4, 4, 3).permute(0, 3, 1, 2), "channels_last"),
        (torch.empty(2, 3, 1, 1).expand(2, 3, 4, 4), "other"),
        (torch.empty(4, 4, 3, 2).permute(3, 2, 1, 0), "other"),
        (torch.empty(3, 4, 4), "other"),
        (torch.empty(2, 3, 4, 4, 4), "contiguous"),
        (torch.empty(2, 3, 4, 4, 4, memory_format=torch.channels_last_3d), "channels_last"),
    ],
)
def test_classify(tensor, expected):
    assert classify(tensor) == expected


def with_scale():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 3))
    model.scale = nn.Parameter(torch.ones(2, 4, 5, 5))
    return model


ORIGINAL = "parametrizations.weight.original"
CONVERSIONS = [
    (convolutions(), {}, {"0.weight": (27, 1, 9, 3), "2.weight": (8, 1, 8, 8)}, "channels_last"),
    (
        with_scale(),
        {"mode": "conv"},
        {"0.weight": (27, 1, 9, 3), "1.weight": (36, 1, 12, 4)},
        "mixed",
    ),
    # told by its strides
    (nn.Sequential(nn.Conv2d(8, 8, 1)), {}, {"0.weight": (8, 1, 8, 8)}, "channels_last"),
    (
        nn.Sequential(nn.Conv3d(3, 8, 3), nn.Conv3d(8, 8, 1), nn.Conv2d(3, 8, 3)),
        {"memory_format": torch.channels_last_3d},
        {"0.weight": (81, 1, 27, 9, 3), "1.weight": (8, 1, 8, 8, 8), "2.weight": (27, 1, 9, 3)},
        "channels_last",
    ),
    (
        nn.Sequential(spectral_norm(nn.Conv2d(8, 8, 3)), weight_norm(nn.Conv2d(8, 8, 3))),
        {"mode": "select", "select": ["?"]},
        {
            f"0.{ORIGINAL}": (72, 1, 24, 8),
            f"1.{ORIGINAL}0": (1, 1, 1, 1),
            f"1.{ORIGINAL}1": (72, 1, 24, 8),
        },
        "channels_last",
    ),
]


@pytest.mark.parametrize(("model", "arguments", "changed", "memory_format"), CONVERSIONS)
def test_strides_of_converted_models(model, arguments, changed, memory_format):
    before, values = strides(model), copy.deepcopy(model.state_dict())
    assert model_memory_format(model) == "contiguous"
    report = convert(model, **arguments)
    assert strides(model) == before | changed
    assert {*report.changed} == {name for name in changed if changed[name] != before[name]}
    assert model_memory_format(model) == memory_format
    assert not convert(model, **arguments).changed
    layout = layout_of(model)
    assert convert(model, memory_format="contiguous").changed and strides(model) == before
    convert(model, layout)
    assert strides(model) == before | changed
    for name, value in model.state_dict().items():  # converting did not run the power iteration
        assert torch.equal(value, values[name]), name


def test_conversions_equal_those_of_torch():
    for mode, of_torch in (("full", nn.Module.to), ("conv", convert_conv2d_weight_memory_format)):
        model = nn.Sequential(torchvision.models.mobilenet_v2(), with_scale())
        converted = copy.deepcopy(model)
        convert(converted, mode)
        of_torch(model, memory_format=CHANNELS_LAST)
        assert strides(converted) == strides(model)


def test_conversion_keeps_parameters_hooks_requires_grad_and_gradients():
    model, calls = convolutions(), list[int]()
    model[2].weight.requires_grad_(False)
    model[0].register_forward_hook(lambda *_: calls.append(1))
    model[0].weight.register_hook(lambda _: calls.append(2))
    x = torch.randn(2, 3, 4, 4)
    model(x).sum().backward()
    parameters = list(model.parameters())
    convert(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert not model[2].weight.requires_grad
    assert model[0].weight.grad.stride() == model[0].weight.stride()
    model(x.to(memory_format=CHANNELS_LAST)).sum().backward()
    assert calls == [1, 2, 1, 2]


def test_conversion_keeps_ties_aliases_and_overlapping_parts_of_a_larger_memory():
    model = nn.ModuleDict({name: nn.Conv2d(3, 8, 3) for name in "abc"})
    model["b"].weight = model["a"].weight  # tied: one Parameter
    model["c"].weight = nn.Parameter(model["a"].weight.data)  # aliased: two Parameters, one memory
    convert(model)
    assert model["b"].weight is model["a"].weight
    assert model["c"].weight.data_ptr() == model["a"].weight.data_ptr()
    assert model["a"].weight.stride() == model["c"].weight.stride() == (27, 1, 9, 3)

    flat = torch.randn(1000)
    model = nn.ModuleDict({name: nn.Conv2d(3, 16, 3, bias=False) for name in "abcd"})
    model["a"].weight = nn.Parameter(flat[:288].view(32, 1, 3, 3))
    model["b"].weight = nn.Parameter(flat[:144].view(16, 1, 3, 3))
    model["c"].weight = nn.Parameter(flat[288:504].view(8, 3, 3, 3))  # follows them: apart
    model["d"].weight = nn.Parameter(flat[600:603].view(1, 3, 1, 1).expand(8, 3, 3, 3))
    report = convert(model)
    assert {*report.left} == {"a.weight", "b.weight", "d.weight"}
    assert report.changed == ["c.weight"] and model["c"].weight.stride() == (27, 1, 9, 3)
    assert model["a"].weight.data_ptr() == model["b"].weight.data_ptr() == flat.data_ptr()
    assert "shares its memory" in str(report)


def test_select_by_pattern_and_predicate():
    model = torchvision.models.resnet18()
    names = set(convert(model, "select", ["layer1", "*downsample*"]).changed)
    assert {"layer1.0.conv1.weight", "layer2.0.downsample.0.weight"} < names and len(names) == 7
    assert model_memory_format(model) == "mixed"
    grouped = torchvision.models.resnext50_32x4d()
    convert(grouped, "select", lambda _, module: getattr(module, "groups", 1) == 1)
    assert classify(grouped.layer1[0].conv2.weight) == "contiguous"
    assert classify(grouped.conv1.weight) == "channels_last"


def exported():
    return torch.export.export(nn.Conv2d(3, 8, 3), (torch.randn(2, 3, 8, 8),))


def with_weight(change):
    model = convolutions()
    model[0].weight = nn.Parameter(change(model[0].weight.data))
    return model


def around(kind):
    """A module of this type, which is not initialised: it would need a process group."""
    module = object.__new__(kind)
    nn.Module.__init__(module)
    return nn.Sequential(module)


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (convolutions, {"mode": "ful"}, "did you mean full"),
        (convolutions, {"mode": "select"}, "needs select="),
        (torchvision.models.resnet18, {"mode": "select", "select": ["layr1"]}, "mean layer1"),
        (convolutions, {"memory_format": torch.preserve_format}, "preserve_format"),
        (convolutions, {"memory_format": "channels_lst"}, "did you mean channels_last"),
        (exported, {"mode": "conv"}, "an exported program has no modules; use full"),
        (dict, {}, "dict"),
        (lambda: with_weight(lambda weight: TwoTensor(weight, weight.clone())), {}, "TwoTensor"),
        (lambda: around(nn.parallel.DistributedDataParallel), {}, "DistributedDataParallel"),
        (lambda: around(type("FSDPConv2d", (FSDPModule, nn.Conv2d), {})), {}, "FSDPConv2d"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_unchanged(build, arguments, message):
    model = build()
    before = [tensor.stride() for tensor in getattr(model, "parameters", tuple)()]
    with pytest.raises(ConfigError, match=message):
        convert(model, **arguments)
    assert before == [tensor.stride() for tensor in getattr(model, "parameters", tuple)()]


def test_images_have_strides_that_tell_their_format_and_scripted_convolutions_are_known():
    image = torch.empty(4, 1, 4, 4)
    assert to_memory_format(image, torch.contiguous_format) is image
    marked = to_memory_format(image, CHANNELS_LAST)
    assert to_memory_format(marked, torch.contiguous_format).stride() == (16, 16, 4, 1)
    scripted = nn.Sequential(torch.jit.script(nn.Conv2d(4, 4, 3)))
    assert convert(scripted, "conv").changed == ["0.weight"]
    compiled = torch.compile(nn.Sequential(nn.Conv2d(4, 4, 3)))
    assert convert(compiled).changed == ["0.weight"], "without the wrapper's part"


def test_gradients_have_the_strides_of_weights_and_are_views_of_ddps_bucket(tmp_path):
    settings = {"model": "tests.networks:small", "precision": "fp32", "channels_last": True}
    cfg = checked_config({**settings, "device": "cpu", "data": {"name": "synthetic"}})
    with group_of_one(tmp_path), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = state_of(cfg, resolve_precision("fp32", CPU), Dist(0, 2, CPU))
        images = torch.randn(4, 3, 32, 32).to(memory_format=CHANNELS_LAST)
        for _ in range(3):
            state.train_step([Batch(images, torch.arange(4) % 3)])
        state.parts.wrapped_model(images).sum().backward()
    assert not [item for item in caught if "strides" in str(item.message)]
    parameters = list(state.model.parameters())
    storages = {parameter.grad.untyped_storage().data_ptr() for parameter in parameters}
    assert len(storages) == 1
    assert all(parameter.grad.stride() == parameter.stride() for parameter in parameters)
    formats = [classify(parameter.grad) for parameter in parameters if parameter.dim() == 4]
    assert formats == ["channels_last"] * 2
