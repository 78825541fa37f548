"""The audit finds planted losses with module, line, direction and bytes, and nothing in a clean model."""

import json
import linecache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.memory_format.audit import audit
from cl_train.memory_format.audit_report import Call, LayoutReport
from cl_train.memory_format.convert import convert
from cl_train.step.precision import Precision

THIS_FILE = Path(__file__).name


def channels_last_images(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


class Block(nn.Module):
    """conv, bn, relu, conv, sum: a ResNet block with a place for something to go wrong."""

    def __init__(self, planted: Any = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.planted = planted
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn(self.conv1(x)))
        if self.planted is not None:
            y = self.planted(y)
        return x + self.conv2(y)


class Contiguous(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous()


class Reshape(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0], -1).view_as(x)


class Regroup(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


class _NewGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        result = torch.empty(gradient.shape)
        result.copy_(gradient * 2)
        return result


class CustomGradient(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x)


def planted_model(planted: Any) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(planted), Block())
    convert(model)
    return model


def audit_planted(planted: Any) -> LayoutReport:
    return audit(planted_model(planted), channels_last_images(2, 3, 16, 16))


def assert_at(call: Call, module: str, direction: str, text: str) -> None:
    file, line = call.source.rsplit(":", 1)
    assert call.module == module and call.direction == direction
    assert file.endswith(THIS_FILE) and call.line == text
    assert linecache.getline(__file__, int(line)).strip() == text


IMAGE_BYTES = 2 * 8 * 16 * 16 * 4


def test_a_clean_model_gives_none() -> None:
    report = audit_planted(None)
    assert report.of("lost") == [] and report.of("restored") == []
    assert report.totals["kept"] > 20 and report.moved_bytes == 0
    assert len(report.verdict()) == 1


def test_a_planted_contiguous_is_found() -> None:
    report = audit_planted(Contiguous())
    lost = report.of("lost")
    assert [(call.operator, call.copy) for call in lost] == [("aten.clone.default", "explicit")]
    assert_at(lost[0], "1.planted", "forward", "return x.contiguous()")
    assert lost[0].moved_bytes == 2 * IMAGE_BYTES  # one read, one write
    assert lost[0].shape == (2, 8, 16, 16)
    restored = report.of("restored")
    assert "1.conv2" in [call.module for call in restored if call.direction == "forward"]
    assert ".contiguous()" in report.verdict()[0]


def test_a_planted_reshape_is_found() -> None:
    lost = audit_planted(Reshape()).of("lost", "forward")
    assert len(lost) == 1 and lost[0].moved_bytes == 2 * IMAGE_BYTES
    assert_at(lost[0], "1.planted", "forward", "return x.reshape(x.shape[0], -1).view_as(x)")


def test_channels_regrouped_through_five_dimensions_are_found() -> None:
    lost = audit_planted(Regroup()).of("lost", "forward")
    assert len(lost) == 1 and lost[0].copy == "explicit" and lost[0].moved_bytes == 2 * IMAGE_BYTES
    assert_at(lost[0], "1.planted", "forward", "return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)")


@pytest.mark.parametrize(
    ("function", "line"),
    [(_ContiguousGradient, "return gradient.contiguous()"), (_NewGradient, "result.copy_(gradient * 2)")],
)
def test_contiguous_gradients_of_a_custom_function_are_found(function: Any, line: str) -> None:
    report = audit_planted(CustomGradient(function))
    assert report.of("lost", "forward") == []
    lost = report.of("lost", "backward")
    assert_at(lost[0], "1.planted", "backward", line)
    assert lost[0].moved_bytes == 2 * IMAGE_BYTES


def test_a_contiguous_batch_is_restored_by_the_first_convolution() -> None:
    report = audit(planted_model(None), torch.randn(2, 3, 16, 16))
    assert report.of("lost") == []
    first = report.of("restored", "forward")[0]
    assert (first.module, first.copy, first.moved_bytes) == ("0", "hidden", 2 * 2 * 3 * 16 * 16 * 4)


def test_size_one_dimensions_are_ambiguous_and_never_lost() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Conv2d(8, 1, 1), nn.ReLU(), nn.Conv2d(1, 4, 3), nn.MaxPool2d(10), nn.ReLU()
    )
    convert(model)
    report = audit(model, channels_last_images(2, 1, 14, 14))
    assert report.of("lost") == []
    assert report.totals["ambiguous"] > 0
    modules = {call.module for call in report.of("ambiguous")}
    assert "2" in modules and "5" in modules


