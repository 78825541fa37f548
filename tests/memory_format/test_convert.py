"""Converting models: strides, identity of parameters, sharing, reversal; and the layouts of state that follows them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from cl_train.config.schema import ConfigError
from cl_train.memory_format.audit import audit
from cl_train.memory_format.convert import convert, has_borders
from cl_train.memory_format.layout import classify, layout_digest, model_memory_format, to_memory_format

CHANNELS_LAST = torch.channels_last


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(128, 5)
    )


def strides(model: nn.Module) -> dict[str, tuple[int, ...]]:
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
def test_classify(tensor: torch.Tensor, expected: str) -> None:
    assert classify(tensor) == expected


class WithScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.up = nn.ConvTranspose2d(8, 4, 3)
        self.scale = nn.Parameter(torch.ones(2, 4, 5, 5))


def test_conversions_equal_those_of_torch() -> None:
    model = small_model()
    report = convert(model)
    assert strides(model) == strides(small_model().to(memory_format=CHANNELS_LAST))
    assert report.changed == ["0.weight", "3.weight"] and report.ambiguous == ["3.weight"]
    assert model[0].weight.stride() == (27, 1, 9, 3) and report.moved_bytes == 8 * 3 * 3 * 3 * 4
    assert model_memory_format(model) == "channels_last"
    model = WithScale()
    assert convert(model, "conv").left == {"scale": "not selected"}
    assert strides(model) == strides(nn.utils.convert_conv2d_weight_memory_format(WithScale(), CHANNELS_LAST))
    assert model_memory_format(model) == "mixed"


def test_conversion_is_idempotent_and_reversible() -> None:
    model = torchvision.models.mobilenet_v2()
    before, values = strides(model), copy.deepcopy(model.state_dict())
    original = layout_digest(model)
    assert set(convert(model, "none").left) > {"features.0.0.weight"} and layout_digest(model) == original
    assert convert(model).changed and (digest := layout_digest(model)) != original
    assert not convert(model).changed and layout_digest(model) == digest
    assert convert(model, memory_format="contiguous").changed
    assert strides(model) == before and layout_digest(model) == original
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name
    assert convert(model, memory_format="channels_last").changed and layout_digest(model) == digest


def test_conversion_keeps_parameters_hooks_requires_grad_and_gradients() -> None:
    model = small_model()
    model[3].weight.requires_grad_(False)
    calls: list[int] = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    model[0].weight.register_hook(lambda _: calls.append(2))
    x = torch.randn(2, 3, 4, 4)
    model(x).sum().backward()
    parameters = list(model.parameters())
    convert(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert not model[3].weight.requires_grad
    assert model[0].weight.grad.stride() == model[0].weight.stride()
    model(x.to(memory_format=CHANNELS_LAST)).sum().backward()
    assert calls == [1, 2, 1, 2]


def test_conversion_keeps_ties_and_aliases_and_leaves_memory_shared_in_two_shapes() -> None:
    model = nn.Module()
    model.a, model.b, model.c, model.d = (nn.Conv2d(3, 8, 3) for _ in range(4))
    model.b.weight = model.a.weight  # tied: one Parameter
    model.c.weight = nn.Parameter(model.a.weight.data)  # aliased: two Parameters, one memory
    model.linear = nn.Linear(27, 6)
    model.linear.weight = nn.Parameter(model.d.weight.data[2:].view(6, 27))  # overlaps
    report = convert(model)
    assert model.b.weight is model.a.weight
    assert model.c.weight.data_ptr() == model.a.weight.data_ptr()
    assert model.a.weight.stride() == model.c.weight.stride() == (27, 1, 9, 3)
    assert report.left == {"d.weight": "shares its memory with a tensor of another shape"}
    assert "shares its memory" in str(report) and model.d.weight.is_contiguous()


def test_select_by_pattern_and_predicate() -> None:
    model = torchvision.models.resnet18()
    report = convert(model, "select", ["layer1", "*downsample*"])
    names = set(report.changed)
    assert "layer1.0.conv1.weight" in names and "layer2.0.downsample.0.weight" in names
    assert "conv1.weight" in report.left and len(names) == 7
    assert model_memory_format(model) == "mixed"
    grouped = torchvision.models.resnext50_32x4d()
    convert(grouped, "select", lambda _, module: getattr(module, "groups", 1) == 1)
    assert classify(grouped.layer1[0].conv2.weight) == "contiguous"
    assert classify(grouped.conv1.weight) == "channels_last"


def test_selected_modules_of_a_mixed_model_compute_contiguous_between_copies() -> None:
    model, seen = torchvision.models.resnet18(num_classes=5).eval(), {}
    images = torch.randn(2, 3, 64, 64).to(memory_format=CHANNELS_LAST)
    expected = model(images)
    convert(model, "mixed", ["layer4", "layer4.0", "layer1.0.conv?"])
    model = copy.deepcopy(model)  # as an EMA or a benchmark does
    layers = (model.layer1[0].conv2, model.layer1[1].conv2, model.layer4[0].conv1)
    assert [classify(layer.weight) for layer in layers] == ["contiguous", "channels_last", "contiguous"]
    for name in ("layer1.0.conv2", "layer1.1.conv2", "layer4.1", "avgpool"):

        def see(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            seen[name] = (classify(inputs[0]), classify(output))

        model.get_submodule(name).register_forward_hook(see, prepend=True)
    torch.testing.assert_close(model(images), expected)
    assert seen.pop("avgpool")[0] == "channels_last"
    assert seen == {
        "layer1.0.conv2": ("contiguous", "contiguous"),
        "layer1.1.conv2": ("channels_last", "channels_last"),
        "layer4.1": ("contiguous", "contiguous"),
    }
    assert has_borders(model) and not has_borders(model.layer2)
    with pytest.raises(ConfigError, match="leave out conversion=mixed"):
        audit(model, images, time=True)
    convert(model, "none")
    assert has_borders(model)
    convert(model, memory_format=torch.contiguous_format)
    assert not has_borders(model)
    model(images.contiguous())
    assert {formats for name, formats in seen.items() if name != "avgpool"} == {("contiguous", "contiguous")}


class Named(nn.Module):
    """A shared convolution, called by name, that appends to its caller's list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = Collecting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        self.second(found, image=self.first(found, image=x))
        return torch.cat(found)


