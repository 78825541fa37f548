"""Unusual models through audit and convert: they work, or are refused with a remedy."""

import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from cl_train.config.schema import ConfigError
from cl_train.memory_format.audit import audit
from cl_train.memory_format.convert import convert
from cl_train.memory_format.layout import model_memory_format

pytestmark = pytest.mark.filterwarnings("ignore")  # of deprecated kinds of models, by torch


class Body(nn.Module):
    """A convolution and a head; `finish` makes the output of the features."""

    def __init__(self, finish: Callable[..., Any] = lambda x: x, convolution: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = convolution or nn.Conv2d(3, 4, 3)
        self.finish = finish

    def forward(self, x: torch.Tensor) -> Any:
        return self.finish(self.conv(x))


@dataclass
class HuggingFaceOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor


class MappingOutput(dict):
    def __getattr__(self, name: str) -> Any:
        return self[name]


Pair = namedtuple("Pair", "logits features")


def with_tensor(name: str, tensor: torch.Tensor | nn.Parameter) -> nn.Module:
    model = Body()
    if isinstance(tensor, nn.Parameter):
        model.register_parameter(name, tensor)
    else:
        model.register_buffer(name, tensor)
    return model


class Lists(nn.Module):
    """Tensors in Python lists, which are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [torch.randn(4, 3, 3, 3), torch.randn(4, 4, 3, 3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = F.conv2d(x, weight)
        return x


class ExtraState(Body):
    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": {1, 2}}

    def set_extra_state(self, state: Any) -> None:
        pass


class Raises(Body):
    def forward(self, x: torch.Tensor) -> Any:
        raise KeyError("odd key")


class ReturnsClass(nn.Module):
    """A new class of its own for each call; spies on the caller's state."""

    def forward(self, x: torch.Tensor) -> Any:
        return type("Output", (), {"logits": x * 2})()


class Swaps(Body):
    """Replaces its own parameter in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.conv.weight = nn.Parameter(self.conv.weight.detach() * 2)
        return self.conv(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1, 3, 1, 1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft2(x) * self.scale


class SparseEmbedding(Body):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3)) + self.embedding(torch.tensor([1, 2]))


class Checkpointed(Body):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(self.conv, x, use_reentrant=False)


class NoGrad(Body):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            return self.conv(x)


class Inference(Body):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.inference_mode():
            return self.conv(x)


class Recursive(Body):
    """Calls a child twice, and a hook of its own raises nothing."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.conv(F.pad(self.conv(x)[:, :3], (1, 1, 1, 1)))


class Attribute(Body):
    """A plain attribute holds a non-leaf tensor, which cannot be deep-copied."""

    def forward(self, x: torch.Tensor) -> Any:
        self.cache = self.conv(x)
        return self.cache


def quantised() -> nn.Module:
    model = nn.Sequential(torch.ao.quantization.QuantStub(), nn.Conv2d(3, 4, 3), torch.ao.quantization.DeQuantStub())
    model.qconfig = torch.ao.quantization.get_default_qconfig("fbgemm")
    prepared = torch.ao.quantization.prepare(model.eval())
    prepared(torch.randn(2, 3, 8, 8))
    return torch.ao.quantization.convert(prepared)


def shared_in_two_shapes() -> nn.Module:
    model = Body()
    model.flat = nn.Parameter(model.conv.weight.data.view(4, 27))
    return model


def old_weight_norm() -> nn.Module:
    return Body(convolution=nn.utils.weight_norm(nn.Conv2d(3, 4, 3)))


def scripted_inside() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())), nn.Conv2d(4, 4, 1))


def inference_parameters() -> nn.Module:
    with torch.inference_mode():
        return Body()


def meta_model() -> nn.Module:
    with torch.device("meta"):
        return Body()


