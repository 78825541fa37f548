"""FLOPs equal the published figures; shares follow from them."""

import pytest
import torch
import torchvision

from cl_train.step.precision import BY_NAME
from cl_train.step.utilisation import flops_of, matmul_tflop_per_s, utilisation

QUICK = ("resnet18", "mobilenet_v2", "squeezenet1_1")
SLOW = (
    "alexnet", "vgg11", "vgg16", "vgg19_bn", "resnet34", "resnet50", "resnet101", "resnext50_32x4d", "wide_resnet50_2",
    "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet0_5", "mnasnet1_0", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0",
    "densenet121", "efficientnet_b0",
)  # fmt: skip


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_flops_are_the_published_ones(name: str) -> None:
    weights = next(iter(torchvision.models.get_model_weights(name)))
    with torch.device("meta"):
        model = torchvision.models.get_model(name).eval()
    size = weights.transforms().crop_size[0]
    published = 2 * weights.meta["_ops"]  # torchvision publishes billions of multiply-adds, rounded
    assert flops_of(lambda: model(torch.empty(1, 3, size, size, device="meta"))) / 1e9 == pytest.approx(published, 0.02)


def test_shares_are_of_three_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < matmul_tflop_per_s(BY_NAME["fp32"], torch.device("cpu")) < 100
    monkeypatch.setattr("cl_train.step.utilisation.matmul_tflop_per_s", lambda *_: 400.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    trained = utilisation(8.0, 5000.0, BY_NAME["fp16"], torch.device("cuda"), training=True)
    assert trained["tflop_per_s"] == 120 and trained["matmul_pct"] == 30
    assert (trained["data_sheet_tflop_per_s"], trained["data_sheet_pct"]) == (312, 38.46)
    inferred = utilisation(8.0, 5000.0, BY_NAME["tf32"], torch.device("cuda"), training=False)
    assert (inferred["tflop_per_s"], inferred["data_sheet_tflop_per_s"]) == (40, 156)
