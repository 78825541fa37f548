"""The models of PyTorch's tutorial "Channels Last Memory Format"; the one-liners of our page."""

import contextlib
import io
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from cl_train.measure import zoo
from cl_train.measure.audit import audit
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import model_memory_format


def test_the_tutorials_list_has_28_models_that_torchvision_knows():
    assert len(set(zoo.TUTORIAL)) == 28
    assert set(zoo.TUTORIAL) <= set(torchvision.models.list_models())


# What the tutorial names first as its losses; the operators that lose the layout in each model.
FORWARD_LOSSES = {"alexnet": {"clone"}, "vgg": {"clone"}, "shufflenet": {"clone", "cat"}}


# One of each family.
MODELS = "alexnet mnasnet0_5 mobilenet_v2 resnet18 resnext50_32x4d shufflenet_v2_x0_5"
MODELS += " squeezenet1_0 vgg11"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS.split())
def test_a_model_of_each_family_is_converted_and_loses_only_what_is_known(name):
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
