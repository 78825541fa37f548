"""What surrounds a model (batch, mixes, gradients, average, optimizer), inductor's choices, and the audit command."""

import copy
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from cl_train.commands.audit import main
from cl_train.config.schema import ConfigError
from cl_train.memory_format.convert import convert
from cl_train.memory_format.inductor import compiled_graphs
from cl_train.step.precision import MasterWeights, cast_model, resolve_precision, trainable_parameters
from tests.memory_format.training_path import LayoutCheck, check_training_path, compare_strides

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("shape", "state", "parameter", "expected"),
    [
        ((8, 3, 3, 3), (27, 1, 9, 3), (27, 1, 9, 3), "kept"),
        ((8, 4, 1, 1), (4, 1, 1, 1), (4, 1, 4, 4), "ambiguous"),
        ((8, 3, 3, 3), (27, 9, 3, 1), (27, 1, 9, 3), "lost"),
        ((8, 1, 3, 3), (9, 9, 3, 1), (9, 1, 3, 1), "ambiguous"),
    ],
)
def test_mismatches_in_size_1_dimensions_are_ambiguous(shape: Any, state: Any, parameter: Any, expected: str) -> None:
    tensors = [{"weight": torch.empty_strided(shape, strides)} for strides in (state, parameter)]
    assert compare_strides("gradients", *tensors).outcome == expected


class Pointwise(nn.Module):
    """3x3 and 1x1 convolutions with an image as output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def check(model: nn.Module, **options: Any) -> dict[str, LayoutCheck]:
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    found = check_training_path(model, lambda: model(images).square().sum(), **options)
    return {item.what: item for item in found}


def test_a_sound_run_keeps_everything() -> None:
    model = Pointwise()
    convert(model)
    optimizer = torch.optim.AdamW(model.parameters())
    found = check(model, ema=copy.deepcopy(model), optimizer=optimizer)
    assert {what: item.outcome for what, item in found.items()} == {
        "gradients (DDP buckets)": "kept",
        "EMA weights": "kept",
        "optimizer: exp_avg": "kept",
        "optimizer: exp_avg_sq": "kept",
    }


def test_stale_strides_around_the_model_are_found() -> None:
    model = Pointwise()
    stale = copy.deepcopy(model)  # an EMA made before converting
    convert(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros(parameter.shape)  # as a file has it
    found = check(model, ema=stale, optimizer=optimizer)
    assert found["EMA weights"].outcome == "lost"
    assert "layers.0.weight" in found["EMA weights"].detail
    assert "1 mismatches in" in found["EMA weights"].detail and "1 in size-1" in found["EMA weights"].detail
    assert found["optimizer: momentum_buffer"].outcome == "lost"


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_gradients_in_another_layout_are_real_mismatches() -> None:
    model = Pointwise()
    convert(model)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.contiguous())
        parameter.grad = torch.zeros(parameter.shape)  # accumulates into what is there
    assert check(model)["gradients (DDP buckets)"].outcome == "lost"


def test_the_optimizer_state_of_master_weights_is_checked_for_every_parameter() -> None:
    precision = resolve_precision("fp16_o2", torch.device("cpu"))
    model = cast_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)), precision)
    convert(model)
    masters = MasterWeights(model)
    optimizer = torch.optim.SGD(trainable_parameters(model, masters).values(), lr=0.1, momentum=0.9)
    images = torch.randn(2, 3, 8, 8, dtype=torch.float16).to(memory_format=torch.channels_last)
    step = lambda: model(images).float().square().mean()  # noqa: E731
    found = {item.what: item for item in check_training_path(model, step, optimizer=optimizer, masters=masters)}
    assert found["optimizer: momentum_buffer"].detail == "0 mismatches in 6 tensors"
    assert found["fp32 master weights"].outcome == "kept"


def decisions(model: nn.Module, backward: bool, size: int = 32) -> list[tuple[str, bool]]:
    x = torch.randn(2, 3, size, size)
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
def test_the_command_tells_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "audit.json"
    assert main(["model=shufflenet_v2_x0_5", "data.image_size=64", "precision=fp32", f"out={path}"]) == 0
    output = capsys.readouterr().out
    assert "13 x cat (forward)" in output and "shufflenetv2.py:95" in output
    report = json.loads(path.read_text())
    assert report["totals"]["lost"] == 32 and report["step_ms"] > 0


@pytest.mark.slow
def test_the_command_on_a_model_of_ones_own_and_wrong_words(tmp_path: Path) -> None:
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
    with pytest.raises(ConfigError, match="did you mean model"):
        main(["modl=resnet18"])


@pytest.mark.slow
def test_r3d_18_in_channels_last_3d() -> None:
    from cl_train.memory_format.audit import audit
    from cl_train.memory_format.layout import model_memory_format, to_memory_format

    torch.manual_seed(0)
    model = torchvision.models.video.r3d_18(num_classes=10).double()
    x = torch.randn(2, 3, 4, 32, 32, dtype=torch.float64)
    expected, gradients = step_of(model, x)
    report = convert(model, memory_format=torch.channels_last_3d)
    assert len(report.changed) == 20 and model_memory_format(model) == "channels_last"
    found, converted = step_of(model, to_memory_format(x, torch.channels_last_3d))
    assert torch.allclose(found, expected, rtol=1e-9)
    for name, gradient in gradients.items():
        assert torch.allclose(converted[name], gradient, rtol=1e-6, atol=1e-10), name
    audited = audit(model.float(), to_memory_format(x.float(), torch.channels_last_3d))
    assert audited.of("lost", "forward") == [] and audited.totals["kept"] > 100


def step_of(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    model.train()
    output = model(x)
    F.cross_entropy(output, torch.zeros(len(x), dtype=torch.int64)).backward()
    with warnings.catch_warnings():
        return output.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
