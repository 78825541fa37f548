"""Models that are not classifiers of tensors: through parity and compare_layouts without a traceback of ours.

Each row says what becomes of a model: it agrees, it is found to differ, or it is refused with a remedy.
"""

import copy
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

Images = torch.Tensor


def body() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


class With(nn.Module):
    """The body, and a function of its feature maps."""

    def __init__(self, head: Callable[[Images], Any], first: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.head = first or body(), head

    def forward(self, x: Images) -> Any:
        return self.head(self.body(x))


@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


class DictOutput(dict):  # type: ignore[type-arg]
    """As Hugging Face's ModelOutput: keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


Pair = namedtuple("Pair", ["logits", "aux"])


def pooled(x: Images) -> torch.Tensor:
    return x.mean((2, 3))


class Segmentation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aux = body(), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Images) -> dict[str, torch.Tensor]:
        x = self.body(x)
        return {"out": self.head(x), "aux": self.aux(x)}


class Detector(nn.Module):
    """Takes a list of images, returns a list of dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = body()

    def forward(self, images: list[Images]) -> list[dict[str, torch.Tensor]]:
        return [
            {"boxes": pooled(self.body(image[None])), "labels": torch.zeros(1, dtype=torch.int64)} for image in images
        ]


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.rnn = body(), nn.GRU(8, 6, batch_first=True)

    def forward(self, x: Images) -> torch.Tensor:
        return self.rnn(self.body(x).flatten(2).transpose(1, 2))[0][:, -1]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.embedding = body(), nn.Embedding(5, 8)

    def forward(self, image: Images, token: torch.Tensor) -> torch.Tensor:
        return pooled(self.body(image)) * self.embedding(token)


class SparseEmbedding(With):
    def __init__(self) -> None:
        super().__init__(pooled)
        self.table = nn.Embedding(5, 8, sparse=True)

    def forward(self, x: Images) -> torch.Tensor:
        return super().forward(x) + self.table(torch.zeros(len(x), dtype=torch.int64))


class Spectral(nn.Module):
    """Complex inside and out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = body(), nn.Parameter(torch.ones(8, 1, 1, dtype=torch.complex64))

    def forward(self, x: Images) -> torch.Tensor:
        return torch.fft.fft2(self.body(x).float()) * self.weight


class FixedFp32(nn.Module):
    """Creates fp32 tensors whatever the model's dtype is: does not run in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(8, 4)

    def forward(self, x: Images) -> torch.Tensor:
        return self.head(pooled(self.body(x)).float())


class ExtraState(With):
    def get_extra_state(self) -> Any:
        return {"f": lambda: None}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("not called")


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), nn.Linear(8 * 16 * 16, 4)

    def forward(self, x: Images) -> torch.Tensor:
        x = self.body(x)
        return self.head(x.view(x.shape[0], -1))


class ReadsStrides(nn.Module):
    def forward(self, x: Images) -> torch.Tensor:
        return x if x.is_contiguous() else x * 1.2


def weight_norm(kind: str) -> nn.Module:
    convolution = nn.Conv2d(3, 8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        make = nn.utils.weight_norm if kind == "old" else nn.utils.parametrizations.weight_norm
        make(convolution)
    return With(pooled, convolution)


def scripted() -> nn.Module:
    return With(pooled, nn.Sequential(torch.jit.script(body()), nn.Conv2d(8, 8, 3)))


def quantised() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())
    model[0] = torch.ao.nn.quantized.Conv2d(3, 8, 3)
    return model


def frozen() -> nn.Module:
    return With(pooled).requires_grad_(False)


