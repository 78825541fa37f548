"""Faults planted inside a training process, by functions that the fork server calls before train.py.

Parameters come in environment variables: PLANT_STEP (1-based step of this process), PLANT_RANK, PLANT_SIGNAL, ...
"""

import errno
import os
import time
from pathlib import Path
from typing import Any

import torch

import cl_train.data.transforms
import cl_train.step.train_step
import cl_train.system.checkpoints
import cl_train.system.distributed
import cl_train.system.files
import cl_train.training.build
import cl_train.training.setup
import cl_train.training.state
from tests.processes import is_signal_received, wait_until


def number(name: str, default: int = 0) -> int:
    return int(os.environ.get(f"PLANT_{name}", default))


def here() -> bool:
    """This is the rank in which the fault is planted."""
    return number("RANK", 0) == int(os.environ.get("RANK", 0))


def short_retries() -> None:
    """A disk that stays full ends the run after a second instead of a minute."""
    cl_train.system.files.RETRY_S = 1.0


def slow_steps() -> None:
    """Each step takes PLANT_MS milliseconds more, so that a signal from outside finds the run at work."""
    original = cl_train.training.build.train_step

    def train_step(*arguments: Any) -> Any:
        time.sleep(number("MS", 20) / 1000)
        return original(*arguments)

    cl_train.training.build.train_step = train_step
    cl_train.system.distributed.ANSWER_S = number("ANSWER_S", 3)


def hold_step() -> None:
    """Step PLANT_STEP makes the file PLANT_HOLD and waits until somebody deletes it."""
    original, calls, hold = cl_train.training.build.train_step, [0], Path(os.environ["PLANT_HOLD"])

    def train_step(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == number("STEP", 3):
            hold.touch()
            wait_until(lambda: not hold.exists())
        return original(*arguments)

    cl_train.training.build.train_step = train_step


def signal_after_save() -> None:
    """Send PLANT_SIGNAL to this process when the checkpoint of step PLANT_STEP is on the disk."""
    original = cl_train.training.state.Checkpoints.save

    def save(self: Any, progress: Any, *rest: Any, **named: Any) -> None:
        original(self, progress, *rest, **named)
        if progress.step == number("STEP"):
            self.store.wait()
            os.kill(os.getpid(), number("SIGNAL"))
            wait_until(is_signal_received)

    cl_train.training.state.Checkpoints.save = save  # type: ignore[method-assign]


def bad_loss() -> None:
    """The loss of steps PLANT_STEP to PLANT_STEP + PLANT_COUNT - 1 is PLANT_VALUE, on rank PLANT_RANK only."""
    original, calls = cl_train.step.train_step.loss_of, [0]
    first, last = number("STEP"), number("STEP") + number("COUNT", 1)

    def loss_of(output: Any, *rest: Any) -> torch.Tensor:
        loss = original(output, *rest)
        if torch.is_grad_enabled():
            calls[0] += 1
            if here() and first <= calls[0] < last:
                return loss * float(os.environ["PLANT_VALUE"])
        return loss

    cl_train.step.train_step.loss_of = loss_of


def bad_gradient() -> None:
    """One gradient of steps PLANT_STEP to ... holds PLANT_VALUE, on rank PLANT_RANK, before ranks exchange them."""
    original, calls = cl_train.training.build.train_step, [0]
    first, last = number("STEP"), number("STEP") + number("COUNT", 1)

    def train_step(parts: Any, micro_batches: Any) -> Any:
        calls[0] += 1
        if here() and first <= calls[0] < last:
            parameter = next(iter(parts.model.parameters()))
            handle = parameter.register_hook(lambda gradient: gradient.fill_(float(os.environ["PLANT_VALUE"])))
            try:
                return original(parts, micro_batches)
            finally:
                handle.remove()
        return original(parts, micro_batches)

    cl_train.training.build.train_step = train_step


def bad_images() -> None:
    """The images of step PLANT_STEP are NaN: loss, gradients and BatchNorm's statistics go bad together."""
    original, calls = cl_train.training.build.train_step, [0]

    def train_step(parts: Any, micro_batches: Any) -> Any:
        calls[0] += 1
        if here() and calls[0] == number("STEP"):
            for batch in micro_batches:
                batch.images.fill_(float("nan"))
        return original(parts, micro_batches)

    cl_train.training.build.train_step = train_step


def full_disk() -> None:
    """Writing the checkpoints of steps PLANT_STEP to PLANT_STEP + PLANT_COUNT - 1 fails half way: no space left.

    The run gives up after PLANT_MINUTES.
    """
    cl_train.system.checkpoints.MAX_MINUTES_WITHOUT_CHECKPOINT = number("MINUTES", 30)
    original = cl_train.system.checkpoints.os.fsync
    first, last = number("STEP"), number("STEP") + number("COUNT", 1)

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        digits = "".join(letter for letter in name.split(".pt")[0] if letter.isdigit())
        if ".pt" in name and first <= int(digits or 0) < last:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    cl_train.system.checkpoints.os.fsync = fsync  # type: ignore[assignment]


def worker_raises() -> None:
    """Reading a training image raises something unforeseen, PLANT_STEP images into a worker's life."""
    original, calls = cl_train.data.transforms.ImageReader.read, [0]

    def read(self: Any, *arguments: Any, **named: Any) -> int:
        calls[0] += 1
        if calls[0] == number("STEP"):
            raise MemoryError("planted")
        return original(self, *arguments, **named)

    cl_train.data.transforms.ImageReader.read = read  # type: ignore[method-assign]


def worker_exits() -> None:
    """A worker leaves by os._exit, as a decoder that calls exit() would."""
    original, calls, parent = cl_train.data.transforms.ImageReader.read, [0], os.getpid()

    def read(self: Any, *arguments: Any, **named: Any) -> int:
        calls[0] += 1
        if calls[0] == number("STEP") and os.getpid() != parent:
            os._exit(3)
        return original(self, *arguments, **named)

    cl_train.data.transforms.ImageReader.read = read  # type: ignore[method-assign]


def check_layout() -> None:
    """Each step: 4-D weights have the strides of PLANT_FORMAT, and optimizer state those of its weight."""
    original = cl_train.training.build.train_step

    def train_step(parts: Any, micro_batches: Any) -> Any:
        layout = getattr(torch, os.environ["PLANT_FORMAT"])
        for parameters in parts.optimizer.param_groups:
            for parameter in parameters["params"]:
                if parameter.dim() == 4:
                    assert parameter.is_contiguous(memory_format=layout), parameter.stride()
                for value in parts.optimizer.state.get(parameter, {}).values():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        assert value.stride() == parameter.stride(), (value.stride(), parameter.stride())
        return original(parts, micro_batches)

    cl_train.training.build.train_step = train_step


def clock_jumps_back() -> None:
    """The wall clock goes back an hour at each reading."""
    original, readings = time.time, [0]

    def now() -> float:
        readings[0] += 1
        return original() - 3600.0 * readings[0]

    time.time = now


def slow_data() -> None:
    """Reading the list of images takes hours."""

    def build_data(*arguments: Any, **named: Any) -> Any:
        print("reading the data", flush=True)
        time.sleep(10_000)

    cl_train.training.setup.build_data = build_data
