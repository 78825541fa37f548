"""The guard stops at the planted line, in plain loops, Lightning and DDP, and never in a ResNet."""

import linecache
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import cl_train
from cl_train.memory_format.guard import LayoutLost


def planted(forward: Any, backward: Any) -> Any:
    """A function with its own backward pass; None: it passes its input on."""

    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return forward(x) if forward else x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return backward(gradient) if backward else gradient

    return Planted.apply


LOSSES: dict[str, Any] = {
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(memory_format=torch.contiguous_format),
    "to": lambda x: x.to(memory_format=torch.contiguous_format),
    "reshape": lambda x: x.reshape(len(x), -1).view(x.shape),
    "flatten": lambda x: x.flatten(1).view(x.shape),
    "shuffle": lambda x: x.view(len(x), 2, 4, *x.shape[2:]).transpose(1, 2).reshape(x.shape),
    "cat with contiguous": lambda x: torch.cat([x[:, :4].contiguous(), x[:, 4:]], 1),
    "written into contiguous": lambda x: torch.zeros(x.shape).copy_(x),
    "instance norm": lambda x: F.instance_norm(x),
    "contiguous gradient": planted(None, lambda gradient: gradient.contiguous()),
    "reshaped gradient": planted(None, lambda gradient: gradient.reshape(-1).view(gradient.shape)),
    "gradient written into contiguous": planted(None, lambda gradient: torch.zeros(gradient.shape).copy_(gradient)),
}


class Model(nn.Module):
    def __init__(self, loss: Any = None) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.Sequential(nn.BatchNorm2d(8), Lossy(loss) if loss else nn.ReLU())
        self.head = nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.stem(x)))


class Lossy(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x)


def converted(model: nn.Module) -> nn.Module:
    cl_train.convert(model)
    return model


def images(size: int = 8) -> torch.Tensor:
    return torch.randn(2, 3, size, size).to(memory_format=torch.channels_last)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        with cl_train.layout_guard():
            model(images(64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", LOSSES)
def test_the_guard_raises_at_the_line_of_the_loss(name: str) -> None:
    with pytest.raises(LayoutLost) as raised:
        train(converted(Model(LOSSES[name])))
    message = str(raised.value)
    line = re.search(r"at (\S+):(\d+) `(.*?)`,", message)
    assert line is not None and line[1].endswith(Path(__file__).name), message
    assert linecache.getline(__file__, int(line[2])).strip() == line[3]
    words = {"contiguous gradient": "gradient.contiguous()", "instance norm": "F.instance_norm"}
    assert words.get(name, name.split()[0]) in line[3] and "block.1 (Lossy)" in message
    assert ("in backward" in message) == ("gradient" in name) and "64, 64]" in message


def test_resnets_pass_with_their_optimizer() -> None:
    train(converted(torchvision.models.resnet18(num_classes=4)))
    with cl_train.layout_guard():  # not converted: there is nothing to lose
        torchvision.models.resnet18()(torch.randn(2, 3, 32, 32)).mean().backward()


def test_losses_are_allowed_by_pattern_or_only_warned_about() -> None:
    model = converted(Model(LOSSES["contiguous"]))
    for pattern in ("clone", "block.*", "Lossy", "*test_guard.py:*", "*x.contiguous()*"):
        with cl_train.layout_guard(allow=[pattern]):
            model(images())
    with pytest.warns(UserWarning, match="clone lost channels_last") as warned, cl_train.layout_guard("warn"):
        for _ in range(2):
            model(images())
    assert {Path(warning.filename).name for warning in warned} == {"test_guard.py"}
    with pytest.raises(ValueError, match="raise or warn"), cl_train.layout_guard("stop"):  # type: ignore[arg-type]
        pass
    assert not torch.nn.modules.module._global_forward_hooks


def test_video_is_guarded_too() -> None:
    model = converted(nn.Sequential(nn.Conv3d(3, 4, 1), Lossy(lambda x: x.contiguous())))
    with pytest.raises(LayoutLost), cl_train.layout_guard():
        model(torch.randn(2, 3, 2, 4, 4).to(memory_format=torch.channels_last_3d))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_is_guarded(one_rank: None) -> None:
    train(nn.parallel.DistributedDataParallel(converted(torchvision.models.resnet18(num_classes=4))))
    for name in ("contiguous", "contiguous gradient"):
        with pytest.raises(LayoutLost, match=r"module.block.1 \(Lossy\)"):
            train(nn.parallel.DistributedDataParallel(converted(Model(LOSSES[name]))))


@pytest.mark.slow
def test_lightning_is_guarded(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self, net: nn.Module) -> None:
                super().__init__()
                self.net = net

            def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
                return self.net(batch.to(memory_format=torch.channels_last)).square().sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

        def fit(net: nn.Module) -> None:
            trainer = lightning.Trainer(
                max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path,
                enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            data = torch.utils.data.DataLoader([image for image in torch.randn(4, 3, 32, 32)], batch_size=2)
            with cl_train.layout_guard():
                trainer.fit(Module(net), data)

        fit(converted(torchvision.models.resnet18(num_classes=4)))
        for name in ("contiguous", "contiguous gradient"):
            with pytest.raises(LayoutLost, match=r"test_guard\.py"):
                fit(converted(Model(LOSSES[name])))
