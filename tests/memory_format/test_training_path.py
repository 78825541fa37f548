"""What surrounds a model has its strides; inductor's choices; video; the audit command."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from cl_train.config.schema import OptimConfig
from cl_train.memory_format.audit import audit
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import model_memory_format, to_memory_format
from cl_train.memory_format.operator_support import compiled_graphs
from cl_train.step.optim import build_optimizer
from cl_train.step.precision import EMA, MasterWeights, cast_model, resolve_precision

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("name", "optimizer"), [("fp32", "adamw"), ("fp32", "sgd"), ("fp16_o2", "sgd")])
def test_gradients_averages_moments_and_master_weights_have_the_strides_of_the_weights(
    name: str, optimizer: str
) -> None:
    precision = resolve_precision(name, torch.device("cpu"))
    model = cast_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)), precision)
    convert(model)
    masters, ema = MasterWeights(model, precision), EMA(model, 0.9)
    weights = masters.trainable()
    updates = build_optimizer(OptimConfig(name=optimizer), model, weights, lr=0.1)
    images = torch.randn(2, 3, 8, 8, dtype=precision.input_dtype).to(memory_format=torch.channels_last)
    model(images).float().square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    masters.copy_gradients_from_model()
    updates.step()
    ema.update(masters.state_dict())
    averages = dict(ema.module.named_parameters())
    for name, parameter in model.named_parameters():
        moments = [value for value in updates.state[weights[name]].values() if value.shape == parameter.shape]
        assert len(moments) == (2 if optimizer == "adamw" else 1)
        for tensor in (gradients[name], weights[name], weights[name].grad, averages[name], *moments):
            assert tensor.stride() == parameter.stride(), name
    assert model[0].weight.stride() == (27, 1, 9, 3)


def decisions(model: nn.Module, backward: bool) -> list[tuple[str, bool]]:
    x = torch.randn(2, 3, 32, 32)
    graphs = compiled_graphs(model, lambda compiled: compiled(x).square().mean(), backward)
    assert [graph["graph"] for graph in graphs] == list(range(len(graphs)))
    return [(graph["direction"], graph["channels_last"]) for graph in graphs]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of inductor and oneDNN about themselves
def test_what_inductor_decides() -> None:
    model = nn.Sequential(nn.Conv2d(3, 128, 3), nn.ReLU(), nn.Conv2d(128, 128, 3, groups=2))
    assert decisions(model, True) == [("forward", True), ("backward", True)]
    assert decisions(nn.Flatten(), False) == [("inference", False)]
    torch.backends.mkldnn.enabled = False  # as on a GPU: inductor's own rules
    try:
        assert not any(laid_out for _, laid_out in decisions(model, True))  # a grouped convolution
        wide = nn.Sequential(nn.Conv2d(3, 128, 3), nn.ReLU(), nn.Conv2d(128, 128, 3))
        assert all(laid_out for _, laid_out in decisions(wide, True))
    finally:
        torch.backends.mkldnn.enabled = True


@pytest.mark.slow
def test_the_command_on_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(
        "import torch\n"
        "class Lossy(torch.nn.Module):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        self.conv, self.fc = torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(8, num_classes)\n"
        "    def forward(self, x):\n"
        "        x = self.conv(x).contiguous()\n"
        "        return self.fc(x.amax((2, 3)))\n"
        "build = Lossy\n"
    )
    script = str(ROOT / "scripts" / "audit.py")
    words = ["model=my_model:build", "data.image_size=16", "precision=fp32", "compile=true", "out=audit.json"]
    done = subprocess.run([sys.executable, script, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "my_model.py:7" in done.stdout and "x = self.conv(x).contiguous()" in done.stdout
    compiled = json.loads((tmp_path / "audit.json").read_text())["compiled"]
    assert [graph["direction"] for graph in compiled] == ["forward", "backward"]


@pytest.mark.slow
def test_r3d_18_in_channels_last_3d() -> None:
    torch.manual_seed(0)
    model = torchvision.models.video.r3d_18(num_classes=10).double()
    other = copy.deepcopy(model)
    x = torch.randn(2, 3, 4, 32, 32, dtype=torch.float64)
    report = convert(other, memory_format=torch.channels_last_3d)
    assert len(report.changed) == 20 and model_memory_format(other) == "channels_last"
    outputs = [model(x), other(to_memory_format(x, torch.channels_last_3d))]
    assert torch.allclose(*outputs, rtol=1e-9)
    for output in outputs:
        F.cross_entropy(output, torch.zeros(len(x), dtype=torch.int64)).backward()
    for (name, expected), found in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(found.grad, expected.grad, rtol=1e-6, atol=1e-10), name
    audited = audit(other.float(), to_memory_format(x.float(), torch.channels_last_3d))
    assert audited.of("lost", "forward") == [] and audited.totals["kept"] > 100