def windows(x: torch.Tensor) -> torch.Tensor:
    """Window partitioning, attention's part left out, and back."""
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, c)
    mixed = parts.softmax(1)
    return mixed.reshape(n, h // 2, w // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w)


# How the audit ends: "ok"; or words of the refusal. Convert must never fail with anything but a ConfigError.
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tensor": (Body, "ok"),
    "dict": (lambda: Body(lambda x: {"logits": x, "name": "a"}), "ok"),
    "nested dict": (lambda: Body(lambda x: {"a": {"b": [x]}}), "ok"),
    "tuple": (lambda: Body(lambda x: (x, x * 2)), "ok"),
    "list": (lambda: Body(lambda x: [x, None]), "ok"),
    "named tuple": (lambda: Body(lambda x: Pair(x, x)), "ok"),
    "dataclass": (lambda: Body(lambda x: HuggingFaceOutput(None, x)), "ok"),
    "mapping with attributes": (lambda: Body(lambda x: MappingOutput(logits=x)), "ok"),
    "string": (lambda: Body(lambda x: "cat"), "output="),
    "none": (lambda: Body(lambda x: None), "output="),
    "integers": (lambda: Body(lambda x: x.argmax(1)), "output="),
    "python number": (lambda: Body(lambda x: x.sum().item()), "output="),
    "own class": (ReturnsClass, "output="),
    "empty": (lambda: Body(lambda x: x[:0]), "ok"),
    "scalar": (lambda: Body(lambda x: x.mean()), "ok"),
    "half": (lambda: Body(lambda x: x.half()), "ok"),
    "weight norm": (lambda: Body(convolution=nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))), "ok"),
    "old weight norm": (old_weight_norm, "ok"),
    "spectral norm": (lambda: Body(convolution=nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3))), "ok"),
    "pruned": (lambda: Body(convolution=prune.random_unstructured(nn.Conv2d(3, 4, 3), "weight", 0.5)), "ok"),
    "lazy": (lambda: nn.Sequential(nn.LazyConv2d(4, 3)), "run one batch"),
    "lazy norm": (lambda: nn.Sequential(nn.LazyBatchNorm2d()), "run one batch"),
    "sparse embedding": (SparseEmbedding, "ok"),
    "sparse buffer": (lambda: with_tensor("s", torch.eye(3).to_sparse()), "ok"),
    "sparse 4-D parameter": (lambda: with_tensor("s", nn.Parameter(torch.ones(2, 2, 2, 2).to_sparse())), "ok"),
    "sparse csr buffer": (lambda: with_tensor("s", torch.eye(3).to_sparse_csr()), "ok"),
    "expanded buffer": (lambda: with_tensor("e", torch.zeros(1, 3, 1, 1).expand(2, 3, 4, 4)), "ok"),
    "expanded parameter": (lambda: with_tensor("e", nn.Parameter(torch.zeros(1).expand(2, 3, 4, 4))), "ok"),
    "integer buffer": (lambda: with_tensor("i", torch.zeros(2, 3, 4, 4, dtype=torch.int8)), "ok"),
    "bool buffer": (lambda: with_tensor("b", torch.ones(2, 3, 4, 4, dtype=torch.bool)), "ok"),
    "complex": (Complex, "ok"),
    "empty parameter": (lambda: with_tensor("e", nn.Parameter(torch.empty(0, 3, 4, 4))), "ok"),
    "none parameter": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, affine=False)), "ok"),
    "quantised": (quantised, "ok"),
    "scripted inside": (scripted_inside, "ok"),
    "traced": (lambda: torch.jit.trace(Body().conv, torch.randn(2, 3, 8, 8)), "ok"),
    "fx": (lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())), "ok"),
    "compiled": (lambda: torch.compile(nn.Sequential(nn.ReLU()), backend="eager"), "ok"),
    "tensors in lists": (Lists, "ok"),
    "view": (lambda: Body(lambda x: x.view(x.shape[0], -1)), ".reshape"),
    "extra state": (ExtraState, "ok"),
    "raises": (Raises, "odd key"),
    "swaps its parameter": (Swaps, "ok"),
    "checkpointed": (Checkpointed, "ok"),
    "no grad": (NoGrad, "ok"),
    "inference mode": (Inference, "ok"),
    "recursive": (Recursive, "ok"),
    "cache of the output": (Attribute, "ok"),
    "shared in two shapes": (shared_in_two_shapes, "ok"),
    "inference parameters": (inference_parameters, "Inference"),
    "meta": (meta_model, "meta"),
    "wrong channels": (lambda: nn.Sequential(nn.Conv2d(5, 4, 3)), "channels"),
    "no module children": (nn.Identity, "ok"),
    "double": (lambda: Body().double(), "dtype"),
    "window partitioning": (lambda: Body(windows), "ok"),
}


SLOW = ("compiled", "quantised", "scripted inside", "traced")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS]
)
def test_odd_model(name: str) -> None:
    build, expected = MODELS[name]
    torch.manual_seed(0)
    model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            report = convert(model)
            assert str(report) and report.to_dict()["mode"] == "full"
            assert not report.changed or model_memory_format(model) in ("channels_last", "mixed")
        except ConfigError as error:
            assert expected in str(error)
        images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
        if expected == "ok":
            result = audit(model, images, measure=name == "tensor")
            assert result.totals and str(result) and result.to_dict()["step_bytes"] >= 0
        else:
            with pytest.raises(ConfigError, match=f"(?s).*{expected}"):
                audit(model, images)
    assert not getattr(model, "_forward_pre_hooks", None) or name == "old weight norm"


def scaled(x: torch.Tensor, output: Any) -> Any:
    """`output` with each number replaced by a multiple of `x`."""
    if isinstance(output, dict):
        return type(output)({key: x * value for key, value in output.items()})
    return tuple(x * value for value in output)


def test_an_entry_of_the_output_is_selected() -> None:
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for output, key in (({"a": 1.0, "b": 2.0}, "b"), ((1.0, 2.0), 1), (MappingOutput(b=2.0), "b")):
        model = Body(lambda x, output=output: scaled(x, output))
        assert audit(model, images, output=key).totals
        with pytest.raises(ConfigError, match="no such entry"):
            audit(model, images, output="nothing")
    own = audit(Body(lambda x: "cat"), images, loss=lambda output: torch.ones(1, requires_grad=True).sum())
    assert own.totals
    with pytest.raises(ConfigError, match="scalar"):
        audit(Body(), images, loss=lambda output: output)


def test_copies_of_window_partitioning_are_losses() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Body(windows, nn.Conv2d(4, 4, 1)), nn.Conv2d(4, 4, 3))
    convert(model)
    report = audit(model, torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
    lost = report.of("lost", "forward")
    assert [(call.copy, call.moved_bytes) for call in lost] == [("explicit", 2 * 2 * 4 * 8 * 8 * 4)]
    assert "2" in [call.module for call in report.of("restored", "forward")]  # reads the windows, put together again
    contiguous = audit(
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Body(windows, nn.Conv2d(4, 4, 1))), torch.randn(2, 3, 8, 8)
    )
    assert contiguous.of("lost") == []
