"""Faults planted inside a training process, by functions that the fork server calls before train.py.

Parameters come in environment variables: PLANT_STEP (1-based step of this process), PLANT_RANK, PLANT_SIGNAL, ...
As a program: train.py with slower steps.
"""

import errno
import os
import runpy
import time
from collections.abc import Callable
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
from tests.faults.forkserver import REPOSITORY
from tests.processes import is_signal_received, wait_until


def number(name: str, default: int = 0) -> int:
    return int(os.environ.get(f"PLANT_{name}", default))


def is_planted(step: int) -> bool:
    """The step is one of PLANT_STEP to PLANT_STEP + PLANT_COUNT - 1, in the rank PLANT_RANK."""
    return number("RANK") == int(os.environ.get("RANK", 0)) and 0 <= step - number("STEP") < number("COUNT", 1)


def short_retries() -> None:
    """A disk that stays full ends the run after a second instead of a minute."""
    cl_train.system.files.RETRY_S = 1.0


def before_step(act: Callable[[int, Any, Any], None]) -> None:
    """Call `act(number of the step, its parts, its batches)` before each step."""
    original, calls = cl_train.training.build.train_step, [0]

    def train_step(parts: Any, micro_batches: Any) -> Any:
        calls[0] += 1
        act(calls[0], parts, micro_batches)
        return original(parts, micro_batches)

    cl_train.training.build.train_step = train_step


def slow_steps() -> None:
    """Each step takes PLANT_MS milliseconds more, so that a signal from outside finds the run at work."""
    before_step(lambda *_: time.sleep(number("MS", 20) / 1000))
    cl_train.system.distributed.ANSWER_S = number("ANSWER_S", 3)


def hold_step() -> None:
    """Step PLANT_STEP makes the file PLANT_HOLD and waits until somebody deletes it."""
    hold = Path(os.environ["PLANT_HOLD"])

    def wait(step: int, *_: Any) -> None:
        if step == number("STEP", 3):
            hold.touch()
            wait_until(lambda: not hold.exists())

    before_step(wait)


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
    """The loss of the planted steps is PLANT_VALUE."""
    original, step = cl_train.step.train_step.loss_of, [0]
    before_step(lambda now, *_: step.__setitem__(0, now))

    def loss_of(*arguments: Any) -> torch.Tensor:
        loss = original(*arguments)
        return loss * float(os.environ["PLANT_VALUE"]) if torch.is_grad_enabled() and is_planted(step[0]) else loss

    cl_train.step.train_step.loss_of = loss_of


def bad_gradient() -> None:
    """One gradient of the planted steps holds PLANT_VALUE, before ranks exchange them."""
    step = [0]

    def plant(now: int, parts: Any, micro_batches: Any) -> None:
        step[0] = now
        if now == 1:
            next(iter(parts.model.parameters())).register_hook(spoil)

    def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
        return gradient.fill_(float(os.environ["PLANT_VALUE"])) if is_planted(step[0]) else None

    before_step(plant)


def bad_images() -> None:
    """The images of the planted steps are NaN: loss, gradients and BatchNorm's statistics go bad together."""

    def spoil(step: int, parts: Any, micro_batches: Any) -> None:
        for batch in micro_batches if is_planted(step) else ():
            batch.images.fill_(float("nan"))

    before_step(spoil)


def full_disk() -> None:
    """Writing checkpoints of the planted steps fails half way: no space left; the run gives up after PLANT_MINUTES."""
    cl_train.system.checkpoints.MAX_MINUTES_WITHOUT_CHECKPOINT = number("MINUTES", 30)
    original = cl_train.system.checkpoints.os.fsync

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        digits = "".join(letter for letter in name.split(".pt")[0] if letter.isdigit())
        if ".pt" in name and is_planted(int(digits or 0)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    cl_train.system.checkpoints.os.fsync = fsync  # type: ignore[assignment]


def bad_worker() -> None:
    """Reading image PLANT_STEP of a worker's life raises something unforeseen.

    With PLANT_EXIT the worker leaves by os._exit, as a decoder that calls exit() would.
    """
    original, calls, parent = cl_train.data.transforms.ImageReader.read, [0], os.getpid()

    def read(self: Any, *arguments: Any, **named: Any) -> int:
        calls[0] += 1
        if calls[0] == number("STEP") and os.getpid() != parent:
            if number("EXIT"):
                os._exit(3)
            raise MemoryError("planted")
        return original(self, *arguments, **named)

    cl_train.data.transforms.ImageReader.read = read  # type: ignore[method-assign]


def check_layout() -> None:
    """Each step: 4-D weights have the strides of PLANT_FORMAT, and optimizer state those of its weight."""

    def check(step: int, parts: Any, micro_batches: Any) -> None:
        layout = getattr(torch, os.environ["PLANT_FORMAT"])
        for parameters in parts.optimizer.param_groups:
            for parameter in parameters["params"]:
                assert parameter.dim() != 4 or parameter.is_contiguous(memory_format=layout), parameter.stride()
                for value in parts.optimizer.state.get(parameter, {}).values():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        assert value.stride() == parameter.stride(), (value.stride(), parameter.stride())

    before_step(check)


def check_layout_and_signal() -> None:
    signal_after_save()
    check_layout()


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


if __name__ == "__main__":
    slow_steps()
    runpy.run_path(str(REPOSITORY / "train.py"), run_name="__main__")