class Collecting(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(4, 4, 1)

    def forward(self, found: list[torch.Tensor], image: torch.Tensor) -> torch.Tensor:
        self.seen = classify(image)
        found.append(super().forward(image))
        return found[-1]


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_shared_modules_lists_and_keyword_arguments_at_the_borders() -> None:
    model, images = Named(), torch.randn(2, 4, 6, 6).to(memory_format=CHANNELS_LAST)
    expected = model(images)
    convert(model, "mixed", ["second"])
    torch.testing.assert_close(model(images), expected)
    assert model.second.seen == "contiguous"
    script = nn.Sequential(torch.jit.script(nn.Conv2d(4, 4, 3)))
    for changed, arguments, message in (
        (script, {"select": ["0"]}, "scripted"),
        (model, {"select": ["first"], "memory_format": "contiguous"}, "must be channels_last"),
    ):
        before = layout_digest(changed)
        with pytest.raises(ConfigError, match=message):
            convert(changed, "mixed", **arguments)
        assert layout_digest(changed) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "ful"}, "did you mean full"),
        ({"mode": "select"}, "needs select="),
        ({"mode": "mixed", "select": ["layr1"]}, "no such module; did you mean layer1"),
        ({"mode": "select", "select": ["layr1"]}, "no such module; did you mean layer1"),
        ({"memory_format": torch.preserve_format}, "preserve_format"),
        ({"memory_format": "channels_lst"}, "did you mean channels_last"),
    ],
)
def test_wrong_conversions_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(torchvision.models.resnet18(), **arguments)


def with_weight(change: Any) -> nn.Module:
    model = small_model()
    model[0].weight = nn.Parameter(change(model[0].weight.data))
    return model


def mesh() -> Any:
    return init_device_mesh("cpu", (1,))


def partly_sharded() -> nn.Module:
    model = nn.Sequential(small_model(), nn.Conv2d(3, 8, 3))
    fully_shard(model[1], mesh=mesh())
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (dict, "dict"),
        (lambda: nn.Sequential(nn.parallel.DistributedDataParallel(small_model())), "DistributedDataParallel"),
        (partly_sharded, "FSDP"),
        (lambda: with_weight(lambda weight: distribute_tensor(weight, mesh())), "DTensor"),
        (lambda: with_weight(lambda weight: TwoTensor(weight, weight.clone())), "TwoTensor"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_unchanged(build: Any, reason: str, tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=reason):
            convert(build())
    finally:
        torch.distributed.destroy_process_group()


def test_parametrised_weights_are_converted_and_stay_parametrised() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 3)))
    weight = model[0].parametrizations.weight
    u = weight[0]._u.clone()
    report = convert(model, "conv")
    assert report.changed == ["0.parametrizations.weight.original"]
    assert torch.equal(weight[0]._u, u)  # converting did not run the power iteration
    assert weight.original.stride() == (72, 1, 24, 8)
    selected = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3)))
    assert convert(selected, "select", ["0"]).changed


def test_only_ambiguous_weights_and_images_are_told_by_their_strides() -> None:
    model, image = nn.Sequential(nn.Conv2d(8, 8, 1)), torch.empty(4, 1, 4, 4)
    assert model_memory_format(model) == "contiguous" and to_memory_format(image, torch.contiguous_format) is image
    convert(model)
    assert model_memory_format(model) == "channels_last"
    marked = to_memory_format(image, CHANNELS_LAST)
    assert to_memory_format(marked, torch.contiguous_format).stride() == (16, 16, 4, 1)


def test_a_convolution_that_is_no_module_is_not_passed_over_in_silence() -> None:
    program = torch.export.export(nn.Conv2d(3, 8, 3), (torch.randn(2, 3, 8, 8),))
    with pytest.raises(ConfigError, match="conversion=conv: an exported program has no modules; use full"):
        convert(program, "conv")
    assert "finds none: use full" in str(convert(program.module(), "conv"))


def test_three_dimensional_convolutions() -> None:
    model = nn.Sequential(nn.Conv3d(3, 8, 3), nn.Conv3d(8, 8, 1), nn.Conv2d(3, 8, 3))
    report = convert(model, memory_format=torch.channels_last_3d)
    assert model[0].weight.stride() == (81, 1, 27, 9, 3)
    assert model[2].weight.stride() == (27, 1, 9, 3)
    assert report.ambiguous == ["1.weight"]
    assert model_memory_format(model) == "channels_last"
