"""Small networks for tests, named on the command line as model=tests.networks:small."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.processes import is_signal_received, wait_until


def small(num_classes: int) -> nn.Sequential:
    """Two convolutions with BatchNorm: every channel count above 1, so that no stride is ambiguous.

    The running statistics follow fast, so that the few steps of a test are enough for evaluation.
    """
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8, momentum=0.5),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16, momentum=0.5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


def state_of(cfg: Any, precision: Any, dist: Any, classes: int = 3) -> Any:
    """The model of a run and its step, without data."""
    from cl_train.training.setup import build_state

    data: Any = SimpleNamespace(num_classes=classes, classes=(), class_counts=None)
    return build_state(cfg, precision, dist, data)


def video(num_classes: int) -> nn.Sequential:
    """The same in three dimensions."""
    return nn.Sequential(
        nn.Conv3d(3, 8, 3, padding=1, bias=False),
        nn.InstanceNorm3d(8, affine=True),
        nn.ReLU(),
        nn.Conv3d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm3d(16),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


def dropout(num_classes: int) -> nn.Sequential:
    """The values that are dropped do not depend on the layout."""
    return nn.Sequential(*small(num_classes)[:-1], nn.Dropout(0.3), nn.Linear(16, num_classes))


class Applied(nn.Module):
    """Calls `function`; without weights, so that state dicts stay alike."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.function(images)


def _with(function: Callable[[torch.Tensor], torch.Tensor], num_classes: int) -> nn.Sequential:
    layers = small(num_classes)
    layers[2] = nn.Sequential(nn.ReLU(), Applied(function))
    return layers


def copying(num_classes: int) -> nn.Sequential:
    """As `small`; a copy loses channels_last."""
    return _with(torch.Tensor.contiguous, num_classes)


def doubled(num_classes: int) -> nn.Sequential:
    """The weights of `small`, and another function."""
    return _with(lambda images: images * 2, num_classes)


def permuting(num_classes: int) -> nn.Sequential:
    """Makes its images channels_last by itself, before its only convolution."""

    def last(images: torch.Tensor) -> torch.Tensor:
        return images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    layers = [nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)]
    return nn.Sequential(Applied(last), *layers)


def without_batchnorm(num_classes: int) -> nn.Sequential:
    """No layer mixes the images of a batch, so a batch may be split over processes without a
    change.
    """
    layers = [layer for layer in small(num_classes) if not isinstance(layer, nn.BatchNorm2d)]
    layers[0] = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    return nn.Sequential(*layers)


class Versioned(nn.Sequential):
    """As torchvision's MNASNet: a state dict without the module's version cannot be loaded."""

    _version = 2

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        if metadata.get("version") != 2:
            raise ValueError(f"version should be set to 2 instead of {metadata.get('version')}")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def versioned(num_classes: int) -> nn.Module:
    return Versioned(*small(num_classes))


def too_few_outputs(num_classes: int) -> nn.Module:
    return small(num_classes - 1)


def unsaveable(num_classes: int) -> nn.Module:
    class Unsaveable(nn.Identity):
        def get_extra_state(self) -> object:
            return object()

    return nn.Sequential(small(num_classes), Unsaveable())


class Fault(nn.Module):
    """Calls `at(self, images, number)` in each forward pass; `number` counts those in training or
    in evaluation.
    """

    def __init__(self, at: Callable[["Fault", torch.Tensor, int], torch.Tensor | None]) -> None:
        super().__init__()
        self.at = at
        self.calls: dict[object, int] = {True: 0, False: 0}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls[self.training] += 1
        changed = self.at(self, images, self.calls[self.training])
        return images if changed is None else changed


def raising(num_classes: int) -> nn.Module:
    def fail(module: Fault, images: torch.Tensor, number: int) -> None:
        raise ValueError("planted,\nin two lines")

    return nn.Sequential(small(num_classes), Fault(fail))


def nan_at_third_step(num_classes: int) -> nn.Module:
    def spoil(module: Fault, logits: torch.Tensor, number: int) -> torch.Tensor:
        return logits * (torch.nan if module.training and number == 3 else 1)

    return nn.Sequential(small(num_classes), Fault(spoil))


def nan_images_at_a_step(num_classes: int, *, plan: Any, at_step: int) -> nn.Module:
    """BatchNorm gets NaN in step `at_step` of the run, in whichever process; `plan` is patched."""
    step = 0

    def observed(self: Any, progress: Any, lr_at: Any = plan.lr_at) -> float:
        nonlocal step
        step = progress.step + 1
        return float(lr_at(self, progress))

    def spoil(module: Fault, images: torch.Tensor, number: int) -> torch.Tensor:
        return images * (torch.nan if module.training and step == at_step else 1)

    plan.lr_at = observed
    return nn.Sequential(Fault(spoil), small(num_classes))


def gated(num_classes: int) -> nn.Module:
    """Its tenth forward pass in training waits until the folder GATE has the file `open`, or a
    signal arrives.

    The process announces its wait by a file in that folder, with its id as name.
    """

    def wait(module: Fault, images: torch.Tensor, number: int) -> None:
        gate = Path(os.environ["GATE"])
        if module.training and number == 10 and not (gate / "open").exists():
            (gate / str(os.getpid())).touch()
            wait_until(lambda: (gate / "open").exists() or is_signal_received())

    return nn.Sequential(Fault(wait), nn.Dropout(0.3), without_batchnorm(num_classes))


def signalling(num_classes: int, signum: int, *, in_training: bool, at_call: int = 2) -> nn.Module:
    """Sends a signal to its own process, under torchrun that of rank 1, at a forward pass."""

    def send(module: Fault, images: torch.Tensor, number: int) -> None:
        is_due = (module.training, number) == (in_training, at_call)
        if is_due and os.environ.get("RANK", "1") == "1":
            os.kill(os.getpid(), signum)
            wait_until(is_signal_received)

    return nn.Sequential(Fault(send), small(num_classes))


terminated_in_evaluation = partial(signalling, signum=signal.SIGTERM, in_training=False)
terminated_in_training = partial(signalling, signum=signal.SIGTERM, in_training=True)
asked_to_save = partial(signalling, signum=signal.SIGUSR1, in_training=True)