def test_a_contiguous_model_has_nothing_to_lose() -> None:
    report = audit(Block(), torch.randn(2, 8, 16, 16))
    assert report.of("lost") == [] and report.of("kept") == []
    assert len(report.verdict()) == 1


def test_the_model_is_afterwards_what_it_was() -> None:
    model = planted_model(Contiguous())
    model[0].weight.grad = torch.ones_like(model[0].weight)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    images = channels_last_images(2, 3, 16, 16)
    random_state = torch.get_rng_state()
    audit(model, images, measure=True)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[1].conv1.weight.grad is None
    assert not model[0]._forward_hooks and not model[0]._forward_pre_hooks


class GrowingBuffer(nn.Module):
    """A forward pass replaces the buffer by one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("anchors", torch.zeros(0))
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.anchors = torch.ones(x.shape[-1])
        return self.conv(x)


def test_a_buffer_that_changes_its_shape_is_restored() -> None:
    model = GrowingBuffer()
    audit(model, channels_last_images(2, 3, 8, 8))
    assert model.anchors.shape == (0,) and list(model.state_dict()) == ["anchors", "conv.weight", "conv.bias"]


def test_an_error_in_the_model_leaves_no_hooks() -> None:
    model = planted_model(None)
    with pytest.raises(ConfigError, match="expected input"):
        audit(model, channels_last_images(2, 5, 16, 16))
    assert not model[0]._forward_hooks and not model[1]._forward_pre_hooks


def test_measured_shares_and_json() -> None:
    report = audit(planted_model(Contiguous()), channels_last_images(2, 3, 16, 16), measure=True, name="planted")
    assert report.step_ms is not None and report.step_ms > 0
    assert report.copy_ms is not None and 0 < report.copy_ms < report.step_ms
    assert 0 < report.moved_pct < 100
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["totals"]["lost"] >= 1 and plain["calls"][0]["outcome"] == "lost"
    assert plain["calls"][0]["copy_ms"] > 0
    assert "measured" in str(report)


def test_autocast_inference_and_other_batches() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(Contiguous())

        def forward(self, image: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": self.block(image) * scale}

    model = TwoInputs().eval()
    convert(model)
    image, scale = channels_last_images(2, 8, 16, 16), torch.ones(())
    bf16 = Precision("bf16", autocast_dtype=torch.bfloat16)
    report = audit(model, {"image": image, "scale": scale}, precision=bf16, backward=False)
    lost = report.of("lost")
    assert len(lost) == 1 and lost[0].dtype == "bfloat16" and lost[0].moved_bytes == IMAGE_BYTES
    assert {call.direction for call in report.calls} == {"forward"}
    assert audit(model, (image, scale)).of("lost", "forward")[0].dtype == "float32"


def test_what_is_no_model_and_a_batch_without_images_are_refused() -> None:
    with pytest.raises(ValueError, match="4 or 5 dimensions"):
        audit(nn.Linear(3, 2), torch.randn(2, 3))
    with pytest.raises(ValueError, match="a int is no model"):
        audit(3, torch.randn(2, 3, 4, 4))  # type: ignore[arg-type]


def test_resnet18_keeps_channels_last_and_creates_only_the_gradient_of_its_global_mean() -> None:
    model = torchvision.models.resnet18()
    convert(model)
    report = audit(model, channels_last_images(2, 3, 64, 64))
    assert report.of("lost") == [] and "keeps channels_last in all" in report.summary()
    assert [(call.operator, call.module) for call in report.of("created")] == [("aten.div.Scalar", "avgpool")]
    assert "expanded" in report.verdict()[-1]
    assert [call.module for call in report.of("restored")] == ["layer4.1.relu"]


class Sliced(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, 1:].transpose(2, 3)


class Unfolded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.unfold(x, 3, padding=1).view(x.shape[0], -1, *x.shape[2:])[:, ::9]


@pytest.mark.parametrize(("planted", "operator"), [(Sliced(), "slice_backward"), (Unfolded(), "col2im")])
def test_a_gradient_that_a_kernel_allocates_is_not_called_expanded(planted: nn.Module, operator: str) -> None:
    last = nn.Flatten(0)  # the gradient is not channels_last
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), planted, last).to(memory_format=torch.channels_last)
    report = audit(model, channels_last_images(2, 3, 8, 8))
    for line in report.verdict():
        assert "expanded" not in line
    assert operator in str([call.operator for call in report.of("created")])


def test_a_detection_model_takes_images_of_three_dimensions() -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 8, 3), Contiguous())

        def forward(self, images: list[torch.Tensor], targets: Any = None) -> dict[str, torch.Tensor]:
            features = self.body(torch.stack(images).to(memory_format=torch.channels_last))
            return {"loss": features.mean() if targets is None else features.mean() * targets[0]["boxes"].mean()}

    model = Detector().to(memory_format=torch.channels_last)
    images = [torch.randn(3, 16, 16), torch.randn(3, 16, 16)]
    for batch in (images, (images,), (images, [{"boxes": torch.ones(1, 4)}]), {"images": images}):
        assert [call.module for call in audit(model, batch).of("lost", "forward")] == ["body.1"]


@pytest.mark.slow
def test_shufflenet_loses_at_its_concatenations() -> None:
    model = torchvision.models.shufflenet_v2_x1_0()
    convert(model)
    report = audit(model, channels_last_images(2, 3, 64, 64))
    cats = [call for call in report.of("lost") if call.operator == "aten.cat.default"]
    assert sum(call.count for call in cats) == 26  # 13 blocks with a split: forward, and the gradient of their chunks
    assert all("shufflenetv2.py" in call.source for call in cats)
    assert any("13 x cat (forward)" in line for line in report.verdict())


@pytest.mark.slow
def test_vgg_loses_at_flatten() -> None:
    model = torchvision.models.vgg11(num_classes=10)
    convert(model)
    lost = audit(model, channels_last_images(2, 3, 32, 32)).of("lost")
    assert [(call.operator, call.line) for call in lost] == [("aten.clone.default", "x = torch.flatten(x, 1)")]


def test_video_is_watched_in_five_dimensions() -> None:
    model = nn.Sequential(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), Contiguous(), nn.Conv3d(8, 8, 3))
    convert(model, memory_format=torch.channels_last_3d)
    report = audit(model, torch.randn(2, 3, 6, 8, 8).to(memory_format=torch.channels_last_3d))
    assert [(call.module, call.direction) for call in report.of("lost")] == [("3", "forward")]
    assert report.totals["kept"] > 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, torch.fx.symbolic_trace])
def test_scripted_and_traced_models_are_audited_alike(make: Any) -> None:
    eager = torchvision.models.shufflenet_v2_x0_5()
    other = make(torchvision.models.shufflenet_v2_x0_5())
    totals = []
    for model in (eager, other):
        convert(model)
        totals.append(audit(model, channels_last_images(2, 3, 64, 64)).totals)
    assert totals[0] == totals[1] and totals[0]["lost"] == 32


def test_a_frozen_model_and_one_that_returns_classes_are_audited_forward() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Conv2d(3, 8, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.body(images).mean((2, 3)).argmax(1)

    frozen = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).to(memory_format=torch.channels_last).requires_grad_(False)
    for model in (frozen, nn.Sequential(nn.ReLU())):
        assert audit(model, channels_last_images(2, 3, 8, 8)).calls
    classes = Choice().to(memory_format=torch.channels_last)
    assert audit(classes, channels_last_images(2, 3, 8, 8), backward=False).calls
    with pytest.raises(ConfigError, match="output=KEY"):
        audit(classes, channels_last_images(2, 3, 8, 8))
