"""The usual wrappings of weights are found and named; converting proves that the outputs are equal, or fails."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cl_train.config.schema import ConfigError
from cl_train.models.convert_file import convert_file
from cl_train.models.files import read_weights
from cl_train.models.sources import build_model

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
SMALL = "tests.networks:small"
STATE = {"conv.weight": torch.ones(4, 3, 3, 3), "conv.bias": torch.zeros(4)}


def prefixed(prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": value for name, value in STATE.items()}


WRAPPED: dict[str, tuple[Any, str]] = {  # the file, and words of what was taken
    "plain": (STATE, ""),
    "state_dict": ({"state_dict": STATE, "epoch": 3}, "'state_dict'"),
    "model": ({"model": STATE, "optimizer": {"state": {}}}, "'model'"),
    "model_state_dict": ({"model_state_dict": STATE, "loss": 0.5}, "'model_state_dict'"),
    "model_ema": ({"model_ema": STATE}, "'model_ema'"),
    "ema": ({"ema": STATE}, "'ema'"),
    "both": ({"model": STATE, "model_ema": prefixed("x.")}, "model_ema"),
    "DDP": ({"model": prefixed("module.")}, "'module.'"),
    "compiled": (prefixed("_orig_mod."), "'_orig_mod.'"),
    "DDP of a compiled model": ({"state_dict": prefixed("module._orig_mod.")}, "'module._orig_mod.'"),
    "nested": ({"model": {"state_dict": prefixed("module.")}}, "'model.state_dict'"),
    "timm with args": ({"state_dict": STATE, "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99))}, "'state_dict'"),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_weights(name: str, tmp_path: Path) -> None:
    content, taken = WRAPPED[name]
    torch.save(content, tmp_path / "w.pth")
    weights = read_weights(tmp_path / "w.pth")
    assert list(weights.tensors) == list(STATE) and taken in weights.taken


def test_an_entry_and_a_prefix_by_option(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save({"model": STATE, "ema": prefixed("backbone."), "epoch": 1}, path)
    assert list(read_weights(path, entry="ema").tensors) == list(prefixed("backbone."))
    weights = read_weights(path, entry="ema", prefix="backbone.")
    assert list(weights.tensors) == list(STATE) and "backbone." in weights.taken
    with pytest.raises(ConfigError, match="did you mean ema"):
        read_weights(path, entry="emma")
    with pytest.raises(ConfigError, match="prefix=neck"):
        read_weights(path, prefix="neck.")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, args: argparse.Namespace) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = build_model(SMALL, num_classes=3)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.model(torch.randn(2, 3, 32, 32)).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(max_steps=1, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.fit(Module(argparse.Namespace(lr=0.1)), [0])
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    result = convert_file(
        tmp_path / "last.ckpt", tmp_path / "w.pth", model_name=SMALL, input_shape=(2, 3, 32, 32), prefix="model."
    )
    assert result.passed and "state_dict" in result.taken


def test_a_missing_prefix_is_suggested(tmp_path: Path) -> None:
    state = {f"model.{name}": value for name, value in build_model(SMALL, num_classes=3).state_dict().items()}
    torch.save({"state_dict": state | {"loss.weight": torch.ones(3)}}, tmp_path / "in.ckpt")
    for read in (
        lambda: convert_file(tmp_path / "in.ckpt", tmp_path / "out.pth", model_name=SMALL),
        lambda: build_model(SMALL, num_classes=3, weights=str(tmp_path / "in.ckpt")),
    ):
        with pytest.raises(ConfigError, match=r"lacks .* prefix=model\. "):
            read()
    assert not (tmp_path / "out.pth").exists()


class WithExtraState(nn.Conv2d):
    def get_extra_state(self) -> dict[str, int]:
        return {"updates": 7}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.updates = state["updates"]


def with_extra_state(num_classes: int) -> nn.Module:
    return WithExtraState(3, num_classes, 3)


def test_extra_state_is_kept(tmp_path: Path) -> None:
    torch.save(with_extra_state(4).state_dict(), tmp_path / "in.pth")
    own = f"{__name__}:with_extra_state"
    assert convert_file(tmp_path / "in.pth", tmp_path / "out.pth", model_name=own, input_shape=(2, 3, 8, 8)).passed
    assert torch.load(tmp_path / "out.pth")["_extra_state"] == {"updates": 7}
    with pytest.raises(ConfigError, match="extra state"):
        convert_file(tmp_path / "in.pth", tmp_path / "out.safetensors")


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return x.view(x.shape[0], -1)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": self.conv(x)}


def viewing(num_classes: int) -> nn.Module:
    return Viewing()


def named(num_classes: int) -> nn.Module:
    return Named()


def save_weights(model: nn.Module) -> Callable[[Path], None]:
    return lambda path: torch.save(model.state_dict(), path)


def save_frozen(path: Path) -> None:
    torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3)).eval())).save(str(path))


@pytest.mark.parametrize(
    ("save", "options", "problem"),
    [
        (save_frozen, {"trust": True}, "not converted"),
        (save_weights(Viewing()), {}, "model=<name>"),
        (save_weights(Viewing()), {"model_name": f"{__name__}:viewing"}, ".reshape"),
        (save_weights(nn.Linear(3, 4)), {}, "not converted"),
        (save_weights(Named()), {"model_name": f"{__name__}:named", "output": "b"}, "no such entry"),
        (save_weights(Named()), {"model_name": f"{__name__}:named", "output": "a"}, ""),
    ],
)
def test_what_is_not_proved_is_said(save: Any, options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    save(tmp_path / "in.pt")
    result = convert_file(tmp_path / "in.pt", tmp_path / "out.pt", input_shape=(2, 3, 8, 8), **options)
    assert result.passed == (problem == "")
    assert problem in "\n".join(result.problems)
    is_kept = problem in ("", "model=<name>", "no such entry")  # values are equal; only the outputs are unconfirmed
    assert (tmp_path / "out.pt").exists() == is_kept
