"""FLOPs equal the published figures; shares follow from them."""

import pytest
import torch
import torchvision

from cl_train.step.precision import BY_NAME
from cl_train.step.utilisation import (
    data_sheet_tflop_per_s,
    describe,
    flops_of,
    utilisation,
)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "squeezenet1_1"])
def test_flops_are_the_published_ones(name):
    weights = next(iter(torchvision.models.get_model_weights(name)))
    size = weights.transforms().crop_size[0]
    with torch.device("meta"):
        model, image = torchvision.models.get_model(name).eval(), torch.empty(1, 3, size, size)
    published = 2e9 * weights.meta["_ops"]  # billions of multiply-adds, rounded
    assert flops_of(lambda: model(image)) == pytest.approx(published, 0.02)


@pytest.mark.parametrize(
    ("name", "frozen", "passes"),
    [
        ("resnet18", (), 2.93),  # no gradient of the images: the first convolution counts twice
        ("resnet18", ("conv1", "bn1", "layer"), 1.0),
        ("resnext50_32x4d", (), 2.97),  # groups
        ("resnet18", ("conv1", "bn1", "layer1"), 2.33),
    ],
)
def test_a_backward_pass_counts_as_far_as_it_runs(name, frozen, passes):
    with torch.device("meta"):
        model, images = torchvision.models.get_model(name), torch.empty(2, 3, 64, 64)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not parameter_name.startswith(frozen or ("none",)))
    forward = flops_of(lambda: model(images))
    step = flops_of(lambda: model(images).sum().backward(), gradients=True)
    assert step / forward == pytest.approx(passes, abs=0.05)


def test_shares_are_of_the_data_sheet_where_it_is_known(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    arguments = 8.0, 24.0, 5000.0, BY_NAME["fp16"]
    trained = utilisation(*arguments, torch.device("cuda"))
    assert trained["tflop_per_s"] == 120
    assert (trained["data_sheet_tflop_per_s"], trained["data_sheet_pct"]) == (312, 38.46)
    assert describe(trained) == "8 GFLOP per image, 120 TFLOP/s: 38 % of the data sheet's peak"
    inferred = utilisation(8.0, 8.0, 7500.0, BY_NAME["tf32"], torch.device("cuda"))
    assert (inferred["data_sheet_tflop_per_s"], inferred["data_sheet_pct"]) == (156, 38.46)
    on_cpu = utilisation(*arguments, torch.device("cpu"))
    assert describe(on_cpu) == "8 GFLOP per image, 120 TFLOP/s"


@pytest.mark.parametrize(
    ("name", "fp16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5, 66.9),
        ("NVIDIA H100 PCIe", 756.5, 51.2),
        ("NVIDIA GH200 480GB", 989.5, 66.9),
        ("NVIDIA B200", 2250.0, 75.0),
        ("NVIDIA A10G", 70.0, 35.0),
        ("Tesla V100-PCIE-32GB", 112.0, 14.0),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None, None),
        ("NVIDIA A1000", None, None),
    ],
)
def test_the_peak_is_that_of_the_whole_gpu_by_name(name, fp16, fp32, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    of = [data_sheet_tflop_per_s(BY_NAME[each], torch.device("cuda")) for each in ("fp16", "fp32")]
    assert of == [fp16, fp32]
