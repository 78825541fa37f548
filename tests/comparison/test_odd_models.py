"""Models that are not classifiers of tensors: through parity and compare_layouts without a traceback of ours.

Each row says what becomes of a model: it agrees, it is found to differ, or it is refused with a remedy.
"""

import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cl_train.comparison.paired import compare_layouts
from cl_train.comparison.parity import check_parity
from cl_train.comparison.timed_model import TimedModel
from cl_train.config.schema import ConfigError
from cl_train.memory_format import crashes
from cl_train.step import utilisation


class Made(nn.Module):
    """The modules `parts`, called by `run`."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def body() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


def pooled(x: torch.Tensor) -> torch.Tensor:
    return x.mean((2, 3))


def features(head: Callable[[torch.Tensor], Any] = pooled, first: nn.Module | None = None) -> nn.Module:
    """The body, and a function of its feature maps."""
    return Made(lambda model, x: head(model.body(x)), body=first or body())


@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


class DictOutput(dict):  # type: ignore[type-arg]
    """As Hugging Face's ModelOutput: keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


Pair = namedtuple("Pair", ["logits", "aux"])


def segmentation() -> nn.Module:
    heads = {"out": nn.Conv2d(8, 4, 1), "aux": nn.Conv2d(8, 4, 1)}

    def run(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = model.body(x)
        return {name: getattr(model, name)(x) for name in heads}

    return Made(run, body=body(), **heads)


def detector() -> nn.Module:
    """Takes a list of images, returns a list of dicts."""

    def run(model: Any, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        boxes = [pooled(model.body(image[None])) for image in images]
        return [{"boxes": box, "labels": torch.zeros(1, dtype=torch.int64)} for box in boxes]

    return Made(run, body=body())


def two_inputs() -> nn.Module:
    return Made(lambda m, image, token: pooled(m.body(image)) * m.table(token), body=body(), table=nn.Embedding(5, 8))


def sparse_gradients() -> nn.Module:
    table = nn.Embedding(5, 8, sparse=True)
    return Made(lambda m, x: pooled(m.body(x)) + m.table(x.new_zeros(len(x)).long()), body=body(), table=table)


def recurrent() -> nn.Module:
    rnn = nn.GRU(8, 6, batch_first=True)
    return Made(lambda m, x: m.rnn(m.body(x).flatten(2).transpose(1, 2))[0][:, -1], body=body(), rnn=rnn)


def spectral() -> nn.Module:
    """Complex inside and out."""
    model = Made(lambda m, x: torch.fft.fft2(m.body(x).float()) * m.weight, body=body())
    model.weight = nn.Parameter(torch.ones(8, 1, 1, dtype=torch.complex64))
    return model


def viewing() -> nn.Module:
    head = nn.Linear(8 * 16 * 16, 4)
    return Made(lambda m, x: m.head(m.body(x).view(len(x), -1)), body=body(), head=head)


def reads_strides() -> nn.Module:
    return nn.Sequential(body(), Made(lambda _, x: x if x.is_contiguous() else x * 1.2), nn.Flatten())


class ExtraState(Made):
    def get_extra_state(self) -> Any:
        return {"f": lambda: None}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("not called")


def weight_norm(make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    convolution = nn.Conv2d(3, 8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        make(convolution)
    return features(first=convolution)


def uncopyable() -> nn.Module:
    model = features()
    model.lock = (item for item in range(3))  # type: ignore[assignment] # a generator
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Any]] = {
    # name: (model, further arguments, True: the layouts agree; False: they differ; a word of the refusal)
    "logits": (features, {}, True),
    "dict": (segmentation, {}, True),
    "dict with a selected entry": (segmentation, {"output": "out"}, True),
    "dict with a wrong entry": (segmentation, {"output": "nosuch"}, "aux"),
    "dict with a loss": (segmentation, {"loss": lambda out: out["out"].square().mean()}, True),
    "tuple": (lambda: features(lambda x: (pooled(x), x)), {}, True),
    "list": (lambda: features(lambda x: [x, pooled(x)]), {"output": 1}, True),
    "named tuple": (lambda: features(lambda x: Pair(pooled(x), x)), {}, True),
    "dataclass": (lambda: features(lambda x: Output(pooled(x), (x,))), {}, True),
    "dict with attributes": (lambda: features(lambda x: DictOutput(logits=pooled(x))), {}, True),
    "str": (lambda: features(lambda x: "cat"), {}, "output"),
    "no tensor": (lambda: features(lambda x: None), {}, "output"),
    "classes": (lambda: features(lambda x: pooled(x).argmax(1)), {}, "output"),
    "autoencoder": (lambda: nn.Sequential(body(), nn.ConvTranspose2d(8, 3, 3, padding=1)), {}, True),
    "video": (
        lambda: nn.Sequential(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.AdaptiveAvgPool3d(1), nn.Flatten()),
        {"image_size": (3, 4, 12, 12)},
        True,
    ),
    "detector": (detector, {"batch": ([torch.randn(3, 12, 12), torch.randn(3, 10, 12)],)}, True),
    "two inputs": (two_inputs, {"batch": (torch.randn(4, 3, 12, 12), torch.tensor([0, 1, 2, 3]))}, True),
    "keywords": (two_inputs, {"batch": {"image": torch.randn(2, 3, 12, 12), "token": torch.tensor([0, 1])}}, True),
    "recurrent": (recurrent, {"image_size": 4}, True),
    "weight_norm, old": (lambda: weight_norm(nn.utils.weight_norm), {}, True),
    "weight_norm, new": (lambda: weight_norm(nn.utils.parametrizations.weight_norm), {}, True),
    "spectral_norm": (lambda: weight_norm(nn.utils.parametrizations.spectral_norm), {}, True),
    "complex": (spectral, {}, True),
    "fp32 only": (  # creates fp32 tensors whatever the model's dtype is: does not run in float64
        lambda: Made(lambda m, x: m.head(pooled(m.body(x)).float()), body=body(), head=nn.Linear(8, 4)), {}, True,
    ),
    "own extra state": (lambda: ExtraState(lambda model, x: pooled(model.body(x)), body=body()), {}, True),
    "scripted inside": (
        lambda: features(pooled, nn.Sequential(torch.jit.script(body()), nn.Conv2d(8, 8, 3))), {}, True,
    ),
    "no parameters": (lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), {}, True),
    "frozen": (lambda: features().requires_grad_(False), {}, True),
    "sparse gradients": (sparse_gradients, {}, True),
    "dropout": (lambda: features(lambda x: pooled(F.dropout(x, 0.5, True))), {}, True),
    "reads strides": (reads_strides, {}, False),
    "view": (viewing, {"image_size": 16}, False),
    "lazy": (lambda: nn.Sequential(nn.LazyConv2d(8, 3), nn.Flatten()), {}, "run one batch"),
    "quantised": (lambda: nn.Sequential(torch.ao.nn.quantized.Conv2d(3, 8, 3), nn.Flatten()), {}, "quantized"),
    "wrong channels": (lambda: nn.Conv2d(1, 8, 3), {}, "image_size"),
    "attribute that cannot be copied": (uncopyable, {}, "copied"),
}  # fmt: skip
# What compare_layouts does otherwise: it measures speed, so equal results are no subject, and it needs an optimizer.
SPEED = {"reads strides": True, "view": "reshape", "complex": "floating point", "no parameters": "mode=infer",
         "frozen": "mode=infer", "sparse gradients": "parse"}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, except where a test says otherwise; two rounds of one step."""

    def once(self: TimedModel, steps: int) -> list[float]:
        self.step()
        return [0.01]

    monkeypatch.setattr(TimedModel, "block_times_s", once)
    monkeypatch.setattr(crashes, "_is_child", True)
    monkeypatch.setitem(utilisation._MATMUL, "cpu", 16)


def refused(function: Callable[..., Any], model: nn.Module, problem: str, **arguments: Any) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        function(model, **arguments)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.filterwarnings("ignore:.*(torch.jit|quantiz|ao.quantization|lazy|Lazy).*")
@pytest.mark.parametrize("name", list(MODELS))
def test_parity_and_speed(name: str) -> None:
    build, arguments, expected = MODELS[name]
    torch.manual_seed(0)
    arguments, speed = {"image_size": 12, **arguments}, SPEED.get(name, expected)
    if isinstance(expected, bool):
        model = build()
        before = {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        report = check_parity(model, **arguments)
        assert report.passed is expected, str(report)
        assert expected or report.first_divergence
        assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    else:
        refused(check_parity, build(), expected, **arguments)
    arguments = {"batch_size": 2, "precision": "fp32", "time_limit_s": 0.0, "target_ci": 9.0, **arguments}
    if speed is True:
        assert [one.layout for one in compare_layouts(build(), **arguments).speeds] == ["contiguous", "channels_last"]
        return
    refused(compare_layouts, build(), speed, **arguments)
    if speed == "mode=infer":
        assert compare_layouts(build(), **arguments, mode="infer").speeds


@pytest.mark.slow
def test_a_compiled_model_is_compared_eager() -> None:
    assert check_parity(torch.compile(features()), image_size=12).passed


def test_the_line_of_a_view_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crashes, "_is_child", False)
    report = check_parity(viewing(), image_size=16)
    assert ".view(len(x), -1)" in str(report) and ".reshape" in str(report)
