"""Small networks for tests, named on the command line as model=tests.networks:small."""

import os
import signal
from pathlib import Path

import torch
from torch import nn

from tests.processes import is_signal_received, wait_until


def small(num_classes: int) -> nn.Module:
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


def without_batchnorm(num_classes: int) -> nn.Module:
    """No layer mixes the images of a batch, so a batch may be split over processes without a change."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


class _AbortsInChannelsLast(nn.Module):
    """Ends its process, as a kernel does that writes beyond its memory."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.shape[1] > 1 and not images.is_contiguous():
            os.abort()
        return images


def aborts_in_channels_last(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), _AbortsInChannelsLast(), small(num_classes))


class _Gate(nn.Module):
    """The tenth forward pass in training waits until the folder GATE has the file `open`, or a signal arrives.

    The process announces its wait by a file in that folder, with its id as name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        gate = Path(os.environ["GATE"])
        if self.calls == 10 and not (gate / "open").exists():
            (gate / str(os.getpid())).touch()
            wait_until(lambda: (gate / "open").exists() or is_signal_received())
        return images


def gated(num_classes: int) -> nn.Module:
    """Can be interrupted in training, with random numbers that a checkpoint must restore."""
    return nn.Sequential(_Gate(), nn.Dropout(0.3), without_batchnorm(num_classes))


class _Faulty(nn.Module):
    """A network whose output is NaN at one forward pass in training."""

    def __init__(self, num_classes: int, bad_call: int) -> None:
        super().__init__()
        self.network = small(num_classes)
        self.bad_call = bad_call
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(images)
        if self.training:
            self.calls += 1
            if self.calls == self.bad_call:
                logits = logits * float("nan")
        return logits


def nan_at_third_step(num_classes: int) -> nn.Module:
    return _Faulty(num_classes, bad_call=3)


def too_few_outputs(num_classes: int) -> nn.Module:
    return small(num_classes - 1)


def raising(num_classes: int) -> nn.Module:
    class Raising(nn.Conv2d):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise ValueError("planted")

    return nn.Sequential(small(num_classes), Raising(3, 3, 1))


def uncopyable(num_classes: int) -> nn.Module:
    """Holds a tensor that is a result, as torch.nn.utils.weight_norm's modules do: it cannot be deep-copied."""
    model = small(num_classes)
    model.result = torch.ones(1, requires_grad=True) * 2  # type: ignore[assignment]
    return model


class _Signalling(nn.Module):
    """Sends `signum` to its own process at a forward pass, counted over training or over evaluation."""

    def __init__(self, num_classes: int, signum: int, *, in_training: bool, at_call: int) -> None:
        super().__init__()
        self.network = small(num_classes)
        self.signum, self.in_training, self.at_call, self.calls = signum, in_training, at_call, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training == self.in_training and os.environ.get("RANK", "1") == "1":  # under torchrun rank 1 alone
            self.calls += 1
            if self.calls == self.at_call:
                os.kill(os.getpid(), self.signum)
                wait_until(is_signal_received)
        logits: torch.Tensor = self.network(images)
        return logits


def terminated_in_evaluation(num_classes: int) -> nn.Module:
    return _Signalling(num_classes, signal.SIGTERM, in_training=False, at_call=2)


def terminated_in_training(num_classes: int) -> nn.Module:
    return _Signalling(num_classes, signal.SIGTERM, in_training=True, at_call=2)


def asked_to_save(num_classes: int) -> nn.Module:
    return _Signalling(num_classes, signal.SIGUSR1, in_training=True, at_call=2)


def unsaveable(num_classes: int) -> nn.Module:
    class Unsaveable(nn.Identity):
        def get_extra_state(self) -> object:
            return object()

    return nn.Sequential(small(num_classes), Unsaveable())


class _KilledAt(nn.Module):
    """SIGKILLs its process at a forward pass: KILL_AT=train,24,2 is the second one in training on 24 px images."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.network = nn.Sequential(small(num_classes)[:-1], nn.Dropout(0.3), nn.Linear(16, num_classes))
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mode, size, call = os.environ["KILL_AT"].split(",")
        # More than two images: not the check before the first epoch.
        if len(images) > 2 and (self.training, images.shape[-1]) == (mode == "train", int(size)):
            self.calls += 1
            if self.calls == int(call):
                os.kill(os.getpid(), signal.SIGKILL)
        logits: torch.Tensor = self.network(images)
        return logits


def killed_at(num_classes: int) -> nn.Module:
    return _KilledAt(num_classes)