def uncopyable() -> nn.Module:
    model = With(pooled)
    model.lock = (item for item in range(3))  # type: ignore[assignment] # a generator
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Any]] = {
    # name: (model, further arguments, True: the layouts agree; False: they differ; a word of the refusal)
    "logits": (lambda: With(pooled), {}, True),
    "dict": (Segmentation, {}, True),
    "dict with a selected entry": (Segmentation, {"output": "out"}, True),
    "dict with a wrong entry": (Segmentation, {"output": "nosuch"}, "aux"),
    "dict with a loss": (Segmentation, {"loss": lambda out: out["out"].square().mean()}, True),
    "tuple": (lambda: With(lambda x: (pooled(x), x)), {}, True),
    "list": (lambda: With(lambda x: [x, pooled(x)]), {"output": 1}, True),
    "named tuple": (lambda: With(lambda x: Pair(pooled(x), x)), {}, True),
    "dataclass": (lambda: With(lambda x: Output(pooled(x), (x,))), {}, True),
    "dict with attributes": (lambda: With(lambda x: DictOutput(logits=pooled(x))), {}, True),
    "str": (lambda: With(lambda x: "cat"), {}, "output"),
    "no tensor": (lambda: With(lambda x: None), {}, "output"),
    "classes": (lambda: With(lambda x: pooled(x).argmax(1)), {}, "output"),
    "autoencoder": (lambda: nn.Sequential(body(), nn.ConvTranspose2d(8, 3, 3, padding=1)), {}, True),
    "video": (Video, {"image_size": (3, 4, 12, 12)}, True),
    "detector": (Detector, {"batch": ([torch.randn(3, 12, 12), torch.randn(3, 10, 12)],)}, True),
    "two inputs": (TwoInputs, {"batch": (torch.randn(4, 3, 12, 12), torch.tensor([0, 1, 2, 3]))}, True),
    "keywords": (TwoInputs, {"batch": {"image": torch.randn(2, 3, 12, 12), "token": torch.tensor([0, 1])}}, True),
    "recurrent": (Recurrent, {}, True),
    "weight_norm, old": (lambda: weight_norm("old"), {}, True),
    "weight_norm, new": (lambda: weight_norm("new"), {}, True),
    "spectral_norm": (lambda: With(pooled, nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3))), {}, True),
    "complex": (Spectral, {}, True),
    "fp32 only": (FixedFp32, {}, True),
    "own extra state": (lambda: ExtraState(pooled), {}, True),
    "scripted inside": (scripted, {}, True),
    "no parameters": (lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), {}, True),
    "dropout": (lambda: With(lambda x: pooled(F.dropout(x, 0.5, True))), {}, True),
    "reads strides": (lambda: nn.Sequential(body(), ReadsStrides(), nn.Flatten()), {}, False),
    "view": (Viewing, {"image_size": 16}, False),
    "lazy": (lambda: nn.Sequential(nn.LazyConv2d(8, 3), nn.Flatten()), {}, "run one batch"),
    "quantised": (quantised, {}, "quantized"),
    "wrong channels": (lambda: nn.Conv2d(1, 8, 3), {}, "image_size"),
    "attribute that cannot be copied": (uncopyable, {}, "copied"),
}
# What compare_layouts does otherwise: it measures speed, so equal results are no subject, and it needs an optimizer.
SPEED = {"reads strides": True, "view": "reshape", "complex": "floating point", "no parameters": "mode=infer"}


@pytest.mark.filterwarnings("ignore:.*(torch.jit|quantiz|ao.quantization|lazy|Lazy).*")
@pytest.mark.parametrize("name", list(MODELS))
def test_parity(name: str) -> None:
    build, arguments, expected = MODELS[name]
    torch.manual_seed(0)
    model = build()
    if isinstance(expected, bool):
        report = check_parity(model, **{"image_size": 12, **arguments})
        assert report.passed is expected, str(report)
        assert expected or report.first_divergence
        return
    with pytest.raises(ConfigError, match=expected) as error:
        check_parity(model, **{"image_size": 12, **arguments})
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.filterwarnings("ignore:.*(torch.jit|quantiz|ao.quantization|lazy|Lazy).*")
@pytest.mark.parametrize("name", list(MODELS))
def test_compare_layouts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, arguments, expected = MODELS[name]
    expected = SPEED.get(name, expected)
    torch.manual_seed(0)
    model = build()
    options = {"batch_size": 2, "image_size": 12, "precision": "fp32", "time_limit_s": 0.0, "target_ci": 9.0}

    def once(self: TimedModel, steps: int) -> list[float]:
        self.step()
        return [0.01]

    monkeypatch.setattr(TimedModel, "block_times_s", once)
    if expected is True:
        done = compare_layouts(model, **{**options, **arguments})
        assert [speed.layout for speed in done.speeds] == ["contiguous", "channels_last"]
        return
    with pytest.raises(ConfigError, match=expected) as error:
        compare_layouts(model, **{**options, **arguments})
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.slow
def test_a_compiled_model_is_compared_eager() -> None:
    assert check_parity(torch.compile(With(pooled)), image_size=12).passed


def test_the_line_of_a_view_is_named() -> None:
    report = check_parity(Viewing(), image_size=16)
    assert "x.view(x.shape[0], -1)" in str(report) and ".reshape" in str(report)


def test_frozen_models_are_compared_in_inference() -> None:
    assert check_parity(frozen(), image_size=12).passed
    with pytest.raises(ConfigError, match="mode=infer"):
        compare_layouts(frozen(), 2, image_size=12)
    assert compare_layouts(frozen(), 2, image_size=12, mode="infer", time_limit_s=0.0).speeds


def test_models_stay_as_they_are() -> None:
    model = weight_norm("old")
    before = copy.deepcopy({name: value.clone() for name, value in model.state_dict().items()})
    check_parity(model, image_size=12)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_sparse_gradients() -> None:
    assert check_parity(SparseEmbedding(), image_size=12).passed
    with pytest.raises(ConfigError, match="parse"):
        compare_layouts(SparseEmbedding(), 2, image_size=12, time_limit_s=0.0)
